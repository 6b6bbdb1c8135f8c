"""How one tensor is cut: its global geometry and the elements that each rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_zero.collectives import Collectives
from lightning_zero.layout import FlatLayout, Fragment

__all__ = ["Slicing"]


@dataclass(frozen=True, eq=False)
class Slicing:
    """How one tensor is cut: its global geometry and the elements that each rank holds.

    Args:
        name: full name of the parameter it belongs to, for errors.
        shape: global shape.
        stride: global stride, dense: elements are counted in storage order.
        layout: of the buffers that the tensor lies in, cut for the ranks, or whole on each of them.
        index: of the tensor in it.
        collectives: of the ranks that hold the fragments.
    """

    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    layout: FlatLayout
    index: int
    collectives: Collectives

    def __deepcopy__(self, memo: dict[int, Any]) -> Slicing:
        return self

    @cached_property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return self.shape.numel()

    @cached_property
    def own(self) -> Fragment:
        """This rank's fragment."""
        return self._fragment_of(self.collectives.rank)

    @cached_property
    def fragments(self) -> tuple[Fragment, ...]:
        """One for each rank, made when asked for: of a model on a thousand ranks they would be a hundred megabytes."""
        return tuple(map(self._fragment_of, range(self.collectives.world_size)))

    def _fragment_of(self, rank: int) -> Fragment:
        return self.layout.fragment(self.index, 0 if self.layout.num_shards == 1 else rank)

    @cached_property
    def lies_here(self) -> bool:
        """Whether this rank holds some of its elements."""
        return self.own.numel > 0

    @cached_property
    def replicated(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return self.layout.num_shards == 1 or self.numel == 0

    @cached_property
    def contiguous(self) -> bool:
        """Whether storage order is the order of indices."""
        return torch.empty_strided(self.shape, self.stride, device="meta").is_contiguous()

    def is_cut_as(self, other: Slicing) -> bool:
        """Whether each rank holds the same elements of a tensor of ``other``, in the same order."""
        return self is other or (self.fragments == other.fragments and self.stride == other.stride)

    def flatten(self, whole: Tensor) -> Tensor:
        """``whole``, of the global shape, as shape (numel,) in storage order; a view where it can be."""
        if whole.stride() != self.stride and not (self.contiguous and whole.is_contiguous()):
            whole = torch.empty_strided(self.shape, self.stride, dtype=whole.dtype, device=whole.device).copy_(whole)
        return whole.as_strided((self.numel,), (1,), whole.storage_offset())

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's fragment of ``whole``, shape (own.numel,); a view where it can be."""
        return self.flatten(whole)[self.own.start : self.own.stop]

    def shape_up(self, flat: Tensor) -> Tensor:
        """The inverse of `flatten`: a view of global shape and stride."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())

    def assemble(self, fragment: Tensor) -> Tensor:
        """The whole tensor from every rank's fragment: a collective on all ranks, unless it is replicated."""
        if self.replicated:
            return self.shape_up(fragment)
        longest = max(piece.numel for piece in self.fragments)
        device = self.collectives.device
        padded = torch.zeros(longest, dtype=fragment.dtype, device=device)
        padded[: fragment.numel()] = fragment
        received = padded.new_empty(len(self.fragments) * longest)
        self.collectives.all_gather(received, padded, purpose="fragment").wait()
        chunks = received.view(len(self.fragments), longest)
        flat = torch.cat([chunk[: piece.numel] for chunk, piece in zip(chunks, self.fragments, strict=True)])
        return self.shape_up(flat.to(fragment.device))

    def assemble_on_first(self, fragment: Tensor) -> Tensor | None:
        """As `assemble`, on rank 0 alone, in memory of its own; ``None`` on the others."""
        is_first = self.collectives.rank == 0
        if self.replicated:
            return self.shape_up(fragment).clone() if is_first else None
        device = self.collectives.device
        flat = torch.empty(self.numel, dtype=fragment.dtype, device=device) if is_first else None
        bounds = [(piece.start, piece.stop) for piece in self.fragments]
        self.collectives.gather_on_first(flat, fragment.to(device), bounds)
        return None if flat is None else self.shape_up(flat)
