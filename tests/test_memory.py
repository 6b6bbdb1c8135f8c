"""Bytes of model state that a rank really holds, counted from live storages and not from anyone's books."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
import torch.nn.functional as F
from distributed import run_ranks
from torch import nn

import lightning_zero
from lightning_zero.engine import engine_of
from lightning_zero.sharded_parameter import ShardedTensor, ShardedView

STAGES = [0, 1, 2, 3]
WIDTH, HIDDEN, BLOCKS, TOKENS = 64, 127, 6, 41

STEP_COUNTER = 4
"""Bytes: AdamW keeps one fp32 number a parameter."""


class Block(nn.Module):
    """Odd sizes: padding shows. 16_449 parameters, 64 KiB."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x + self.scale * self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Two of its parameters are large parts of the root, and groups of their own."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PSI = sum(p.numel() for p in Net().parameters())


def start_counting():
    """From now on `live_bytes` counts what is made from now on, and only reference counts free it."""
    gc.collect()
    gc.freeze()  # `get_objects` leaves out what is frozen
    gc.disable()


def live_bytes():
    """Bytes of every storage that a tensor made since `start_counting` refers to, each counted once."""
    found = {}
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor) or isinstance(thing, ShardedView):
            continue
        with torch._C.DisableTorchFunctionSubclass():
            tensor = thing.fragment if isinstance(thing, ShardedTensor) else thing
            # Flags on the wire are one byte a parameter, and go when the next ones come.
            if tensor.layout is torch.strided and tensor.dtype is not torch.uint8:
                storage = tensor.untyped_storage()
                found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def resting_bytes(engine):
    """`live_bytes` without free buffers, when gloo's threads have let go of the tensors of finished collectives."""
    for _ in range(4):
        # Each of gloo's two threads holds the tensors of its last collective until it takes another one.
        torch.distributed.all_reduce(torch.zeros(1))
    engine.pool.trim()
    counted = []
    for _ in range(8):
        counted.append(live_bytes())
        time.sleep(0.005)
    return min(counted)


def loss_of(model, rank, number):
    tokens = torch.tensor([(7 * number + 3 * rank) % TOKENS])
    return F.cross_entropy(model(tokens), tokens)


def train(model, optimizer, rank, count, first=0):
    for number in range(first, first + count):
        optimizer.zero_grad()
        loss_of(model, rank, number).backward()
        optimizer.step()


def _at_rest(rank, stage, recipe):
    start_counting()
    model = lightning_zero.shard(Net(), stage=stage, units=["Block"], precision=recipe)
    engine = engine_of(model)
    built = resting_bytes(engine)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, rank, 3)
    stepped = resting_bytes(engine)
    held = lightning_zero.held_bytes(model, [optimizer])
    with lightning_zero.no_sync(model):
        optimizer.zero_grad()
        cleared = resting_bytes(engine)
        loss_of(model, rank, 9).backward()
    waiting = resting_bytes(engine)
    return {
        "built": built,
        "stepped": stepped,
        "cleared": cleared,
        "waiting": waiting,
        "held": held,
        "total": sum(group.layout.total for group in engine.groups),
        "padding": sum(group.layout.padding for group in engine.groups),
        "fragments": sum(p.fragment.numel() for p in model.parameters()),
        "groups": len(engine.groups),
        "root": sum(group.layout.total for group in engine.root.groups),
        "parameters": len(list(model.parameters())),
    }


def padded_bytes(stage, world_size, total, main, model, grad):
    """Bytes of parameters and gradients: the formula over psi plus padding."""
    return lightning_zero.STAGES[stage].bytes_per_rank(
        total, world_size, main_itemsize=main, model_itemsize=model, grad_itemsize=grad
    )


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_an_fp32_rank_holds_the_formula_and_its_padding_to_the_byte(stage, world_size):
    """After a step, gradients still there: the formula, over psi plus padding for flat buffers.

    On top come a step counter a parameter, the 4-byte placeholder of each group's closed leaves, and at stage 3 the
    whole root, which is gathered ahead when a step ends.
    """
    ranks = run_ranks(world_size, _at_rest, stage, None)
    for got in ranks:
        assert got["total"] - got["padding"] == PSI
        state = padded_bytes(stage, world_size, got["total"], 4, 4, 4)
        # Optimizer state is allocated parameter by parameter, so it has no padding.
        optimizer = 8 * got["fragments"]
        small = STEP_COUNTER * got["parameters"] + 4 * got["groups"]
        root = 4 * got["root"] if stage == 3 else 0
        assert got["stepped"] == state.parameters + state.gradients + optimizer + root + small
        assert got["built"] == state.parameters + 4 * got["groups"]
        assert got["cleared"] == got["stepped"] - state.gradients
        assert got["held"].parameters == state.parameters + root
        assert got["held"].gradients == state.gradients
        assert got["held"].optimizer == optimizer
    total = sum(got["fragments"] for got in ranks)
    assert total == (PSI if stage else world_size * PSI), "fragments cover psi exactly once"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_mixed_rank_holds_what_the_table_says(stage):
    """bf16 compute over fp32 main weights and gradients: 16 psi / N at stage 3, 2 psi + 16 psi / N at stage 2.

    At stage 1 the whole gradient rests, in fp32, where micro-batches add up: 6 psi + 12 psi / N.
    """
    world_size = 2
    for got in run_ranks(world_size, _at_rest, stage, lightning_zero.PrecisionRecipe(compute=torch.bfloat16)):
        shard, small = got["total"] // world_size, STEP_COUNTER * got["parameters"] + 2 * got["groups"]
        whole = 2 * got["total"] if stage < 3 else 0
        optimizer = 8 * got["fragments"]
        root = 2 * got["root"] if stage == 3 else 0  # gathered ahead when the step ended
        gradients = {1: 4 * got["total"], 2: 4 * shard, 3: 4 * shard}[stage]
        assert got["stepped"] == whole + 4 * shard + gradients + optimizer + root + small
        assert got["cleared"] == whole + 4 * shard + optimizer + root + small
        assert got["waiting"] == got["cleared"] - root + gradients
        assert got["held"].parameters == whole + 4 * shard + root
        assert got["held"].gradients == gradients
        assert got["held"].optimizer == optimizer


