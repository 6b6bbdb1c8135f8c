"""The only caller of torch.distributed's collectives; every payload is counted here.

    all_gather          whole <- shard of every rank
    reduce_scatter      shard <- mean over ranks of whole
    all_reduce          in place

Gathers, reductions and flags have an order of their own each: a rank reduces a unit when its backward is done with it,
and gathers the next one when it gets there, so ranks that use different parts interleave the two differently. Each
order must be the same on every rank.

With one rank, and no process group, each is a local copy or nothing, and counts nothing.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from lightning_zero.watch import Operation, Watch

__all__ = ["Collectives", "Pending"]

# Newer releases rename these two and warn on the old names.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"

_TAG = 0x5A330000
"""Of messages between two ranks, so that they meet none of the user's own; `Collectives.new_tag` counts on from it."""

TakeBuffer = Callable[[int, torch.dtype], Tensor]


class Pending:
    """A collective under way; ``wait`` makes its result visible to the current stream.

    Args:
        works: of torch.
        finish: called once after them.
        operation: what it is to a `Watch`, where other ranks take part.
    """

    def __init__(
        self,
        works: Sequence[Any] = (),
        finish: Callable[[], object] | None = None,
        operation: Operation | None = None,
    ) -> None:
        self._works = works
        self._finish = finish
        self.operation = operation

    @classmethod
    def on_stream(cls, result: Tensor) -> Pending:
        """Work on the current stream whose ``result`` the stream that waits needs."""
        return cls([_OnStream(result.device)] if result.is_cuda else ())

    def wait(self) -> None:
        """Wait once; later calls return at once. References to the tensors are dropped here."""
        for work in self._works:
            work.wait()
        finish, self._works, self._finish = self._finish, (), None
        if finish is not None:
            finish()


