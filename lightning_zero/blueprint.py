"""What a module becomes when it is sharded, before anything is allocated: the engine builds it, the planner counts it.

module    who holds which parameter        `holders`
units     which of them are whole together `find_units`
groups    the same dtypes, all trained or all frozen
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from lightning_zero.autocast import is_multiplied
from lightning_zero.group_plan import GroupPlan
from lightning_zero.holders import Holder, Holders, holders_of_parameters, homes
from lightning_zero.layout import FlatLayout
from lightning_zero.offload import OffloadTarget
from lightning_zero.placements import STAGES, Placements
from lightning_zero.precision import Dtypes, PrecisionRecipe
from lightning_zero.units import NamedModules

__all__ = ["Blueprint", "Candidate", "CutSizes", "PlannedGroup", "PlannedUnit", "placements_of"]

OWN_GROUP_SHARE = 1 / 4
"""A root parameter that holds this part of the root, as an embedding or a head does, is a group of its own: its
gradient leaves as soon as it is there."""


def placements_of(placements: Placements, world_size: int, offload: OffloadTarget | None) -> Placements:
    """What rests where on ``world_size`` ranks of a stage with ``placements``."""
    if world_size > 1:
        return placements
    if offload is None:
        # There is nothing to share: every state rests whole, and no stage differs.
        return STAGES[0]
    # Gradients leave unit by unit where they need not rest whole; weights stay, unless they are offloaded too.
    return placements if offload.parameters else replace(placements, parameter=STAGES[0].parameter)


@dataclass(frozen=True)
class Candidate:
    """A parameter that may be offloaded.

    Args:
        unit: that it belongs to.
        numel: elements of the whole parameter.
        shards: that it is cut into.
        trained: whether it has gradients and optimizer state.
        dtypes: of its state.
    """

    unit: int | None
    numel: int
    shards: int
    trained: bool
    dtypes: Dtypes

    @property
    def known_bytes(self) -> float:
        """Of main weights and gradients, a rank."""
        dtypes = self.dtypes
        gradient = dtypes.main_grad.itemsize
        if dtypes.main_grad != dtypes.main:  # it is widened for the optimizer
            gradient += dtypes.main.itemsize
        return self.numel / self.shards * (dtypes.main.itemsize + (gradient if self.trained else 0))

    @property
    def likely_bytes(self) -> float:
        """With Adam's two moments."""
        return self.known_bytes + 2 * self.trained * self.numel / self.shards * self.dtypes.main.itemsize


@dataclass(frozen=True)
class PlannedGroup:
    """Parameters that will share buffers, and what these will hold."""

    parameters: tuple[Tensor, ...]
    plan: GroupPlan


@dataclass(frozen=True)
class PlannedUnit:
    """Parameters that will be whole together; the root's ``number`` is ``None``."""

    name: str
    number: int | None
    groups: tuple[PlannedGroup, ...]


@dataclass(frozen=True)
class CutSizes:
    """How a model is cut, in bytes of its weights as they were before it was sharded.

    Args:
        units: how many.
        largest: full name of the largest one's (first) module; "" where there is none.
        largest_bytes: that it holds.
        root: full name of the largest parameter that is in no unit; "" where all are in one.
        root_bytes: that are in no unit.
        total_bytes: of the whole model.
    """

    units: int
    largest: str
    largest_bytes: int
    root: str
    root_bytes: int
    total_bytes: int

    def __str__(self) -> str:
        def size(nbytes: int) -> str:
            scaled = f"{nbytes / 1e6:,.4g} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:,.4g} kB"
            return f"{scaled}, {nbytes / max(self.total_bytes, 1):.0%}"

        number = f"{self.units or 'no'} unit{'' if self.units == 1 else 's'}"
        largest = f", the largest `{self.largest}` ({size(self.largest_bytes)} of the model)" if self.units else ""
        rest = f"{size(self.root_bytes)}, most of it `{self.root}`" if self.root else "nothing"
        return f"{number}{largest}; in no unit, whole from forward to backward at stage 3: {rest}"


