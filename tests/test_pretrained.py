"""Folders of Hugging Face: read once, whichever way a module asks for them, and right to the last bit."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from counting import allocations, peak
from distributed import run_ranks
from lightning.pytorch import LightningModule
from rows import launched
from safetensors.torch import load_file, save_file
from test_checkpoints import make_trainer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

import lightning_zero
from lightning_zero import CheckpointError, ZeROStrategy


def config(**changes: Any) -> hf.LlamaConfig:
    sizes = {
        "vocab_size": 17, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    }  # fmt: skip
    return hf.LlamaConfig(**{**sizes, "tie_word_embeddings": True, **changes})


@pytest.fixture(scope="module", params=["one file", "several files"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose head is its embedding."""
    path = tmp_path_factory.mktemp("hf")
    torch.manual_seed(0)
    hf.LlamaForCausalLM(config()).save_pretrained(path, max_shard_size="10GB" if request.param == "one file" else "4KB")
    assert (path / "model.safetensors").exists() == (request.param == "one file")
    return path


def expected(folder: Path) -> dict[str, Tensor]:
    """What one process finds, non-persistent buffers included."""
    model = hf.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {**model.state_dict(), **dict(model.named_buffers())}


def found_in(model: nn.Module) -> dict[str, Tensor]:
    """A collective."""
    with lightning_zero.gathered(model):
        return {n: v.detach().clone() for n, v in (*model.state_dict().items(), *model.named_buffers())}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name, value in wanted.items() if not torch.equal(value, found[name])] == []


# Into a module


@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_rank_reads_its_fragments(folder: Path, stage: int, offload: str | None) -> None:
    """Of a module that is sharded already; on three ranks pieces begin and end anywhere."""

    def on_rank(rank: int) -> dict[str, Tensor]:
        torch.manual_seed(rank)
        model = lightning_zero.shard(hf.LlamaForCausalLM(config()), stage=stage, offload=offload)
        lightning_zero.load_pretrained(model, folder)
        return found_in(model)

    for found in run_ranks(3, on_rank):
        assert_equal(found, expected(folder))


def test_rank_zero_reads_for_all_what_is_sharded_afterwards(folder: Path) -> None:
    """On ``meta`` everywhere: rank 1 gets nothing, its weights come as shards; angles are in no file."""

    def on_rank(rank: int) -> tuple[int, dict[str, Tensor]]:
        with torch.device("meta"):
            model = hf.LlamaForCausalLM(config())
        lightning_zero.load_pretrained(model, folder)
        real = sum(not p.is_meta for p in model.parameters())
        assert model.lm_head.weight is model.model.embed_tokens.weight
        lightning_zero.shard(model, stage=3)
        return real, found_in(model)

    (all_of_them, first), (none, second) = run_ranks(2, on_rank)
    assert all_of_them == len(list(hf.LlamaForCausalLM(config()).parameters())) and none == 0
    assert_equal(first, expected(folder))
    assert_equal(second, expected(folder))


