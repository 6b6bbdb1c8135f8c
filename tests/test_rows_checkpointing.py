"""R9. Activation checkpointing, the strategy's, Hugging Face's or the user's own, changes no gradient."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf
from rows import (
    STAGES,
    WORLD_SIZE,
    Regression,
    Run,
    assert_close,
    assert_trained_as,
    fit_plain,
    fit_ranks,
    setup_module,  # noqa: F401
    teardown_module,  # noqa: F401
    tokens,
    vectors,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_zero import OffloadActivations, ZeROStrategy, shard

WIDTH, DEPTH = 6, 4


def strategy(stage: int, policy: Any, unit: type[nn.Module]) -> ZeROStrategy:
    """Small as they are, all activations move where they are offloaded."""
    if policy == "offload":
        policy = OffloadActivations(min_bytes=1)
    return ZeROStrategy(stage, units=[unit], activation_checkpointing=policy)


class LoraBlock(nn.Module):
    """A frozen norm and Linear, and a trained update of rank 2."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.lora_a = nn.Linear(WIDTH, 2, bias=False)
        self.lora_b = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + torch.tanh(self.base(y) + self.lora_b(self.lora_a(y)))


class LoraNet(Regression):
    """Adapters over a frozen base, its embedding frozen too; blocks may be checkpointed by the user."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.embed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(LoraBlock() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.record.append([bool(p.grad.norm()) for name, p in self.named_parameters() if "lora" in name])


@cache
def plain_lora() -> Run:
    return fit_plain(LoraNet, vectors(3, WIDTH, WIDTH))


@pytest.mark.parametrize("policy", [None, "full"])
@pytest.mark.parametrize("stage", STAGES)
def test_b5_the_users_checkpoint_around_frozen_layers(stage: int, policy: str | None) -> None:
    """B5: `checkpoint(use_reentrant=False)` around LoRA blocks with a frozen LayerNorm and Linear."""
    runs = fit_ranks(
        stage, lambda: LoraNet(False), vectors(3, WIDTH, WIDTH), strategy=strategy(stage, policy, LoraBlock)
    )
    assert_trained_as(plain_lora(), runs)


@pytest.mark.parametrize("policy", ["full", "selective", "offload"])
@pytest.mark.parametrize("stage", STAGES)
def test_q3_adapters_train_below_a_frozen_embedding(stage: int, policy: str) -> None:
    """Q3: no input of the first block asks for a gradient, and the strategy's own checkpointing gives it one."""
    runs = fit_ranks(stage, LoraNet, vectors(3, WIDTH, WIDTH), strategy=strategy(stage, policy, LoraBlock))
    assert_trained_as(plain_lora(), runs)
    assert all(run.record == [[True] * 2 * DEPTH] * 3 for run in runs)


# Q1: Hugging Face


