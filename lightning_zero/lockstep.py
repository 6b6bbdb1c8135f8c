"""Ranks that differ: one that needs a unit asks the others, one that needs nothing serves them until all have met.

    rank 0    ask 3 | ask 4 | meet ...........  done       the shorter validation set, the shorter sentence
    rank 1    ask 3 | ask 4 | ask 5 | ask 6 | meet done

Every bar is one exchange of a few bytes among all ranks. The lowest number comes first: units are numbered below the
places where ranks meet, so those meet only when nobody asks any more. Ranks that meet in different places never would
have gone on together: all of them raise.

Training flows without questions, in one order on all ranks; a meeting stands before it. Where ranks may differ in
training too, it asks as evaluation does, and meets before each reduction. There the question for the unit that is
likely to come next goes out ahead: ranks that agree find its answer when they need it.

    rank 0    ask 3, ask 4 ahead | compute 3 | 4 begins to gather, ask 5 ahead | compute 4 | ...
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from lightning_zero.collectives import Collectives, Pending
from lightning_zero.watch import RanksDifferError

__all__ = ["FLOWING", "PLACES", "Lockstep"]

PLACES = {
    "setup": "setting up",
    "norm": "a norm or another reduction over a sharded tensor",
    "fragment": "a read of a sharded tensor",
    "checkpoint": "gathering a checkpoint",
    "writeback": "the end of `lightning_zero.gathered`",
    "gathered": "the beginning of `lightning_zero.gathered`",
    "batch": "the beginning of a training batch",
    "training step": "the beginning of a training step",
    "write": "the first write to a weight after a training step",
    "optimizer step": "the end of an optimizer step",
    "evaluation": "the beginning of validation or test",
    "evaluation end": "the end of an evaluation",
    "barrier": "`strategy.barrier`",
    "broadcast": "`strategy.broadcast`",
    "reduce": "`strategy.reduce`, as of a logged metric",
    "all_gather": "`strategy.all_gather`",
    "end": "the end of the run",
    "buffers": "rank 0's buffers before a training step",
    "flags": "the beginning or the end of a backward",
    "reduction": "a reduction of gradients",
}
"""Where ranks meet, by a short name; the order is that of their numbers."""

FLOWING = {"reduce": "reduction", "flags": "flags", "buffers": "buffers"}
"""Purposes of collectives that come in one order in training, and their places: a meeting stands before the first one
alone, but where training asks, before each."""

_FIRST_PLACE = 1 << 40
_NAMES = list(PLACES)


class Servable(Protocol):
    """What ranks gather together: a unit."""

    def serve(self, wanted: bool) -> None:
        """Take part in a gather, and keep what comes if it is ``wanted`` here."""


@dataclass(frozen=True)
class _Exchange:
    """One exchange under way, in which this rank said ``number``."""

    number: int
    values: torch.Tensor
    pending: Pending


class Member(Protocol):
    """The windows of one module, whose root is whole on all ranks, or on none, where training flows."""

    @property
    def holds_root(self) -> bool:
        """Whether the root is whole here, or about to be."""

    def agree_on_root(self, all_hold: bool) -> None:
        """Let go of the root unless every rank holds it."""


class _Numbers:
    """Numbers of everything that is sharded over one process group: the same on every rank."""

    def __init__(self) -> None:
        self.units: dict[int, weakref.ref[Servable]] = {}
        self.modules = 0
        self.members: weakref.WeakSet[Member] = weakref.WeakSet()
        self.asked = False
        self.ahead: _Exchange | None = None


class Lockstep:
    """The questions and meetings of one sharded module; ranks may be at another module of the same group.

    Args:
        units: of the module.
        collectives: of the ranks.
        trains: whether training asks too.
    """

    def __init__(self, units: Sequence[Servable], collectives: Collectives, trains: bool = False) -> None:
        self.trains = trains
        self._collectives = collectives
        group = collectives.group
        self._shared = _Numbers() if group is None else _of_groups.setdefault(group, _Numbers())
        first = len(self._shared.units)
        self._number = {unit: first + i for i, unit in enumerate(units)}
        self._shared.units.update({number: weakref.ref(unit) for unit, number in self._number.items()})
        self._first_place = _FIRST_PLACE + self._shared.modules * len(PLACES)
        self._shared.modules += 1

    @property
    def asked(self) -> bool:
        """Whether ranks may be in different places: one asked, or served, since the last meeting of all modules."""
        return self._shared.asked or self.trains

    def ask(self, unit: Servable, following: Servable | None = None) -> None:
        """Begin to gather ``unit``, after what other ranks need before it.

        Args:
            following: what this rank will ask for next, likely: its question goes out now.
        """
        number = self._number[unit]
        wanted = None
        while wanted != number:
            wanted, _, _ = self._exchange(number, True)
            self._serve(wanted, wanted == number)
        if following is not None:
            self._shared.ahead = self._begin(self._number[following], True)

    def join(self, windows: Member) -> None:
        """Have meetings agree on the root of ``windows``: those of other modules too, after which nobody may ask."""
        self._shared.members.add(windows)

    def meet(self, place: str, agrees: bool = True) -> None:
        """Serve until all ranks are at ``place``, one of `PLACES`.

        Args:
            place: the same on all ranks.
            agrees: whether roots that are not whole everywhere are let go of: what follows gathers unasked.

        Raises:
            RanksDifferError: another rank is elsewhere, and asks for nothing.
        """
        if self._collectives.world_size == 1:
            return
        number = self._first_place + _NAMES.index(place)
        while True:
            lowest, highest, all_hold = self._exchange(number, all(each.holds_root for each in self._shared.members))
            if lowest >= _FIRST_PLACE:
                break
            self._serve(lowest, wanted=False)
        self._shared.asked = False
        if lowest != highest:
            other = lowest if lowest != number else highest
            raise RanksDifferError(
                f"rank {self._collectives.rank} is at {PLACES[place]}, another rank is at {self._describe(other)}: they"
                " cannot go on together. Give every rank the same number of training batches (`drop_last=True`, a"
                " `DistributedSampler`), and call what communicates on all ranks or on none."
            )
        for windows in self._shared.members if agrees else ():
            windows.agree_on_root(all_hold)

    @staticmethod
    def _describe(number: int) -> str:
        return PLACES[_NAMES[(number - _FIRST_PLACE) % len(PLACES)]] if number >= _FIRST_PLACE else "a forward"

    def _serve(self, number: int, wanted: bool) -> None:
        self._shared.asked = True
        unit = self._shared.units[number]()
        assert unit is not None, "a unit that another rank still needs is gone here"
        unit.serve(wanted)

    def _exchange(self, number: int, holds_root: bool) -> tuple[int, int, bool]:
        """Lowest and highest number of all ranks, and whether all of them ``holds_root``.

        What was asked ahead is answered first, with the number of a unit: whoever is at a place asks again.
        """
        begun, self._shared.ahead = self._shared.ahead or self._begin(number, holds_root), None
        operation = begun.pending.operation
        with self._collectives.watch.waiting_for(f"the other ranks at {self._describe(begun.number)}", operation):
            begun.pending.wait()
        lowest, negated, all_hold = begun.values.tolist()
        return lowest, -negated, bool(all_hold)

    def _begin(self, number: int, holds_root: bool) -> _Exchange:
        values = torch.tensor([number, -number, int(holds_root)])
        return _Exchange(number, values, self._collectives.minimum(values))


_of_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _Numbers] = weakref.WeakKeyDictionary()
