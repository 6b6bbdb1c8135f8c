"""Ranks that differ: one that needs a unit asks the others, one that needs nothing serves them until all have met.

    rank 0    ask 3 | ask 4 | meet ...........  done       the shorter validation set, the shorter sentence
    rank 1    ask 3 | ask 4 | ask 5 | ask 6 | meet done

Every bar is one exchange of a few bytes among all ranks. The lowest number comes first: units are numbered below the
places where ranks meet, so those meet only when nobody asks any more. Ranks that meet in different places never would
have gone on together: all of them raise.

Training flows without questions, in one order on all ranks; a meeting stands before it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from lightning_zero.collectives import Collectives

__all__ = ["FLOWING", "PLACES", "Lockstep", "RanksDifferError"]

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
}
"""Where ranks meet, by a short name; the order is that of their numbers."""

FLOWING = ("reduce", "flags", "buffers")
"""Purposes of collectives that come in one order in training: a meeting stands before the first one alone."""

_FIRST_PLACE = 1 << 40
_NAMES = list(PLACES)


class RanksDifferError(RuntimeError):
    """Ranks have come to places from which they cannot go on together."""


class Servable(Protocol):
    """What ranks gather together: a unit."""

    def serve(self, wanted: bool) -> None:
        """Take part in a gather, and keep what comes if it is ``wanted`` here."""


class _Numbers:
    """Numbers of everything that is sharded over one process group: the same on every rank."""

    def __init__(self) -> None:
        self.units: dict[int, weakref.ref[Servable]] = {}
        self.modules = 0
        self.asked = False


class Lockstep:
    """The questions and meetings of one sharded module; ranks may be at another module of the same group.

    Args:
        units: of the module.
        collectives: of the ranks.
    """

    def __init__(self, units: Sequence[Servable], collectives: Collectives) -> None:
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
        """Whether this rank asked, or served, since its last meeting, for whichever module."""
        return self._shared.asked

    def ask(self, unit: Servable) -> None:
        """Begin to gather ``unit``, after what other ranks need before it."""
        number = self._number[unit]
        wanted = None
        while wanted != number:
            wanted, _, _ = self._exchange(number, True)
            self._serve(wanted, wanted == number)

    def meet(self, place: str, holds_root: bool = True) -> bool:
        """Serve until all ranks are at ``place``, one of `PLACES`. Returns whether every rank ``holds_root``.

        Raises:
            RanksDifferError: another rank is elsewhere, and asks for nothing.
        """
        if self._collectives.world_size == 1:
            return holds_root
        number = self._first_place + _NAMES.index(place)
        while True:
            lowest, highest, all_hold = self._exchange(number, holds_root)
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
        return all_hold

    @staticmethod
    def _describe(number: int) -> str:
        return PLACES[_NAMES[(number - _FIRST_PLACE) % len(PLACES)]] if number >= _FIRST_PLACE else "a forward"

    def _serve(self, number: int, wanted: bool) -> None:
        self._shared.asked = True
        unit = self._shared.units[number]()
        assert unit is not None, "a unit that another rank still needs is gone here"
        unit.serve(wanted)

    def _exchange(self, number: int, holds_root: bool) -> tuple[int, int, bool]:
        """Lowest and highest number of all ranks, and whether all of them ``holds_root``."""
        values = torch.tensor([number, -number, int(holds_root)])
        with self._collectives.watch.waiting_for(f"the other ranks at {self._describe(number)}"):
            lowest, negated, all_hold = self._collectives.minimum(values).tolist()
        return lowest, -negated, bool(all_hold)


_of_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _Numbers] = weakref.WeakKeyDictionary()
