"""From a module's parameters to units that hold their state: what its blueprint says, built."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_zero.blueprint import Blueprint, PlannedGroup, PlannedUnit
from lightning_zero.collectives import Collectives
from lightning_zero.flat_buffer import BufferPool
from lightning_zero.holders import require_values
from lightning_zero.lane import Lane
from lightning_zero.offload import OffloadTarget
from lightning_zero.offloading import Offloading
from lightning_zero.param_group import ParamGroup
from lightning_zero.progress import progress
from lightning_zero.unit import Unit

__all__ = ["Assembly", "adopt_buffers"]


class Assembly:
    """The units of a module, whose parameters become sharded in place: a collective.

    Args:
        blueprint: of the plain module.
        collectives: of the ranks that share the state.
        pool: of whole and gradient buffers.
        held: see `ParamGroup`.
        offload: where state rests off the device, if it does.
        local_ranks: ranks on this host.

    Raises:
        OffloadError: there is no room for what is offloaded.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        collectives: Collectives,
        pool: BufferPool,
        held: dict[int, ParamGroup],
        offload: OffloadTarget | None,
        local_ranks: int,
    ) -> None:
        self._collectives = collectives
        self._pool = pool
        self._held = held
        self._holders = blueprint.holders
        if collectives.rank == 0:
            require_values(self._holders)
        self.offloading: Offloading | None = None
        """What is offloaded, and what works on it."""
        if offload is not None:
            self.offloading = Offloading(offload, blueprint, collectives, local_ranks)
        takes = self.offloading.takes if self.offloading is not None else _takes_nothing
        planned_units = list(blueprint.units(takes))
        shown = progress(planned_units, "Sharding", collectives.rank == 0)
        built = [self._unit(planned) for planned in shown]
        self.units = built[:-1]
        """In the order of the blueprint."""
        self.root = built[-1]
        """What is in no unit."""

    def _unit(self, planned: PlannedUnit) -> Unit:
        built = [self._group(group) for group in planned.groups]
        unit = Unit(planned.name, built, is_root=planned.number is None)
        for group in built:
            for index, sharded in enumerate(group.parameters):
                for holder in self._holders[sharded]:
                    unit.add_slot(holder.module, holder.attribute, holder.name, group, index)
        return unit

    def _group(self, planned: PlannedGroup) -> ParamGroup:
        names = [self._holders[parameter][0].name for parameter in planned.parameters]
        lane = None
        if planned.plan.offloaded:
            assert self.offloading is not None
            lane = Lane(names[0], self.offloading.background)
        return ParamGroup(names, planned.parameters, planned.plan, self._collectives, self._pool, self._held, lane)


def _takes_nothing(unit: int | None, trained: bool) -> bool:
    return False


def adopt_buffers(module: nn.Module, dtype: torch.dtype | None, collectives: Collectives) -> None:
    """Put rank 0's buffers on the device, floating-point ones in ``dtype``, if any; shared ones stay shared."""
    adopted: dict[Tensor, Tensor] = {}
    for submodule in module.modules():
        for name, buffer in submodule._buffers.items():
            if buffer is None:
                continue
            if buffer.is_meta and collectives.rank == 0:
                raise ValueError(
                    f"the buffer `{name}` of a `{type(submodule).__name__}` is on the meta device of rank 0, whose"
                    " values are everyone's. Build the model there without `torch.device('meta')`, or give it values:"
                    " `lightning_zero.load_pretrained(model, folder)`."
                )
            if buffer not in adopted:
                wanted = dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype
                like = buffer.to(wanted)
                device = collectives.device
                value = torch.empty_like(like, device=device) if buffer.is_meta else like.to(device)
                value.copy_(collectives.broadcast(value.contiguous()))
                adopted[buffer] = value
            submodule._buffers[name] = adopted[buffer]
