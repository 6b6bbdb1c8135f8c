"""What a plain loop calls: `shard` and its way back, and what a sharded module tells of itself.

shard(model, stage=3)       parameters at rest; `model(x)`, `loss.backward()`, `optimizer.step()` as ever
unshard(model)              an ordinary model again
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from lightning_zero.activation import activation_policies
from lightning_zero.collectives import Collectives
from lightning_zero.compiled import compile_options
from lightning_zero.engine import Engine, engine_of
from lightning_zero.offload import OffloadTarget, offload_target
from lightning_zero.placements import Placements, StateBytes, Where, stage_placements
from lightning_zero.precision import PrecisionRecipe
from lightning_zero.units import UnitSpec

__all__ = ["MovedBytes", "checked_offload", "moved_bytes", "no_sync", "planned_bytes", "shard", "unshard"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_log = logging.getLogger("lightning_zero")


def shard(
    module: ModuleT,
    stage: int = 3,
    units: UnitSpec | None = None,
    *,
    precision: PrecisionRecipe | None = None,
    process_group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    offload: OffloadTarget | str | None = None,
    local_ranks: int | None = None,
    activation_checkpointing: Any = None,
    compile: bool | dict[str, Any] | None = False,
    ranks_may_differ: bool = False,
    log: Callable[[str], None] = _log.info,
) -> ModuleT:
    """Shard ``module`` in place over the ranks of a process group, and return it.

    Every rank calls this at the same place, before the optimizer is made::

        model = lightning_zero.shard(Model(), stage=3)
        optimizer = torch.optim.AdamW(model.parameters())
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

    Args:
        module: the model. Rank 0's values are the truth; on other ranks parameters may be on ``meta``.
        stage: 0 (plain data parallelism) to 3 (Rajbhandari 2020).
        units: module classes (types or names) or a predicate; default: blocks, or what they consist of, so that each
            holds at most 1/4 of the parameters, or is one layer.
        precision: dtypes; default: each parameter's own throughout.
        process_group: default: the default group, or one process alone.
        device: where state lives; default: the parameters' device.
        offload: where main weights, gradients and optimizer state rest instead: "cpu", "disk" or an `OffloadTarget`.
        local_ranks: ranks on this host, which share its room for offloaded state; default: what ``torchrun`` says, else
            all.
        activation_checkpointing: what units keep for backward: "full", "selective", "offload", a set of module classes
            to recompute, an `ActivationPolicy`, or several of these; default: everything.
        compile: compile the forward of each unit; a dictionary holds arguments of `torch.compile`.
        ranks_may_differ: let ranks use different blocks in training at stage 3 too, at a price; else that is a
            `RanksDifferError`.
        log: takes a line on rank 0 that says how the model is cut.

    Raises:
        ValueError: ``stage``, ``units``, ``offload``, ``activation_checkpointing`` or ``device`` is bad, or parameters
            lie on several devices.
        OffloadError: there is no room for what is offloaded.
        AlreadyShardedError: a part of ``module`` is sharded.
        TypeError: a parameter is of a class of its own, as some quantized ones are; or ``compile`` says nothing.
    """
    placements = stage_placements(stage)
    target = checked_offload(offload, placements)
    policies = activation_policies(activation_checkpointing)
    options = compile_options(compile)
    where = torch.device(device) if device is not None else _common_device(module)
    if where.type == "mps":
        raise ValueError("device='mps' has no collectives that sharding could use. Use `accelerator='cpu'`.")
    collectives = Collectives.of(process_group, where)
    if local_ranks is None:
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", collectives.world_size))
    recipe = precision or PrecisionRecipe()
    engine = Engine(
        module, placements, recipe, units, collectives, target, local_ranks, policies, options, ranks_may_differ
    )
    if collectives.rank == 0:
        log(f"`{type(module).__name__}` at stage {stage}: {engine.sizes}{_checkpointed(engine) if policies else ''}.")
    return module


def _checkpointed(engine: Engine) -> str:
    # What is a single layer keeps its input alone anyway.
    number = engine.num_checkpointed
    return f"; activation checkpointing of {f'{number:,} modules' if number else 'nothing: no unit would keep less'}"


def checked_offload(offload: OffloadTarget | str | None, placements: Placements) -> OffloadTarget | None:
    """The target that ``offload`` means.

    Raises:
        ValueError: it is unknown, or does not go with ``placements``.
        TypeError: it is no target.
    """
    target = offload_target(offload)
    if target is not None and target.parameters and placements.keeps_whole_parameters:
        raise ValueError(
            f"`{type(target).__name__}(parameters=True)` needs stage 3: at other stages whole parameters rest on the"
            " device. Write `stage=3`, or leave `parameters` out."
        )
    return target


def _common_device(module: nn.Module) -> torch.device:
    first: tuple[str, torch.device] | None = None
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            continue
        if first is not None and parameter.device != first[1]:
            raise ValueError(
                f"`{name}` is on {parameter.device}, but `{first[0]}` is on {first[1]}."
                " Move the module first, `module.to(device)`, or pass `device=`."
            )
        first = first or (name, parameter.device)
    if first is not None:
        return first[1]
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@dataclass(frozen=True)
class MovedBytes:
    """What offload moved, bytes a rank."""

    to_device: int
    to_rest: int


def planned_bytes(module: nn.Module, moments: int = 2, where: Where = "everywhere") -> StateBytes:
    """Bytes of model state that this rank holds of a sharded ``module`` at rest by formula, padding included.

    Args:
        moments: optimizer state in multiples of the main weights: 2 for Adam.
        where: what rests on the device alone, or what is offloaded alone.

    Raises:
        ValueError: ``module`` was not sharded.
    """
    return _required_engine(module).planned_bytes(moments, where)


def moved_bytes(module: nn.Module) -> MovedBytes:
    """Bytes that this rank moved between the device and where offloaded state rests, since ``module`` was sharded.

    Raises:
        ValueError: ``module`` was not sharded.
    """
    engine = _required_engine(module)
    engine.finish_updates()
    moved = {} if engine.background is None else engine.background.moved
    return MovedBytes(to_device=moved.get("to device", 0), to_rest=moved.get("to rest", 0))


def unshard(module: ModuleT, device: torch.device | None = None) -> ModuleT:
    """Make ``module`` an ordinary module with whole parameters again: a collective on all ranks. Returns it.

    Args:
        device: where the whole parameters go, one group at a time; default: where the shards are.
    """
    _required_engine(module).release(device)
    return module


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Context of the micro-batches before the last one of an optimizer step.

    At stages 0 and 1 their gradients wait, whole, and are reduced once; at stages 2 and 3 there is no place to wait,
    and each backward reduces into the shard.
    """
    with _required_engine(module).accumulate():
        yield


def _required_engine(module: nn.Module) -> Engine:
    engine = engine_of(module)
    if engine is None:
        raise ValueError(
            f"this `{type(module).__name__}` was not sharded. Call `lightning_zero.shard(module, stage=3)` first, and"
            " pass the same module."
        )
    return engine
