"""Offsets in one buffer, against a slow twin that gives every element its place."""

import random

import pytest

from lightning_zero.layout import ALIGNMENT, FlatLayout


def fragments_of(layout, index):
    """The fragments of tensor ``index`` in every shard, in order."""
    return [layout.fragment(index, shard) for shard in range(layout.num_shards)]


def layouts(seed, count=60):
    """Random sizes, with 0-element tensors and scalars among them, and 1 to 7 shards."""
    rng = random.Random(seed)
    for _ in range(count):
        sizes = tuple(
            rng.choice([0, 1, rng.randrange(1, 9), rng.randrange(1, 200)]) for _ in range(rng.randrange(0, 9))
        )
        yield FlatLayout(sizes, rng.randrange(1, 8))


@pytest.mark.parametrize("seed", range(5))
def test_fragments_cover_each_tensor_exactly_once_and_in_order(seed):
    """Joined over shards, the fragments are 0, 1, ..., numel - 1."""
    for layout in layouts(seed):
        for index, numel in enumerate(layout.numels):
            elements = [e for piece in fragments_of(layout, index) for e in range(piece.start, piece.stop)]
            assert elements == list(range(numel)), (layout, index)


@pytest.mark.parametrize("seed", range(5))
def test_a_fragment_lies_where_the_tensor_lies_in_the_whole_buffer(seed):
    """The twin writes (tensor, element) into a list, cuts it into shards and looks fragments up there."""
    for layout in layouts(seed):
        buffer = [None] * layout.total
        for index, numel in enumerate(layout.numels):
            for element in range(numel):
                assert buffer[layout.offsets[index] + element] is None, "tensors overlap"
                buffer[layout.offsets[index] + element] = (index, element)
        for shard in range(layout.num_shards):
            mine = buffer[shard * layout.shard_numel : (shard + 1) * layout.shard_numel]
            for index in range(len(layout.numels)):
                piece = layout.fragment(index, shard)
                expected = [(index, e) for e in range(piece.start, piece.stop)]
                assert mine[piece.offset : piece.offset + piece.numel] == expected
                assert piece.numel == sum(place is not None and place[0] == index for place in mine)
        assert layout.padding == buffer.count(None)


@pytest.mark.parametrize("seed", range(5))
def test_every_tensor_and_every_shard_is_aligned(seed):
    """16 bytes in 2-byte dtypes, which is 8 elements."""
    for layout in layouts(seed):
        assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
        assert layout.shard_numel % ALIGNMENT == 0
        assert layout.shard_numel * layout.num_shards == layout.total


@pytest.mark.parametrize("seed", range(5))
def test_padding_is_bounded(seed):
    """Less than one alignment a tensor and less than one aligned element a shard: the price is known beforehand."""
    for layout in layouts(seed):
        assert layout.padding <= (ALIGNMENT - 1) * len(layout.numels) + ALIGNMENT * layout.num_shards


@pytest.mark.parametrize("seed", range(5))
def test_an_element_names_its_tensor(seed):
    """Also beside 0-element tensors, which share their offset with the next one."""
    for layout in layouts(seed):
        for index, numel in enumerate(layout.numels):
            for element in {0, numel // 2, numel - 1} if numel else ():
                assert layout.tensor_at(layout.offsets[index] + element) == index


def test_the_example_in_the_docstring():
    """Tensors of 5 and 3 elements on two ranks: at 0 and 8, 16 elements, one tensor each."""
    layout = FlatLayout((5, 3), num_shards=2)
    assert (layout.offsets, layout.total, layout.shard_numel, layout.padding) == ((0, 8), 16, 8, 8)
    assert [piece.numel for piece in fragments_of(layout, 0)] == [5, 0]
    assert [piece.numel for piece in fragments_of(layout, 1)] == [0, 3]


def test_a_scalar_lies_on_one_rank_and_an_empty_tensor_on_none():
    """Both keep their place in the order."""
    layout = FlatLayout((1, 0, 1), num_shards=4)
    assert [piece.numel for piece in fragments_of(layout, 0)] == [1, 0, 0, 0]
    assert [piece.numel for piece in fragments_of(layout, 1)] == [0, 0, 0, 0]
    assert [piece.numel for piece in fragments_of(layout, 2)] == [0, 1, 0, 0]


def test_no_tensors_make_no_buffer():
    """A layout of nothing has no elements and no padding."""
    layout = FlatLayout((), num_shards=3)
    assert (layout.total, layout.shard_numel, layout.padding) == (0, 0, 0)
