"""The gradients of one group: local ones wait in a whole buffer, mean ones rest where the optimizer reads them.

arrive 0, 1, ...  ->  | whole buffer |  --reduce-->  in flight  --settle-->  main_grad  --publish-->  p.grad

Where `main_grad` rests off the device, micro-batches add up on the device first. Their sum moves in the background
after the last reduction, or when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from lightning_zero.collectives import Collectives, Pending
from lightning_zero.flat_buffer import BufferPool
from lightning_zero.lane import Lane
from lightning_zero.modes import making_ordinary_tensors, unobserved, unrecorded
from lightning_zero.partition import Partition
from lightning_zero.placements import Placements
from lightning_zero.precision import Dtypes
from lightning_zero.sharded_parameter import ShardedTensor

__all__ = ["GroupGradients"]


class GroupGradients:
    """Local and mean gradients of the tensors of one partition.

    Args:
        partition: where they lie.
        placements: whether mean gradients rest whole, in place of the local ones, or as a shard.
        dtypes: of local gradients, on the wire, of mean gradients, and in which these are read.
        collectives: of the ranks that take part in the mean.
        pool: buffers.
        lane: of the mean gradients that rest off the device, where they do.
    """

    def __init__(
        self,
        partition: Partition,
        placements: Placements,
        dtypes: Dtypes,
        collectives: Collectives,
        pool: BufferPool,
        lane: Lane | None = None,
    ) -> None:
        self._partition = partition
        self._placements = placements
        self._dtypes = dtypes
        self._collectives = collectives
        self._tag = collectives.new_tag()
        self._pool = pool
        self._lane = lane
        self._descent: _Descent | None = None
        self.arrived: set[int] = set()
        """Tensors whose local gradient waits in the whole buffer."""
        self.sent: set[int] = set()
        """Tensors whose local gradient is part of a reduction of this backward."""
        self._local: Tensor | None = None
        self._views: list[Tensor] = []
        self._reducing: tuple[Pending, Tensor, Tensor] | None = None
        self._more_follow = False
        self._main: Tensor | None = None
        self._widens = dtypes.main_grad != dtypes.main
        # Which tensors have a mean gradient, and those that somebody has read: a tensor in Python is made when it is.
        self._published: set[int] = set()
        self._grads: dict[int, ShardedTensor] = {}
        # Gradients that user code put there, and places in the main buffer whose gradient user code took away.
        self._foreign: set[int] = set()
        self._dropped: set[int] = set()

    @unrecorded
    def arrive(self, index: int, grad: Tensor) -> None:
        """Take a local gradient, or add it to one that waits."""
        if self._local is None:
            self._local = self._pool.take(self._partition.layout.total, self._dtypes.gradient)
            self._views = self._partition.views(self._local)
        grad = grad.to_dense() if grad.layout != torch.strided else grad
        if index in self.arrived:
            self._views[index].add_(grad)
        else:
            self._views[index].copy_(grad)
            self.arrived.add(index)

    @unrecorded
    def reduce(self, more_follow: bool = False) -> None:
        """Begin to average the gradients that arrived, with zeros for those that did not; `settle` ends it.

        Args:
            more_follow: whether further backwards add to these gradients before they are read.
        """
        self.settle()
        self._more_follow = more_follow
        whole = self._local
        if whole is None:
            whole = self._pool.take(self._partition.layout.total, self._dtypes.gradient)
        for i in range(len(self._partition.slicings)):
            if i not in self.arrived:
                self._partition.view(whole, i).zero_()
        whole = self._cast(whole, self._dtypes.reduce)
        self._reducing = (*self._average(whole), whole)
        self.sent |= self.arrived
        self.arrived = set()
        self._local, self._views = None, []

    def _cast(self, buffer: Tensor, dtype: torch.dtype) -> Tensor:
        return buffer if buffer.dtype == dtype else self._pool.take(buffer.numel(), dtype).copy_(buffer)

    def _average(self, whole: Tensor) -> tuple[Pending, Tensor]:
        layout = self._partition.layout
        if layout.num_shards == 1:
            return self._collectives.all_reduce_mean(whole), whole
        if self._placements.keeps_whole_gradients:
            out = self._partition.own_shard(whole)
        else:
            out = self._pool.take(layout.shard_numel, self._dtypes.reduce)
        return self._collectives.reduce_scatter(out, whole, self._pool.take, tag=self._tag), out

    @unrecorded
    def settle(self) -> None:
        """End a reduction: its result joins the mean gradients, and the whole buffer is free where it need not rest."""
        if self._reducing is None:
            return
        pending, out, _ = self._reducing
        name = self._partition.slicings[0].name
        with self._collectives.watch.waiting_for(f"the mean gradients of `{name}` and its unit", pending.operation):
            pending.wait()
        self._reducing = None
        out = self._cast(out, self._dtypes.main_grad)
        for i in self._foreign:
            grad = self._grads[i]
            grad.fragment.add_(self._partition.fragment(out, i).to(grad.device))
        self._clear_dropped()
        if self._lane is not None:
            self._descend(out, self._lane)
        elif self._main is None:
            self._main = out
        else:
            self._main.add_(out)

    def _descend(self, out: Tensor, lane: Lane) -> None:
        """Add ``out`` on the device to what has not begun to move, or let it move after that."""
        with lane.still():
            if self._descent is not None and self._descent.add(out):
                pass
            elif self._main is None:
                self._main = lane.take(out.numel(), out.dtype)
                self._descent = _Descent(out, self._main, lane, adds=False)
            else:
                self._descent = _Descent(out, self._main, lane, adds=True)
        lane.background.leaves(lane, self._more_follow)

    def _clear_dropped(self) -> None:
        """Gradients that were set to ``None`` start from zero, in a copy: someone may have kept the old values."""
        if not self._dropped:
            return
        assert self._main is not None
        main = self._copy_of_main(self._main.dtype)
        dropped = [self._partition.fragment(main, i) for i in self._dropped]
        self._at_rest(lambda: torch._foreach_zero_(dropped))
        self._dropped.clear()
        self._move(main)

    def _copy_of_main(self, dtype: torch.dtype) -> Tensor:
        """The mean gradients in another buffer where they rest."""
        main = self._main
        assert main is not None
        take = self._pool.take if self._lane is None else self._lane.take
        copy = take(main.numel(), dtype)
        self._at_rest(lambda: copy.copy_(main))
        # What comes now adds to the copy.
        self._descent = None
        return copy

    def _at_rest(self, operation: Callable[[], object]) -> None:
        if self._lane is None:
            operation()
        else:
            self._lane.add(operation)

    def _move(self, main: Tensor) -> None:
        """Let the mean gradients lie in ``main``, which has their values."""
        self._main = main
        self._grads = {i: self._grads[i] for i in self._foreign}

    def publish(self, used: Sequence[int]) -> None:
        """Give the tensors ``used`` on any rank their mean gradients; the others keep what they had."""
        self.settle()
        self.sent = set()
        self._published.update(used)

    def discard_unreduced(self) -> None:
        """Forget what a backward that failed brought, local or reduced, and was not published."""
        if self._reducing is not None:
            # Its buffers are used again after it. One that fails uses them no more, and why the ranks have lost each
            # other is told already: the backward that failed did so for that, or the next collective will.
            with suppress(RuntimeError):
                self._reducing[0].wait()
            self._reducing = None
        self.arrived, self.sent, self._local, self._views = set(), set(), None, []
        if self._main is not None:
            self._drop(set(range(len(self._partition.slicings))) - self._published)

    def get(self, index: int) -> ShardedTensor | None:
        """The mean gradient of tensor ``index``, or ``None``. The first read widens all to the main dtype."""
        if index in self._grads and not self._widens:
            return self._grads[index]
        return self._read(index) if index in self._published else None

    @unobserved
    def _read(self, index: int) -> ShardedTensor:
        """The mean gradient of tensor ``index``, which is made at its first read."""
        if self._widens and self._main is not None and self._main.dtype != self._dtypes.main:
            # Torch's optimizers refuse a gradient of another dtype than the weight's.
            with torch.inference_mode(False), torch.no_grad():
                self._clear_dropped()
                self._move(self._copy_of_main(self._dtypes.main))
        if index not in self._grads:
            assert self._main is not None
            with making_ordinary_tensors():
                fragment = self._partition.fragment(self._main, index)
                self._grads[index] = ShardedTensor(fragment, self._partition.slicings[index], lane=self._lane)
        return self._grads[index]

    def buffers(self) -> Iterator[tuple[Tensor, bool]]:
        """What holds gradients now, local and mean, and whether off the device."""
        off = self._lane is not None
        if self._local is not None:
            yield self._local, False
        # Asked once: in the background it may move meanwhile.
        value = None if self._descent is None else self._descent.value
        if value is not None:
            yield value, False
        if self._main is not None:
            yield self._main, off
        for i in self._foreign:
            yield self._grads[i].fragment, off

    def set(self, index: int, grad: ShardedTensor | None) -> None:
        """Replace a mean gradient; ``None`` also drops a local one that waits for a reduction."""
        self.arrived.discard(index)
        known = self._grads.pop(index, None)
        if grad is not None:
            self._grads[index] = grad
            if grad is known:
                return
            self._foreign.add(index)
            self._published.add(index)
        else:
            self._foreign.discard(index)
            self._published.discard(index)
        if self._main is not None:
            self._drop([index])

    def _drop(self, indices: Iterable[int]) -> None:
        """Note that the main buffer holds nothing for these, or let go of it where it holds nothing at all."""
        self._dropped.update(indices)
        if self._published <= self._foreign:
            self._main = self._descent = None
            self._dropped.clear()


class _Descent:
    """Mean gradients on their way to where they rest: until the transfer begins, others add to them on the device.

    Args:
        value: on the device, shape (n,).
        resting: where it goes.
        lane: that does it.
        adds: whether ``resting`` has values already.
    """

    def __init__(self, value: Tensor, resting: Tensor, lane: Lane, adds: bool) -> None:
        self.value: Tensor | None = value
        self._resting = resting
        self._lane = lane
        self._adds = adds
        self._mark = lane.background.copies.mark()
        lane.add(self._move)

    def add(self, more: Tensor) -> bool:
        """Add ``more`` while that is possible; whether it was.

        Not what others follow: user code changed the sum since then. And not where the sum began to rest: whether a
        transfer has begun must not change the order of additions.
        """
        if self._adds or self.value is None or not self._lane.ends_with(self._move):
            return False
        self.value.add_(more)
        self._mark = self._lane.background.copies.mark()
        return True

    def _move(self) -> None:
        shared, value = self._lane.background, self.value
        assert value is not None
        into = self._lane.take(value.numel(), value.dtype) if self._adds else self._resting
        # At its end the host has waited, so the buffer on the device may be used again.
        with shared.copies.after(self._mark):
            shared.target.to_rest(into, value)
        shared.count_moved("to rest", value.nbytes)
        self.value = None
        if self._adds:
            self._resting.add_(into)
