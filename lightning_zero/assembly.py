"""From a module's parameters to units: grouped by dtype, cut over the ranks, some of them offloaded.

module    who holds which parameter        `holders`
units     which of them are whole together `find_units`
groups    the same dtypes, all trained or all frozen
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.autocast import is_multiplied
from lightning_zero.collectives import Collectives
from lightning_zero.flat_buffer import BufferPool
from lightning_zero.holders import Holder, holders_of_parameters, homes, require_values
from lightning_zero.lane import Lane
from lightning_zero.offload import OffloadTarget
from lightning_zero.offloading import Candidate, Offloading
from lightning_zero.param_group import ParamGroup
from lightning_zero.placements import Placements
from lightning_zero.precision import Dtypes, PrecisionRecipe
from lightning_zero.unit import Unit
from lightning_zero.units import NamedModules

__all__ = ["Assembly", "adopt_buffers"]

OWN_GROUP_SHARE = 1 / 4
"""A root parameter that holds this part of the root, as an embedding or a head does, is a group of its own: its
gradient leaves as soon as it is there."""


class Assembly:
    """The units of ``module``, whose parameters become sharded in place: a collective.

    Args:
        module: plain.
        plan: its units.
        placements: what rests where.
        recipe: dtypes.
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
        module: nn.Module,
        plan: Sequence[NamedModules],
        placements: Placements,
        recipe: PrecisionRecipe,
        collectives: Collectives,
        pool: BufferPool,
        held: dict[int, ParamGroup],
        offload: OffloadTarget | None,
        local_ranks: int,
    ) -> None:
        self._placements = placements
        self._recipe = recipe
        self._collectives = collectives
        self._pool = pool
        self._held = held
        self._holders = holders_of_parameters(module)
        home_of = homes(self._holders, plan)
        if collectives.rank == 0:
            require_values(self._holders)
        self.offloading: Offloading | None = None
        """What is offloaded, and what works on it."""
        if offload is not None:
            candidates = self._candidates(offload, home_of)
            numbers = (None, *range(len(plan)))
            self.offloading = Offloading(offload, candidates, numbers, collectives, local_ranks)
        self.units = [
            self._unit(members[0][0], number, [p for p in self._holders if home_of[p] == number])
            for number, members in enumerate(plan)
        ]
        """In the order of ``plan``."""
        self.root = self._unit("", None, [p for p in self._holders if home_of[p] is None])
        """What is in no unit."""

    def _candidates(self, offload: OffloadTarget, home_of: Mapping[Tensor, int | None]) -> list[Candidate]:
        shards = self._collectives.world_size if self._placements.shards_optimizer else 1
        return [
            Candidate(home, p.numel(), shards, p.requires_grad, self._dtypes(p, self._holders[p], True))
            for p, home in home_of.items()
            if (offload.optimizer if p.requires_grad else offload.parameters)
        ]

    def _unit(self, name: str, number: int | None, parameters: Sequence[Tensor]) -> Unit:
        """The unit ``number``, or the root, ``None``."""
        groups: dict[Any, list[Tensor]] = {}
        total = sum(parameter.numel() for parameter in parameters)
        for parameter in parameters:
            large = number is None and parameter.numel() >= total * OWN_GROUP_SHARE
            offloaded = self.offloading is not None and self.offloading.takes(number, parameter.requires_grad)
            dtypes = self._dtypes(parameter, self._holders[parameter], offloaded)
            key = (dtypes, parameter.requires_grad, offloaded, id(parameter) if large else None)
            groups.setdefault(key, []).append(parameter)
        built = [self._group(members, dtypes, offloaded) for (dtypes, _, offloaded, _), members in groups.items()]
        unit = Unit(name, built, is_root=number is None)
        for group in built:
            for index, sharded in enumerate(group.parameters):
                for holder in self._holders[sharded]:
                    unit.add_slot(holder.module, holder.attribute, holder.name, group, index)
        return unit

    def _dtypes(self, parameter: Tensor, holders: Sequence[Holder], offloaded: bool) -> Dtypes:
        trained, placements = parameter.requires_grad, self._placements
        return self._recipe.dtypes(
            parameter.dtype,
            trained=trained,
            gathered=placements.shards_optimizer or offloaded if trained else not placements.keeps_whole_parameters,
            # An embedding that is the head as well is looked up too.
            multiplied=all(is_multiplied(holder.module, holder.attribute, parameter) for holder in holders),
        )

    def _group(self, parameters: Sequence[Tensor], dtypes: Dtypes, offloaded: bool) -> ParamGroup:
        names = [self._holders[parameter][0].name for parameter in parameters]
        lane = Lane(names[0], self.offloading.background) if offloaded and self.offloading is not None else None
        return ParamGroup(names, parameters, self._placements, dtypes, self._collectives, self._pool, self._held, lane)


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
