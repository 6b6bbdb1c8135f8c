"""Where the tensors of a group lie: in a whole buffer, and in this rank's shard of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_zero.layout import FlatLayout
from lightning_zero.slicing import Slicing

__all__ = ["Partition"]


@dataclass(frozen=True)
class Partition:
    """A layout, the geometry of its tensors, and the shard that is this rank's.

    Args:
        layout: offsets in the whole buffer.
        slicings: of each tensor.
        shard: this rank's shard; 0 where nothing is cut.
    """

    layout: FlatLayout
    slicings: Sequence[Slicing]
    shard: int

    def view(self, whole: Tensor, index: int) -> Tensor:
        """Tensor ``index`` inside ``whole``, shape (layout.total,), in its global geometry."""
        shape, stride, offset = self._places[index]
        return whole.as_strided(shape, stride, whole.storage_offset() + offset)

    def views(self, whole: Tensor) -> list[Tensor]:
        """All tensors inside ``whole``."""
        first = whole.storage_offset()
        return [whole.as_strided(shape, stride, first + offset) for shape, stride, offset in self._places]

    @cached_property
    def _places(self) -> list[tuple[torch.Size, tuple[int, ...], int]]:
        return [(s.shape, s.stride, offset) for s, offset in zip(self.slicings, self.layout.offsets, strict=True)]

    def fragment(self, shard: Tensor, index: int) -> Tensor:
        """Tensor ``index`` inside ``shard``, shape (layout.shard_numel,): this rank's elements, shape (n,)."""
        start, stop = self._bounds[index]
        return shard[start:stop]

    @cached_property
    def _bounds(self) -> list[tuple[int, int]]:
        pieces = [self.layout.fragment(index, self.shard) for index in range(len(self.slicings))]
        return [(piece.offset, piece.offset + piece.numel) for piece in pieces]

    def own_shard(self, whole: Tensor) -> Tensor:
        """This rank's shard of ``whole``, a view."""
        size = self.layout.shard_numel
        return whole[self.shard * size : (self.shard + 1) * size]
