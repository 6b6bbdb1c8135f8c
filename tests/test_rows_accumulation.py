"""R5. Accumulated gradients: right values, a last short window, hooks and schedulers once per window, no growth."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from lightning.pytorch import LightningModule
from rows import (
    STAGES,
    Block,
    Regression,
    Run,
    assert_trained_as,
    fit_plain,
    fit_ranks,
    setup_module,  # noqa: F401
    share,
    teardown_module,  # noqa: F401
    trunk,
    vectors,
)
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_zero import held_bytes, no_sync, shard
from lightning_zero.engine import engine_of
from lightning_zero.flat_buffer import BufferPool


class Scheduled(Regression):
    """A warm-up by step, and the rate after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 4), *(Block(4) for _ in range(9)), nn.Linear(4, 3))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_batch_end(self, *_: Any) -> None:
        self.record.append(self.lr_schedulers().get_last_lr()[0])


@cache
def scheduled_twin(accumulate: int) -> Run:
    return fit_plain(Scheduled, vectors(7, 5, 3), accumulate_grad_batches=accumulate)


@pytest.mark.parametrize("stage", STAGES)
def test_e7_the_schedule_moves_once_per_window(stage: int) -> None:
    """E7: 7 batches, accumulate 3: 1/8 of the rate, and 1/8 more after batches 3, 6 and 7, as in one process."""
    runs = fit_ranks(stage, Scheduled, vectors(7, 5, 3), accumulate_grad_batches=3)
    assert_trained_as(scheduled_twin(3), runs)
    for run in runs:
        assert run.record == scheduled_twin(3).record
        assert run.record == pytest.approx([0.01 * k / 8 for k in (1, 1, 2, 2, 2, 3, 4)])


@pytest.mark.parametrize("stage", STAGES)
def test_g6_accumulation_equals_one_process(stage: int, tmp_path: Path) -> None:
    """G6: Lightning blocks the gradient synchronisation of a window's first batches; every stage accepts that."""
    runs = fit_ranks(stage, Scheduled, vectors(7, 5, 3), tmp_path / "last.ckpt", accumulate_grad_batches=2)
    assert_trained_as(scheduled_twin(2), runs, tmp_path / "last.ckpt", Scheduled)
    assert [run.steps for run in runs] == [4, 4]


class ScalarWeight(LightningModule):
    """One weight under SGD(1), whose mean gradient is 1 in each batch: rank 0 sees 0.5, rank 1 sees 1.5."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.record: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.weight * batch[0].mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.record.append(float(self.weight))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def halves(count: int) -> list[tuple[Tensor]]:
    return [(torch.tensor([0.5, 1.5]),)] * count


@pytest.mark.parametrize("stage", STAGES)
def test_g1_a_short_last_window_is_stepped(stage: int) -> None:
    """G1: 6 batches, accumulate 4: 4 gradients of 1/4, then 2 of 1/4: the weight is -1, then -1.5."""
    for run in fit_ranks(stage, ScalarWeight, halves(6), accumulate_grad_batches=4):
        assert run.record == [0, 0, 0, -1, -1, -1.5]


@pytest.mark.parametrize("stage", STAGES)
def test_g2_each_epoch_ends_its_window(stage: int) -> None:
    """G2: 2 batches, accumulate 8, 3 epochs: 3 steps of 2/8, as Lightning does on one device."""
    for run in fit_ranks(stage, ScalarWeight, halves(2), accumulate_grad_batches=8, max_epochs=3):
        assert run.record == [0, -0.25, -0.25, -0.5, -0.5, -0.75]
        assert run.steps == 3


class CountsHooks(Regression):
    """Notes each hook around an optimizer step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = trunk(5)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.record.append("optimizer_step")
        super().optimizer_step(*args, **kwargs)

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.record.append("on_before_optimizer_step")

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        self.record.append("configure_gradient_clipping")

    def on_before_zero_grad(self, *_: Any) -> None:
        self.record.append("on_before_zero_grad")


@pytest.mark.parametrize("stage", STAGES)
def test_g3_hooks_run_once_per_window(stage: int) -> None:
    """G3: 5 batches, accumulate 2: three windows, and each hook three times, in the order of one process."""
    twin = fit_plain(CountsHooks, vectors(5, 5, 5), accumulate_grad_batches=2)
    assert len(twin.record) == 4 * 3
    for run in fit_ranks(stage, CountsHooks, vectors(5, 5, 5), accumulate_grad_batches=2):
        assert run.record == twin.record


def settled_bytes_in_use(pool: BufferPool) -> int:
    """Bytes in use once gloo's threads, which hold a finished collective's tensors for a moment, let go of them."""
    fewest = pool.nbytes_in_use
    for _ in range(10):
        time.sleep(0.002)
        fewest = min(fewest, pool.nbytes_in_use)
    return fewest


@pytest.mark.parametrize("stage", STAGES)
def test_g7_gradients_take_no_more_room_from_batch_to_batch(stage: int) -> None:
    """G7: between micro-batches a rank holds its gradient shard (stage 1: the whole gradient), and never more."""

    def accumulate(rank: int) -> tuple[list[int], int, int]:
        model = shard(nn.Sequential(nn.Linear(5, 4), *(Block(4) for _ in range(9)), nn.Linear(4, 3)), stage=stage)
        engine = engine_of(model)
        assert engine is not None and engine.units
        in_use = []
        with no_sync(model):
            for x, y in share(vectors(6, 5, 3), rank):
                F.mse_loss(model(x), y).backward()
                in_use.append(settled_bytes_in_use(engine.pool))
        return in_use, held_bytes(model).gradients, 8 * sum(group.layout.total for group in engine.groups)

    for in_use, gradients, whole in run_ranks(2, accumulate):
        # whole: bytes in float64, padding included. Padding makes the two shards of every buffer equal.
        resting = whole if stage == 1 else whole // 2
        assert in_use == [resting] * 6
        assert gradients == resting
