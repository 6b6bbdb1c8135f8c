"""The order in which gradients are averaged: the same on every rank, as early as it can be.

    backward        unit n done | unit n-1 done | ...          gradients of n travel while n-1 computes
    end             what is missing, with zeros; then `grad` appears on the parameters

Ranks may differ in which parameters got a gradient. A small exchange of flags at the end of every backward settles it:
a parameter that no rank used keeps its gradient as it was, one that some rank used gets the mean over all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lightning_zero.collectives import Collectives, Pending
from lightning_zero.param_group import ParamGroup

__all__ = ["Reducer"]

_UNUSED, _IN_TIME, _LATE = 0, 1, 2

AGREEMENTS = 2
"""The order is rank 0's forward order at first, and what its first backward was observed to do from then on."""


class Reducer:
    """Reductions of all groups of one model.

    Args:
        groups: in an order that is the same on every rank.
        collectives: of the ranks that share the gradients.
        forward_order: the groups in the order of rank 0's first forward, as far as it is known.
        on_end: called at the end of each backward, when gradients are published.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        collectives: Collectives,
        forward_order: Callable[[], Iterable[ParamGroup]],
        on_end: Callable[[], None],
    ) -> None:
        self._groups = list(groups)
        self._collectives = collectives
        self._forward_order = forward_order
        self._on_end = on_end
        self._whole_may_wait = all(group.placements.keeps_whole_gradients for group in groups)
        self.accumulating = False
        """Whether this backward is not the last of its optimizer step; only where whole gradients may wait."""
        self._order = list(reversed(self._groups))
        self._agreed = 0
        self._excluded: dict[ParamGroup, set[int]] = {group: set() for group in groups}
        self._flags = Pending()
        self._running = False
        self._awaited: dict[ParamGroup, set[int]] = {}
        self._completed: dict[ParamGroup, None] = {}
        self._launched: dict[ParamGroup, None] = {}
        self._cursor = 0

    # During backward

    def begin(self) -> None:
        """Note that a backward runs: its end is when the engine's outermost graph task ends."""
        if self._running or torch._C._current_graph_task_id() == -1:
            return
        self._running = True
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        if self._agreed < AGREEMENTS:
            self._agree_on_order()
        self._completed.clear()
        self._awaited = {group: self._expected(group) for group in self._groups}

    def _expected(self, group: ParamGroup) -> set[int]:
        """Parameters whose gradients a reduction waits for: trained now, and used the last time on some rank."""
        return set(group.expected) - self._excluded[group]

    def _agree_on_order(self) -> None:
        first = reversed(list(self._forward_order())) if self._agreed == 0 else self._completed
        ordered = dict.fromkeys((*first, *self._order))
        number = {group: i for i, group in enumerate(self._groups)}
        positions = torch.tensor([number[group] for group in ordered])
        self._order = [self._groups[i] for i in self._collectives.broadcast_flags(positions).tolist()]
        self._agreed += 1

    def arrived(self, group: ParamGroup, index: int) -> None:
        """Backward gave ``group`` the gradient of its parameter ``index``."""
        self.begin()
        awaited = self._awaited[group]
        awaited.discard(index)
        if awaited or group in self._completed:
            return
        self._completed[group] = None
        if not (self.accumulating and self._whole_may_wait):
            self._advance()

    def _advance(self) -> None:
        """Reduce, in the agreed order, what is complete."""
        while self._cursor < len(self._order):
            group = self._order[self._cursor]
            if group in self._completed:
                self._launch(group)
            elif self._awaited[group]:
                return
            self._cursor += 1

    def _launch(self, group: ParamGroup) -> None:
        # One reduction under way at a time: at most two units' gradients are whole, this one's and the next one's.
        for other in self._launched:
            other.gradients.settle()
        group.gradients.reduce()
        self._launched[group] = None

    # At the end

    def finish(self) -> None:
        """Reduce what is missing and publish gradients; also what earlier backwards left to wait."""
        self._running = False
        if not (self.accumulating and self._whole_may_wait):
            self._flush()
        self._on_end()

    def _flush(self) -> None:
        flags = self._exchange_flags()
        for group in self._order:
            mine = flags[group]
            if group in self._launched:
                if _LATE in mine.values():
                    self._launch(group)
            elif any(mine.values()):
                self._launch(group)
        self._launched.clear()
        self._cursor = 0
        for group in self._groups:
            group.publish([index for index, flag in flags[group].items() if flag])

    def _exchange_flags(self) -> dict[ParamGroup, dict[int, int]]:
        """For each parameter, whether any rank has a gradient of it, and whether one came after its reduction."""
        own = {group: self._own_flags(group) for group in self._groups}
        missing = any(
            flag == _UNUSED and i not in self._excluded[group] and group.parameters[i].requires_grad
            for group, flags in own.items()
            for i, flag in flags.items()
        )
        tensor = torch.tensor([flag for flags in own.values() for flag in flags.values()], dtype=torch.uint8)
        self._flags.wait()
        self._flags = self._collectives.max_flags(tensor)
        # Read only where they can differ from this rank's own: reading waits for the slowest rank.
        if not missing and not any(self._excluded.values()):
            return own
        self._flags.wait()
        return self._note(own, tensor)

    def _own_flags(self, group: ParamGroup) -> dict[int, int]:
        pending = _LATE if group in self._launched else _IN_TIME
        return {
            i: pending if i in group.gradients.arrived else _IN_TIME if i in group.gradients.sent else _UNUSED
            for i in range(len(group.parameters))
        }

    def _note(self, own: dict[ParamGroup, dict[int, int]], tensor: Tensor) -> dict[ParamGroup, dict[int, int]]:
        """All ranks' flags by group; parameters that no rank used are not waited for the next time."""
        values = iter(tensor.tolist())
        flags = {group: {i: next(values) for i in indices} for group, indices in own.items()}
        for group, by_index in flags.items():
            trained = set(group.expected)
            self._excluded[group] = {i for i, flag in by_index.items() if flag == _UNUSED and i in trained}
        return flags

    # Outside backward

    def flush(self) -> None:
        """Reduce now what waits: someone reads a gradient, or an optimizer steps."""
        if not self._running and any(group.gradients.arrived for group in self._groups):
            self._flush()

    def recover(self) -> None:
        """Forget a backward that ended with an exception."""
        if self._running and torch._C._current_graph_task_id() == -1:
            self._running = False
            self._launched.clear()
            self._cursor = 0
            for group in self._groups:
                group.gradients.discard_unreduced()
            self._on_end()