class _OnStream:
    """What the current CUDA stream does so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.current_stream(device).record_event()

    def wait(self) -> None:
        """Have the stream that is current now wait for it."""
        torch.cuda.current_stream(self._device).wait_event(self._event)


class _Shared:
    """What everything that is sharded over one process group has in common.

    Args:
        group: the ranks.
        flags_group: see `Collectives`.
        reductions_group: see `Collectives`.
    """

    def __init__(
        self, group: dist.ProcessGroup, flags_group: dist.ProcessGroup, reductions_group: dist.ProcessGroup
    ) -> None:
        # torch.distributed keeps groups alive until they are destroyed. Optimizer state refers to this object and may
        # outlive that: a group that is held longer aborts the process when it exits.
        self.group, self.flags_group, self.reductions_group = map(weakref.ref, (group, flags_group, reductions_group))
        self.tags = itertools.count(_TAG + 1)
        groups = [weakref.ref(each) for each in dict.fromkeys((group, flags_group, reductions_group))]
        self.watch = Watch(
            dist.get_rank(group), dist.get_world_size(group), _store_of(group), interrupt=lambda: _break(groups)
        )


_shared_of: weakref.WeakKeyDictionary[dist.ProcessGroup, _Shared] = weakref.WeakKeyDictionary()


class Collectives:
    """Collectives of one process group.

    Args:
        group: the ranks that share the state; ``None`` is one process alone.
        device: where the payloads of ``group`` live.
        flags_group: the same ranks over gloo: flags travel on the host, and their order is independent of the
            payloads' order. Defaults to ``group``.
        reductions_group: the same ranks again: the order of reductions is independent of that of gathers. Defaults to
            ``group``: on gloo, tags tell the messages of one from those of the other.
    """

    record: ClassVar[Callable[[str, str, str, int], object] | None] = None
    """Called with each collective in turn: the name of its ranks' process group, its order ("gathers", "reductions" or
    "flags"), purpose and bytes. In each order of a group all ranks must have the same ones."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        flags_group: dist.ProcessGroup | None = None,
        reductions_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._shared: _Shared | None = None
        if group is not None:
            if group not in _shared_of:
                _shared_of[group] = _Shared(group, flags_group or group, reductions_group or group)
            self._shared = _shared_of[group]
        self.device = device
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self._source = 0 if group is None else dist.get_global_rank(group, 0)
        self.watch = Watch(0, 1) if self._shared is None else self._shared.watch
        self._is_native = group is not None and dist.get_backend(group) != "gloo"
        self.meet: Callable[[str], object] | None = None
        """Called with its purpose before a collective: other ranks may need something first. Not before gathers, which
        are what they may need, and not before the exchanges that tell."""
        self.on_begin: Callable[[str, int], None] | None = None
        """Called with the purpose of a collective and its bytes, as they are counted."""
        self.calls: Counter[str] = Counter()
        """Number of collectives by purpose."""
        self.payload: Counter[str] = Counter()
        """Elements by purpose. An all-reduce of n elements counts 2 n, as a ring sends it."""
        self.nbytes: Counter[str] = Counter()
        """``payload`` times the itemsize, bytes; on the wire each rank sends (W - 1) / W of it."""
        # The watch's thread runs while somebody may wait.
        self.watch.begin()
        self.close = weakref.finalize(self, self.watch.end)
        """End this use of the watch, once; garbage collection does so too."""
        self.close.atexit = False

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, device: torch.device) -> Collectives:
        """Collectives of ``group``, or of the default group where one is initialized.

        Every rank must call this at the same place: it may create further groups.
        """
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is None or dist.get_world_size(group) == 1:
            return cls(None, device)
        if group in _shared_of or dist.get_backend(group) == "fake":
            # torch's group for measurements: nobody is at the other end to make a group with.
            return cls(group, device)
        timeout = group._get_backend(device).options._timeout
        ranks = dist.get_process_group_ranks(group)

        def same_ranks(backend: str) -> dist.ProcessGroup:
            # Another set of ranks may do the same with another module at this moment.
            made: dist.ProcessGroup = dist.new_group(ranks, timeout, backend=backend, use_local_synchronization=True)
            return made

        # Not on gloo: its reductions are messages with tags of their own, and a group more would cost connections. On
        # NCCL two communicators may be at work at once: a reduction waits for ranks that have not come to it, while
        # they wait for a gather that this rank has launched before.
        backend = dist.get_backend(group)
        return cls(group, device, same_ranks("gloo"), None if backend == "gloo" else same_ranks(backend))

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks; ``None`` is one process alone.

        Raises:
            RuntimeError: the process group was destroyed.
        """
        return None if self._shared is None else _alive(self._shared.group)

    @property
    def _reductions_group(self) -> dist.ProcessGroup | None:
        return None if self._shared is None else _alive(self._shared.reductions_group)

    @property
    def _flags_group(self) -> dist.ProcessGroup | None:
        return None if self._shared is None else _alive(self._shared.flags_group)

    def new_tag(self) -> int:
        """A number, the same on every rank, for messages that must not be taken for any others.

        Where ranks gather different units, each waits for its own: nobody computes with another unit's weights.
        """
        return 0 if self._shared is None else next(self._shared.tags)

    def reset_counts(self) -> None:
        """Set all counters to zero."""
        for counter in (self.calls, self.payload, self.nbytes):
            counter.clear()

    def _begin(
        self, purpose: str, tensor: Tensor, times: int = 1, order: str = "reductions", tag: int | None = None
    ) -> Operation:
        """Note that all ranks, sooner or later, take part in a collective; which one it is of its order, or tag."""
        if purpose not in ("gather", "lockstep") and self.meet is not None:
            self.meet(purpose)
        self._count(purpose, tensor, times)
        if Collectives.record is not None:
            assert self.group is not None
            Collectives.record(self.group.group_name, order, purpose, times * tensor.numel() * tensor.element_size())
        return self.watch.launch(f"{order}, {purpose}" if tag is None else tag)

    def _count(self, purpose: str, tensor: Tensor, times: int = 1) -> None:
        if self.on_begin is not None:
            self.on_begin(purpose, times * tensor.numel() * tensor.element_size())
        self.calls[purpose] += 1
        self.payload[purpose] += times * tensor.numel()
        self.nbytes[purpose] += times * tensor.numel() * tensor.element_size()

    def all_gather(self, whole: Tensor, shard: Tensor, purpose: str = "gather", tag: int = _TAG) -> Pending:
        """Concatenate the shards of all ranks; ``shard`` may be this rank's slice of ``whole``.

        Args:
            whole: shape (W * n,).
            shard: shape (n,).
            purpose: under which it is counted.
            tag: see `new_tag`.
        """
        if self.group is None:
            whole.copy_(shard)
            return Pending()
        operation = self._begin(purpose, whole, order="gathers", tag=tag)
        if self._is_native:
            work = getattr(dist, _ALL_GATHER)(whole, shard, group=self.group, async_op=True)
            return Pending([work], operation=operation)
        chunks = whole.view(self.world_size, -1)
        if chunks[self.rank].data_ptr() != shard.data_ptr():
            chunks[self.rank].copy_(shard)
        # Each pair of ranks exchanges directly: on loopback 0.6 of the time of gloo's all-gather, half of its CPU time.
        works = self._exchange(lambda peer: shard, lambda peer: chunks[peer], tag)
        return Pending(works, operation=operation)

    def scatter_from_first(self, own: Tensor, whole: Tensor | None) -> None:
        """Rank 0 gives each rank its chunk of ``whole``.

        A rank counts what it sends.

        Args:
            own: shape (n,), receives this rank's chunk.
            whole: shape (W * n,), on rank 0 alone.
        """
        if self.group is None:
            assert whole is not None
            own.copy_(whole)
            return
        works: list[Any] = []
        operation = self.watch.launch(_TAG)
        if whole is None:
            works = [dist.irecv(own, group=self.group, tag=_TAG, group_src=0)]
        else:
            chunks = whole.view(self.world_size, -1)
            own.copy_(chunks[0])
            for peer in range(1, self.world_size):
                self._count("setup", own)
                works.append(dist.isend(chunks[peer], group=self.group, tag=_TAG, group_dst=peer))
        with self.watch.waiting_for("rank 0's values (setup)", operation):
            for work in works:
                work.wait()

    def gather_on_first(self, whole: Tensor | None, part: Tensor, bounds: Sequence[tuple[int, int]]) -> None:
        """Rank 0 puts together what ranks have; the others receive nothing, and need no memory for it.

        A rank counts what it sends.

        Args:
            whole: shape (n,), on rank 0 alone.
            part: this rank's elements.
            bounds: where each rank's elements go in ``whole``, first and last but one; of nothing nothing is sent.
        """
        if self.group is None:
            assert whole is not None
            whole[slice(*bounds[0])] = part
            return
        if self.meet is not None:
            self.meet("checkpoint")
        works: list[Any] = []
        operation = self.watch.launch(_TAG)
        if whole is None and part.numel():
            self._count("checkpoint", part)
            works = [dist.isend(part, group=self.group, tag=_TAG, group_dst=0)]
        elif whole is not None:
            works = [
                dist.irecv(whole[start:stop], group=self.group, tag=_TAG, group_src=peer)
                for peer, (start, stop) in enumerate(bounds)
                if peer and stop > start
            ]
            whole[slice(*bounds[0])] = part
        with self.watch.waiting_for("the other ranks' parts of a checkpoint", operation):
            for work in works:
                work.wait()

    def _exchange(self, send: Callable[[int], Tensor], receive: Callable[[int], Tensor], tag: int) -> list[Any]:
        """Begin to send ``send(peer)`` to each other rank and to receive ``receive(peer)`` from it."""
        works = []
        with self.watch.waiting_for("a connection to the other ranks"):
            for peer in range(self.world_size):
                if peer != self.rank:
                    works.append(dist.irecv(receive(peer), group=self.group, tag=tag, group_src=peer))
                    works.append(dist.isend(send(peer), group=self.group, tag=tag, group_dst=peer))
        return works

    def reduce_scatter(
        self, out: Tensor, whole: Tensor, take: TakeBuffer, purpose: str = "reduce", tag: int = _TAG
    ) -> Pending:
        """Mean over ranks of ``whole``; this rank keeps its chunk.

        With two ranks holding [1, 2, 3, 4] and [5, 6, 7, 8], rank 0 gets [3, 4] and rank 1 gets [5, 6].

        Args:
            out: shape (n,); may be this rank's slice of ``whole``.
            whole: shape (W * n,), must not be written before ``wait``.
            take: gives a scratch buffer of a number of elements and dtype, where the backend needs one.
            purpose: under which it is counted.
            tag: see `new_tag`.
        """
        if self.group is None:
            out.copy_(whole)
            return Pending()
        operation = self._begin(purpose, whole, tag=tag)
        before = _divides_first(whole)
        if before:
            whole.div_(self.world_size)
        divisor = 1 if before else self.world_size
        if self._is_native:
            group = self._reductions_group
            work = getattr(dist, _REDUCE_SCATTER)(_real(out), _real(whole), group=group, async_op=True)
            return Pending([work], lambda: _divide(out, divisor), operation)
        # gloo emulates a reduce-scatter by reducing everything on every rank. Each rank sends the others their chunks
        # instead, half of that, and sums its own.
        chunks = whole.view(self.world_size, -1)
        received = take((self.world_size - 1) * chunks.shape[1], whole.dtype).view(self.world_size - 1, -1)
        place = lambda peer: received[peer - 1 if peer > self.rank else peer]  # noqa: E731
        works = self._exchange(lambda peer: chunks[peer], place, tag)
        return Pending(works, lambda: _sum(out, chunks[self.rank], received, divisor), operation)

    def all_reduce_mean(self, whole: Tensor, purpose: str = "reduce") -> Pending:
        """Mean over ranks, in place."""
        if self.group is None:
            return Pending()
        before = _divides_first(whole)
        if before:
            whole.div_(self.world_size)
        operation = self._begin(purpose, whole, times=2)
        work = dist.all_reduce(whole, group=self._reductions_group, async_op=True)
        return Pending([work], lambda: _divide(whole, 1 if before else self.world_size), operation)

    def all_reduce(self, tensor: Tensor, op: str = "sum", purpose: str = "norm") -> Tensor:
        """Combine over ranks, in place and at once; ``op`` is "sum", "max" or "min". Returns ``tensor``."""
        if self.group is not None:
            operation = self._begin(purpose, tensor, times=2)
            # A tensor that user code moved to the host travels from the device.
            value = tensor.to(self.device)
            with self.watch.waiting_for(f"the other ranks' part of a {purpose}", operation):
                dist.all_reduce(value, getattr(dist.ReduceOp, op.upper()), group=self._reductions_group)
            if value is not tensor:
                tensor.copy_(value)
        return tensor

    def broadcast(self, tensor: Tensor, purpose: str = "setup") -> Tensor:
        """Rank 0's value, in place and at once. Returns ``tensor``."""
        if self.group is not None:
            operation = self._begin(purpose, tensor)
            with self.watch.waiting_for(f"rank 0's values ({purpose})", operation):
                dist.broadcast(tensor, self._source, group=self._reductions_group)
        return tensor

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's ``value``, pickled."""
        if self.group is None:
            return value
        found = [value]
        with self.watch.waiting_for("rank 0's description of a model"):
            dist.broadcast_object_list(found, src=self._source, group=self._flags_group)
        return found[0]

    def max_flags(self, flags: Tensor) -> Pending:
        """Elementwise maximum over ranks of a small host tensor, in place, in an order of its own."""
        if self.group is None:
            return Pending()
        operation = self._begin("flags", flags, times=2, order="flags")
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._flags_group, async_op=True)
        return Pending([work], operation=operation)

    def on_any_rank(self, holds: bool) -> bool:
        """Whether ``holds`` is true on one rank or more."""
        flag = torch.tensor([holds], dtype=torch.uint8)
        self.max_flags(flag).wait()
        return bool(flag.item())

    def minimum(self, values: Tensor) -> Pending:
        """Elementwise minimum over ranks of a small host tensor, in place."""
        if self.group is None:
            return Pending()
        operation = self._begin("lockstep", values, times=2, order="flags")
        # Not an all-reduce, as flags: a rank that meets while another one is in a backward must not be taken for that
        # one's peer. Gloo tells collectives of different kinds from each other, and of one kind it aborts the process.
        of_all = values.new_empty(self.world_size, len(values))
        work = getattr(dist, _ALL_GATHER)(of_all.view(-1), values, group=self._flags_group, async_op=True)
        return Pending([work], lambda: values.copy_(of_all.amin(0)), operation)

    def broadcast_flags(self, flags: Tensor) -> Tensor:
        """Rank 0's value of a small host tensor, in place and at once. Returns ``flags``."""
        if self.group is not None:
            operation = self._begin("flags", flags, order="flags")
            with self.watch.waiting_for("rank 0's order of reductions", operation):
                dist.broadcast(flags, self._source, group=self._flags_group)
        return flags


