"""Activations that wait for backward in host memory.

    forward     unit 0 | unit 1 | unit 2      what a unit saves leaves for the host when it is saved
    backward    unit 2 | unit 1 | unit 0      while unit 2 is computed, unit 1's activations come back

On CUDA both ways run on a stream of their own, beside the computation.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_zero.flat_buffer import BufferPool, storage_id
from lightning_zero.modes import unobserved
from lightning_zero.saved_hooks import steps_aside

__all__ = ["HostStash", "Ticket", "Visit", "without_graph"]


def without_graph(tensor: Tensor) -> Tensor:
    """``tensor``, as a hook may keep it: autograd adds the graph when it takes it back.

    The result of an operation holds the operation, which would hold the result: without a backward, for ever.
    """
    return tensor.detach() if type(tensor) is Tensor and tensor.grad_fn is not None else tensor


class _Region(NamedTuple):
    """The memory that a tensor takes of its storage: in elements, from ``offset`` on."""

    offset: int
    numel: int


WASTE = 4
"""A tensor with gaps, as a part of queries, keys and values in one, moves with its storage if that has up to so many
times its bytes."""


def _region(tensor: Tensor) -> _Region:
    if torch._prims_common.is_non_overlapping_and_dense_or_false(tensor):
        return _Region(int(tensor.storage_offset()), tensor.numel())
    return _Region(0, tensor.untyped_storage().nbytes() // tensor.itemsize)


class _Moved:
    """Memory that is on the host.

    Args:
        source: the storage on the device.
        host: its elements, shape (numel,).
    """

    def __init__(self, source: torch.UntypedStorage, host: Tensor) -> None:
        self.device = source.device
        self.source = StorageWeakRef(source)
        self.host = host
        self.value: Tensor | None = None
        """On the device, shape (numel,), once it came back."""
        self.ready: Any = None
        """When the copy that is under way is done."""


class Ticket:
    """One tensor that is in the stash; whoever holds the ticket gets it back.

    Args:
        tensor: on the device.
        moved: may be that of other tickets too: memory that several operations or units save moves once.
        offset: of the tensor there.
        visit: of the unit that saved it.
    """

    def __init__(self, tensor: Tensor, moved: _Moved, offset: int, visit: Visit) -> None:
        self._geometry = tensor.size(), tensor.stride(), offset
        self.requires_grad = tensor.requires_grad
        self.moved = moved
        self.visit = visit

    @unobserved
    def get(self) -> Tensor:
        """The tensor, on its device."""
        return self.visit.stash.get(self).as_strided(*self._geometry)


class Visit:
    """One forward of one unit: what it saved comes back together.

    Args:
        stash: that keeps it.
        previous: the forward before it, which backward reaches next.
    """

    def __init__(self, stash: HostStash, previous: Visit | None) -> None:
        self.stash = stash
        self._previous = None if previous is None else weakref.ref(previous)
        self.tickets: weakref.WeakSet[Ticket] = weakref.WeakSet()

    @property
    def previous(self) -> Visit | None:
        """The forward before it, if something of it is left."""
        return None if self._previous is None else self._previous()

    # Hooks of saved tensors; a window, which saves weights as places, takes its turn before them.

    @steps_aside
    def pack(self, tensor: Tensor) -> Any:
        """``tensor`` in the stash, or as it is."""
        return self.stash.put(tensor, self) if self.stash.accepts(tensor) else without_graph(tensor)

    def unpack(self, packed: Any) -> Tensor:
        """The inverse of `pack`."""
        return packed.get() if isinstance(packed, Ticket) else packed


class HostStash:
    """Keeps tensors of a device in host memory.

    Args:
        min_bytes: smaller tensors stay where they are.
        pin_memory: page-lock the host's copies of CUDA tensors, so that they move beside the computation.
    """

    def __init__(self, min_bytes: int, pin_memory: bool) -> None:
        self.min_bytes = min_bytes
        self.pin_memory = pin_memory
        pinned = pin_memory and torch.cuda.is_available()
        self._pool = BufferPool(
            torch.device("cpu"), allocate=lambda numel, dtype: torch.empty(numel, dtype=dtype, pin_memory=pinned)
        )
        self._moved: weakref.WeakValueDictionary[tuple[Any, ...], _Moved] = weakref.WeakValueDictionary()
        """What is here, by the place in memory where it was."""
        self._last: weakref.ref[Visit] | None = None
        self._near: list[Visit] = []
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}
        self.bytes_to_host = 0
        """That left the device so far."""
        self.bytes_to_device = 0
        """That came back so far."""

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, in another process too, begins empty.
        return HostStash, (self.min_bytes, self.pin_memory)

    def visit(self) -> Visit:
        """Begin a forward of a unit."""
        visit = Visit(self, None if self._last is None else self._last())
        self._last = weakref.ref(visit)
        return visit

    def accepts(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` moves: a plain one that is large."""
        return (
            type(tensor) in (Tensor, FakeTensor)
            and tensor.layout is torch.strided
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
            and self.min_bytes <= _region(tensor).numel * tensor.itemsize <= WASTE * tensor.nbytes
        )

    @unobserved
    def put(self, tensor: Tensor, visit: Visit) -> Ticket:
        """Take ``tensor``, which `accepts` allows, as it is now. Its memory is free when nobody else holds it."""
        region = _region(tensor)
        place = (storage_id(tensor), region, tensor.dtype, tensor._version)
        moved = self._moved.get(place)
        # Another tensor may lie where a dead one lay.
        if moved is None or moved.source.expired():
            moved = self._moved[place] = self._to_host(tensor, region)
        ticket = Ticket(tensor, moved, int(tensor.storage_offset()) - region.offset, visit)
        visit.tickets.add(ticket)
        return ticket

    def _to_host(self, tensor: Tensor, region: _Region) -> _Moved:
        flat = tensor.detach().as_strided((region.numel,), (1,), region.offset)
        moved = _Moved(tensor.untyped_storage(), self._pool.take(region.numel, tensor.dtype))
        with self._copying(tensor.device, to_host=True) as stream:
            moved.host.copy_(flat, non_blocking=True)
            if stream is not None:
                # It is freed on the compute stream: not before this copy is done.
                flat.record_stream(stream)
        self.bytes_to_host += flat.nbytes
        return moved

    def get(self, ticket: Ticket) -> Tensor:
        """Its memory, on the device. What the same unit saved, and the unit before it, begins to come back too."""
        visit, moved, previous = ticket.visit, ticket.moved, ticket.visit.previous
        near = [visit] if previous is None else [visit, previous]
        if near != self._near:
            self._approach(near)
        self._fetch(moved)
        assert moved.value is not None
        if moved.ready is not None:
            torch.cuda.current_stream(moved.device).wait_event(moved.ready)
        return moved.value

    def _approach(self, near: list[Visit]) -> None:
        """Have what ``near`` saved come back, and let go of what other visits alone saved."""
        passed, self._near = self._near, near
        wanted = dict.fromkeys(ticket.moved for visit in near for ticket in visit.tickets)
        for visit in passed:
            for ticket in visit.tickets:
                if ticket.moved not in wanted:
                    ticket.moved.value = ticket.moved.ready = None
        for moved in wanted:
            self._fetch(moved)

    def _fetch(self, moved: _Moved) -> None:
        if moved.value is not None:
            return
        moved.value = torch.empty_like(moved.host, device=moved.device)
        with self._copying(moved.device, to_host=False) as stream:
            moved.value.copy_(moved.host, non_blocking=True)
            if stream is not None:
                moved.value.record_stream(stream)
                moved.ready = stream.record_event()
        self.bytes_to_device += moved.value.nbytes

    @contextmanager
    def _copying(self, device: torch.device, to_host: bool) -> Iterator[Any]:
        """Context of a copy that begins after what the compute stream does now, beside what it does next."""
        if device.type != "cuda":
            yield None
            return
        if device not in self._streams:
            self._streams[device] = (torch.cuda.Stream(device), torch.cuda.Stream(device))
        stream, opposite = self._streams[device][to_host], self._streams[device][not to_host]
        stream.wait_stream(torch.cuda.current_stream(device))
        # A buffer on the host may be read there yet, or written.
        stream.wait_stream(opposite)
        with torch.cuda.stream(stream):
            yield stream
