"""`ZeROMonitor`: what was planned is what was measured, in loggers, in a table and in a report."""

from __future__ import annotations

import csv
import io
import json
import re
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from distributed import run_ranks
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from rows import launched
from test_planner import llama
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_zero
from lightning_zero import ZeROMonitor, ZeROStrategy, progress
from lightning_zero.checkpoint.one_file import full_state_dict


class Tuning(LightningModule):
    """A small Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.model = hf.LlamaForCausalLM(llama())

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fitted(
    rank: int,
    strategy: Any,
    callbacks: list[Callback],
    folder: Path | None = None,
    module: Any = None,
    **arguments: Any,
) -> Any:
    torch.manual_seed(0)
    loader = DataLoader([torch.arange(24).view(2, 12) + rank + i for i in range(12)], batch_size=None)  # type: ignore[arg-type]
    built = (module or Tuning)()
    with launched(rank):
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, callbacks=callbacks,
            logger=CSVLogger(folder, name="", version="") if folder is not None else False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=2,
            use_distributed_sampler=False, **arguments,
        )  # fmt: skip
        trainer.fit(built, loader)
    return trainer


WAYS = [
    (1, None, "32-true", 1),
    (2, None, "bf16-mixed", 2),
    (3, None, "32-true", 1),
    (3, None, "bf16-mixed", 2),
    (3, "cpu", "32-true", 1),
]


@pytest.mark.parametrize(("stage", "offload", "precision", "accumulate"), WAYS)
def test_planned_is_measured_to_the_byte(
    stage: int, offload: str | None, precision: str, accumulate: int, tmp_path: Path
) -> None:
    """Each line of the table, on each rank, after a fit through the Trainer; rank 0 writes the report."""

    def on_rank(rank: int) -> list[tuple[str, float, float]]:
        monitor = ZeROMonitor(report=tmp_path / "report.html")
        fitted(
            rank, ZeROStrategy(stage, offload=offload), [monitor], precision=precision,
            accumulate_grad_batches=accumulate,
        )  # fmt: skip
        return [(line.name, line.planned, line.measured) for line in monitor.lines]

    for lines in run_ranks(2, on_rank):
        assert len(lines) == 9
        assert [line for line in lines if line[1] != line[2]] == []
        named = {name: measured for name, _, measured in lines}
        assert named["gathered in a step"] > 0
        assert named["reduced in a step"] > 0
        assert (named["whole weights in flight, at most"] > 0) == (stage == 3)
        assert (named["moved to the device in a step"] > 0) == (offload is not None)
    figures = figures_of(tmp_path / "report.html")
    assert [line["planned"] for line in figures["lines"]] == [line["measured"] for line in figures["lines"]]


def figures_of(report: Path) -> Any:
    found = re.search(r'id="figures">(.*?)</script>', report.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_report_shows_one_step_as_it_was_counted(tmp_path: Path) -> None:
    """Units were whole one after the other, at most as many bytes as planned; bytes sent are the counters'."""

    def on_rank(rank: int) -> None:
        fitted(rank, ZeROStrategy(3), [ZeROMonitor(report=tmp_path / "report.html")])

    run_ranks(2, on_rank)
    text = (tmp_path / "report.html").read_text()
    figures = figures_of(tmp_path / "report.html")
    step, lines = figures["recording"], {line["name"]: line["measured"] for line in figures["lines"]}
    assert max(nbytes for _, nbytes in step["inFlight"]) == lines["whole weights in flight, at most"]
    assert sum(nbytes for purpose, *_, nbytes in step["sent"] if purpose == "gather") == lines["gathered in a step"]
    assert sum(nbytes for purpose, *_, nbytes in step["sent"] if purpose == "reduce") == lines["reduced in a step"]
    names = {name for name, *_ in step["whole"]}
    assert {f"model.model.layers.{i}" for i in range(4)} <= names
    assert all(0 <= begin <= end <= step["seconds"] for _, begin, end, _ in step["whole"])
    # Each block is gathered in forward and in backward, but for the last one, which stays whole between them.
    times = [sum(name == f"model.model.layers.{i}" for name, *_ in step["whole"]) for i in range(4)]
    assert times == [2, 2, 2, 1]
    assert "http" not in text.replace("http-equiv", "")
    assert f"{lines['gathered in a step']:,.0f}" in text


def test_metrics_go_to_loggers(tmp_path: Path) -> None:
    """Averages of a step, and the least and the most of any rank, through the logger that the Trainer has."""

    def on_rank(rank: int) -> None:
        fitted(rank, ZeROStrategy(3), [ZeROMonitor()], tmp_path)

    run_ranks(2, on_rank)
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [2, 4, 6, 8, 10, 12]
    last = {key: float(value) for key, value in rows[-1].items()}
    numel = sum(p.numel() for p in hf.LlamaForCausalLM(llama()).parameters())
    # Two ranks, 2 x 12 tokens each; 6 FLOPs a parameter and token.
    assert last["zero/tokens_per_second"] == pytest.approx(2 * 24 / last["zero/step_seconds"])
    assert last["zero/samples_per_second"] == pytest.approx(2 * 2 / last["zero/step_seconds"])
    assert last["zero/flops_per_second"] == pytest.approx(6 * numel * last["zero/tokens_per_second"])
    assert 0 <= last["zero/wait_seconds"] <= last["zero/step_seconds"]
    assert last["zero/device_parameters_bytes_max"] == pytest.approx(4 * numel / 2, rel=0.02)
    for name in ("memory_now", "memory_peak", "units_peak", "device_parameters", "device_optimizer"):
        assert 0 < last[f"zero/{name}_bytes_min"] <= last[f"zero/{name}_bytes_max"]


