"""R6. Manual optimization: several backwards, several optimizers, steps that touch half of the model."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rows import (
    STAGES,
    Block,
    Regression,
    Run,
    assert_close,
    assert_trained_as,
    fit_plain,
    fit_ranks,
    read_checkpoint,
    setup_module,  # noqa: F401
    teardown_module,  # noqa: F401
    vectors,
)
from torch import Tensor, nn
from torch.nn import functional as F


class SeveralBackwards(Regression):
    """Three backwards, one of them twice through one graph, before a step; then a second step in the same batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(4, 5), *(Block(5) for _ in range(9)), nn.Linear(5, 3))

    def before_step(self) -> None:
        """Called with all gradients there."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.mse_loss(self(x), y))
        loss = F.l1_loss(self(2 * x), y)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss / 2)
        self.before_step()
        optimizer.step()
        # The weights are new, and so must the second forward's be.
        optimizer.zero_grad()
        again = F.mse_loss(self(x), y)
        self.record.append(again.item())
        self.manual_backward(again)
        self.before_step()
        optimizer.step()


class ClipsByHand(SeveralBackwards):
    """As the documentation has it."""

    def before_step(self) -> None:
        self.clip_gradients(self.optimizers(), gradient_clip_val=0.5, gradient_clip_algorithm="norm")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


@pytest.mark.parametrize("stage", STAGES)
def test_h1_backward_may_run_anywhere_and_several_times(stage: int, tmp_path: Path) -> None:
    """H1: one optimizer, four backwards and two steps in each `training_step`."""
    twin = fit_plain(SeveralBackwards, vectors(3, 4, 3))
    runs = fit_ranks(stage, SeveralBackwards, vectors(3, 4, 3), tmp_path / "last.ckpt")
    assert_trained_as(twin, runs, tmp_path / "last.ckpt", SeveralBackwards)
    assert [run.steps for run in runs] == [6, 6]
    means = [sum(pair) / 2 for pair in zip(runs[0].record, runs[1].record)]
    assert means == pytest.approx(twin.record, abs=1e-10)


@pytest.mark.parametrize("stage", STAGES)
def test_h3_clip_gradients_clips_the_whole_gradient(stage: int, tmp_path: Path) -> None:
    """H3: `self.clip_gradients(optimizer, 0.5, "norm")` before each step."""
    twin = fit_plain(ClipsByHand, vectors(3, 4, 3))
    runs = fit_ranks(stage, ClipsByHand, vectors(3, 4, 3), tmp_path / "last.ckpt")
    assert_trained_as(twin, runs, tmp_path / "last.ckpt", ClipsByHand)


class Gan(Regression):
    """Two Adams; the discriminator is stepped twice for each step of the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(3, 5), *(Block(5) for _ in range(10)), nn.Linear(5, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 3), *(Block(3) for _ in range(11)), nn.Linear(3, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        noise, real = batch
        for_generator, for_discriminator = self.optimizers()
        for _ in range(2):
            self.toggle_optimizer(for_discriminator)
            self.judge(noise, real)
            self.note_gradients()
            for_discriminator.step()
            for_discriminator.zero_grad()
            self.untoggle_optimizer(for_discriminator)
        self.toggle_optimizer(for_generator)
        self.manual_backward(F.softplus(-self.discriminator(self.generator(noise))).mean())
        self.note_gradients()
        for_generator.step()
        for_generator.zero_grad()
        self.untoggle_optimizer(for_generator)

    def judge(self, noise: Tensor, real: Tensor) -> None:
        """Not detached: what keeps gradients out of the generator is the toggle alone."""
        fake = self.discriminator(self.generator(noise))
        self.manual_backward(F.softplus(fake).mean() + F.softplus(-self.discriminator(real)).mean())

    def note_gradients(self) -> None:
        halves = (self.generator, self.discriminator)
        self.record.append([{p.grad is not None for p in half.parameters()} for half in halves])
        self.record.append([{p.requires_grad for p in half.parameters()} for half in halves])

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.Adam(self.generator.parameters(), lr=0.01, betas=(0.5, 0.9)),
            torch.optim.Adam(self.discriminator.parameters(), lr=0.02),
        )


@cache
def gan_twin() -> Run:
    return fit_plain(Gan, vectors(2, 3, 4), max_epochs=2)


@pytest.mark.parametrize("stage", STAGES)
def test_h2_toggled_optimizers_train_a_gan(stage: int, tmp_path: Path) -> None:
    """H2: gradients reach only the half whose optimizer is on; both halves train as in one process."""
    runs = fit_ranks(stage, Gan, vectors(2, 3, 4), tmp_path / "last.ckpt", max_epochs=2)
    assert_trained_as(gan_twin(), runs, tmp_path / "last.ckpt", Gan)
    # Each step leaves two notes, of gradients and of flags: twice the discriminator alone, then the generator alone.
    one_batch = [[{False}, {True}]] * 4 + [[{True}, {False}]] * 2
    for run in (*runs, gan_twin()):
        assert run.record == one_batch * 4


@pytest.mark.parametrize("stage", STAGES)
def test_h2_a_gan_resumes_with_both_optimizer_states(stage: int, tmp_path: Path) -> None:
    """H2: one epoch, a checkpoint, a new module resumed for another epoch: the straight run of two."""
    first = tmp_path / "first.ckpt"
    fit_ranks(stage, Gan, vectors(2, 3, 4), first)
    runs = fit_ranks(stage, Gan, vectors(2, 3, 4), tmp_path / "last.ckpt", ckpt_path=first, max_epochs=2)
    assert_trained_as(gan_twin(), runs, tmp_path / "last.ckpt", Gan)
    states = read_checkpoint(tmp_path / "last.ckpt")["optimizer_states"]
    # 12 and 13 layers of two parameters; 4 batches of one step and of two.
    assert [len(state["state"]) for state in states] == [24, 26]
    assert [float(state["state"][0]["step"]) for state in states] == [4, 8]


class ModeSwitch(Regression):
    """One forward, of which a mode picks the half."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(3, 4), *(Block(4) for _ in range(10)))
        self.discriminator = nn.Sequential(*(Block(4) for _ in range(10)), nn.Linear(4, 1))

    def forward(self, x: Tensor, mode: str) -> Tensor:
        return self.generator(x) if mode == "generate" else self.discriminator(x)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        noise, real = batch
        mode = ("discriminate", "generate")[batch_idx % 2]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        if mode == "generate":
            loss = F.mse_loss(self(noise, mode), real)
        else:
            loss = F.softplus(self(real, mode)).mean()
        self.manual_backward(loss)
        self.record.append([all(p.grad is None for p in m.parameters()) for m in (self.generator, self.discriminator)])
        optimizer.step()


@pytest.mark.parametrize("stage", STAGES)
def test_c6_a_step_may_touch_half_of_the_model(stage: int, tmp_path: Path) -> None:
    """C6: the other half keeps `grad is None`, so AdamW neither decays it nor advances its step."""
    twin = fit_plain(ModeSwitch, vectors(4, 3, 4))
    runs = fit_ranks(stage, ModeSwitch, vectors(4, 3, 4), tmp_path / "last.ckpt")
    assert_trained_as(twin, runs, tmp_path / "last.ckpt", ModeSwitch)
    for run in runs:
        assert run.record == [[True, False], [False, True]] * 2
    states = read_checkpoint(tmp_path / "last.ckpt")["optimizer_states"][0]["state"]
    assert {float(state["step"]) for state in states.values()} == {2.0}
    assert_close({"w": runs[0].live["generator.0.weight"]}, {"w": twin.live["generator.0.weight"]})