class Llama(Regression):
    """`use_cache` is left at its default, which is true; ``record`` counts forwards of blocks in each step."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        config = hf.LlamaConfig(
            vocab_size=13, hidden_size=12, intermediate_size=9, num_hidden_layers=DEPTH, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=16, pad_token_id=0, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        self.model = hf.LlamaForCausalLM(config)
        assert self.model.config.use_cache
        self.model.train()
        if use_reentrant is not None:
            self.model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        for layer in self.model.model.layers:
            layer.mlp.register_forward_pre_hook(self.count)

    def count(self, *_: Any) -> None:
        self.record[-1] += 1

    def on_train_batch_start(self, *_: Any) -> None:
        self.record.append(0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss


@cache
def plain_llama() -> Run:
    return fit_plain(Llama, tokens(2, 13))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("use_reentrant", "policy"),
    [
        pair
        for pair in itertools.product((None, False, True), (None, "full", "selective"))
        if any(pair) or False in pair
    ],
)
def test_q1_a_block_is_computed_twice_whoever_checkpoints_it(
    use_reentrant: bool | None, policy: str | None, stage: int
) -> None:
    """Q1: Hugging Face's checkpointing, the strategy's, or both: two forwards of a block, not three."""
    runs = fit_ranks(
        stage,
        lambda: Llama(use_reentrant),
        tokens(2, 13),
        strategy=strategy(stage, policy, hf.models.llama.modeling_llama.LlamaDecoderLayer),
    )
    assert_trained_as(plain_llama(), runs)
    assert all(run.record == [2 * DEPTH] * 2 for run in runs)


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_q1_hugging_face_checkpointing_and_offloaded_activations(use_reentrant: bool | None) -> None:
    """Q1: what Hugging Face recomputes has its inputs on the host; without that nothing is recomputed."""
    unit = hf.models.llama.modeling_llama.LlamaDecoderLayer
    runs = fit_ranks(3, lambda: Llama(use_reentrant), tokens(2, 13), strategy=strategy(3, "offload", unit))
    assert_trained_as(plain_llama(), runs)
    assert all(run.record == [(1 if use_reentrant is None else 2) * DEPTH] * 2 for run in runs)


TEXT = torch.arange(5)[None]


def llama() -> Any:
    """The model alone."""
    module = Llama()
    module.record.append(0)
    return module.model


def test_q1_a_cache_that_nobody_asked_for_stays_empty() -> None:
    """Q1: blocks would append keys and values to it once in forward and once in backward, and keep them alive."""
    lengths = []
    for policy in (None, "full", "selective"):
        out = shard(llama(), stage=3, activation_checkpointing=policy)(input_ids=TEXT, labels=TEXT)
        out.loss.backward()
        lengths.append([out.past_key_values.get_seq_length(layer) for layer in range(DEPTH)])
    assert lengths == [[5] * DEPTH, [0] * DEPTH, [0] * DEPTH]


def test_q1_a_prefix_in_the_cache_is_refused_and_not_dropped() -> None:
    """Q1: without it the loss would be another one. What blocks before this one appended is no prefix of it."""
    model = shard(llama(), stage=3, activation_checkpointing="full")
    with torch.no_grad():
        prefix = model(input_ids=TEXT).past_key_values
    with pytest.raises(ValueError, match=r"of a `LlamaDecoderLayer` .* holds keys and values, as a prefix"):
        model(input_ids=TEXT, labels=TEXT, past_key_values=prefix)
    plain = llama()
    second = plain.model.layers[1]
    second.__class__ = type("Second", (type(second),), {})
    model = shard(plain, stage=3, activation_checkpointing={"Second"})
    out = model(input_ids=TEXT, labels=TEXT)
    assert [out.past_key_values.get_seq_length(layer) for layer in range(DEPTH)] == [5, 0, 5, 5]


# Q2, Q4, Q5: blocks of the user's


class Block(nn.Module):
    """With dropout, and arguments that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: Tensor, *, mask: Tensor | None = None, training: bool = False, cfg: dict[str, Any] | None = None
    ) -> Tensor:
        y = torch.tanh(self.linear(x))
        if mask is not None:
            y = y.masked_fill(mask, 0.0)
        if cfg is not None:
            y = y * cfg["a"] + cfg["deep"]["b"]
        return x + F.dropout(y, 0.5, training)


class Net(Regression):
    """Calls its blocks plainly, or the second one under the user's checkpoint."""

    def __init__(self, use_reentrant: bool | None = None, dropout: bool = False, arguments: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.use_reentrant, self.dropout, self.arguments = use_reentrant, dropout, arguments

    def forward(self, x: Tensor) -> Tensor:
        kwargs: dict[str, Any] = {"training": self.dropout}
        if self.arguments:
            cfg = {"a": self.scale, "deep": {"b": torch.full((WIDTH,), 0.1)}, "name": None}
            kwargs |= {"mask": x > 0.5, "cfg": cfg}
        for i, block in enumerate(self.blocks):
            if i == 1 and self.use_reentrant is not None:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
            else:
                x = block(x, **kwargs)
        return x

    def on_fit_start(self) -> None:
        torch.manual_seed(self.global_rank)  # the same numbers in each run that is compared


@pytest.mark.parametrize("policy", [None, "full", "offload"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_q2_the_users_checkpoint_around_one_block(stage: int, use_reentrant: bool, policy: str | None) -> None:
    """Q2: beside blocks that the strategy treats, and around one."""
    batches = vectors(3, WIDTH, WIDTH)
    runs = fit_ranks(stage, lambda: Net(use_reentrant), batches, strategy=strategy(stage, policy, Block))
    assert_trained_as(fit_plain(Net, batches), runs)


@pytest.mark.parametrize("stage", STAGES)
def test_q4_dropout_is_the_same_with_and_without(stage: int) -> None:
    """Q4: dropout 0.5, three steps: equal parameters to the last bit under each policy."""
    batches = vectors(3, WIDTH, WIDTH)

    def trained(policy: str | None) -> list[Run]:
        return fit_ranks(stage, lambda: Net(dropout=True), batches, strategy=strategy(stage, policy, Block))

    without = trained(None)
    for policy in ("full", "selective", "offload"):
        for found, expected in zip(trained(policy), without, strict=True):
            assert found.losses == expected.losses
            assert_close(found.live, expected.live, tolerance=0)


@pytest.mark.parametrize("policy", ["full", "selective", "offload"])
@pytest.mark.parametrize("stage", STAGES)
def test_q5_arguments_of_a_block_pass_unchanged(stage: int, policy: str) -> None:
    """Q5: a mask, a flag, and a nested dictionary of tensors, one of them a trained parameter."""
    batches = vectors(3, WIDTH, WIDTH)
    runs = fit_ranks(stage, lambda: Net(arguments=True), batches, strategy=strategy(stage, policy, Block))
    assert_trained_as(fit_plain(lambda: Net(arguments=True), batches), runs)
    assert len(runs) == WORLD_SIZE
