"""What policies cost and save, counted and not timed: operations, bytes that wait for backward, bytes that move.

none         3 F                       F: operations of one forward; its backward has twice as many
full         3 F + R                   R: of what is computed again, up to the last tensor that backward needs
selective    3 F                       products and attention are not computed again
every=2      3 F + R / 2
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as hf
from counting import peak
from distributed import run_ranks
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

import lightning_zero
from lightning_zero import OffloadActivations, Recompute, Selective, activation_bytes
from lightning_zero.engine import engine_of

BATCH, LENGTH, WIDTH, HEADS, INNER, LAYERS, VOCABULARY = 2, 12, 16, 4, 24, 4, 11
KEYS = WIDTH // 2
"""Width of keys and of values: two of four heads."""


def small() -> OffloadActivations:
    """Moves every activation."""
    return OffloadActivations(min_bytes=1)


def llama() -> Any:
    config = hf.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS // 2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(config).train()


def text(rank: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(rank))


# Operations

ROWS = BATCH * LENGTH
DOWN = 2 * ROWS * INNER * WIDTH
"""A product of (n, k) and (k, m) has 2 n k m: a multiplication and an addition for each."""
PRODUCTS = 2 * ROWS * WIDTH * (2 * WIDTH + 2 * KEYS) + 2 * 2 * ROWS * WIDTH * INNER + DOWN
"""Of one block: queries, the result of attention, keys, values; gate, up and down."""
ATTENTION = 2 * 2 * ROWS * LENGTH * WIDTH
"""Of one block: queries by keys, and scores by values, each (length, width) by (width, length) for each text."""
HEAD = 2 * ROWS * WIDTH * VOCABULARY
FORWARD = LAYERS * (PRODUCTS + ATTENTION) + HEAD

# Flash attention computes its scores again in its own backward: five products for two, 2.5 in place of 2.
PLAIN = 3 * FORWARD
FLASH = PLAIN + LAYERS * ATTENTION // 2

RECOMPUTED = LAYERS * (PRODUCTS + ATTENTION - DOWN)
"""A block ends with its largest product and a sum. Backward needs what goes into the product, not what comes out, so
the second forward stops before it. The head is in no block."""


def operations(rank: int, policy: Any, backend: SDPBackend) -> int:
    """That one training step has."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def forward(q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return sdpa_flop(q, k, v)

    def backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return sdpa_backward_flop(grad, q, k, v)

    formulas = {attention: forward, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: backward}
    model = lightning_zero.shard(llama(), stage=3, activation_checkpointing=policy)
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    with sdpa_kernel(backend), counter:
        model(input_ids=text(rank), labels=text(rank)).loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("backend", "without"), [(SDPBackend.MATH, PLAIN), (SDPBackend.FLASH_ATTENTION, FLASH)], ids=["math", "flash"]
)
def test_a_step_has_exactly_the_operations_of_its_policy(backend: SDPBackend, without: int, world_size: int) -> None:
    """On a Hugging Face Llama; a rank computes what one process computes on its data."""
    expected = {
        "none": (None, without),
        "full": ("full", without + RECOMPUTED),
        "every second": (Recompute(every=2), without + RECOMPUTED // 2),
        "selective": ("selective", without),
        "offload": (small(), without),
        "full and offload": (("full", small()), without + RECOMPUTED),
    }
    for name, (policy, count) in expected.items():
        assert run_ranks(world_size, operations, policy, backend) == [count] * world_size, name


def test_selective_computes_again_what_it_is_not_told_to_keep() -> None:
    """Without attention among what is kept, it alone comes on top."""
    save = [torch.ops.aten.mm.default]
    assert operations(0, Selective(save=save), SDPBackend.FLASH_ATTENTION) == FLASH + LAYERS * ATTENTION


# Bytes that wait for backward


class Block(nn.Module):
    """Residual, with dropout, and a mask that all blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x))))) * mask


Call = tuple[list[nn.Module], Tensor, dict[str, Any]]


def plain_blocks() -> Call:
    """Blocks, the input of the first one, and the arguments that all of them get."""
    torch.manual_seed(0)
    return [Block() for _ in range(LAYERS)], torch.randn(BATCH, LENGTH, WIDTH), {"mask": torch.rand(LENGTH, 1)}


def llama_blocks() -> Call:
    model = llama().model
    x = torch.randn(BATCH, LENGTH, WIDTH)
    cos, sin = model.rotary_emb(x, torch.arange(LENGTH)[None])
    return list(model.layers), x, {"position_embeddings": (cos.clone(), sin.clone())}


MAKE = {"plain": plain_blocks, "Llama": llama_blocks}
INPUT = 4 * BATCH * LENGTH * WIDTH
SHARED = {"plain": 4 * LENGTH, "Llama": 2 * 4 * LENGTH * WIDTH // HEADS}
"""Bytes of the input of a block, and of arguments that all blocks share: a mask, or cosines and sines."""
RANDOM_STATE = torch.get_rng_state().nbytes
"""Which each recomputed forward keeps, on the host."""

POLICIES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "full": Recompute,
    "selective": Selective,
    "offload": small,
    "offload of large ones": lambda: OffloadActivations(min_bytes=INPUT),
    "full and offload": lambda: Recompute(inputs=small()),
    "selective and offload": lambda: Selective(inputs=small()),
}


@dataclass
class Counted:
    """Bytes on the device."""

    kept: int = 0
    """Allocated, and not freed since."""


@contextmanager
def counting(policy: Any) -> Iterator[Counted]:
    """What is allocated and freed inside: torch's profiler sees each. Copies and random states on the host are not of
    the device."""
    store = policy if isinstance(policy, OffloadActivations) else getattr(policy, "inputs", None)
    counted, states, own = Counted(), [], torch.get_rng_state

    def noted() -> Tensor:
        states.append(RANDOM_STATE)
        return own()

    before = 0 if store is None else store.stash._pool.nbytes
    torch.get_rng_state = noted
    # What tests before this one left would count as freed here.
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            yield counted
    finally:
        gc.enable()
        torch.get_rng_state = own
    counted.kept = sum(event.self_cpu_memory_usage for event in found.key_averages()) - sum(states)
    counted.kept -= 0 if store is None else store.stash._pool.nbytes - before


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("kind", MAKE)
def test_predicted_bytes_are_those_that_wait(kind: str, name: str) -> None:
    """One block, whose input nobody else holds: `activation_bytes`, on fake tensors, and what is really alive."""
    (block, *_), x, shared = MAKE[kind]()
    policy = POLICIES[name]()
    predicted = activation_bytes(policy, block, x.requires_grad_(), **shared)

    def forward(x: Tensor, shared: Any) -> Tensor:
        return block(x, **shared) if policy is None else policy.run(block, block.forward, (x,), shared)

    with counting(policy) as counted:
        out = forward(x + 0, tree_map(lambda tensor: tensor + 0, shared))
    assert predicted == counted.kept - out.nbytes
    assert x.grad is None and out.requires_grad


def test_parameters_may_be_on_meta() -> None:
    """As those of a model that is too large to be built here; nothing is allocated, on the host neither."""
    (block, *_), x, shared = llama_blocks()
    for new in POLICIES.values():
        expected = activation_bytes(new(), block, x.requires_grad_(), **shared)
        store = new()
        block.to("meta")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            assert activation_bytes(store, block, x, **shared) == expected
        largest = max(event.self_cpu_memory_usage for event in found.key_averages())
        assert largest <= 2 * RANDOM_STATE
        block.to_empty(device="cpu")


def per_block(kind: str, policy: Any) -> int:
    """Bytes that wait for one block, without what blocks share."""
    (block, *_), x, shared = MAKE[kind]()
    keeps_shared = not (isinstance(policy, OffloadActivations) and policy.min_bytes == 1)
    keeps_shared = keeps_shared and getattr(policy, "inputs", None) is None
    return activation_bytes(policy, block, x.requires_grad_(), **shared) - keeps_shared * SHARED[kind]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("kind", MAKE)
def test_a_stack_of_units_keeps_what_its_units_keep(kind: str, name: str) -> None:
    """The sum over units, with what they share once."""
    blocks, x, shared = MAKE[kind]()
    policy = POLICIES[name]()
    model: Any = nn.Module()
    model.blocks = nn.ModuleList(blocks)
    lightning_zero.shard(model, units=[type(blocks[0])], activation_checkpointing=policy)

    def forward(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x, **shared)
        return x

    x.requires_grad_()
    forward(x).sum().backward()
    del x.grad
    policy_bytes = per_block(kind, policy)
    with counting(policy) as counted:
        out = forward(x + 0)
    # Of results only the last one is nobody's input.
    assert counted.kept - out.nbytes == LAYERS * policy_bytes
    if name == "full":
        assert policy_bytes == INPUT
    elif name in ("offload", "full and offload"):
        assert policy_bytes == 0


# Bytes that move


def storages_of_a_step(policy: Any) -> tuple[list[bool], list[bool], int]:
    """Which inputs of blocks, and which results inside of blocks, were alive between forward and backward; the tokens
    are the same each time."""
    model = lightning_zero.shard(llama(), stage=3, activation_checkpointing=policy)
    inputs: list[StorageWeakRef] = []
    inside: list[StorageWeakRef] = []

    def note(into: list[StorageWeakRef]) -> Callable[..., None]:
        return lambda module, args, *_: into.append(StorageWeakRef(args[0].untyped_storage()))

    for layer in model.model.layers:
        layer.register_forward_pre_hook(note(inputs))
        layer.mlp.register_forward_pre_hook(note(inside))
        layer.mlp.down_proj.register_forward_pre_hook(note(inside))
    loss = model(input_ids=text(), labels=text()).loss
    alive = [[not storage.expired() for storage in noted] for noted in (inputs, inside)]
    loss.backward()
    return *alive, len(inputs)


@pytest.mark.parametrize(
    ("name", "keeps_inputs", "keeps_results"),
    [
        ("none", True, True),
        ("full", True, False),
        ("offload", False, False),
        ("full and offload", False, False),
        ("selective and offload", False, False),
    ],
)
def test_what_is_kept_elsewhere_dies_on_the_device(name: str, keeps_inputs: bool, keeps_results: bool) -> None:
    """After forward nobody holds the storage of what is offloaded, nor of what is to be computed again."""
    inputs, inside, count = storages_of_a_step(POLICIES[name]())
    assert count == LAYERS
    assert inputs == [keeps_inputs] * LAYERS
    assert inside == [keeps_results] * 2 * LAYERS


def moved_in_a_step(policy: Any, stage: int, model: Any = None) -> list[int]:
    """Bytes to the host in forward, to the device in it, then the same in backward."""
    model = lightning_zero.shard(model or llama(), stage=stage, activation_checkpointing=policy)
    stash = policy.stash if isinstance(policy, OffloadActivations) else policy.inputs.stash
    loss = model(input_ids=text(), labels=text()).loss
    forward = [stash.bytes_to_host, stash.bytes_to_device]
    loss.backward()
    return [*forward, stash.bytes_to_host - forward[0], stash.bytes_to_device - forward[1]]


ANGLES = 2 * 4 * LENGTH * WIDTH // HEADS
"""Bytes of cosines and sines, for all blocks; positions are 8 bytes each."""


@pytest.mark.parametrize("world_size", [1, 2])
def test_each_byte_goes_to_the_host_once_and_comes_back_once(world_size: int) -> None:
    """With recomputation the inputs alone. What several blocks share moves once, and weights never do."""
    kept = LAYERS * per_block("Llama", None) + SHARED["Llama"]
    inputs = LAYERS * INPUT + ANGLES + 8 * LENGTH
    for new, expected in ((small, kept), (lambda: Recompute(inputs=small()), inputs)):
        for found in run_ranks(world_size, lambda _, new=new: moved_in_a_step(new(), 3)):
            assert found == [expected, 0, 0, expected]
    assert moved_in_a_step(OffloadActivations(min_bytes=kept), 3) == [0, 0, 0, 0]


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_of_the_root_stay_where_they_are(stage: int) -> None:
    """A policy around the head moves its input; its weight is a place in a buffer as ever."""

    def on_rank(_: int) -> list[int]:
        model: Any = llama()
        model.lm_head.__class__ = type("Head", (nn.Linear,), {})
        return moved_in_a_step(OffloadActivations(min_bytes=1, classes={"Head"}), stage, model)

    assert run_ranks(2, on_rank) == [[INPUT, 0, 0, INPUT]] * 2


class Parts(nn.Module):
    """Queries, keys and values are parts of one result; of another one a hundredth is used; a third one is expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        sparse = torch.ones(100 * LENGTH, WIDTH).exp()[::100]
        row = torch.arange(1.0, WIDTH + 1).expand(BATCH, LENGTH, WIDTH)
        return q * k * (v * row) * sparse


def test_parts_of_one_result_move_together() -> None:
    """Once, and none of them waits on the device; what is a small part of its memory stays, and an expanded row moves
    as a row."""
    gradients = []
    for policy in (None, small()):
        torch.manual_seed(0)
        module = Parts()
        x = torch.randn(BATCH, LENGTH, WIDTH)
        (module(x) if policy is None else policy.run(module, module.forward, (x,), {})).sum().backward()
        gradients.append(module.qkv.weight.grad)
    assert torch.equal(*gradients)
    # The input, the result with three parts, q k, v row; the row.
    assert policy.stash.bytes_to_host == policy.stash.bytes_to_device == (1 + 3 + 2) * INPUT + 4 * WIDTH
    assert activation_bytes(small(), module, x) == 4 * 100 * LENGTH * WIDTH


# The peak of a step


class Attending(nn.Module):
    """Its activations are three times its weights, twelve times its input."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(2 * WIDTH, 6 * WIDTH)
        self.up = nn.Linear(2 * WIDTH, 8 * WIDTH)
        self.down = nn.Linear(8 * WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + torch.softmax(q @ k.mT, -1) @ v
        return x + self.down(torch.tanh(self.up(x)))


class Deep(nn.Module):
    """Twelve blocks over one text."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 2 * WIDTH)
        self.blocks = nn.ModuleList(Attending() for _ in range(12))
        self.head = nn.Linear(2 * WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), tokens)