def test_a_plain_module_is_read_in_place(folder: Path) -> None:
    """Dtypes are the module's; scalars and memory in another order than indices too."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar = nn.Parameter(torch.zeros(()))
            self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
            self.transposed = nn.Parameter(torch.zeros(7, 5).t().bfloat16())
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    torch.manual_seed(1)
    values = {n: torch.randn(v.shape).mul(9).to(v.dtype).contiguous() for n, v in Odd().state_dict().items()}
    save_file(values, folder / "odd.safetensors")
    index = {"weight_map": dict.fromkeys(values, "odd.safetensors")}
    other = folder / "odd"
    other.mkdir()
    os.replace(folder / "odd.safetensors", other / "odd.safetensors")
    (other / "model.safetensors.index.json").write_text(json.dumps(index))

    def on_rank(rank: int) -> dict[str, Tensor]:
        model = lightning_zero.shard(Odd(), stage=3)
        lightning_zero.load_pretrained(model, other)
        return {name: value.contiguous() for name, value in found_in(model).items()}

    for found in run_ranks(2, on_rank):
        assert_equal(found, values)
    plain = Odd()
    lightning_zero.load_pretrained(plain, other)
    assert_equal({n: v.contiguous() for n, v in plain.state_dict().items()}, values)


def test_what_does_not_fit_is_named_and_nothing_is_read(folder: Path, tmp_path: Path) -> None:
    """Shapes, names, folders."""
    for model, message in (
        (
            hf.LlamaForCausalLM(config(intermediate_size=20)),
            r"has shape \(24, 16\), and in `LlamaForCausalLM` \(20, 16\)",
        ),
        (
            hf.LlamaForCausalLM(config(num_hidden_layers=5)),
            r"lacks \['model.layers.4.input_layernorm.weight', .* and has \[\]",
        ),
        (
            hf.LlamaForCausalLM(config(num_hidden_layers=3)),
            r"lacks \[\] and has \['model.layers.3.input_layernorm.weight'",
        ),
        (
            hf.LlamaModel(config()),
            r"Give the part of the module that was saved, .* `from_pretrained` in `configure_model`",
        ),
    ):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(CheckpointError, match=message):
            lightning_zero.load_pretrained(model, folder)
        assert_equal(model.state_dict(), before)
    lightning_zero.load_pretrained(hf.LlamaForCausalLM(config(num_hidden_layers=3)), folder, strict=False)
    with pytest.raises(FileNotFoundError, match=r"holds neither model.safetensors nor"):
        lightning_zero.load_pretrained(nn.Linear(2, 2), tmp_path)


def test_a_buffer_without_values_is_an_error() -> None:
    """Rank 0's are everyone's: what it has on ``meta`` would be whatever lies in memory."""
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config())
    for name, parameter in list(model.named_parameters()):
        model.get_submodule(name.rpartition(".")[0]).register_parameter(
            name.rpartition(".")[2], nn.Parameter(torch.zeros(parameter.shape))
        )
    with pytest.raises(ValueError, match="the buffer `inv_freq` of a `LlamaRotaryEmbedding` is on the meta device"):
        lightning_zero.shard(model)


# In `configure_model`, as it is written


class Tuning(LightningModule):
    """Loads its model by `from_pretrained`."""

    def __init__(self, load: Callable[[], Any]) -> None:
        super().__init__()
        self.load = load
        self.on_meta: list[tuple[bool, str]] = []

    def configure_model(self) -> None:
        self.model = self.load()
        members = (*self.model.named_parameters(), *self.model.named_buffers())
        self.on_meta = [(value.is_meta, name) for name, value in members]

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def tuned(strategy: Any, load: Callable[[], Any], rank: int) -> Tuning:
    module = Tuning(load)
    batches = [torch.arange(8)[None] + rank, torch.arange(8)[None] + 3 + rank]
    with launched(rank):
        make_trainer(strategy, 2).fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return module


LOADS: dict[str, Callable[[Path], Any]] = {
    "auto class": lambda folder: hf.AutoModelForCausalLM.from_pretrained(folder),
    "class": lambda folder: hf.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32),
    "base model": lambda folder: Headed(hf.AutoModel.from_pretrained(str(folder), attn_implementation="eager")),
    "other classes": lambda folder: hf.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3),
}


class Headed(nn.Module):
    """A head of one's own over a base model; random, and rank 0's."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base, self.head = base, nn.Linear(16, 17)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.base(input_ids=input_ids).last_hidden_state)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return hf.modeling_outputs.CausalLMOutput(loss=loss)


