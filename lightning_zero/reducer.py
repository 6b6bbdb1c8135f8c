"""The order in which gradients are averaged: the same on every rank, as early as it can be.

    begin     which gradients will come, exchanged           a group that only other ranks use is joined with zeros
    backward  unit n done | unit n-1 done | ...              gradients of n travel while n-1 computes
    end       which gradients came, exchanged                `grad` appears on the parameters

Ranks may differ in which parameters get a gradient: one that no rank used keeps its gradient as it was, one that some
rank used gets the mean over all. Both exchanges are a byte a parameter. A rank reads the first only where the others
may differ from itself; the second is over when the last reductions are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch

from lightning_zero.collectives import Collectives
from lightning_zero.param_group import ParamGroup
from lightning_zero.watch import RanksDifferError

__all__ = ["Reducer"]

_UNUSED, _IN_TIME, _LATE = 0, 1, 2

AGREEMENTS = 2
"""The order is rank 0's forward order at first, and what its first backward was observed to do from then on."""


class _Flags:
    """A byte for each parameter of each group, and some more; after `read` the maximum over ranks.

    Args:
        groups: whose parameters.
        values: of a group, a byte for each parameter.
        more: further bytes.
        collectives: of the ranks.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        values: Callable[[ParamGroup], list[int]],
        more: Sequence[int],
        collectives: Collectives,
    ) -> None:
        self._start: dict[ParamGroup, int] = {}
        self.own: list[int] = []
        for group in groups:
            self._start[group] = len(self.own)
            self.own += values(group)
        self._more = len(self.own)
        self.own += more
        self._tensor = torch.tensor(self.own, dtype=torch.uint8)
        self._watch = collectives.watch
        self._pending = collectives.max_flags(self._tensor)
        self._read: list[int] | None = None

    def read(self) -> None:
        """Wait for the other ranks' bytes."""
        if self._read is None:
            with self._watch.waiting_for("the flags of a backward", self._pending.operation):
                self._pending.wait()
            self._read = self._tensor.tolist()

    def of(self, group: ParamGroup) -> list[int]:
        """The bytes of ``group``: of all ranks once they were read, before that this rank's own."""
        start = self._start[group]
        values = self.own if self._read is None else self._read
        return values[start : start + len(group.parameters)]

    @property
    def more(self) -> list[int]:
        """The further bytes, after `read`."""
        assert self._read is not None
        return self._read[self._more :]


