"""What an out-of-memory error is told besides: what was planned, what is held, and the plan that would have fitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.engine import Engine
from lightning_zero.group_plan import GroupPlan
from lightning_zero.held import held_bytes
from lightning_zero.host_memory import free_host_bytes
from lightning_zero.layout import FlatLayout
from lightning_zero.placements import STAGES
from lightning_zero.planner.need import Choice, Need, most_moments, need_of, running_need
from lightning_zero.resident import memory_now, memory_peak

__all__ = ["explained", "is_out_of_memory"]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the host as the device of a CPU run, had no room."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def explained(
    error: BaseException, engine: Engine, module: nn.Module, optimizers: Sequence[Optimizer], micro_batches: int
) -> str:
    """The message of ``error`` and what to do, in bytes of this rank."""
    device = engine.collectives.device
    need = running_need(engine, optimizers, micro_batches)
    held = held_bytes(module, optimizers, "device")
    peak, room = memory_peak(device), _room(device)
    # Activations, and what user code holds: no stage changes it.
    rest = max(0.0, peak - need.on_device.total - need.whole_units - need.unit_gradients)
    lines = [
        str(error),
        f"Planned on this rank: {_gb(need.on_device.parameters)} of parameters, {_gb(need.on_device.gradients)} of"
        f" gradients, {_gb(need.on_device.optimizer)} of optimizer state, {_gb(need.whole_units + need.unit_gradients)}"
        f" of units in flight. Held now: {_gb(held.parameters)}, {_gb(held.gradients)}, {_gb(held.optimizer)} of model"
        f" state, {_gb(memory_now(device))} in all, {_gb(peak)} at the peak; the device has {_gb(room)}.",
        f"Activations and all else take {_gb(rest)} at the peak, which no stage shards.",
        _advice(engine, most_moments(optimizers), micro_batches, rest, room),
    ]
    return "\n".join(lines)


def _advice(engine: Engine, moments: float, micro_batches: int, rest: float, room: float) -> str:
    offloaded = engine.background is not None
    for choice in (*(Choice(stage) for stage in STAGES), *(Choice(stage, "cpu") for stage in (1, 2, 3))):
        now = STAGES[choice.stage] == engine.stage_placements and bool(choice.offload) == offloaded
        need = _need(engine, choice, moments, micro_batches)
        if not now and need.device + rest <= room:
            offload = f", offload={choice.offload!r}" if choice.offload else ""
            return (
                f"This would have fitted, with {_gb(need.device + rest)}:"
                f" `Trainer(strategy=ZeROStrategy(stage={choice.stage}{offload}))`."
            )
    return (
        "No stage makes room for that. Keep less for backward, `ZeROStrategy(activation_checkpointing='full')`, take"
        " smaller micro-batches, `Trainer(accumulate_grad_batches=...)`, or more cards."
    )


def _need(engine: Engine, choice: Choice, moments: float, micro_batches: int) -> Need:
    ranks = engine.collectives.world_size
    units = [[_as(plan, choice, ranks) for plan in unit] for unit in engine.plans]
    return need_of(units, engine.collectives.rank, lambda _: moments, micro_batches)


def _as(plan: GroupPlan, choice: Choice, ranks: int) -> GroupPlan:
    """``plan`` under another stage."""
    placements = STAGES[choice.stage]
    layout = FlatLayout(plan.layout.numels, ranks if placements.shards_optimizer else 1)
    # Where nothing is gathered, whole weights are the main weights.
    dtypes = plan.dtypes if placements.shards_optimizer else replace(plan.dtypes, model=plan.dtypes.main)
    offloaded = bool(choice.offload) and plan.trained
    return replace(
        plan, layout=layout, placements=placements, dtypes=dtypes, offloaded=offloaded, moves_each_gather=False
    )


def _room(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[1])
    return float(free_host_bytes() or 0) + memory_now(device)


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.3f} GB"