class Blueprint:
    """The units of ``module``, plain, over ``world_size`` ranks.

    Args:
        module: its parameters may be on ``meta``.
        modules: of each unit, in the order of the forward; see `find_units`.
        placements: what rests where; see `placements_of`.
        recipe: dtypes.
        world_size: ranks that share the state.
        offload: where state rests off the device, if it does.
    """

    def __init__(
        self,
        module: nn.Module,
        modules: Sequence[NamedModules],
        placements: Placements,
        recipe: PrecisionRecipe,
        world_size: int,
        offload: OffloadTarget | None,
    ) -> None:
        self._modules = modules
        self._placements = placements
        self._recipe = recipe
        self._world_size = world_size
        self._offload = offload
        self.holders: Holders = holders_of_parameters(module)
        self._home_of = homes(self.holders, modules)

    @property
    def numbers(self) -> tuple[int | None, ...]:
        """Of the units, in the order in which a step needs them: the root first."""
        return (None, *range(len(self._modules)))

    @property
    def sizes(self) -> CutSizes:
        """Of its units and its root."""
        held: dict[int | None, int] = dict.fromkeys(self.numbers, 0)
        for parameter, home in self._home_of.items():
            held[home] += parameter.nbytes
        largest = max(self.numbers[1:], key=lambda number: held[number], default=None)
        root = max((p for p, home in self._home_of.items() if home is None), key=lambda p: p.nbytes, default=None)
        return CutSizes(
            units=len(self._modules),
            largest="" if largest is None else self._modules[largest][0][0],
            largest_bytes=0 if largest is None else held[largest],
            root="" if root is None else self.holders[root][0].name,
            root_bytes=held[None],
            total_bytes=sum(held.values()),
        )

    def candidates(self) -> list[Candidate]:
        """What the target may take."""
        offload = self._offload
        if offload is None:
            return []
        shards = self._world_size if self._placements.shards_optimizer else 1
        return [
            Candidate(home, p.numel(), shards, p.requires_grad, self._dtypes(p, self.holders[p], True))
            for p, home in self._home_of.items()
            if (offload.optimizer if p.requires_grad else offload.parameters)
        ]

    def units(self, takes: Callable[[int | None, bool], bool]) -> Iterator[PlannedUnit]:
        """All units in the order of the forward, and the root after them.

        Args:
            takes: whether the trained parameters of a unit, or its frozen ones, are offloaded.
        """
        numbers = (*range(len(self._modules)), None)
        names = [*(members[0][0] for members in self._modules), ""]
        for name, number in zip(names, numbers, strict=True):
            parameters = [p for p in self.holders if self._home_of[p] == number]
            yield PlannedUnit(name, number, tuple(self._groups(number, parameters, takes)))

    def _groups(
        self, number: int | None, parameters: Sequence[Tensor], takes: Callable[[int | None, bool], bool]
    ) -> Iterator[PlannedGroup]:
        groups: dict[Any, list[Tensor]] = {}
        total = sum(parameter.numel() for parameter in parameters)
        for parameter in parameters:
            large = number is None and parameter.numel() >= total * OWN_GROUP_SHARE
            offloaded = self._offload is not None and takes(number, parameter.requires_grad)
            dtypes = self._dtypes(parameter, self.holders[parameter], offloaded)
            key = (dtypes, parameter.requires_grad, offloaded, id(parameter) if large else None)
            groups.setdefault(key, []).append(parameter)
        placements = self._placements
        shards = self._world_size if placements.shards_optimizer else 1
        for (dtypes, trained, offloaded, _), members in groups.items():
            moves = offloaded and not placements.keeps_whole_parameters
            yield PlannedGroup(
                tuple(members),
                GroupPlan(
                    FlatLayout(tuple(p.numel() for p in members), shards),
                    placements,
                    dtypes,
                    trained,
                    self._world_size,
                    stays_whole=number in (None, len(self._modules) - 1),
                    offloaded=offloaded,
                    moves_each_gather=moves and self._offload is not None and self._offload.parameters,
                ),
            )

    def _dtypes(self, parameter: Tensor, holders: Sequence[Holder], offloaded: bool) -> Dtypes:
        trained, placements = parameter.requires_grad, self._placements
        return self._recipe.dtypes(
            parameter.dtype,
            trained=trained,
            gathered=placements.shards_optimizer or offloaded if trained else not placements.keeps_whole_parameters,
            # An embedding that is the head as well is looked up too.
            multiplied=all(is_multiplied(holder.module, holder.attribute, parameter) for holder in holders),
        )