# Inside a step

ACTIVATIONS = 40 * 1024
"""Bytes: one token through six blocks, forward and backward, is 8 KiB; a unit is 64 KiB, so nothing can hide here."""


def _peak(rank, stage):
    start_counting()
    model = lightning_zero.shard(Net(), stage=stage, units=["Block"])
    engine = engine_of(model)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, rank, 2)
    optimizer.zero_grad()
    rest = resting_bytes(engine)
    shards = engine.root.groups[0].main_weight.element_size() * sum(g.layout.shard_numel for g in engine.groups)
    sampled = {"forward": [], "backward": []}
    units_whole = []

    def sample(when):
        sampled[when].append(live_bytes())
        units_whole.append(sum(unit.numel_whole > 0 for unit in engine.units))

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_: sample("forward"))
    for parameter in model.parameters():
        parameter.register_hook(lambda _: sample("backward"))
    peaks = {"forward": [], "backward": []}
    for number in range(2, 6):
        optimizer.zero_grad()
        # What the pool keeps for the next step is memory too, but not this forward's.
        engine.pool.trim()
        loss_of(model, rank, number).backward()
        optimizer.step()
        for when, values in sampled.items():
            peaks[when].append(max(values))
            values.clear()
    # The least of four steps: gloo's threads may hold the tensors of a finished collective for a moment longer, and
    # the pool then takes a further buffer.
    peak = {when: min(values) for when, values in peaks.items()}
    unit = max(4 * sum(g.layout.total for g in unit.groups) for unit in engine.units)
    root = 4 * sum(g.layout.total for g in engine.root.groups)
    return rest, peak, unit, root, shards, max(units_whole)


def test_stage_3_holds_the_root_two_units_and_two_gradients_at_the_peak():
    """Above what rests: in forward the root and two units whole; in backward their gradients too, mean shards, and on
    gloo the receive buffer of one all-to-all with the shard it is summed into."""
    for rest, peak, unit, root, shards, units_whole in run_ranks(2, _peak, 3):
        assert units_whole <= 2
        assert rest + root + unit < peak["forward"] <= rest + root + 2 * unit + ACTIVATIONS
        received = max(unit, root)
        assert peak["backward"] <= rest + 2 * root + 4 * unit + received + 1.5 * shards + ACTIVATIONS


def test_stage_2_holds_two_units_gradients_at_the_peak():
    """Whole weights rest; a whole gradient lives from its first arrival to its reduction."""
    for rest, peak, unit, root, shards, _ in run_ranks(2, _peak, 2):
        assert peak["forward"] <= rest + ACTIVATIONS
        assert peak["backward"] <= rest + root + 2 * unit + max(unit, root) + 1.5 * shards + ACTIVATIONS


def _pool(rank, stage):
    model = lightning_zero.shard(Net(), stage=stage, units=["Block"])
    optimizer = torch.optim.AdamW(model.parameters())
    sizes = []
    for number in range(12):
        train(model, optimizer, rank, 1, number)
        sizes.append(engine_of(model).pool.nbytes)
    return sizes


@pytest.mark.parametrize("stage", STAGES)
def test_the_pool_stops_growing(stage):
    """After its second step a run maps no memory, but for what gloo's two threads were slow to let go of: two buffers,
    however many steps follow."""
    for sizes in run_ranks(2, _pool, stage):
        assert sizes[-1] <= sizes[1] + 4 * 2 * (PSI // BLOCKS)


# The end


def bytes_left():
    """`live_bytes`, when gathers that the last step began have ended: until then they hold their buffers."""
    deadline = time.monotonic() + 2
    while live_bytes() and time.monotonic() < deadline:
        time.sleep(0.01)
    return live_bytes()


def _freed(rank, stage):
    start_counting()
    model = lightning_zero.shard(Net(), stage=stage, units=["Block"])
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, rank, 2)
    optimizer.zero_grad()
    lightning_zero.unshard(model)
    plain = live_bytes()
    alive = weakref.ref(model), weakref.ref(model.blocks[0])
    del optimizer, model
    return plain, [reference() is None for reference in alive], bytes_left()


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_dies_with_its_last_reference(stage):
    """Without the garbage collector, after `unshard`; what it held is returned."""
    for plain, died, left in run_ranks(2, _freed, stage):
        assert plain >= 4 * PSI
        assert died == [True, True]
        assert left == 0


def _freed_at_rest(rank, stage):
    start_counting()
    model = lightning_zero.shard(Net(), stage=stage, units=["Block"])
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, rank, 2)
    alive = weakref.ref(model)
    del optimizer, model
    return alive() is None, bytes_left()


@pytest.mark.parametrize("stage", STAGES)
def test_a_sharded_model_dies_with_its_last_reference_too(stage):
    """The engine holds no way back to the module: flat buffers go at once, not at the next collection."""
    for died, left in run_ranks(2, _freed_at_rest, stage):
        assert died
        assert left == 0


def test_held_bytes_of_a_plain_model_are_its_own():
    """The same question for a model that is not sharded."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, 0, 0).backward()
    optimizer.step()
    held = lightning_zero.held_bytes(model, [optimizer])
    assert (held.parameters, held.gradients, held.optimizer) == (4 * PSI, 4 * PSI, 8 * PSI)
