"""R7. Unused parameters, branches that depend on the data, modules that nobody calls, outputs left out of the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rows import (
    STAGES,
    Block,
    Regression,
    assert_trained_as,
    fit_plain,
    fit_ranks,
    read_checkpoint,
    setup_module,  # noqa: F401
    teardown_module,  # noqa: F401
    trunk,
    vectors,
)
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_zero import ZeROStrategy


class Branching(Regression):
    """Every other batch passes a layer of the root and a block of its own unit; the other batches skip both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.blocks = trunk(5)
        self.sometimes = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            if i != 4 or batch_idx % 2:
                x = block(x)
        if batch_idx % 2:
            x = self.sometimes(x)
        return F.mse_loss(self.last(x), y)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.record.append([p.grad is None for p in (self.sometimes.weight, self.blocks[4].linear.bias)])


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_c1_a_branch_taken_in_every_other_step(stage: int, accumulate: int, tmp_path: Path) -> None:
    """C1: 6 batches; where it is skipped, `grad is None` and AdamW leaves the layer alone; with accumulation too."""
    twin = fit_plain(Branching, vectors(6, 4, 3), accumulate_grad_batches=accumulate)
    runs = fit_ranks(stage, Branching, vectors(6, 4, 3), tmp_path / "last.ckpt", accumulate_grad_batches=accumulate)
    assert_trained_as(twin, runs, tmp_path / "last.ckpt", Branching)
    for run in (*runs, twin):
        assert run.record == ([[True, True], [False, False]] * 3 if accumulate == 1 else [[False, False]] * 3)


class NeverCalled(Regression):
    """Children that no forward calls: with and without parameters, beside the units and among them."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(3, 2)
        self.empty = nn.Identity()
        self.empty_list = nn.ModuleList([nn.Dropout(), nn.Sequential()])
        self.blocks = trunk(5)
        self.idle_blocks = nn.ModuleList([Block(4), nn.ReLU(), Block(3)])
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(x))


@pytest.mark.parametrize("stage", STAGES)
def test_c16_modules_that_nobody_calls_are_harmless(stage: int, tmp_path: Path) -> None:
    """C16: three steps; they keep every bit under AdamW's decay, and get no optimizer state."""
    twin = fit_plain(NeverCalled, vectors(3, 5, 3))
    strategy = ZeROStrategy(stage, units=["Block"])
    runs = fit_ranks(stage, NeverCalled, vectors(3, 5, 3), tmp_path / "last.ckpt", strategy=strategy)
    assert_trained_as(twin, runs, tmp_path / "last.ckpt", NeverCalled)
    torch.manual_seed(0)
    start = NeverCalled().state_dict()
    unmoved = {name.split(".")[0] for name, value in runs[0].after.items() if torch.equal(value, start[name])}
    assert unmoved == {"idle", "idle_blocks"}
    assert "idle_blocks.0.linear.weight" in runs[0].in_units
    # Nine blocks and the last layer, two parameters each.
    assert len(read_checkpoint(tmp_path / "last.ckpt")["optimizer_states"][0]["state"]) == 20


class TwoOutputs(Regression):
    """Both heads are computed, in a tuple and a dict; the loss looks at the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = trunk(5)
        self.side_blocks = trunk(5)
        self.a = nn.Linear(5, 3)
        self.b = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:  # type: ignore[override]
        h = self.blocks(x)
        return self.a(h), {"b": self.b(self.side_blocks(h))}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        a, rest = self(x)
        assert rest["b"].requires_grad
        return F.mse_loss(a, y)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.record.append({name.split(".")[0] for name, p in self.named_parameters() if p.grad is None})


@pytest.mark.parametrize("stage", STAGES)
def test_c8_outputs_left_out_of_the_loss_are_fine(stage: int, tmp_path: Path) -> None:
    """C8: what is computed only for them gets no gradient, and the rest trains as in one process."""
    twin = fit_plain(TwoOutputs, vectors(3, 5, 3))
    runs = fit_ranks(stage, TwoOutputs, vectors(3, 5, 3), tmp_path / "last.ckpt")
    assert_trained_as(twin, runs, tmp_path / "last.ckpt", TwoOutputs)
    for run in runs:
        assert run.record == [{"side_blocks", "b"}] * 3