class _Classified(Tuning):
    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens[:, 0] % 3).loss


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", LOADS)
def test_from_pretrained_loads_once_and_trains_as_everywhere(folder: Path, name: str, stage: int) -> None:
    """Rank 1 builds on ``meta``; weights, buffers and what training makes of them are those of DDP."""

    def on_rank(rank: int) -> tuple[bool, list[str], bool]:
        found = {}
        for strategy in ("ddp", ZeROStrategy(stage)):
            torch.manual_seed(0)
            if name == "other classes":
                globals()["Tuning"], kept = _Classified, Tuning
            try:
                found[str(strategy)] = tuned(strategy, lambda: LOADS[name](folder), rank)
            finally:
                if name == "other classes":
                    globals()["Tuning"] = kept
        ddp, ours = found.values()
        values, wanted = ({**module.state_dict(), **dict(module.named_buffers())} for module in (ours, ddp))
        differing = [n for n, v in wanted.items() if not torch.allclose(v, values[n], rtol=0, atol=1e-6)]
        of_hub = [on_meta for on_meta, member in ours.on_meta if member.split(".")[0] != "head"]
        generation = [getattr(m.model, "generation_config", None) for m in found.values()]
        return all(of_hub) if rank else not any(of_hub), differing, str(generation[0]) == str(generation[1])

    assert run_ranks(2, on_rank) == [(True, [], True)] * 2


def test_what_fails_on_rank_zero_fails_on_all(folder: Path, tmp_path: Path) -> None:
    """And nobody waits."""

    def on_rank(rank: int) -> str:
        try:
            tuned(ZeROStrategy(3), lambda: hf.LlamaForCausalLM.from_pretrained(tmp_path, config=config()), rank)
        except Exception as error:
            return str(error)
        return ""

    first, second = run_ranks(2, on_rank)
    assert str(tmp_path) in first
    assert second == "`from_pretrained` failed on rank 0, which says why."


def test_what_cannot_be_shared_names_the_other_way(folder: Path) -> None:
    """A model that places itself, and one that is more than its configuration says."""

    class Changed(hf.LlamaForCausalLM):
        @classmethod
        def _load_pretrained_model(cls, model: Any, *args: Any, **kwargs: Any) -> Any:
            model.extra = nn.Linear(2, 2)
            return super()._load_pretrained_model(model, *args, **kwargs)

    def on_rank(rank: int) -> list[str]:
        errors = []
        for load in (
            lambda: hf.LlamaForCausalLM.from_pretrained(folder, device_map="cpu"),
            lambda: Changed.from_pretrained(folder),
        ):
            try:
                tuned(ZeROStrategy(3), load, rank)
            except CheckpointError as error:
                errors.append(str(error))
        return errors

    globals()["Changed"] = Changed
    Changed.__qualname__ = "Changed"
    for placed, changed in run_ranks(2, on_rank):
        assert "`from_pretrained(device_map=...)`" in placed and "lightning_zero.load_pretrained" in placed
        assert "cannot be built from its configuration alone" in changed and "lightning_zero.load_pretrained" in changed


def test_the_method_is_itself_again(folder: Path) -> None:
    """Outside of `configure_model` every rank loads."""

    def on_rank(rank: int) -> bool:
        own = vars(hf.PreTrainedModel)["from_pretrained"]
        tuned(ZeROStrategy(3), lambda: hf.LlamaForCausalLM.from_pretrained(folder), rank)
        return vars(hf.PreTrainedModel)["from_pretrained"] is own

    assert run_ranks(2, on_rank) == [True, True]


def test_a_host_holds_one_copy_of_the_model(tmp_path: Path) -> None:
    """60 MB: what rank 1 takes until it is sharded is its shard and a unit, and not another copy."""
    large = config(hidden_size=512, intermediate_size=1408, num_hidden_layers=5, vocab_size=512)
    hf.LlamaForCausalLM(large).save_pretrained(tmp_path)
    size = sum(value.nbytes for value in load_file(tmp_path / "model.safetensors").values())
    assert size > 50e6

    class Measured(Tuning):
        def configure_model(self) -> None:
            self.found = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self.found.start()
            super().configure_model()

        def on_train_start(self) -> None:
            self.found.stop()

    def on_rank(rank: int) -> tuple[int, int]:
        module = Measured(lambda: hf.LlamaForCausalLM.from_pretrained(tmp_path))
        with launched(rank):
            make_trainer(ZeROStrategy(3), 2).fit(module, DataLoader([torch.arange(8)[None]], batch_size=None))  # type: ignore[arg-type]
        return peak(module.found), sum(allocations(module.found))

    for rank, (most, left) in enumerate(run_ranks(2, on_rank)):
        assert left < 0.8 * size, "half of the model, and a unit of a fifth: what rank 0 loaded went unit by unit"
        # Beside its half a rank holds a unit of a fifth, in which it receives, and copies of what it cuts.
        assert rank == 0 or most < 0.95 * size


