"""Collectives on gloo ranks, against what one process computes from all ranks' tensors."""

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks

from lightning_zero.collectives import _ALL_GATHER, _REDUCE_SCATTER, Collectives

CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def payload(rank, world_size, dtype, scale=1.0):
    """Rank's tensor of 8 elements a rank, reproducible anywhere."""
    values = torch.randn(8 * world_size, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return (values * scale).to(dtype)


def take(numel, dtype):
    return torch.full((numel,), float("nan"), dtype=dtype)


def _reduce(rank, world_size, in_place):
    collectives = Collectives.of(None, CPU)
    results = []
    for dtype in DTYPES:
        whole = payload(rank, world_size, dtype)
        out = whole[rank * 8 : rank * 8 + 8] if in_place else torch.empty(8, dtype=dtype)
        pending = collectives.reduce_scatter(out, whole, take)
        pending.wait()
        pending.wait()  # once is enough, twice is harmless
        results.append(out.clone())
    return results


@pytest.mark.parametrize("in_place", [False, True], ids=["own buffer", "slice of whole"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_reduce_scatter_is_the_mean_and_each_rank_keeps_its_chunk(world_size, in_place):
    """Within one rounding of each of the W summands of the dtype, of the mean in float64."""
    ranks = run_ranks(world_size, _reduce, world_size, in_place)
    for number, dtype in enumerate(DTYPES):
        wholes = torch.stack([payload(rank, world_size, dtype).double() for rank in range(world_size)])
        joined = torch.cat([results[number] for results in ranks]).double()
        bound = torch.finfo(dtype).eps * wholes.abs().sum(0)
        assert ((joined - wholes.mean(0)).abs() <= bound).all(), dtype


def _natively(rank, dtype):
    own = getattr(dist, _REDUCE_SCATTER)

    def refuses_complex(out, whole, **arguments):
        assert not out.is_complex() and not whole.is_complex()
        return own(out, whole, **arguments)

    setattr(dist, _REDUCE_SCATTER, refuses_complex)
    collectives = Collectives.of(None, CPU)
    collectives._is_native = True
    shard, whole = torch.zeros(4, dtype=dtype), (torch.arange(8.0) + rank).to(dtype)
    collectives.reduce_scatter(shard, whole, take).wait()
    collectives.all_gather(whole, shard).wait()
    return whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.complex128])
def test_torchs_own_functions_move_complex_numbers(dtype):
    """Mean shards of [0, 1, ... 7] and [1, 2, ... 8], joined again; a reduce-scatter of NCCL knows no complex ones."""
    for whole in run_ranks(2, _natively, dtype):
        assert torch.equal(whole, (torch.arange(8.0) + 0.5).to(dtype))


def _near_max(rank, world_size, kind):
    collectives = Collectives.of(None, CPU)
    whole = torch.full((8 * world_size,), 60000.0, dtype=torch.float16)
    if kind == "reduce_scatter":
        out = torch.empty(8, dtype=torch.float16)
        collectives.reduce_scatter(out, whole, take).wait()
        return out
    collectives.all_reduce_mean(whole).wait()
    return whole


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_mean_of_large_fp16_gradients_does_not_overflow(world_size, kind):
    """60000 on every rank: the sum is beyond 65504, the mean is not. 0.1 % is 2 fp16 roundings."""
    for out in run_ranks(world_size, _near_max, world_size, kind):
        assert torch.allclose(out.double(), torch.full_like(out, 60000.0).double(), rtol=1e-3)


def _gather(rank, world_size):
    collectives = Collectives.of(None, CPU)
    whole = torch.full((4 * world_size,), float("nan"))
    mine = whole[rank * 4 : rank * 4 + 4]
    mine.copy_(torch.arange(4.0) + 10 * rank)
    collectives.all_gather(whole, mine).wait()
    other = torch.empty(4 * world_size)
    collectives.all_gather(other, torch.arange(4.0) + 10 * rank, purpose="fragment").wait()
    return whole, other, dict(collectives.calls), dict(collectives.payload), dict(collectives.nbytes)


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_gather_joins_shards_also_when_the_shard_is_a_slice_of_the_whole(world_size):
    """So the weights of stages 1 and 2 need no second copy; each call is counted under its purpose."""
    expected = torch.cat([torch.arange(4.0) + 10 * rank for rank in range(world_size)])
    for whole, other, calls, elements, nbytes in run_ranks(world_size, _gather, world_size):
        assert torch.equal(whole, expected)
        assert torch.equal(other, expected)
        assert calls == {"gather": 1, "fragment": 1}
        assert elements == {"gather": 4 * world_size, "fragment": 4 * world_size}
        assert nbytes == {"gather": 16 * world_size, "fragment": 16 * world_size}


def _rest(rank, world_size):
    collectives = Collectives.of(None, CPU)
    mean = torch.full((3,), float(rank))
    collectives.all_reduce_mean(mean).wait()
    value = torch.tensor([float(rank), -float(rank)])
    ops = {op: collectives.all_reduce(value.clone(), op) for op in ("sum", "max", "min")}
    first = collectives.broadcast(torch.full((5,), float(rank + 7)))
    flags = torch.tensor([rank == 1, False, rank == 0], dtype=torch.uint8)
    collectives.max_flags(flags).wait()
    order = collectives.broadcast_flags(torch.tensor([rank, 3]))
    calls, elements, nbytes = map(dict, (collectives.calls, collectives.payload, collectives.nbytes))
    collectives.reset_counts()
    assert not collectives.calls and not collectives.payload and not collectives.nbytes
    return mean, ops, first, flags, order, calls, elements, nbytes


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_other_collectives_and_their_counters(world_size):
    """An all-reduce of n elements counts 2 n, as a ring sends it."""
    top = world_size - 1
    for mean, ops, first, flags, order, calls, elements, nbytes in run_ranks(world_size, _rest, world_size):
        assert torch.allclose(mean, torch.full((3,), top / 2))
        total = float(sum(range(world_size)))
        assert ops["sum"].tolist() == [total, -total]
        assert ops["max"].tolist() == [top, 0]
        assert ops["min"].tolist() == [0, -top]
        assert first.tolist() == [7.0] * 5
        assert flags.tolist() == [1, 0, 1]
        assert order.tolist() == [0, 3]
        assert calls == {"reduce": 1, "norm": 3, "setup": 1, "flags": 2}
        assert elements == {"reduce": 6, "norm": 12, "setup": 5, "flags": 2 * 3 + 2}
        assert nbytes == {"reduce": 24, "norm": 48, "setup": 20, "flags": 2 * 3 + 2 * 8}


def _flags_beside_payloads(rank):
    # Rank 1 issues the two in the other order: flags travel in their own group.
    collectives = Collectives.of(None, CPU)
    flags, whole = torch.tensor([rank], dtype=torch.uint8), torch.ones(2)
    steps = [lambda: collectives.max_flags(flags), lambda: collectives.all_reduce_mean(whole)]
    for pending in [step() for step in (reversed(steps) if rank else steps)]:
        pending.wait()
    return flags.item(), whole.tolist()


def test_flags_travel_in_an_order_of_their_own():
    """A rank may read its flags before or after a reduction that others have begun."""
    assert run_ranks(2, _flags_beside_payloads) == [(1, [1.0, 1.0])] * 2


def test_alone_collectives_are_copies_and_count_nothing():
    """No process group is needed."""
    alone = Collectives.of(None, CPU)
    whole, shard = torch.zeros(4), torch.arange(4.0)
    alone.all_gather(whole, shard).wait()
    assert torch.equal(whole, shard)
    out = torch.empty(4)
    alone.reduce_scatter(out, whole, take).wait()
    assert torch.equal(out, whole)
    alone.all_reduce_mean(whole).wait()
    assert torch.equal(alone.all_reduce(whole.clone()), whole)
    assert torch.equal(alone.broadcast(whole), whole)
    alone.max_flags(torch.ones(1)).wait()
    assert (alone.rank, alone.world_size, dict(alone.calls)) == (0, 1, {})


class _Groups:
    """Stands before `torch.distributed` and notes which group each collective was given."""

    def __init__(self, monkeypatch):
        self.seen = []
        for name in (_ALL_GATHER, _REDUCE_SCATTER, "all_reduce", "broadcast"):
            monkeypatch.setattr(dist, name, self._noting(name, getattr(dist, name)))

    def _noting(self, name, own):
        def noted(*args, group, **kwargs):
            self.seen.append((name, group))
            return own(*args, group=group, **kwargs)

        return noted


def _orders(rank):
    group = dist.new_group([0, 1], backend="gloo")
    flags, reductions = (dist.new_group([0, 1], backend="gloo") for _ in range(2))
    collectives = Collectives(group, CPU, flags, reductions)
    collectives._is_native = True
    journal = []
    Collectives.record = lambda group, order, purpose, nbytes: journal.append(order)
    with pytest.MonkeyPatch.context() as patch:
        groups = _Groups(patch)
        whole, shard, pending = torch.zeros(4), torch.ones(2), []
        # Rank 1 gathers before it reduces.
        steps = [
            lambda: collectives.reduce_scatter(torch.empty(2), torch.ones(4), take),
            lambda: collectives.all_gather(whole, shard),
        ]
        pending = [step() for step in (reversed(steps) if rank else steps)]
        for one in pending:
            one.wait()
        collectives.all_reduce_mean(torch.ones(3)).wait()
        collectives.all_reduce(torch.ones(1))
        collectives.broadcast(torch.ones(1))
        collectives.max_flags(torch.ones(1)).wait()
        collectives.minimum(torch.ones(1)).wait()
    names = {group: "gathers", flags: "flags", reductions: "reductions"}
    used = [names[group] for _, group in groups.seen]
    return whole.tolist(), used, journal


def test_gathers_reductions_and_flags_have_a_communicator_of_their_own_each():
    """As on NCCL, whose communicators take what comes next for what they expect: `record` names the same orders."""
    for rank, (whole, used, journal) in enumerate(run_ranks(2, _orders)):
        assert whole == [1.0] * 4
        first = ["reductions", "gathers"] if rank == 0 else ["gathers", "reductions"]
        assert used == journal == [*first, "reductions", "reductions", "reductions", "flags", "flags"]


def _crossed(rank):
    collectives = Collectives.of(None, CPU)
    tags = [collectives.new_tag() for _ in range(3)]
    wholes = [torch.empty(2 * n) for n in (4, 4, 6)]
    steps = [
        lambda: collectives.all_gather(wholes[0], torch.full((4,), 1.0), tag=tags[0]),
        lambda: collectives.all_gather(wholes[1], torch.full((4,), 2.0), tag=tags[1]),
        lambda: collectives.all_gather(wholes[2], torch.full((6,), 3.0), tag=tags[2]),
    ]
    for pending in [step() for step in (reversed(steps) if rank else steps)]:
        pending.wait()
    return [whole.tolist() for whole in wholes]


def test_no_unit_is_taken_for_another_one():
    """Ranks begin three gathers in opposite orders: two of one size, which could be mixed up in silence."""
    for found in run_ranks(2, _crossed, journals_differ=True):
        assert found == [[1.0] * 8, [2.0] * 8, [3.0] * 12]
