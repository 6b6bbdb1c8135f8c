"""R4. Gradient clipping and gradient norms are those of one process, at every stage."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from rows import (
    STAGES,
    Block,
    Regression,
    Run,
    assert_trained_as,
    fit_plain,
    fit_ranks,
    setup_module,  # noqa: F401
    teardown_module,  # noqa: F401
    vectors,
)
from torch import Tensor, nn

from lightning_zero import HostMemory, MappedFile, ZeROStrategy

NORMS = (2.0, 1.0, 3.0, math.inf)


def uneven_vectors(steps: int) -> list[Any]:
    """Rank 1's inputs are 50 times as large as rank 0's, and so are its gradients, roughly."""
    batches = vectors(steps, 5, 3)
    for x, _ in batches:
        x[x.shape[0] // 2 :] *= 50
    return batches


class OddAndTied(Regression):
    """Parameters of 7 x 5, 3 and 1 elements, a tied weight, a frozen one and an unused one, beside the units."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7, bias=False)
        self.last = nn.Linear(5, 7, bias=False)
        self.last.weight = self.first.weight
        self.net = nn.Sequential(nn.Linear(7, 5), *(Block(5) for _ in range(12)))
        self.net[4].requires_grad_(False)
        self.unused = nn.Linear(5, 5)
        self.out = nn.Linear(7, 3)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.last(self.net(self.first(x)))) * self.gain

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


@cache
def clipped_twin(algorithm: str) -> Run:
    return fit_plain(OddAndTied, uneven_vectors(3), gradient_clip_val=0.1, gradient_clip_algorithm=algorithm)


@pytest.mark.parametrize("offload", ["", "_offload"])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("stage", STAGES)
def test_f1_gradient_clip_val_clips_the_whole_mean_gradient(
    stage: int, algorithm: str, offload: str, tmp_path: Path
) -> None:
    """F1: by norm and by value, with gradients of very different size on the two ranks, wherever these rest."""
    clip = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": algorithm, "strategy": f"zero{stage}{offload}"}
    runs = fit_ranks(stage, OddAndTied, uneven_vectors(3), tmp_path / "last.ckpt", **clip)
    assert_trained_as(clipped_twin(algorithm), runs, tmp_path / "last.ckpt", OddAndTied)
    # The clip binds: without it training ends elsewhere.
    unclipped = fit_plain(OddAndTied, uneven_vectors(3))
    assert not torch.allclose(unclipped.after["gain"], clipped_twin(algorithm).after["gain"], rtol=1e-3)


def test_f6_clipping_works_with_every_option_of_offload(tmp_path: Path) -> None:
    """F6: a part on the device and the rest off it; parameters too; on a disk."""
    clip = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "norm"}
    for offload in (HostMemory(ratio=0.5), HostMemory(parameters=True), MappedFile(tmp_path)):
        strategy = ZeROStrategy(stage=3, offload=offload)
        runs = fit_ranks(3, OddAndTied, uneven_vectors(3), strategy=strategy, **clip)
        assert_trained_as(clipped_twin("norm"), runs)


class ClipsItself(OddAndTied):
    """Calls torch's own functions on its parameters, and logs the norm."""

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        norms = [
            float(nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None], norm))
            for norm in NORMS
        ]
        each = [None if p.grad is None else float(p.grad.norm()) for p in self.parameters()]
        clipped = nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        after = nn.utils.clip_grad_norm_(self.parameters(), 1e9, foreach=False)
        self.record.append([*norms, float(clipped), float(after), *each])
        self.log("norm", clipped)


@cache
def clips_itself_twin() -> Run:
    return fit_plain(ClipsItself, uneven_vectors(3))


@pytest.mark.parametrize("stage", STAGES)
def test_f2_f3_clip_grad_norm_returns_the_norm_of_one_process(stage: int) -> None:
    """F2, F3: on every rank, four orders; odd sizes, a tied weight counted once, no padding, unused ones without."""
    twin = clips_itself_twin()
    runs = fit_ranks(stage, ClipsItself, uneven_vectors(3))
    assert_trained_as(twin, runs)
    assert runs[0].record == runs[1].record
    for found, expected in zip(runs[0].record, twin.record, strict=True):
        assert found == [value if value is None else pytest.approx(value, rel=1e-10) for value in expected]
    for norms in runs[0].record:
        assert norms[4] == norms[0] and norms[5] == pytest.approx(0.1, rel=1e-4)
        assert norms.count(None) == 4  # weight and bias of the frozen block and of the unused layer


@pytest.mark.parametrize("stage", STAGES)
def test_f4_the_logged_norm_is_the_global_one(stage: int) -> None:
    """F4: the same number at every stage and on every rank, with the unit of one process."""
    twin = clips_itself_twin()
    for run in fit_ranks(stage, ClipsItself, uneven_vectors(3)):
        assert run.metrics == {"norm": pytest.approx(twin.metrics["norm"], rel=1e-10)}


class LogsGradNorms(OddAndTied):
    """Does as Lightning's documentation says."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for order in (2, "inf"):
            self.record.append({name: float(value) for name, value in grad_norm(self, order).items()})
        self.log_dict(grad_norm(self, norm_type=2))


@pytest.mark.parametrize("stage", STAGES)
def test_f5_grad_norm_gives_each_layer_and_the_total(stage: int) -> None:
    """F5: `lightning.pytorch.utilities.grad_norm(self, 2)` in `on_before_optimizer_step`, and the infinity norm."""
    twin = fit_plain(LogsGradNorms, uneven_vectors(2))
    runs = fit_ranks(stage, LogsGradNorms, uneven_vectors(2))
    assert_trained_as(twin, runs)
    for run in runs:
        for found, expected in zip([*run.record, run.metrics], [*twin.record, twin.metrics], strict=True):
            assert found == pytest.approx(expected, rel=1e-10)
    assert "grad_2.0_norm_total" in runs[0].metrics
