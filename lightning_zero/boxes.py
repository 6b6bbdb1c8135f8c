"""A run of consecutive elements of an N-d tensor as boxes: axis-aligned blocks, a handful for each run.

    shape (4, 5), elements [3, 17)      . . . a a      a  head of the first row
                                        b b b b b      b  whole rows
                                        b b b b b
                                        c c . . .      c  head of the last row

In more dimensions head and tail are runs of a smaller tensor, and are cut again. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

__all__ = ["Box", "boxes"]


@dataclass(frozen=True)
class Box:
    """Elements ``[offsets[d], offsets[d] + sizes[d])`` along each dimension d.

    In row-major order they are consecutive elements of the tensor, from number ``start`` on.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return prod(self.sizes)

    def permuted(self, order: Sequence[int]) -> Box:
        """The box of a tensor whose dimension ``order[d]`` is dimension d here."""
        offsets, sizes = [0] * len(order), [0] * len(order)
        for d, other in enumerate(order):
            offsets[other], sizes[other] = self.offsets[d], self.sizes[d]
        return Box(tuple(offsets), tuple(sizes), self.start)


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Elements ``[start, stop)`` of a tensor of ``shape``, in row-major order, as boxes in that order.

    At most ``2 * len(shape) - 1`` of them.
    """
    if stop <= start:
        return []
    if not shape:
        return [Box((), (), start)]
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and (start, stop) != (first * row, (first + 1) * row):
        return _in_row(shape, first, row, start, stop)
    found = []
    if start != first * row:
        found += _in_row(shape, first, row, start, (first + 1) * row)
        first += 1
    tail = []
    if stop != (last + 1) * row:
        tail = _in_row(shape, last, row, last * row, stop)
        last -= 1
    if last >= first:
        inner = tuple(shape[1:])
        found.append(Box((first, *(0 for _ in inner)), (last + 1 - first, *inner), first * row))
    return found + tail


def _in_row(shape: Sequence[int], index: int, row: int, start: int, stop: int) -> list[Box]:
    """Boxes of a part of row ``index``."""
    return [
        Box((index, *box.offsets), (1, *box.sizes), box.start + index * row)
        for box in boxes(shape[1:], start - index * row, stop - index * row)
    ]