def _store_of(group: dist.ProcessGroup) -> Store | None:
    found = dist.distributed_c10d._world.pg_map.get(group)
    return None if found is None else found[1]


def _break(groups: Sequence[weakref.ref[dist.ProcessGroup]]) -> None:
    """Have every wait for other ranks fail at once, on this rank and so on those that wait for it."""
    for reference in groups:
        group = reference()
        if group is None:
            continue
        if dist.get_backend(group) != "gloo":
            group.abort()
            continue
        # Gloo has no way to end a wait but a time limit, and one that passes ends all of the group's.
        peer = (dist.get_rank(group) + 1) % dist.get_world_size(group)
        with suppress(RuntimeError):
            work = dist.irecv(torch.empty(1), group=group, tag=_TAG - 1, group_src=peer)
            assert work is not None
            work.wait(timedelta(milliseconds=1))


def _alive(group: weakref.ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    found = group()
    if found is None:
        raise RuntimeError(
            "the process group of a sharded tensor was destroyed. Read what you need, or call"
            " `lightning_zero.unshard(module)`, before `torch.distributed.destroy_process_group()`."
        )
    return found


def _real(tensor: Tensor) -> Tensor:
    # Of all collectives torch's reduce-scatter alone does not do this, and NCCL knows no complex numbers.
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _divides_first(whole: Tensor) -> bool:
    # A sum of W gradients overflows fp16 long before their mean does; in other dtypes dividing the sum rounds once.
    return whole.dtype is torch.float16


def _divide(tensor: Tensor, divisor: int) -> None:
    if divisor & (divisor - 1):
        tensor.div_(divisor)
    elif divisor > 1:
        tensor.mul_(1 / divisor)  # exact for a power of two, and faster


def _sum(out: Tensor, own: Tensor, received: Tensor, divisor: int) -> None:
    others = received[0] if len(received) == 1 else torch.sum(received, 0)
    torch.add(own, others, out=out)
    _divide(out, divisor)
