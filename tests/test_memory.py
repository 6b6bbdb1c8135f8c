"""Bytes of model state that a rank really holds, counted from live storages and not from anyone's books."""

from __future__ import annotations

import gc
import time
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from distributed import run_ranks
from torch import nn

import lightning_zero
from lightning_zero.engine import engine_of
from lightning_zero.placements import StateBytes
from lightning_zero.precision import RECIPES, PrecisionRecipe
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
    is_mixed = any(group.dtypes.narrow for group in engine_of(model).groups) if engine_of(model) else False
    with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
        return F.cross_entropy(model(tokens), tokens)


def train(model, optimizer, rank, count, first=0):
    for number in range(first, first + count):
        optimizer.zero_grad()
        loss_of(model, rank, number).backward()
        optimizer.step()


LOOKED_UP_OR_SCALED = {"embed.weight", *(f"blocks.{i}.scale" for i in range(BLOCKS))}


def totals(engine, wanted):
    """Elements of all groups whose set of names is ``wanted``, and of those in the root."""
    groups = [group for group in engine.groups if wanted(set(group.names))]
    in_root = [group for group in groups if group in engine.root.groups]
    return sum(group.layout.total for group in groups), sum(group.layout.total for group in in_root)


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
    before_reading = lightning_zero.held_bytes(model, [optimizer])
    return {
        "held before reading": before_reading,
        "built": built,
        "stepped": stepped,
        "cleared": cleared,
        "waiting": waiting,
        "held": held,
        "planned": engine.planned_bytes(),
        "total": sum(group.layout.total for group in engine.groups),
        "looked up or scaled": totals(engine, lambda names: names <= LOOKED_UP_OR_SCALED),
        "multiplied": totals(engine, lambda names: not names <= LOOKED_UP_OR_SCALED),
        "root_bytes": sum(group.layout.total * group.model_dtype.itemsize for group in engine.root.groups),
        "placeholders": sum(group.model_dtype.itemsize for group in engine.groups),
        "padding": sum(group.layout.padding for group in engine.groups),
        "fragments": sum(p.fragment.numel() for p in model.parameters()),
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
        small = STEP_COUNTER * got["parameters"] + got["placeholders"]
        root = got["root_bytes"] if stage == 3 else 0
        assert got["stepped"] == state.parameters + state.gradients + optimizer + root + small
        assert got["built"] == state.parameters + got["placeholders"]
        assert got["cleared"] == got["stepped"] - state.gradients
        assert got["held"].parameters == state.parameters + root
        assert got["held"].gradients == state.gradients
        assert got["held"].optimizer == optimizer
    total = sum(got["fragments"] for got in ranks)
    assert total == (PSI if stage else world_size * PSI), "fragments cover psi exactly once"


MIXED = RECIPES["bf16-mixed"]


@pytest.mark.parametrize(
    "recipe, widths",
    [
        (MIXED, (2, 4, 4)),
        (replace(MIXED, others=torch.bfloat16), (2, 2, 4)),
        (replace(MIXED, main_grad=torch.bfloat16), (2, 4, 2)),
        (PrecisionRecipe(compute=torch.float32), (4, 4, 4)),
    ],
    ids=["bf16-mixed", "all gathers in 2 bytes", "2-byte gradient shard", "compute=float32"],
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_mixed_rank_holds_what_its_recipe_plans_to_the_byte(stage, recipe, widths):
    """fp32 main weights (4 bytes an element) and Adam's moments (8) are sharded; whole weights rest up to stage 2.

    ``widths`` are bytes of a whole element of products, of a whole element of others, and of a mean gradient that was
    not read yet. At stage 1 the whole gradient rests, in fp32, where micro-batches add up. In one dtype main weights
    are a part of the whole ones.
    """
    product, other, mean = widths
    for got in run_ranks(2, _at_rest, stage, recipe):
        others, root_others = got["looked up or scaled"]
        products, root_products = got["multiplied"]
        shard = (products + others) // 2
        whole = product * products + other * others
        # A whole weight of main precision has the main shard inside it.
        apart = 4 * shard - (0 if product < 4 else 4 * products // 2) - (0 if other < 4 else 4 * others // 2)
        parameters = whole + apart if stage < 3 else 4 * shard
        optimizer = 8 * got["fragments"]
        gradients = 4 * 2 * shard if stage == 1 else mean * shard
        read = 4 * 2 * shard if stage == 1 and mean == 4 else 4 * shard  # the optimizer widens what it reads
        root = product * root_products + other * root_others if stage == 3 else 0  # gathered ahead when the step ended
        small = STEP_COUNTER * got["parameters"] + got["placeholders"]
        assert got["stepped"] == parameters + read + optimizer + root + small
        assert got["cleared"] == parameters + optimizer + root + small
        assert got["waiting"] == got["cleared"] - root + gradients
        assert got["planned"] == StateBytes(parameters, gradients, optimizer)
        assert got["held"].parameters == parameters + root
        assert got["held"].optimizer == optimizer
        assert got["held before reading"].gradients == gradients


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


def _never_backward(rank, stage, policy):
    start_counting()
    model = lightning_zero.shard(Net(), stage=stage, units=["Block"], activation_checkpointing=policy)
    engine = engine_of(model)
    loss_of(model, rank, 0)
    before = resting_bytes(engine)
    for number in range(3):
        loss_of(model, rank, number)
    return before, resting_bytes(engine)


@pytest.mark.parametrize("policy", [None, "full", "selective", lightning_zero.OffloadActivations(min_bytes=600)])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_forward_that_nobody_calls_backward_on_leaves_nothing(stage, policy):
    """A skipped step, or a forward outside `no_grad`: its graph dies with its result.

    ReLU saves its own result, and so would hold itself; of 508 bytes, it is too small to be offloaded.
    """
    for before, after in run_ranks(2, _never_backward, stage, policy):
        assert after == before


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