class Reads(Callback):
    """Looks at a weight on rank 0 alone."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            float(module.model.model.layers[1].mlp.up_proj.weight.sum())


def test_a_rank_that_reads_alone_is_served_first() -> None:
    """The monitor's exchange is no answer to what another rank asked for."""

    def on_rank(rank: int) -> int:
        monitor = ZeROMonitor()
        fitted(rank, ZeROStrategy(3), [Reads(), monitor])
        return len(monitor.lines)

    assert run_ranks(2, on_rank) == [9, 9]


def test_another_strategy_is_refused() -> None:
    def on_rank(rank: int) -> str:
        with pytest.raises(ValueError, match="ZeROMonitor measures"):
            fitted(rank, "ddp", [ZeROMonitor()])
        return "refused"

    assert run_ranks(2, on_rank) == ["refused"] * 2


def test_a_run_that_is_too_short_says_so(tmp_path: Path) -> None:
    """One step: nothing to average, and the report is not written with wrong figures."""

    def on_rank(rank: int) -> int:
        monitor = ZeROMonitor(report=tmp_path / "report.html")
        fitted(rank, ZeROStrategy(3), [monitor], max_steps=1)
        return len(monitor.lines)

    assert run_ranks(2, on_rank) == [0, 0]
    assert not (tmp_path / "report.html").exists()


def test_nothing_listens_when_there_is_no_monitor() -> None:
    """Hooks that record are unset before, between and after recorded steps."""

    class Looks(Callback):
        def __init__(self) -> None:
            self.set: list[bool] = []

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            engine = trainer.strategy.engine
            hooks = (engine.in_flight.on_change, engine.collectives.on_begin, engine.collectives.watch.on_wait)
            self.set.append(any(hook is not None for hook in hooks))

    def on_rank(rank: int) -> list[bool]:
        looks = Looks()
        fitted(rank, ZeROStrategy(3), [looks])
        return looks.set

    assert run_ranks(2, on_rank) == [[False] * 12] * 2


# Out of memory


class Hungry(Tuning):
    """Its third step asks for more than there is."""

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(tokens, batch_idx)
        if batch_idx == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")
        return loss


@pytest.mark.parametrize("room", ["a larger stage fits", "nothing fits"])
def test_an_out_of_memory_error_plans(room: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was planned and held on this rank, and the line that would have fitted, or what else to do."""
    numel = sum(p.numel() for p in hf.LlamaForCausalLM(llama()).parameters())

    def on_rank(rank: int) -> str:
        from lightning_zero import out_of_memory

        # As on a device that stage 1 fills: 8 psi + 8 psi / 2 bytes, and stage 2 does not: 4 psi + 12 psi / 2.
        enough = 11 * numel + 2e5 if room == "a larger stage fits" else 1.0
        monkeypatch.setattr(out_of_memory, "_room", lambda device: enough)
        monkeypatch.setattr(out_of_memory, "memory_peak", lambda device: 12.0 * numel)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            fitted(rank, ZeROStrategy(1), [], module=Hungry)
        return str(caught.value)

    for message in run_ranks(2, on_rank):
        assert message.startswith("CUDA out of memory. Tried to allocate 3.00 GiB.")
        assert f"{8e-9 * numel / 2:.3f} GB of optimizer state" in message
        assert "Held now" in message
        if room == "nothing fits":
            assert "activation_checkpointing='full'" in message
        else:
            assert "`Trainer(strategy=ZeROStrategy(stage=2))`" in message


def test_other_errors_are_as_they_were() -> None:
    class Wrong(Tuning):
        def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
            raise RuntimeError("a fault of mine")

    def on_rank(rank: int) -> str:
        with pytest.raises(RuntimeError) as caught:
            fitted(rank, ZeROStrategy(1), [], module=Wrong)
        return str(caught.value)

    assert run_ranks(2, on_rank) == ["a fault of mine"] * 2


# Progress


@pytest.mark.parametrize("takes_long", [True, False])
def test_long_work_shows_its_progress_on_rank_0(takes_long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set-up and a checkpoint; nothing where they are quick, nothing on other ranks."""

    def on_rank(rank: int) -> str:
        if takes_long:
            monkeypatch.setattr(progress, "DELAY", 0.0)
        said = io.StringIO()
        with redirect_stderr(said):
            model = lightning_zero.shard(hf.LlamaForCausalLM(llama()), stage=3)
            full_state_dict(model.state_dict())
        return said.getvalue()

    first, second = run_ranks(2, on_rank)
    assert ("Sharding" in first and "Gathering weights" in first) == takes_long
    assert second == ""