class Reducer:
    """Reductions of all groups of one model.

    Args:
        groups: in an order that is the same on every rank.
        collectives: of the ranks that share the gradients.
        forward_order: the groups in the order of rank 0's first forward, as far as it is known.
        path: which gathers began in which order since the last backward, as one number below 2 ** 32.
        on_end: called at the end of each backward, when gradients are published.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        collectives: Collectives,
        forward_order: Callable[[], Iterable[ParamGroup]],
        path: Callable[[], int],
        on_end: Callable[[], None],
    ) -> None:
        self._groups = list(groups)
        self._collectives = collectives
        self._forward_order = forward_order
        self._path = path
        self._on_end = on_end
        self._whole_may_wait = all(group.placements.keeps_whole_gradients for group in groups)
        self.accumulating = False
        """Whether this backward is not the last of its optimizer step; only where whole gradients may wait."""
        self._order = list(reversed(self._groups))
        self._agreed = 0
        self._running = False
        # What the running graph task calls at its end: it goes uncalled where the task fails.
        self._at_end: weakref.ref[Any] | None = None
        self._failed = False
        self._coming: _Flags | None = None
        self._completed: dict[ParamGroup, None] = {}
        self._launched: dict[ParamGroup, None] = {}
        self._under_way: ParamGroup | None = None
        self._cursor = 0

    # During backward

    @property
    def _waits(self) -> bool:
        """Whether this backward's gradients wait for those of a later one."""
        return self.accumulating and self._whole_may_wait

    def begin(self) -> None:
        """Note that a backward runs: its end is when the engine's outermost graph task ends."""
        if torch._C._current_graph_task_id() == -1 or (self._running and not self._failed):
            return
        self.recover()
        self._running = True
        self._queue_end()
        if self._agreed < AGREEMENTS:
            self._agree_on_order()
        self._completed.clear()
        for group in self._groups:
            group.arrivals.expect()
        if not self._waits:
            self._coming = self._predict()

    def _agree_on_order(self) -> None:
        first = reversed(list(self._forward_order())) if self._agreed == 0 else self._completed
        ordered = dict.fromkeys((*first, *self._order))
        number = {group: i for i, group in enumerate(self._groups)}
        positions = torch.tensor([number[group] for group in ordered])
        self._order = [self._groups[i] for i in self._collectives.broadcast_flags(positions).tolist()]
        self._agreed += 1

    def _predict(self) -> _Flags:
        """Which gradients will come."""

        def values(group: ParamGroup) -> list[int]:
            came = group.gradients.arrived | group.arrivals.awaited.keys()
            return [_IN_TIME if index in came else _UNUSED for index in range(len(group.parameters))]

        return _Flags(self._groups, values, (), self._collectives)

    def completed(self, group: ParamGroup) -> None:
        """Backward gave ``group`` the last gradient that it awaited."""
        self._completed[group] = None
        self._advance()

    def _advance(self) -> None:
        """Reduce, in the agreed order, what is complete here or used on other ranks alone."""
        while not self._waits and self._cursor < len(self._order):
            group = self._order[self._cursor]
            if group.arrivals.awaited:
                return
            if self._is_used(group):
                self._launch(group)
            self._cursor += 1

    def _is_used(self, group: ParamGroup) -> bool:
        """Whether some rank will have a gradient of ``group``, as far as autograd knew at the start."""
        assert self._coming is not None
        if any(self._coming.of(group)):
            return True
        if group.arrivals.trained:
            self._coming.read()
        return any(self._coming.of(group))

    def _launch(self, group: ParamGroup) -> None:
        # One reduction under way at a time: at most two units' gradients are whole, this one's and the next one's.
        # The others join it when their own backward is done with the group. One that needs a gather of this rank's
        # before that, as where ranks use the root at different depths at stage 3, waits for it while this rank waits
        # for that one. With `ranks_may_differ` all meet before, and nothing waits so.
        if self._under_way is not None:
            self._under_way.gradients.settle()
        self._under_way = group
        group.gradients.reduce(more_follow=self.accumulating)
        self._launched[group] = None

    # At the end

    def _queue_end(self) -> None:
        call = partial(self._end_of_task)
        self._at_end = weakref.ref(call, self._task_is_gone)
        torch.autograd.Variable._execution_engine.queue_callback(call)

    def _task_is_gone(self, at_end: weakref.ref[Any]) -> None:
        """A graph task is freed. If it failed, the next gradient is another backward's: that must be noticed."""
        if self._running and at_end is self._at_end:
            self._failed = True
            self._expect_no_backward()

    def _end_of_task(self) -> None:
        """`finish`, if the graph task that ends is the outermost one."""
        node = cast("torch.autograd.graph.Node | None", torch._C._current_autograd_node())
        if node is None:
            self.finish()
            return
        # The first gradient came in a backward inside of `node`, a reentrant checkpoint or a hook, whose own graph task
        # ends here. What comes after `node`, its hooks first, runs in the task around it.
        self._at_end = None

        def queue(*_: Any) -> None:
            handle.remove()
            self._queue_end()

        handle = node.register_hook(queue)

    def finish(self) -> None:
        """Reduce what is missing and publish gradients; also what earlier backwards left to wait.

        Raises:
            RanksDifferError: ranks gathered different units, and computed with each other's.
        """
        self._running = self._failed = False
        try:
            if not self._waits:
                # A gradient that was announced and is undefined never comes.
                for group in self._groups:
                    group.arrivals.expect_nothing()
                self._advance()
                # Before hooks on gradients are called, which may run a backward of their own.
                self._expect_no_backward()
                self._flush()
        except BaseException:  # of a user's hook too
            self._forget()
            raise
        finally:
            self._expect_no_backward()
            self._on_end()

    def _expect_no_backward(self) -> None:
        for group in self._groups:
            group.arrivals.forget()

    def _flush(self) -> None:
        """Reduce what came unannounced, and publish."""
        if self._coming is not None:
            self._coming.read()
        came = self._compare()
        for group in self._order:
            flags = came.of(group)
            if _LATE in flags if group in self._launched else any(flags):
                self._launch(group)
        self._launched.clear()
        self._under_way = None
        self._coming = None
        self._cursor = 0
        for group in self._groups:
            group.publish([index for index, flag in enumerate(came.of(group)) if flag])

    def _compare(self) -> _Flags:
        """Which gradients came, and which after their group's reduction, on any rank."""

        def values(group: ParamGroup) -> list[int]:
            gradients = group.gradients
            late = _LATE if group in self._launched else _IN_TIME
            return [
                late if index in gradients.arrived else _IN_TIME if index in gradients.sent else _UNUSED
                for index in range(len(group.parameters))
            ]

        path = self._path().to_bytes(4, "big")
        # A maximum of bytes and of their complements shows whether all ranks have the same ones.
        came = _Flags(self._groups, values, [*path, *(255 - byte for byte in path)], self._collectives)
        came.read()
        if any(high + negated != 255 for high, negated in zip(came.more[:4], came.more[4:], strict=True)):
            raise RanksDifferError(
                "ranks gathered different blocks in this step, or the same in another order. At stage 3 all ranks must"
                " take the same path in training: draw what is dropped from a generator that is seeded alike on every"
                " rank, or let them differ: `ZeROStrategy(ranks_may_differ=True)`."
            )
        return came

    # Outside backward

    def flush(self) -> None:
        """Reduce now what waits: someone reads a gradient, or an optimizer steps."""
        if self._failed:
            self.recover()
        if not self._running and any(group.gradients.arrived for group in self._groups):
            self._flush()

    def recover(self) -> None:
        """Forget a backward that ended with an exception, and what earlier ones of its optimizer step left to wait."""
        if self._running and (self._failed or torch._C._current_graph_task_id() == -1):
            self._running = self._failed = False
            self._expect_no_backward()
            self._forget()
            self._on_end()

    def _forget(self) -> None:
        self._launched.clear()
        self._under_way = None
        self._coming = None
        self._cursor = 0
        for group in self._groups:
            group.gradients.discard_unreduced()
