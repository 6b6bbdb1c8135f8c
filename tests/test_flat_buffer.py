"""The pool: memory is used again only when nobody can see it."""

import pytest
import torch

from lightning_zero.flat_buffer import BufferPool, _Slot, storage_id


@pytest.fixture
def pool():
    return BufferPool(torch.device("cpu"))


def test_a_dropped_buffer_is_used_again(pool):
    """The same memory: nothing is mapped anew."""
    first = pool.take(100, torch.float32)
    where = first.data_ptr()
    del first
    assert pool.take(100, torch.float32).data_ptr() == where


def test_two_buffers_in_use_never_share_memory(pool):
    """Three at once are three."""
    taken = [pool.take(64, torch.float32) for _ in range(3)]
    assert len({storage_id(buffer) for buffer in taken}) == 3


@pytest.mark.parametrize(
    "hold",
    [
        lambda buffer: buffer[3:5],
        lambda buffer: buffer.view(4, 25).t()[2],
        lambda buffer: buffer.detach(),
        lambda buffer: torch.nn.Parameter(buffer.view(10, 10)),
        lambda buffer: buffer.untyped_storage(),
        lambda buffer: memoryview(buffer.numpy()),
    ],
    ids=["slice", "view", "detach", "parameter", "storage", "numpy"],
)
def test_whoever_holds_a_view_keeps_the_buffer_out_of_use(pool, hold):
    """An escaped view costs memory and never a wrong value; when it goes, the buffer comes back."""
    buffer = pool.take(100, torch.float32)
    where = buffer.data_ptr()
    held = hold(buffer)
    del buffer
    other = pool.take(100, torch.float32)
    assert other.data_ptr() != where
    assert pool.nbytes_in_use == 2 * 400
    del held
    assert pool.nbytes_in_use == 400
    assert pool.take(100, torch.float32).data_ptr() == where


def test_a_tensor_saved_by_autograd_keeps_the_buffer_out_of_use(pool):
    """The graph is the last one who needs it."""
    buffer = pool.take(4, torch.float32).fill_(3.0)
    where = buffer.data_ptr()
    x = torch.ones(4, requires_grad=True)
    out = (x * buffer).sum()
    del buffer
    assert pool.take(4, torch.float32).data_ptr() != where
    out.backward()
    assert x.grad.tolist() == [3.0] * 4
    del out
    assert pool.nbytes_in_use == 0


def test_a_leaf_that_points_elsewhere_gives_the_buffer_back(pool):
    """What windows do: `leaf.data = view`, later `leaf.data = placeholder`."""
    buffer = pool.take(16, torch.float32)
    leaf = torch.nn.Parameter(torch.empty(0))
    leaf.data = buffer.view(4, 4)
    del buffer
    assert pool.nbytes_in_use == 64
    leaf.data = torch.empty(0)
    assert pool.nbytes_in_use == 0


def test_the_steady_state_does_not_grow(pool):
    """Two of a size in flight, for any number of blocks: two buffers."""
    for _ in range(50):
        a = pool.take(128, torch.float32)
        b = pool.take(128, torch.float32)
        del a, b
    assert pool.nbytes == 2 * 128 * 4


@pytest.mark.parametrize("resting", [10, 200])
def test_looking_for_a_buffer_does_not_take_longer_the_more_rest(pool, monkeypatch, resting):
    """Gradients wait for further micro-batches, one unit's come and go; then all are given back, and taken in turn.

    Each take looks at a free one, and at most one that is in use and one at the other end before it.
    """
    looked = 0
    is_free = _Slot.free.fget

    def look(slot):
        nonlocal looked
        looked += 1
        return is_free(slot)

    monkeypatch.setattr(_Slot, "free", property(look))
    waiting = [pool.take(8, torch.float32) for _ in range(resting)]
    comes_and_goes, looked = pool.take(8, torch.float32), 0
    for _ in range(20):
        following = pool.take(8, torch.float32)
        comes_and_goes = following
    waiting.clear()
    waiting += [pool.take(8, torch.float32) for _ in range(resting)]
    assert looked <= 3 * (20 + resting) + resting + 2  # once there is no second one to go to, and all are looked at
    assert comes_and_goes is following


def test_size_and_dtype_are_the_key(pool):
    """A buffer is never cut or reinterpreted for another use."""
    for numel, dtype in [(8, torch.float32), (16, torch.float32), (8, torch.bfloat16), (8, torch.int64)]:
        buffer = pool.take(numel, dtype)
        assert (buffer.shape, buffer.dtype) == ((numel,), dtype)
    assert pool.nbytes == 8 * 4 + 16 * 4 + 8 * 2 + 8 * 8


def test_poison_shows_a_read_of_stale_memory():
    """NaN in floating point; integers have none."""
    pool = BufferPool(torch.device("cpu"), poison=True)
    pool.take(8, torch.float32).fill_(7.0)
    assert pool.take(8, torch.float32).isnan().all()
    pool.take(8, torch.int64).fill_(7)
    assert pool.take(8, torch.int64).eq(7).all()


def test_trimming_returns_what_is_free_and_keeps_what_is_in_use(pool):
    """Afterwards the pool holds what someone holds."""
    kept = pool.take(8, torch.float32)
    pool.take(8, torch.float32)
    pool.take(99, torch.float32)
    pool.trim()
    assert pool.nbytes == pool.nbytes_in_use == kept.nbytes
    del kept
    pool.trim()
    assert pool.nbytes == 0


def test_a_buffer_taken_in_inference_mode_can_be_saved_for_a_backward_later(pool):
    """Evaluation comes first in every run that validates before it trains."""
    with torch.inference_mode():
        first = pool.take(8, torch.float32)
        where = first.data_ptr()
        del first
    buffer = pool.take(8, torch.float32).fill_(2.0)
    assert buffer.data_ptr() == where
    x = torch.ones(8, requires_grad=True)
    (x * buffer).sum().backward()
    assert x.grad.eq(2).all()


def test_each_take_has_its_own_version_counter_or_none_that_matters(pool):
    """Writing a later user's buffer is not an in-place change of the earlier one's tensor."""
    first = pool.take(8, torch.float32)
    version = first._version
    second = pool.take(8, torch.float32)
    second.fill_(1.0)
    assert first._version == version