def peak_of_a_step(_: int, policy: Any) -> tuple[int, int]:
    """Most bytes held during forward and backward, in the steady state, and the sum that they should be."""
    model: Any = lightning_zero.shard(Deep(), stage=3, units=[Attending], activation_checkpointing=policy)
    engine = engine_of(model)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(96) % VOCABULARY
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens).backward()
        optimizer.step()
    optimizer.zero_grad()
    engine.pool.trim()
    held = lightning_zero.held_bytes(model, [optimizer])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        model(tokens).backward()
    most = peak(found)

    def whole(unit: Any) -> int:
        return sum(4 * group.layout.total for group in unit.groups)

    x = torch.zeros(96, 2 * WIDTH, requires_grad=True)
    everything, inputs = (activation_bytes(policy, Attending(), x) for policy in (None, Recompute()))
    shards = sum(vars(lightning_zero.planned_bytes(model)).values())
    expected = shards + whole(engine.root) + 2 * whole(engine.units[0]) + everything + 12 * inputs
    return held.parameters + held.optimizer + most, expected


def test_the_peak_with_recomputation_is_that_of_one_unit_and_all_inputs() -> None:
    """Within a tenth of: shards of 16 bytes a parameter, the whole root, two whole units, the activations of one, and
    an input for each. On top come whole gradients of two units, and what gloo receives into; mean gradients are not
    all there at the peak."""
    for most, expected in run_ranks(2, peak_of_a_step, "full"):
        assert 0.9 * expected <= most <= 1.1 * expected
    for most, expected in run_ranks(2, peak_of_a_step, None):
        assert most > 1.5 * expected
