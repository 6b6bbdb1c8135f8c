"""Will it fit? Figures of the ZeRO paper, and what the engine then really holds and sends, to the byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from counting import allocations
from distributed import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

import lightning_zero
from lightning_zero import PlanError, estimate
from lightning_zero.cli import main
from lightning_zero.engine import engine_of
from lightning_zero.planner.formulas import OPTIMIZERS
from lightning_zero.planner.models import module_subject
from lightning_zero.planner.need import Choice
from lightning_zero.planner.question import Question
from lightning_zero.planner.subjects import SizeSubject
from lightning_zero.precision import RECIPES

GB = 1e9

# The paper's figures


def paper(found: Any, stage: int, offload: str = "") -> float:
    """GB a card as the paper counts."""
    return found.row(stage, offload).need.paper.total / GB  # type: ignore[no-any-return]


def test_seven_and_a_half_billion_parameters_on_64_cards() -> None:
    """Rajbhandari 2020, figure 1: 16 psi = 120 GB; 4 psi + 12 psi / 64, 2 psi + 14 psi / 64, 16 psi / 64."""
    found = estimate(7.5, 64, 80)
    assert paper(found, 0) == pytest.approx(120)
    assert 64 * paper(found, 0) == pytest.approx(7680)
    assert [round(paper(found, stage), 1) for stage in (1, 2, 3)] == [31.4, 16.6, 1.9]
    assert found.row(0).need.paper.optimizer / GB == pytest.approx(90)
    assert [row.traffic for row in found.rows[:4]] == [1.0, 1.0, 1.0, 1.5]
    # Held here, gradients are fp32: 4 psi more than the paper at stage 1 less the 2 psi it counts, 4 / 64 at stage 2.
    held = [found.row(stage).need.on_device.total / GB for stage in range(4)]
    psi = 7.5
    expected = [16 * psi, 6 * psi + 12 * psi / 64, 2 * psi + 16 * psi / 64, 16 * psi / 64]
    assert held == pytest.approx(expected)
    assert found.recommendation.row is not None
    assert found.recommendation.row.choice == Choice(1)
    assert "strategy='zero1'" in found.recommendation.trainer
    assert "devices=8, num_nodes=8" in found.recommendation.trainer


def test_thirteen_billion_parameters_on_four_cards_of_24_gb() -> None:
    """No stage fits alone; stage 2 with the optimizer offloaded does not either, stage 3 with offload does."""
    found = estimate(13, 4, 24)
    assert not any(row.fits for row in found.rows if not row.choice.offload)
    assert paper(found, 3) == pytest.approx(52)
    assert paper(found, 2, "cpu") == pytest.approx(32.5)
    assert not found.row(2, "cpu").fits
    assert paper(found, 3, "cpu") == pytest.approx(13)
    assert found.row(3, "cpu").fits
    off = found.row(3, "cpu").need.off_device
    # 4 cards of one host: fp32 weights and moments, 12 psi, and fp32 gradients, 4 psi.
    assert 4 * (off.parameters + off.optimizer) / GB == pytest.approx(156)
    assert 4 * off.gradients / GB == pytest.approx(52)
    assert found.row(3, "cpu").host / GB == pytest.approx(208)
    assert found.recommendation.row is not None
    assert found.recommendation.row.choice == Choice(3, "cpu")
    assert "ZeROStrategy(stage=3, offload='cpu')" in found.recommendation.trainer


def test_175_billion_parameters_on_1024_cards() -> None:
    """16 psi / N = 2.7 GB a card; its plain layer stack is what is known: 96 layers of width 12,288."""
    found = estimate("175B", 1024, "80GB")
    assert round(paper(found, 3), 1) == 2.7
    subject = SizeSubject(175e9)
    assert round(subject.layers) == 96
    assert subject.width == pytest.approx(12288, rel=0.01)


def test_the_cheapest_plan_that_fits_comes_first() -> None:
    """Stages before activation checkpointing, that before offload, that before more cards, which are then told."""
    assert estimate(1, 8, 80, seq_len=512).recommendation.row.choice == Choice(0)  # type: ignore[union-attr]
    long = estimate(7.5, 8, 80, seq_len=32768).recommendation
    assert long.row is not None
    assert long.row.choice.activation_checkpointing == "full"
    assert not long.row.choice.offload
    more = estimate(70, 8, 24, offload="").recommendation
    assert more.row is not None
    assert more.gpus > 8
    # Beyond one node they come by nodes of 8: stage 3 with checkpoints or without is what is left to try.
    assert more.gpus % 8 == 0
    assert (
        more.row.need.device <= 24e9 < min(row.need.device for row in estimate(70, more.gpus - 8, 24, offload="").rows)
    )
    odd = estimate(7, 9, 80)
    assert "devices=3, num_nodes=3" in odd.recommendation.trainer
    assert f"on {more.gpus}" in more.reason
    none = estimate(500, 8, "1MB").recommendation
    assert none.row is None
    assert "Nothing fits" in none.reason


def test_traffic_takes_as_long_as_the_slowest_link_needs() -> None:
    """Stage 1 in bf16-mixed gathers 2 bytes and reduces 4 a parameter; a ring of N sends (N - 1) / N of it."""
    row = estimate(7.5, 64, 80, bandwidth="300GB/s,25GB/s").row(1)
    assert row.sent == pytest.approx(6 * 7.5e9 * 63 / 64)
    assert row.seconds == pytest.approx(row.sent / 25e9)
    near = estimate(7.5, 8, 80, bandwidth=("300GB/s", "25GB/s")).row(1)
    assert near.seconds == pytest.approx(near.sent / 300e9)
    # Each micro-batch is reduced at stages 2 and 3, and gathered twice at stage 3.
    often = estimate(7.5, 64, 80, accumulate=4)
    assert often.row(1).sent == pytest.approx(row.sent)
    assert often.row(3).sent == pytest.approx(4 * estimate(7.5, 64, 80).row(3).sent)


# Properties

choices = st.builds(Choice, st.integers(0, 3), st.just(""))
precisions = st.sampled_from(sorted(RECIPES))


@settings(max_examples=60, deadline=None)
@given(st.floats(1e6, 1e12), st.integers(1, 4096), precisions, st.sampled_from(sorted(OPTIMIZERS)), st.integers(1, 8))
def test_more_cards_never_need_more_and_a_higher_stage_never_holds_more(
    numel: float, gpus: int, precision: str, optimizer: str, accumulate: int
) -> None:
    """Of model state on a device; the units in flight of a higher stage come on top, as the table says."""
    subject = SizeSubject(numel)
    question = Question(gpus, 80e9, precision=precision, optimizer=optimizer, accumulate=accumulate)
    for offload in ("", "cpu"):
        held = []
        for stage in (0, 1, 2, 3):
            if stage or not offload:
                choice = Choice(stage, offload)
                few = subject.need(choice, question, max(2, gpus)).on_device.total
                more = subject.need(choice, question, 2 * max(2, gpus)).on_device.total
                assert more <= few * (1 + 1e-9)
                held.append(few)
        assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(held))


# Bad input


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--params", "-1", "--gpus", "8", "--gpu-memory", "80GB"], "params='-1'"),
        (["--params", "0", "--gpus", "8", "--gpu-memory", "80GB"], "params='0'"),
        (["--params", "7,5B", "--gpus", "8", "--gpu-memory", "80GB"], "params='7,5B'"),
        (["--params", "1e99", "--gpus", "8", "--gpu-memory", "80GB"], "params='1e99'"),
        (["--params", "nan", "--gpus", "8", "--gpu-memory", "80GB"], "params='nan'"),
        (["--params", "7B", "--gpus", "0", "--gpu-memory", "80GB"], "gpus=0"),
        (["--params", "7B", "--gpus", "eight", "--gpu-memory", "80GB"], "gpus='eight'"),
        (["--params", "7B", "--gpus", "8", "--gpu-memory=-80GB"], "gpu_memory='-80GB'"),
        (["--params", "7B", "--gpus", "8", "--gpu-memory", "80 apples"], "gpu_memory='80 apples'"),
        (["--params", "7B", "--gpus", "8", "--gpu-memory", "80GB", "--precision", "fp8"], "precision='fp8'"),
        (["--params", "7B", "--gpus", "8", "--gpu-memory", "80GB", "--optimizer", "adam9"], "optimizer='adam9'"),
        (["--params", "7B", "--gpus", "8", "--gpu-memory", "80GB", "--stage", "4"], "stage=4"),
        (["--params", "7B", "--gpus", "8", "--gpu-memory", "80GB", "--stage", "0", "--offload", "cpu"], "stage=0"),
        (["--params", "7B", "--gpus", "8", "--gpu-memory", "80GB", "--seq-len", "0"], "seq_len=0"),
        (["--params", "7B", "--gpus", "8", "--gpu-memory", "80GB", "--nodes", "3"], "nodes=3"),
        (["--params", "7B", "--gpus", "8", "--gpu-memory", "80GB", "--nodes", "16"], "nodes=16"),
        (["--params", "7B", "--gpus", "8", "--gpu-memory", "80GB", "--bandwidth", "1,2,3"], "bandwidth='1,2,3'"),
        (["--params", "7B", "--gpus", "8", "--gpu-memory", "80GB", "--lora-rank", "8"], "lora_rank=8"),
        (["--model", ".", "--gpus", "8", "--gpu-memory", "80GB"], "has no config.json"),
        (["--model", "no.such:Thing", "--gpus", "8", "--gpu-memory", "80GB"], "no.such:Thing"),
        (["--model", "torch.nn:Linear", "--gpus", "8", "--gpu-memory", "80GB"], "without arguments"),
        (["--model", "torch.nn:ReLU", "--gpus", "8", "--gpu-memory", "80GB"], "no parameters"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_exit_status_2(
    arguments: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the value."""
    assert main(["estimate", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert names in said.err


def test_units_are_understood() -> None:
    """GB is 1e9 bytes, GiB 2**30; parameters are counted, or in billions where the number is small."""
    same = [estimate(count, 8, memory) for count in (7.5, 7.5e9, "7.5B", "7500M") for memory in (80, 80e9, "80GB")]
    assert len({str(found) for found in same}) == 1
    assert estimate(7, 8, "80GiB").question.gpu_memory == 80 * 2**30
    with pytest.raises(PlanError, match="params=True"):
        estimate(True, 8, 80)


def test_the_command_prints_and_programs_read(capsys: pytest.CaptureFixture[str]) -> None:
    """The table with its units, the same figures as JSON, in GiB when asked."""
    arguments = ["estimate", "--params", "7.5e9", "--gpus", "64", "--gpu-memory", "80GB"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "GB a card" in text
    assert "stage 1 31.4, stage 2 16.6, stage 3 1.9" in " ".join(text.split())
    assert text.rstrip().endswith("strategy='zero1')")
    assert main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["rows"][1]["need"]["paper"]["parameters"] == 15e9
    assert data["recommendation"]["row"]["choice"]["stage"] == 1
    assert main([*arguments, "--gib"]) == 0
    assert "111.8" in capsys.readouterr().out  # 120e9 / 2**30


def test_a_coefficient_that_changes_moves_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formulas are nowhere else."""
    before = estimate(7.5, 64, 80).row(0).need.device
    monkeypatch.setitem(OPTIMIZERS, "adamw", lightning_zero.planner.formulas.OptimizerSize(3))
    assert estimate(7.5, 64, 80).row(0).need.device == pytest.approx(before + 4 * 7.5e9)


# A model


def llama(**changes: Any) -> hf.LlamaConfig:
    sizes = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    }  # fmt: skip
    return hf.LlamaConfig(**{**sizes, **changes})


class Net(nn.Module):
    """A convolutional net, with normalization and odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 7, 3)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(7, 7, 3, padding=1), nn.BatchNorm2d(7)) for _ in range(9))
        )
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.stem.weight.dtype)
        return self.head(self.blocks(self.stem(x)).mean((2, 3))).square().mean()  # type: ignore[no-any-return]


