"""What one rank needs under a way to train, from the plans of its groups: of a plan, and of a running engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from torch.optim import Optimizer

from lightning_zero.engine import Engine
from lightning_zero.group_plan import GroupPlan
from lightning_zero.offloading import moments_of
from lightning_zero.placements import StateBytes

__all__ = ["Choice", "Need", "most_moments", "need_of", "running_need"]


@dataclass(frozen=True)
class Choice:
    """One way to train: a stage and its extras."""

    stage: int
    offload: str = ""
    activation_checkpointing: str = ""


@dataclass(frozen=True)
class Need:
    """What one rank needs; bytes.

    Args:
        on_device: model state at rest.
        off_device: model state at rest off the device.
        paper: model state on the device as the paper counts it, where its way to count applies.
        whole_units: whole weights of units in flight, with the root.
        unit_gradients: whole gradients on their way to their reduction, at most.
        activations: what forwards keep for backward; ``None`` where it is not known.
        gathered: payload of gathers in an optimizer step; (N - 1) / N of it is sent.
        reduced: payload of reductions, likewise.
        to_device: moved to the device in an optimizer step.
        to_rest: moved off it.
        elements: payload of an optimizer step of one micro-batch, in elements per parameter: 2 for data parallelism.
    """

    on_device: StateBytes
    off_device: StateBytes
    paper: StateBytes | None
    whole_units: float
    unit_gradients: float
    activations: float | None
    gathered: float
    reduced: float
    to_device: float
    to_rest: float
    elements: float

    @property
    def device(self) -> float:
        """Bytes on the device in all."""
        return self.on_device.total + self.whole_units + self.unit_gradients + (self.activations or 0.0)


def need_of(
    units: Sequence[Sequence[GroupPlan]], rank: int, moments_of: Callable[[GroupPlan], float], micro_batches: int
) -> Need:
    """What ``rank`` needs for groups of units, the root's last, without activations.

    Args:
        moments_of: optimizer state of a group, in multiples of its main weights.
        micro_batches: of an optimizer step.
    """
    plans = [plan for unit in units for plan in unit]

    def state(off: bool) -> StateBytes:
        found = [plan.state_bytes(rank, moments_of(plan), off) for plan in plans]
        return StateBytes(*(sum(getattr(one, kind.name) for one in found) for kind in fields(StateBytes)))

    *whole, root = [sum(plan.whole_bytes for plan in unit) for unit in units]
    *gradients, root_gradients = [sum(plan.gradient_bytes for plan in unit) for unit in units]
    wait = micro_batches > 1 and not any(plan.placements.reduces_every_backward for plan in plans)
    trained = sum(plan.layout.total for plan in plans if plan.trained)
    off = state(True)
    return Need(
        on_device=state(False),
        off_device=off,
        paper=None,
        whole_units=root + _largest_pair(whole),
        # Where they rest neither whole nor in shards, those of all micro-batches wait.
        unit_gradients=root_gradients + (sum(gradients) if wait else _largest_pair(gradients)),
        activations=None,
        gathered=sum(plan.gathered_bytes(micro_batches) for plan in plans),
        reduced=sum(plan.reduced_bytes(micro_batches) for plan in plans),
        to_device=sum(plan.layout.shard_numel * plan.dtypes.model.itemsize for plan in plans if plan.offloaded),
        to_rest=off.gradients,
        elements=sum(plan.elements for plan in plans) / max(trained, 1),
    )


def _largest_pair(sizes: Sequence[float]) -> float:
    """The unit that computes and the one that is gathered ahead are whole at once; so are their gradients."""
    pairs = [first + second for first, second in itertools.pairwise(sizes)]
    return max(pairs, default=sum(sizes))


def most_moments(optimizers: Sequence[Optimizer]) -> float:
    """Optimizer state in multiples of the weights, of the optimizer that keeps most."""
    return max((moments_of(optimizer) for optimizer in optimizers), default=0.0)


def running_need(engine: Engine, optimizers: Sequence[Optimizer], micro_batches: int) -> Need:
    """What this rank of ``engine`` needs, for the optimizers it has."""
    moments = most_moments(optimizers)
    return need_of(engine.plans, engine.collectives.rank, lambda _: moments, micro_batches)
