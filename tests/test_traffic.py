"""What crosses the wire in one optimizer step, against the table of stages, in the steady state."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed import run_ranks
from torch import nn

import lightning_zero
from lightning_zero import OffloadActivations, Recompute
from lightning_zero.engine import engine_of
from lightning_zero.precision import RECIPES, PrecisionRecipe

STAGES = [0, 1, 2, 3]
WIDTH, BLOCKS, WARM_UP = 12, 4, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 20)
        self.down = nn.Linear(20, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, freeze=False):
        super().__init__()
        self.embed = nn.Embedding(30, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 30, bias=False)
        if freeze:
            self.embed.requires_grad_(False)
            self.blocks[1].requires_grad_(False)
            self.blocks[2].up.requires_grad_(False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def step(model, optimizer, rank, number, micro_batches, clip=False, mixed=False):
    optimizer.zero_grad()
    for micro in range(micro_batches):
        tokens = torch.randint(0, 30, (4,), generator=torch.Generator().manual_seed(100 * number + 10 * rank + micro))
        context = lightning_zero.no_sync(model) if micro < micro_batches - 1 else torch.enable_grad()
        with context:
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                loss = F.cross_entropy(model(tokens), tokens) / micro_batches
            loss.backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _measure(rank, stage, micro_batches, precision, freeze, policy=None):
    torch.manual_seed(rank)
    model = lightning_zero.shard(
        Net(freeze), stage=stage, units=["Block"], precision=precision, activation_checkpointing=policy
    )
    engine = engine_of(model)
    assert len(engine.units) == BLOCKS
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(WARM_UP):
        step(model, optimizer, rank, number, micro_batches, mixed=any(group.dtypes.narrow for group in engine.groups))
    engine.collectives.reset_counts()
    step(model, optimizer, rank, WARM_UP, micro_batches, mixed=any(group.dtypes.narrow for group in engine.groups))
    counts = engine.collectives
    sizes = [
        (
            unit.is_root or unit is engine.units[-1],  # whole from forward to backward
            group.plan.trained,
            group.layout.total,
            len(group.parameters),
            group.model_dtype.itemsize,
        )
        for unit in (engine.root, *engine.units)
        for group in unit.groups
    ]
    return dict(counts.calls), dict(counts.payload), dict(counts.nbytes), sizes


def planned(stage, micro_batches, sizes):
    """The formula of `Placements.traffic` over padded sizes."""
    trained = sum(total for _, is_trained, total, *_ in sizes if is_trained)
    frozen = sum(total for _, is_trained, total, *_ in sizes if not is_trained)
    kept = sum(total for is_kept, _, total, *_ in sizes if is_kept)
    return lightning_zero.STAGES[stage].traffic(
        trained, kept_numel=kept, micro_batches=micro_batches, frozen_numel=frozen
    )


def expected(stage, micro_batches, sizes, reduce_itemsize=4):
    """Calls, elements and bytes by purpose."""
    traffic = planned(stage, micro_batches, sizes)
    gathered_bytes = sum(
        itemsize * planned(stage, micro_batches, [size for size in sizes if size[-1] == itemsize]).gathered
        for itemsize in {itemsize for *_, itemsize in sizes}
    )
    trained_groups = sum(is_trained for _, is_trained, *_ in sizes)
    kept_groups = sum(is_kept for is_kept, *_ in sizes)
    freed_groups = len(sizes) - kept_groups
    backwards = micro_batches if stage >= 2 else 1
    gathers = {0: 0, 1: trained_groups, 2: trained_groups, 3: micro_batches * (2 * freed_groups + kept_groups)}[stage]
    # What will come and what came: a byte a parameter, and 8 for the path. An all-reduce sends twice.
    flags = 2 * (2 * sum(parameters for *_, parameters, _ in sizes) + 8) * backwards
    # At stage 3 the ranks meet before each training step and before the first write: three numbers of 8 bytes.
    meetings = micro_batches + 1 if stage == 3 else 0
    calls = {
        "gather": gathers,
        "reduce": trained_groups * backwards,
        "flags": 2 * backwards,
        "lockstep": meetings,
    }
    payload = {
        "gather": int(traffic.gathered),
        "reduce": int(traffic.reduced),
        "flags": flags,
        "lockstep": 2 * 3 * meetings,
    }
    nbytes = {
        "gather": int(gathered_bytes),
        "reduce": payload["reduce"] * reduce_itemsize,
        "flags": flags,
        "lockstep": 8 * payload["lockstep"],
    }
    return tuple({key: value for key, value in counter.items() if value} for counter in (calls, payload, nbytes))


@pytest.mark.parametrize("freeze", [False, True], ids=["trained", "partly frozen"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_sends_exactly_what_the_table_says(stage, micro_batches, freeze):
    """Nothing more: no other purpose occurs. Two exchanges of flags, of one byte a parameter, a reducing backward."""
    for calls, payload, nbytes, sizes in run_ranks(2, _measure, stage, micro_batches, None, freeze):
        assert (calls, payload, nbytes) == expected(stage, micro_batches, sizes)


@pytest.mark.parametrize("stage", STAGES)
def test_three_ranks_send_the_same_payload(stage):
    """The payload counts elements of the buffers; only padding depends on the number of ranks."""
    for calls, payload, nbytes, sizes in run_ranks(3, _measure, stage, 1, None, False):
        assert (calls, payload, nbytes) == expected(stage, 1, sizes)


WIRE = {
    "bf16-mixed": (RECIPES["bf16-mixed"], 4),
    "2-byte reductions": (PrecisionRecipe(compute=torch.bfloat16, reduce=torch.bfloat16), 2),
    "compute=float32": (PrecisionRecipe(main=torch.float32, compute=torch.float32), 4),
}


@pytest.mark.parametrize("name", WIRE)
@pytest.mark.parametrize("stage", STAGES)
def test_what_autocast_casts_crosses_the_wire_in_two_bytes(stage, name):
    """Elements are those of fp32; the weights of products have 2 bytes, the embedding and the norm 4.

    Stage 0 gathers nothing: nothing there is narrow.
    """
    recipe, reduced = WIRE[name]
    for calls, payload, nbytes, sizes in run_ranks(2, _measure, stage, 1, recipe, False):
        assert (calls, payload, nbytes) == expected(stage, 1, sizes, reduce_itemsize=reduced)
        itemsizes = {itemsize for *_, itemsize in sizes}
        assert itemsizes == ({4} if stage == 0 or name == "compute=float32" else {2, 4})


POLICIES = {
    "full": "full",
    "selective": "selective",
    "offload": OffloadActivations(min_bytes=1),
    "full and offload": ("full", OffloadActivations(min_bytes=1)),
    "every second": Recompute(every=2),
    "parts of units": {nn.Linear},
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("stage", "micro_batches"), [(1, 1), (2, 1), (3, 1), (3, 3)])
def test_to_recompute_sends_nothing_more(stage, micro_batches, name):
    """The second forward runs in the window that backward needs anyway: at stage 3 a unit is gathered once for both.

    Frozen units too: a backward that computes nothing but the gradient of their input.
    """
    for calls, payload, nbytes, sizes in run_ranks(2, _measure, stage, micro_batches, None, True, POLICIES[name]):
        assert (calls, payload, nbytes) == expected(stage, micro_batches, sizes)


def _merged(rank):
    model = lightning_zero.shard(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(16))), stage=3)
    engine = engine_of(model)
    assert len(engine.units) == 8
    optimizer = torch.optim.SGD(model.parameters())
    payloads = []
    for _ in range(WARM_UP):
        engine.collectives.reset_counts()
        optimizer.zero_grad()
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        payloads.append(engine.collectives.payload["gather"])
    last = sum(group.layout.total for group in engine.units[-1].groups)
    return payloads, sum(group.layout.total for group in engine.groups), last


def test_a_unit_of_two_modules_is_gathered_as_any_other():
    """Its second module opens while the next unit is being gathered ahead, and leaves that in place. The last unit is
    whole until backward, which begins with it."""
    for payloads, total, last in run_ranks(2, _merged):
        assert payloads == [2 * total - last] * WARM_UP


def _clipped(rank, stage):
    model = lightning_zero.shard(Net(), stage=stage, units=["Block"])
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(WARM_UP):
        step(model, optimizer, rank, number, 1, clip=True)
    engine_of(model).collectives.reset_counts()
    step(model, optimizer, rank, WARM_UP, 1, clip=True)
    counts = engine_of(model).collectives
    return counts.calls["norm"], counts.payload["norm"], len(list(model.parameters()))


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_costs_one_small_all_reduce_where_gradients_are_sharded(stage):
    """One number a parameter; at stage 0 every rank has them all."""
    for calls, elements, parameters in run_ranks(2, _clipped, stage):
        assert (calls, elements) == ((0, 0) if stage == 0 else (1, 2 * parameters))


def _evaluated(rank, stage):
    model = lightning_zero.shard(Net(), stage=stage, units=["Block"])
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, rank, 0, 1)
    model.eval()
    with torch.no_grad():
        model(torch.arange(3))
        engine_of(model).collectives.reset_counts()
        model(torch.arange(3))
    engine = engine_of(model)
    # The root is whole since the last optimizer step, or is asked for as the units are.
    units = len(engine.units) + (0 if engine.root.is_gathered else 1)
    return dict(engine.collectives.payload), sum(group.layout.total for group in engine.groups), units


@pytest.mark.parametrize("stage", STAGES)
def test_a_forward_alone_gathers_once_at_stage_3_and_nothing_elsewhere(stage):
    """Whole weights rest below stage 3. There a rank asks before each gather: three numbers."""
    for payload, total, asked in run_ranks(2, _evaluated, stage):
        assert payload == ({"gather": total, "lockstep": 2 * 3 * asked} if stage == 3 else {})


# What the counters cannot know


def _spy(calls):
    """Wrap every collective of torch.distributed so that outermost calls are noted in ``calls``.

    Not `irecv`: on two ranks a direct exchange is one `isend`, and one `irecv` of the other's.
    """
    names = [
        "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object",
        "all_gather_coalesced", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all",
        "all_to_all_single", "broadcast", "broadcast_object_list", "reduce", "gather", "gather_object", "scatter",
        "scatter_object_list", "barrier", "monitored_barrier", "send", "recv", "isend", "batch_isend_irecv",
        "all_reduce_coalesced", "_all_gather_base", "_reduce_scatter_base",
    ]  # fmt: skip
    depth = [0]

    def wrapped(name, function):
        def call(*args, **kwargs):
            if depth[0] == 0:
                calls.append(name)
            depth[0] += 1
            try:
                return function(*args, **kwargs)
            finally:
                depth[0] -= 1

        return call

    for module in (dist, dist.distributed_c10d):
        for name in names:
            if hasattr(module, name):
                setattr(module, name, wrapped(name, getattr(module, name)))


def _everything(rank, stage):
    calls = []
    _spy(calls)
    collectives = []
    original = lightning_zero.collectives.Collectives.of.__func__

    def remembered(cls, *args):
        before = len(calls)
        made = original(cls, *args)
        del calls[before:]  # making the group for flags is torch's own business
        collectives.append(made)
        return made

    lightning_zero.collectives.Collectives.of = classmethod(remembered)
    torch.manual_seed(rank)
    model = Net()
    model.register_buffer("mean", torch.zeros(3))
    lightning_zero.shard(model, stage=stage, units=["Block"])
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(3):
        step(model, optimizer, rank, number, 2, clip=True)
        with torch.no_grad():
            model.head.weight[0] = 0.1
            model.blocks[0].up.weight.t().mul_(model.blocks[0].up.weight.norm())
        optimizer.param_groups[0]["lr"] *= model.norm.weight.mean().item() or 1.0
    with lightning_zero.gathered(model, writeback=True), torch.no_grad():
        model.norm.bias.fill_(0.5)
    model.eval()
    model(torch.arange(3))
    from lightning_zero.checkpoint.one_file import full_optimizer_state, full_state_dict

    full_state_dict(model.state_dict())
    full_optimizer_state(optimizer)
    lightning_zero.unshard(model)
    return len(calls), sum(collectives[0].calls.values()), sorted(set(calls))


@pytest.mark.parametrize("stage", STAGES)
def test_no_collective_escapes_the_counters(stage):
    """Set-up, training, clipping, writes and reads at rest, `gathered`, checkpoints and the way back."""
    for called, counted, names in run_ranks(2, _everything, stage):
        assert called == counted
        assert {"all_reduce", "broadcast"} <= set(names), "the spy saw nothing"
