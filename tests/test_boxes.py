"""A run of elements is a handful of boxes that cover it once, in order."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_zero.boxes import Box, boxes


@st.composite
def runs(draw):
    """A shape of up to four dimensions, and a run of its elements, empty ones included."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    numel = torch.Size(shape).numel()
    start = draw(st.integers(0, numel))
    return shape, start, draw(st.integers(start, numel))


@given(runs())
def test_boxes_cover_the_run_once_and_in_order(run):
    """Twin: number all elements of the tensor, and read them box by box."""
    shape, start, stop = run
    numbered = torch.arange(torch.Size(shape).numel()).view(shape)
    found = boxes(shape, start, stop)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    read = [start]
    for box in found:
        block = numbered[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes))].reshape(-1)
        assert block.numel() == box.numel
        assert block[0] == box.start == read[-1]
        assert torch.equal(block, torch.arange(box.start, box.start + box.numel))
        read.append(box.start + box.numel)
    assert read[-1] == stop


def test_an_example_with_numbers():
    """The picture in the file: head, rows, tail."""
    assert boxes((4, 5), 3, 17) == [Box((0, 3), (1, 2), 3), Box((1, 0), (2, 5), 5), Box((3, 0), (1, 2), 15)]


def test_a_permuted_box_is_the_box_of_the_permuted_tensor():
    """Storage order of a transposed (3, 2) matrix is row-major order of (2, 3)."""
    tensor = torch.arange(6).view(2, 3).t()
    (box,) = boxes((2, 3), 3, 6)
    swapped = box.permuted((1, 0))
    assert swapped == Box((0, 1), (3, 1), 3)
    assert tensor[0:3, 1:2].reshape(-1).tolist() == [3, 4, 5]