def llama_loss(model: nn.Module) -> Tensor:
    tokens = torch.arange(12)[None] % 97
    return model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]


def bert_loss(model: nn.Module) -> Tensor:
    return model(input_ids=torch.arange(12)[None] % 53, labels=torch.arange(12)[None] % 53).loss  # type: ignore[no-any-return]


def bert() -> nn.Module:
    sizes = {
        "vocab_size": 53, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    return hf.BertForMaskedLM(hf.BertConfig(**sizes))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
    "llama": (lambda: hf.LlamaForCausalLM(llama()), llama_loss),
    "bert": (bert, bert_loss),
    "net": (Net, lambda model: model(torch.ones(2, 3, 9, 9))),
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_planned_is_what_is_held_and_sent(name: str, world_size: int) -> None:
    """States, units in flight and traffic, to the byte: stages x recipes x offload, with two micro-batches."""
    build, loss_of = MODELS[name]
    ways = [
        (stage, precision, offload)
        for stage in (0, 1, 2, 3)
        for precision in ("32-true", "bf16-mixed", "bf16-true")
        for offload in ("", "cpu")
        if stage or not offload
    ]

    def on_rank(rank: int) -> list[Any]:
        return [_measured(build, loss_of, rank, world_size, *way) for way in ways]

    for rank, found in enumerate(run_ranks(world_size, on_rank)):
        for way, (planned, measured) in zip(ways, found, strict=True):
            assert measured == planned, (name, world_size, rank, way)


def _measured(
    build: Any, loss_of: Any, rank: int, world_size: int, stage: int, precision: str, offload: str
) -> tuple[dict[str, float], dict[str, float]]:
    torch.manual_seed(0)
    model = build()
    if precision == "bf16-true":
        model = model.to(torch.bfloat16)
    question = Question(world_size, 1e9, precision=precision, accumulate=2)
    subject = module_subject(model, precision)
    need = subject.need(Choice(stage, offload), question, world_size, rank)
    where = offload or None
    lightning_zero.shard(model, stage=stage, precision=RECIPES[precision], offload=where)
    engine = engine_of(model)
    assert engine is not None
    optimizer = torch.optim.AdamW(model.parameters())
    scope = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed")

    def micro_batch() -> None:
        with scope:
            loss_of(model).backward()

    def step() -> None:
        with lightning_zero.no_sync(model):
            micro_batch()
        micro_batch()
        optimizer.step()

    step()  # after which the order of units is known
    optimizer.zero_grad()
    engine.finish_transfers()
    engine.collectives.reset_counts()
    engine.in_flight.peak = engine.in_flight.nbytes
    moved = lightning_zero.moved_bytes(model)
    step()
    engine.finish_transfers()
    lightning_zero.moved_bytes(model)
    grads = [p.grad for p in model.parameters()]
    assert any(grad is not None for grad in grads)
    held = {w: lightning_zero.held_bytes(model, [optimizer], w) for w in ("device", "offloaded")}  # type: ignore[arg-type]
    now = lightning_zero.moved_bytes(model)
    root = 0 if engine.placements.keeps_whole_parameters else engine.in_flight.nbytes
    measured = {
        "on device": held["device"].total - root,
        "off device": held["offloaded"].total,
        "units": engine.in_flight.peak,
        "gathered": engine.collectives.nbytes["gather"],
        "reduced": engine.collectives.nbytes["reduce"],
        "to device": now.to_device - moved.to_device,
        "to rest": now.to_rest - moved.to_rest,
    }
    planned = {
        "on device": need.on_device.total,
        "off device": need.off_device.total,
        "units": need.whole_units,
        "gathered": need.gathered,
        "reduced": need.reduced,
        "to device": need.to_device,
        "to rest": need.to_rest,
    }
    return planned, measured


def test_the_command_says_how_a_model_is_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four blocks of 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 56 + 2 * 32 = 8,512 parameters of 4 bytes; embedding, head,
    and norm, 2 * 97 * 32 + 32, are in the root."""
    llama().save_pretrained(tmp_path)
    arguments = ["estimate", "--model", str(tmp_path), "--gpus", "2", "--gpu-memory", "1GB"]
    assert main(arguments) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "It is cut into 4 units, the largest `model.layers.0` (34.05 kB, 21% of the model); in no unit" in text
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["units"] == {
        "units": 4,
        "largest": "model.layers.0",
        "largest_bytes": 4 * 8512,
        "root": "model.embed_tokens.weight",
        "root_bytes": 4 * (2 * 97 * 32 + 32),
        "total_bytes": 4 * 40288,
    }


@pytest.mark.parametrize("policy", ["", "full", "selective", "offload"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_activations_of_a_llama_are_planned_within_a_tenth(precision: str, policy: str) -> None:
    """What is alive at the end of forward, by the allocator's count, for three lengths of sequences."""
    config = llama(hidden_size=64, intermediate_size=176, vocab_size=64)

    def planned(policy: str, seq_len: int) -> float:
        """At the end of forward. The plan has one block besides that is whole again when it is recomputed."""
        subject = module_subject(hf.LlamaForCausalLM(config), precision)
        question = Question(2, 1e9, precision=precision, seq_len=seq_len, micro_batch=2)
        everything, found = (subject.need(Choice(2, "", p), question, 2).activations for p in ("", policy))
        assert everything is not None and found is not None
        part = 1 / config.num_hidden_layers
        return (found - everything * part) / (1 - part)

    def on_rank(rank: int) -> list[int]:
        torch.manual_seed(0)
        module = lightning_zero.shard(
            hf.LlamaForCausalLM(config),
            stage=2,
            precision=RECIPES[precision],
            activation_checkpointing=policy or None,
        )
        return [_kept(module, precision, seq_len) for seq_len in LENGTHS]

    for kept in run_ranks(2, on_rank):
        assert kept == [pytest.approx(planned(policy, seq_len), rel=0.1) for seq_len in LENGTHS]


LENGTHS = (64, 128, 256)


def _kept(module: nn.Module, precision: str, seq_len: int) -> int:
    tokens = torch.randint(64, (2, seq_len))

    def loss_of() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            return module(input_ids=tokens, labels=tokens, use_cache=False).loss  # type: ignore[no-any-return]

    for _ in range(2):
        loss_of().backward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        loss = loss_of()
    kept = sum(allocations(found))
    loss.backward()
    return kept


def test_adapters_leave_the_rest_frozen(tmp_path: Path) -> None:
    """peft trains r (in + out) parameters of each product, here of rank 4; the others have no optimizer state."""
    llama().save_pretrained(tmp_path)
    found = estimate(str(tmp_path), 2, 1, lora_rank=4, precision="32-true")
    whole = estimate(str(tmp_path), 2, 1, precision="32-true")
    products = [m for m in hf.LlamaForCausalLM(llama()).model.modules() if isinstance(m, nn.Linear)]
    trained = sum(4 * (m.in_features + m.out_features) for m in products)
    assert found.subject.numel == whole.subject.numel + trained
    adamw = found.row(1).need.on_device.optimizer
    assert adamw == pytest.approx(8 * trained / 2, rel=0.05)  # the larger of two ranks' shares


def test_a_model_is_built_without_weights(tmp_path: Path) -> None:
    """A config of 70 billion parameters takes no memory to plan."""
    big = llama(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, vocab_size=128256,
                num_attention_heads=64, num_key_value_heads=8)  # fmt: skip
    big.save_pretrained(tmp_path)
    found = estimate(str(tmp_path / "config.json"), 64, "80GB")
    assert found.subject.numel == pytest.approx(70.55e9, rel=1e-3)
    assert found.recommendation.row is not None
    assert found.recommendation.row.choice.stage == 3


# Many ranks, of which only one exists


@pytest.mark.parametrize("world_size", [64, 1024])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_many_ranks_hold_what_is_planned(stage: int, world_size: int) -> None:
    """Torch's fake process group: the engine is set up as on that many ranks, and rank 0 holds 1 / N, to the byte."""

    def on_rank(_: int) -> tuple[Any, Any]:
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        model = hf.LlamaForCausalLM(llama())
        need = module_subject(model, "bf16-mixed").need(Choice(stage), Question(world_size, 1e9), world_size)
        lightning_zero.shard(model, stage=stage, precision=RECIPES["bf16-mixed"])
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                llama_loss(model).backward()
            engine = engine_of(model)
            assert engine is not None
            grads = lightning_zero.held_bytes(model).gradients
            optimizer.step()
        held = lightning_zero.held_bytes(model, [optimizer])
        whole = 0 if engine.placements.keeps_whole_parameters else engine.in_flight.nbytes
        planned = need.on_device
        return (held.parameters - whole, grads, held.optimizer), (
            planned.parameters, planned.gradients, planned.optimizer,
        )  # fmt: skip

    ((measured, planned),) = run_ranks(1, on_rank)
    assert measured == planned
