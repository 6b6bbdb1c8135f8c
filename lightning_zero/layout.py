"""Offsets of many tensors inside one 1-D buffer, cut into equal shards.

    | t0  |    t1    |p|   t2   |p|       p: padding
    shard 0: [0, 8)    shard 1: [8, 16)

Pure arithmetic on element counts: no tensor, no process group.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

__all__ = ["ALIGNMENT", "FlatLayout", "Fragment"]

ALIGNMENT = 8
"""Elements. Every tensor and every shard starts on a multiple: 16 bytes in 2-byte dtypes, which GPU kernels want."""


@dataclass(frozen=True)
class Fragment:
    """The part of one tensor that lies in one shard.

    Elements ``[start, stop)`` of the tensor, in storage order, are elements ``[offset, offset + stop - start)`` of the
    shard.
    """

    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        """Elements in the fragment; 0 where the tensor does not reach into the shard."""
        return self.stop - self.start


@dataclass(frozen=True)
class FlatLayout:
    """Where tensors of the given sizes lie in a buffer that is cut into ``num_shards`` equal shards.

    ``FlatLayout((5, 3), num_shards=2)`` puts the tensors at 0 and 8, pads to 16 elements, and cuts at 8.

    Args:
        numels: elements of each tensor.
        num_shards: number of equal contiguous shards.
    """

    numels: tuple[int, ...]
    num_shards: int

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First element of each tensor in the buffer."""
        offsets, end = [], 0
        for numel in self.numels:
            offsets.append(end)
            end += _round_up(numel, ALIGNMENT)
        return tuple(offsets)

    @cached_property
    def total(self) -> int:
        """Elements of the buffer, padding included."""
        used = sum(_round_up(numel, ALIGNMENT) for numel in self.numels)
        return _round_up(used, ALIGNMENT * self.num_shards)

    @property
    def shard_numel(self) -> int:
        """Elements of one shard, padding included."""
        return self.total // self.num_shards

    @property
    def padding(self) -> int:
        """Elements of the buffer that belong to no tensor."""
        return self.total - sum(self.numels)

    def fragment(self, index: int, shard: int) -> Fragment:
        """The part of tensor ``index`` that lies in ``shard``."""
        begin, numel = self.offsets[index], self.numels[index]
        low = shard * self.shard_numel
        start = min(max(low - begin, 0), numel)
        stop = min(max(low + self.shard_numel - begin, 0), numel)
        return Fragment(start, max(start, stop), max(begin - low, 0) if stop > start else 0)

    def tensor_at(self, offset: int) -> int:
        """Index of the tensor that holds buffer element ``offset``."""
        return bisect_right(self.offsets, offset) - 1


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
