"""Buffers that are used again: pooled by size and dtype, free when nobody else refers to their storage.

    take(1024, float32) -> a       two units in flight use two buffers,
    take(1024, float32) -> b       however many units the model has
    del a
    take(1024, float32) -> a       the same memory: nothing is mapped or faulted anew

A buffer has no "give back": whoever still refers to its storage (a view, a saved tensor, a leaf) keeps it out of use.
An escaped view therefore costs memory and never a wrong value.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_zero.modes import making_ordinary_tensors

__all__ = ["BufferPool", "storage_id"]


def storage_id(tensor: Tensor) -> int:
    """Identity of the memory that ``tensor`` views, valid while someone refers to it."""
    return int(tensor.untyped_storage()._cdata)


class _Slot:
    """One buffer and how many refer to it when nobody else does."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self._storage = buffer.untyped_storage()
        self._alone = self._users()

    def _users(self) -> int:
        # Tensors and numpy arrays count as users of the storage; its one Python object counts its own.
        return int(torch._C._storage_Use_Count(self._storage._cdata)) + sys.getrefcount(self._storage)

    @property
    def free(self) -> bool:
        return self._users() <= self._alone


class BufferPool:
    """1-D buffers on one device.

    On CUDA a buffer may be taken again while kernels that use it are still queued: every later use, a collective
    included, is ordered behind them because it is launched from the same compute stream, or waits for it.

    Args:
        device: where the buffers live.
        poison: fill a buffer with NaN before it is used again, so that a read of stale memory shows.
        allocate: gives memory for a number of elements and dtype; default: from the device's allocator.
    """

    def __init__(
        self,
        device: torch.device,
        poison: bool = False,
        allocate: Callable[[int, torch.dtype], Tensor] | None = None,
    ) -> None:
        self.device = device
        self.poison = poison
        self._allocate = allocate or (lambda numel, dtype: torch.empty(numel, dtype=dtype, device=device))
        # Offloaded state takes buffers in the background too.
        self._lock = threading.Lock()
        self._slots: dict[tuple[int, torch.dtype], list[_Slot]] = defaultdict(list)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer of shape (numel,) with arbitrary content; it is the caller's while referred to."""
        return self.lend(numel, dtype)[0]

    def lend(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """As `take`, and the pool's own tensor of the same memory, which lives as long as that is pooled."""
        with self._lock:
            slots = self._slots[numel, dtype]
            slot = self._first_free(slots)
            with making_ordinary_tensors():
                if slot is None:
                    slot = _Slot(self._allocate(numel, dtype))
                    slots.append(slot)
                elif self.poison and dtype.is_floating_point:
                    slot.buffer.fill_(float("nan"))
                return slot.buffer.detach(), slot.buffer

    def _first_free(self, slots: list[_Slot]) -> _Slot | None:
        """One that nobody uses, moved to the end.

        Where many are taken one after another, the next one is in front; where most stay in use, as gradients do that
        wait for further micro-batches, those that come and go are at the end. So both ends are looked at in turn.
        """
        for step in range(len(slots)):
            place = len(slots) - 1 - step // 2 if step % 2 else step // 2
            if slots[place].free:
                slots.append(slots.pop(place))
                return slots[-1]
        return None

    @property
    def nbytes(self) -> int:
        """Bytes held, in use or not."""
        return sum(slot.buffer.nbytes for slots in self._slots.values() for slot in slots)

    @property
    def nbytes_in_use(self) -> int:
        """Bytes that someone refers to."""
        return sum(slot.buffer.nbytes for slots in self._slots.values() for slot in slots if not slot.free)

    def trim(self) -> None:
        """Forget free buffers, so that their memory returns to the allocator."""
        for key, slots in list(self._slots.items()):
            self._slots[key] = [slot for slot in slots if not slot.free]
