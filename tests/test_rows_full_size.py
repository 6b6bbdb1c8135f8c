"""R3. Parameters look full-size to user code; parameter groups and learning rates are kept, after resume too."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from lightning.pytorch.utilities.model_summary import ModelSummary
from rows import (
    STAGES,
    Block,
    Regression,
    Run,
    assert_trained_as,
    fit_plain,
    fit_ranks,
    launched,
    loader,
    make_trainer,
    setup_module,  # noqa: F401
    share,
    teardown_module,  # noqa: F401
    vectors,
)
from torch import Tensor, nn


def net() -> nn.Sequential:
    """Odd sizes, a norm, a float32 layer nobody calls, and a frozen block among the units."""
    blocks = [Block(5) for _ in range(9)]
    blocks[3].requires_grad_(False)
    return nn.Sequential(nn.Linear(4, 5), *blocks, nn.LayerNorm(5), nn.Linear(5, 3))


class Geometry(Regression):
    """Writes down what its parameters look like, wherever user code may look."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.uncalled = nn.Linear(1, 1, dtype=torch.float32)
        self.scalar = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scalar

    def look(self) -> None:
        self.record.append(
            {
                name: (p.shape, p.ndim, p.numel(), p.stride(), p.dtype, str(p.device), p.requires_grad)
                for name, p in self.named_parameters()
            }
        )

    def configure_optimizers(self) -> Any:
        self.look()
        return super().configure_optimizers()

    def on_fit_start(self) -> None:
        self.look()

    def on_train_start(self) -> None:
        self.look()

    def on_train_batch_start(self, *_: Any) -> None:
        self.look()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.look()
        loss = super().training_step(batch, batch_idx)
        self.look()
        return loss

    def on_after_backward(self) -> None:
        self.look()
        self.record.append([p.grad if p.grad is None else p.grad.shape for p in self.parameters()])

    def on_train_batch_end(self, *_: Any) -> None:
        self.look()

    def on_train_end(self) -> None:
        self.look()


@cache
def geometry_twin() -> Run:
    return fit_plain(Geometry, vectors(2, 4, 3))


@pytest.mark.parametrize("stage", STAGES)
def test_d2_parameters_look_full_size_everywhere(stage: int) -> None:
    """D2: shape, numel, stride, dtype, device and requires_grad, in `configure_optimizers` and every training hook."""
    twin = geometry_twin()
    # configure_optimizers, 2 of the start, 5 looks and 1 at the gradients per batch, 1 of the end
    assert len(twin.record) == 1 + 2 + 2 * (5 + 1) + 1
    for run in fit_ranks(stage, Geometry, vectors(2, 4, 3)):
        assert run.record == twin.record


class Grouped(Regression):
    """Decay by ndim, two learning rates by name, a third group by module class; StepLR."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def configure_optimizers(self) -> Any:
        normed = {p for m in self.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()}
        head = {p for name, p in self.named_parameters() if name.startswith("net.11.")}
        rest = [p for p in self.parameters() if p not in normed | head]
        groups = [
            {"params": [p for p in rest if p.ndim >= 2], "weight_decay": 0.3},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
            {"params": [p for p in self.parameters() if p in normed], "lr": 0.05},
            {"params": [p for p in self.parameters() if p in head], "lr": 0.002, "betas": (0.5, 0.9)},
        ]
        self.record.append([[p.numel() for p in group["params"]] for group in groups])
        optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_batch_end(self, *_: Any) -> None:
        self.record.append([group["lr"] for group in self.optimizers().param_groups])


@cache
def grouped_twin() -> Run:
    return fit_plain(Grouped, vectors(3, 4, 3), max_epochs=2)


@pytest.mark.parametrize("stage", STAGES)
def test_e1_groups_by_ndim_name_and_class_are_those_of_one_process(stage: int, tmp_path: Path) -> None:
    """E1: the sizes in every group are equal, and two decays, three learning rates and other betas act alike."""
    runs = fit_ranks(stage, Grouped, vectors(3, 4, 3), tmp_path / "last.ckpt", max_epochs=2)
    assert_trained_as(grouped_twin(), runs, tmp_path / "last.ckpt", Grouped)
    for run in runs:
        assert run.record == grouped_twin().record


@pytest.mark.parametrize("stage", STAGES)
def test_e2_groups_and_learning_rates_survive_a_resume(stage: int, tmp_path: Path) -> None:
    """E2: three steps, a checkpoint, a new module resumed for three more: the straight run of six."""
    batches, third = vectors(3, 4, 3), tmp_path / "third.ckpt"
    fit_ranks(stage, Grouped, batches, third)
    runs = fit_ranks(stage, Grouped, batches, tmp_path / "last.ckpt", ckpt_path=third, max_epochs=2)
    assert [run.steps for run in runs] == [6, 6]
    assert_trained_as(grouped_twin(), runs, tmp_path / "last.ckpt", Grouped)
    for run in runs:
        assert run.record[1:] == grouped_twin().record[4:]


class ListedInInit(Regression):
    """The optimizer is made over a list that the module has kept since ``__init__``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.saved_list = list(self.net.parameters())

    def configure_optimizers(self) -> Any:
        trained = list(filter(lambda p: p.requires_grad, self.saved_list))
        self.record.append(all(a is b for a, b in zip(self.saved_list, self.net.parameters(), strict=True)))
        return torch.optim.AdamW(trained, lr=0.01)


class OwnParameters(ListedInInit):
    """The optimizer is made over `self.parameters()`."""

    def configure_optimizers(self) -> Any:
        self.record.append(True)
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.mark.parametrize("make", [ListedInInit, OwnParameters])
@pytest.mark.parametrize("stage", STAGES)
def test_e3_lists_kept_since_init_are_the_parameters(stage: int, make: type[Regression]) -> None:
    """E3: a list from `__init__`, `filter(requires_grad)` and `self.parameters()` all train the module."""
    runs = fit_ranks(stage, make, vectors(3, 4, 3))
    assert_trained_as(fit_plain(make, vectors(3, 4, 3)), runs)
    assert all(run.record == [True] for run in runs)


class Summarized(Regression):
    """Summarizes itself while sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def on_fit_start(self) -> None:
        summary = ModelSummary(self, max_depth=-1)
        self.record.append((summary.total_parameters, summary.trainable_parameters, summary.param_nums, str(summary)))


@pytest.mark.parametrize("stage", STAGES)
def test_e6_a_summary_counts_whole_parameters(stage: int) -> None:
    """E6: totals, trainable, each layer and the printed table, in a first fit, in a second, and after both."""

    def fit_twice(rank: int) -> list[Any]:
        with launched(rank):
            module = Summarized()
            for _ in range(2):
                make_trainer(f"zero{stage}").fit(module, loader(share(vectors(1, 4, 3), rank)))
            module.on_fit_start()
            return module.record

    plain = Summarized()
    plain.on_fit_start()
    # 4 * 5 + 5, nine blocks of 5 * 5 + 5, of which one is frozen, 2 * 5, 5 * 3 + 3
    assert plain.record[0][:2] == (25 + 9 * 30 + 10 + 18, 25 + 8 * 30 + 10 + 18)
    assert run_ranks(2, fit_twice) == [plain.record * 3] * 2