# Out of shards


class Word:
    """A tokenizer, as far as it is saved."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def test_a_folder_in_several_files_is_that_of_an_unsharded_model(tmp_path: Path) -> None:
    """File by file, byte by byte, with the tokenizer that the module holds; rank 1 receives nothing."""
    torch.manual_seed(0)
    hf.LlamaForCausalLM(config()).save_pretrained(tmp_path / "plain", max_shard_size="4KB")

    def on_rank(rank: int) -> tuple[int, int]:
        torch.manual_seed(0)
        module = nn.ModuleDict({"net": hf.LlamaForCausalLM(config())})
        module.tokenizer = Word()
        lightning_zero.shard(module, stage=3)
        sent = lightning_zero.engine.engine_of(module).collectives
        sent.reset_counts()
        lightning_zero.save_pretrained(module, tmp_path / "ours", max_shard_size="4KB")
        own = sum(p.fragment.numel() for p in module.parameters())
        return own, sent.payload["checkpoint"] + sent.payload["gather"] + sent.payload["fragment"]

    (kept, nothing), (own, sent) = run_ranks(2, on_rank)
    assert nothing == 0
    assert own == sent > 0
    assert kept + own == sum(p.numel() for p in hf.LlamaForCausalLM(config()).parameters())
    ours, plain = tmp_path / "ours", tmp_path / "plain"
    assert (ours / "tokenizer.json").exists()
    names = {path.name for path in plain.iterdir()}
    assert len(names) > 4
    assert names == {path.name for path in ours.iterdir()} - {"tokenizer.json"}
    for name in names:
        assert (ours / name).read_bytes() == (plain / name).read_bytes(), name


def test_what_cannot_be_written_is_an_error_on_every_rank(tmp_path: Path) -> None:
    """A folder that is a file; no model; two models."""
    (tmp_path / "file").write_text("")
    with pytest.raises(TypeError, match="no Hugging Face model"):
        lightning_zero.save_pretrained(nn.Linear(2, 2), tmp_path)
    pair = nn.ModuleList([hf.LlamaForCausalLM(config()), hf.LlamaForCausalLM(config())])
    with pytest.raises(ValueError, match=r"several.*save_pretrained\(module.0, folder\)"):
        lightning_zero.save_pretrained(pair, tmp_path)

    def on_rank(rank: int) -> str:
        model = lightning_zero.shard(hf.LlamaForCausalLM(config()), stage=3)
        with pytest.raises(CheckpointError) as caught:
            lightning_zero.save_pretrained(model, tmp_path / "file" / "below")
        return str(caught.value)

    assert all("was not written" in message for message in run_ranks(2, on_rank))


# trainer.init_module


def test_init_module_with_empty_init_then_load(folder: Path, tmp_path: Path) -> None:
    """Every rank builds without values inside `trainer.init_module(empty_init=True)`, and the folder gives them."""

    def on_rank(rank: int) -> dict[str, Tensor]:
        with launched(rank):
            trainer = make_trainer(ZeROStrategy(3), 2)
            with trainer.init_module(empty_init=True):
                model = hf.LlamaForCausalLM(config())
            module = Empty(model)
            lightning_zero.load_pretrained(model, folder)
            trainer.validate(module, DataLoader([torch.arange(8)[None]], batch_size=None), verbose=False)  # type: ignore[arg-type]
        return module.seen

    wanted = expected(folder)
    for found in run_ranks(2, on_rank):
        assert_equal(found, wanted)


class Empty(LightningModule):
    """Reads all that it has, in validation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.seen: dict[str, Tensor] = {}

    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        self.model(input_ids=tokens)

    def on_validation_end(self) -> None:
        self.seen = found_in(self.model)
