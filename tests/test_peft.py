"""LoRA by `peft`: a frozen base rests sharded, adapters train as in one plain process and are saved as ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from lightning.pytorch import LightningModule
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from rows import launched, loader, make_trainer, share
from rows import tokens as batches_of_tokens
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from twin import EXACT, WORLD_SIZE, adamw, assert_close, build, compare, plain, shard

import lightning_zero
from lightning_zero.sharded_parameter import RawMemoryError

STAGES = (1, 2, 3)
VOCABULARY = 13


def llama() -> PreTrainedModel:
    """Three layers of odd sizes, float64."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=12, intermediate_size=9, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def gpt2() -> PreTrainedModel:
    """Its layers are `Conv1D`, whose weights lie the other way round."""
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=6, n_layer=3, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


class Tuned(nn.Module):
    """A language model with adapters; its loss on drawn tokens, dropout drawn alike wherever it runs."""

    def __init__(self, base: Callable[[], PreTrainedModel] = llama, **config: Any) -> None:
        super().__init__()
        self.model = get_peft_model(base(), LoraConfig(task_type="CAUSAL_LM", r=2, **config))

    def forward(self, seed: int) -> Tensor:
        ids = torch.randint(VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(seed))
        torch.manual_seed(seed)
        return self.model(input_ids=ids, labels=ids).loss  # type: ignore[no-any-return]


def checkpointed(use_reentrant: bool) -> Tuned:
    """As `transformers` recomputes activations over a frozen embedding."""
    tuned = Tuned(lora_dropout=0.3)
    tuned.model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    tuned.model.enable_input_require_grads()
    return tuned


def two_adapters() -> Tuned:
    """The second one is trained, the first one rests beside it."""
    tuned = Tuned()
    tuned.model.add_adapter("second", LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["o_proj"]))
    tuned.model.set_adapter("second")
    return tuned


