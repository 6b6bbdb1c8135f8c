"""Activations that wait for backward in host memory.

    forward     unit 0 | unit 1 | unit 2      what a unit saves leaves for the host when it is saved
    backward    unit 2 | unit 1 | unit 0      while unit 2 is computed, unit 1's activations come back

On CUDA both ways run on a stream of their own, beside the computation.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_zero.flat_buffer import BufferPool, storage_id
from lightning_zero.modes import unobserved

__all__ = ["HostStash", "Ticket", "Visit", "without_graph"]


def without_graph(tensor: Tensor) -> Tensor:
    """``tensor``, as a hook may keep it: autograd adds the graph when it takes it back.

    The result of an operation holds the operation, which would hold the result: without a backward, for ever.
    """
    return tensor.detach() if type(tensor) is Tensor and tensor.grad_fn is not None else tensor


class Ticket:
    """One tensor that is in the stash; whoever holds the ticket gets it back.

    Args:
        value: on the device.
        host: its elements on the host, shape (numel,).
        visit: of the unit that saved it.
    """

    def __init__(self, value: Tensor, host: Tensor, visit: Visit) -> None:
        self.size, self.stride = value.size(), value.stride()
        self.requires_grad = value.requires_grad
        self.device = value.device
        self.host = host
        self.visit = visit
        self.value: Tensor | None = None
        """On the device, once it came back."""
        self.ready: Any = None
        """When the copy that is under way is done."""

    def get(self) -> Tensor:
        """The tensor, on its device."""
        return self.visit.stash.get(self)


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
        self.known: dict[tuple[Any, ...], tuple[StorageWeakRef, weakref.ref[Ticket]]] = {}
        """What was saved, by its place in memory: one tensor that several operations save moves once."""

    @property
    def previous(self) -> Visit | None:
        """The forward before it, if something of it is left."""
        return None if self._previous is None else self._previous()

    # Hooks of saved tensors; a window, which saves weights as places, takes its turn before them.

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
        """Whether ``tensor`` moves: a plain one that is large and has each of its elements once."""
        return (
            type(tensor) in (Tensor, FakeTensor)
            and tensor.layout is torch.strided
            and tensor.nbytes >= self.min_bytes
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
            and torch._prims_common.is_non_overlapping_and_dense_or_false(tensor)
        )

    @unobserved
    def put(self, tensor: Tensor, visit: Visit) -> Ticket:
        """Take ``tensor``, which `accepts` allows, as it is now. Its memory is free when nobody else holds it."""
        geometry = (tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)
        place = (storage_id(tensor), *geometry, tensor._version)
        if place in visit.known:
            storage, known = visit.known[place]
            ticket = known()
            # Another tensor may lie where a dead one lay.
            if ticket is not None and not storage.expired():
                return ticket
        flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
        ticket = Ticket(tensor, self._pool.take(tensor.numel(), tensor.dtype), visit)
        with self._copying(tensor.device, to_host=True) as stream:
            ticket.host.copy_(flat, non_blocking=True)
            if stream is not None:
                # It is freed on the compute stream: not before this copy is done.
                flat.record_stream(stream)
        self.bytes_to_host += tensor.nbytes
        visit.tickets.add(ticket)
        visit.known[place] = (StorageWeakRef(tensor.untyped_storage()), weakref.ref(ticket))
        return ticket

    @unobserved
    def get(self, ticket: Ticket) -> Tensor:
        """The tensor, on its device. What the same unit saved, and the unit before it, begins to come back too."""
        visit = ticket.visit
        near = [visit] if visit.previous is None else [visit, visit.previous]
        for passed in self._near:
            if passed not in near:
                for other in passed.tickets:
                    other.value = other.ready = None
        self._near = near
        self._fetch(ticket)
        for wanted in near:
            for other in list(wanted.tickets):
                self._fetch(other)
        assert ticket.value is not None
        if ticket.ready is not None:
            torch.cuda.current_stream(ticket.device).wait_event(ticket.ready)
        return ticket.value

    def _fetch(self, ticket: Ticket) -> None:
        if ticket.value is not None:
            return
        flat = torch.empty(ticket.host.numel(), dtype=ticket.host.dtype, device=ticket.device)
        with self._copying(ticket.device, to_host=False) as stream:
            flat.copy_(ticket.host, non_blocking=True)
            if stream is not None:
                flat.record_stream(stream)
                ticket.ready = stream.record_event()
        self.bytes_to_device += flat.nbytes
        ticket.value = flat.as_strided(ticket.size, ticket.stride)

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