MODELS: dict[str, Callable[[], Tuned]] = {
    "attention of Llama": Tuned,
    "all layers of Llama": lambda: Tuned(target_modules="all-linear", lora_dropout=0.3, lora_bias=True),
    "head trained whole": lambda: Tuned(modules_to_save=["lm_head", "input_layernorm"]),
    "Conv1D of GPT-2": lambda: Tuned(gpt2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True),
    "tied head of GPT-2": lambda: Tuned(gpt2, target_modules=["c_attn"], fan_in_fan_out=True, bias="all"),
    "embedding": lambda: Tuned(target_modules=["embed_tokens", "q_proj"]),
    "DoRA": lambda: Tuned(use_dora=True),
    "checkpointing": lambda: checkpointed(use_reentrant=False),
    "reentrant checkpointing": lambda: checkpointed(use_reentrant=True),
    "two adapters": two_adapters,
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", MODELS)
def test_adapters_train_as_in_one_plain_process(name: str, stage: int) -> None:
    """Three steps of AdamW with decay over all parameters, 1e-10; what is frozen keeps every bit, without gradient."""
    twin = compare(MODELS[name], stage, optimizer=adamw)
    start = build(MODELS[name], 0, torch.float64)
    moved = {n for n, p in start.named_parameters() if not torch.equal(p.detach(), twin.live[n])}
    assert moved == {n for n, p in start.named_parameters() if p.requires_grad}
    assert {n for n, gradient in twin.gradients.items() if gradient is not None} == moved
    assert any("lora_A" in n for n in moved) and any("lora_B" in n for n in moved)


def _resting(rank: int, stage: int) -> tuple[int, int]:
    module = shard(build(Tuned, rank, torch.float64), stage)
    optimizer = adamw(module)
    for seed in (rank, 10 + rank):
        optimizer.zero_grad()
        module(seed).backward()
        optimizer.step()
    assert all((p in optimizer.state) == p.requires_grad for p in module.parameters())
    held = lightning_zero.held_bytes(module, [optimizer])
    return int(held.gradients), int(held.optimizer)


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_and_moments_rest_for_adapters_alone(stage: int) -> None:
    """Over both ranks 8 bytes a trained parameter, and two moments; gradients begin at multiples of 8 elements."""
    sizes = [p.numel() for p in Tuned().parameters() if p.requires_grad]
    held = run_ranks(WORLD_SIZE, _resting, stage)
    assert sum(moments for _, moments in held) == 2 * 8 * sum(sizes)
    assert 8 * sum(sizes) <= sum(gradients for gradients, _ in held) <= 8 * sum(numel + 8 for numel in sizes)


# Saving


def trained(rank: int, stage: int) -> Tuned:
    """After three steps, at rest."""
    module = shard(build(lambda: Tuned(modules_to_save=["lm_head"]), rank, torch.float64), stage)
    optimizer = adamw(module)
    for step in range(3):
        optimizer.zero_grad()
        module(10 * step + rank).backward()
        optimizer.step()
    return module  # type: ignore[return-value]


def _saved(rank: int, stage: int, folder: Path, gathered: bool) -> dict[str, Tensor]:
    tuned = trained(rank, stage)
    if not gathered:
        lightning_zero.save_pretrained(tuned, folder / "adapter")
    with lightning_zero.gathered(tuned):
        if rank == 0 and gathered:
            tuned.model.save_pretrained(folder / "adapter")
        return {name: plain(value) for name, value in get_peft_model_state_dict(tuned.model).items()}


@pytest.mark.parametrize("gathered", [True, False], ids=["gathered", "save_pretrained"])
@pytest.mark.parametrize("stage", STAGES)
def test_an_adapter_saved_of_shards_is_complete(stage: int, gathered: bool, tmp_path: Path) -> None:
    """The file that plain `peft` writes: same names, trained values, and a plain process computes the twin's loss."""
    twin = build(lambda: Tuned(modules_to_save=["lm_head"]), 0, torch.float64)
    optimizer = adamw(twin)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(WORLD_SIZE):
            (twin(10 * step + rank) / WORLD_SIZE).backward()
        optimizer.step()
    expected = {name: plain(value) for name, value in get_peft_model_state_dict(twin.model).items()}
    for state in run_ranks(WORLD_SIZE, _saved, stage, tmp_path, gathered):
        assert_close(state, expected, EXACT)
    file = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert_close(dict(sorted(file.items())), dict(sorted(expected.items())), EXACT)
    assert all(value.abs().max() > 0 for name, value in file.items() if "lora_B" in name)
    base = build(llama, 0, torch.float64)
    reloaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    ids = torch.arange(5)[None]
    torch.testing.assert_close(reloaded(input_ids=ids).logits, twin.model(input_ids=ids).logits, rtol=0, atol=EXACT)


def _saved_at_rest(rank: int, stage: int, folder: Path) -> str:
    tuned = trained(rank, stage)
    if rank > 0:
        return ""
    try:
        tuned.model.save_pretrained(folder / str(rank))
    except RawMemoryError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", STAGES)
def test_saving_outside_gathered_is_refused_by_name(stage: int, tmp_path: Path) -> None:
    """On rank 0 alone, as scripts do: at once, with a parameter's name and the way out, and without a file."""
    error, _ = run_ranks(WORLD_SIZE, _saved_at_rest, stage, tmp_path)
    assert "lora_" in error and "lightning_zero.gathered" in error
    assert not list(tmp_path.rglob("*.safetensors"))


# In a Trainer


class FineTuning(LightningModule):
    """The adapter is added in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.record: list[Any] = []
        self.model: Any = llama()

    def configure_model(self) -> None:
        if not isinstance(self.model, PeftModel):
            self.model = get_peft_model(self.model, LoraConfig(task_type="CAUSAL_LM", r=2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def _script(rank: int, stage: int | None, folder: Path) -> list[Tensor]:
    """Fits, and goes on with the module as a script does: saves the adapter, merges it, computes with both."""
    torch.manual_seed(rank)
    module = FineTuning()
    data = batches_of_tokens(3, VOCABULARY)
    if stage is None:
        make_trainer().fit(module, loader(data))
    else:
        with launched(rank):
            make_trainer(f"zero{stage}").fit(module, loader(share(data, rank)))
    ids = torch.arange(5)[None]
    with torch.no_grad():
        found = [module.model(input_ids=ids).logits]
        if rank == 0:
            module.model.save_pretrained(folder / str(stage))
        merged = module.model.merge_and_unload()
        assert not any("lora" in name for name, _ in merged.named_parameters())
        found.append(merged(input_ids=ids).logits)
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_after_fit_the_adapter_is_saved_and_merged_as_ever(stage: int, tmp_path: Path) -> None:
    """Added in `configure_model`; logits with it, merged and unloaded, and of the file, are the twin's."""
    (expected,) = run_ranks(1, _script, None, tmp_path)
    for found in run_ranks(WORLD_SIZE, _script, stage, tmp_path):
        torch.testing.assert_close(found, expected, rtol=0, atol=EXACT)
    files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("None", str(stage))]
    assert_close(files[1], files[0], EXACT)
    assert all(value.abs().max() > 0 for name, value in files[1].items() if "lora_B" in name)
