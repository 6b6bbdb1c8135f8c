"""Training loops that reach into gradients, groups and graphs: through the Trainer as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rows import (
    STAGES,
    Block,
    Regression,
    assert_close,
    assert_same_on_all_ranks,
    assert_trained_as,
    fit_plain,
    fit_ranks,
    setup_module,  # noqa: F401
    teardown_module,  # noqa: F401
    vectors,
)
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_zero import ZeROStrategy
from lightning_zero.engine import engine_of

WIDTH = 5


class Manual(Regression):
    """Manual optimization of nine residual blocks between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(4, WIDTH), *(Block(WIDTH) for _ in range(9)), nn.Linear(WIDTH, 3))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.mse_loss(self(x), y))
        torch.manual_seed(batch_idx)
        with torch.no_grad():
            self.edit(list(self.parameters()))
        optimizer.step()

    def edit(self, parameters: list[Tensor]) -> None:
        """Change the gradients."""


# Edits of gradients between backward and step


def scale(parameters: list[Tensor]) -> None:
    for i, p in enumerate(parameters):
        p.grad.mul_(0.5 + i / 10)


def drop(parameters: list[Tensor]) -> None:
    for p in parameters[::3]:
        p.grad = None


def add_noise_of_their_shape(parameters: list[Tensor]) -> None:
    for p in parameters:
        p.grad.add_(torch.randn(p.shape), alpha=0.01)


def add_noise_like(parameters: list[Tensor]) -> None:
    for p in parameters:
        p.grad.add_(torch.randn_like(p.grad) * 0.01)


def replace_by_plain_tensors(parameters: list[Tensor]) -> None:
    for i, p in enumerate(parameters):
        p.grad = torch.linspace(-1, 1, p.numel()).view(p.shape) / (1 + i)


def replace_by_computed(parameters: list[Tensor]) -> None:
    for p in parameters:
        p.grad = p.grad * 2 + p.detach() / 10


def swap_between_parameters(parameters: list[Tensor]) -> None:
    first, second = parameters[2], parameters[6]
    first.grad, second.grad = second.grad, first.grad


def centralize(parameters: list[Tensor]) -> None:
    for p in parameters:
        if p.ndim > 1:
            p.grad.sub_(p.grad.mean(dim=1, keepdim=True))


def normalize_each(parameters: list[Tensor]) -> None:
    for p in parameters:
        p.grad.div_(p.grad.norm() + 1e-3)


def clip_by_value(parameters: list[Tensor]) -> None:
    nn.utils.clip_grad_value_(parameters, 0.01)


def clip_by_known_norm(parameters: list[Tensor]) -> None:
    norm = nn.utils.get_total_norm([p.grad for p in parameters])
    nn.utils.clip_grads_with_norm_(parameters, 0.1, norm)


def clip_by_unit(parameters: list[Tensor]) -> None:
    for p in parameters:
        if p.ndim > 1:
            bound = 0.01 * p.norm(dim=1, keepdim=True).clamp(min=1e-3)
            p.grad.mul_((bound / p.grad.norm(dim=1, keepdim=True).clamp(min=1e-6)).clamp(max=1.0))


def as_lists(parameters: list[Tensor]) -> None:
    grads = [p.grad for p in parameters]
    torch._foreach_mul_(grads, torch._foreach_norm(grads))
    torch._foreach_add_(grads, parameters, alpha=0.01)


def through_a_vector(parameters: list[Tensor]) -> None:
    flat = torch.cat([p.grad.reshape(-1) for p in parameters])
    flat[flat.abs() < flat.abs().median()] = 0.0
    for p, piece in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad.copy_(piece.view_as(p))


EDITS: list[Callable[[list[Tensor]], None]] = [
    scale, drop, add_noise_of_their_shape, add_noise_like, replace_by_plain_tensors, replace_by_computed,
    swap_between_parameters, centralize, normalize_each, clip_by_value, clip_by_known_norm, clip_by_unit, as_lists,
    through_a_vector,
]  # fmt: skip


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_may_be_edited_before_the_step(stage: int, edit: Callable[[list[Tensor]], None]) -> None:
    """Elementwise, by rows, by whole values, from plain tensors: the step takes what was left there."""

    class Edited(Manual):
        def edit(self, parameters: list[Tensor]) -> None:
            edit(parameters)

    batches = vectors(3, 4, 3)
    assert_trained_as(fit_plain(Edited, batches), fit_ranks(stage, Edited, batches))


# Several gradients in one step


class Projects(Manual):
    """Two losses; the second's gradient loses its part along the first's (gradient surgery)."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        parameters = list(self.parameters())
        optimizer.zero_grad()
        self.manual_backward(F.mse_loss(self(x), y))
        first = [p.grad.clone() for p in parameters]
        optimizer.zero_grad()
        self.manual_backward(F.l1_loss(self(2 * x), y))
        along = sum((p.grad * g).sum() for p, g in zip(parameters, first)) / sum(g.square().sum() for g in first)
        self.record.append(float(along))
        for p, g in zip(parameters, first):
            p.grad.sub_(along * g).add_(g)
        # And one more on top of what was edited.
        self.manual_backward(F.mse_loss(self(-x), y))
        optimizer.step()


class Remembers(Manual):
    """A momentum of its own, from gradients kept over steps; accumulates over two batches."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        self.manual_backward(F.mse_loss(self(x), y) / 2)
        if batch_idx % 2 == 0:
            return
        kept = getattr(self, "kept", None)
        if kept is not None:
            for p, g in zip(self.parameters(), kept):
                p.grad.add_(g, alpha=0.9)
        self.kept = [p.grad.clone() for p in self.parameters()]
        optimizer.step()
        optimizer.zero_grad()


class StepsInBackward(Manual):
    """An optimizer for each parameter steps as soon as its gradient is there, which is then gone."""

    def on_train_start(self) -> None:
        self.own = {p: torch.optim.AdamW([p], lr=0.01, weight_decay=0.1) for p in self.parameters()}
        for p in self.parameters():
            p.register_post_accumulate_grad_hook(self.step_one)

    def step_one(self, parameter: Tensor) -> None:
        """Called by autograd."""
        self.own[parameter].step()
        parameter.grad = None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.manual_backward(F.mse_loss(self(x), y))
        self.record.append({p.grad is None for p in self.parameters()})


class Penalized(Manual):
    """A critic under a gradient penalty, stepped twice for each step of the generator; hinge losses."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(3, WIDTH), *(Block(WIDTH) for _ in range(9)), nn.Linear(WIDTH, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        noise, real = batch
        for_generator, for_critic = self.optimizers()
        for round in range(2):
            self.toggle_optimizer(for_critic)
            fake = self.net(noise * (1 + round)).detach()
            between = (0.3 * fake + 0.7 * real).requires_grad_()
            score = self.critic(between)
            (slope,) = torch.autograd.grad(score.sum(), between, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            loss = F.relu(1 - self.critic(real)).mean() + F.relu(1 + self.critic(fake)).mean() + 10 * penalty
            for_critic.zero_grad()
            self.manual_backward(loss)
            for_critic.step()
            self.untoggle_optimizer(for_critic)
        self.toggle_optimizer(for_generator)
        for_generator.zero_grad()
        self.manual_backward(-self.critic(self.net(noise)).mean())
        for_generator.step()
        self.untoggle_optimizer(for_generator)

    def configure_optimizers(self) -> Any:
        generator = torch.optim.Adam(self.net.parameters(), lr=0.01, betas=(0.0, 0.9))
        return generator, torch.optim.RMSprop(self.critic.parameters(), lr=0.01)


class Retains(Manual):
    """One graph, three backwards: of one output, of the other, and of both."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        out = self(x)
        one, other = F.mse_loss(out[:, :1], y[:, :1]), F.l1_loss(out[:, 1:], y[:, 1:])
        self.manual_backward(one, retain_graph=True)
        self.record.append(float(self.net[4].linear.weight.grad.norm()))
        self.manual_backward(other, retain_graph=True)
        self.manual_backward(one + other)
        self.record.append(float(self.net[4].linear.weight.grad.norm()))
        optimizer.step()


@pytest.mark.parametrize("make", [Projects, Remembers, StepsInBackward, Penalized, Retains])
@pytest.mark.parametrize("stage", STAGES)
def test_several_gradients_in_one_step(stage: int, make: type[Manual]) -> None:
    """As in one process, with what each recorded on the way, which is of mean gradients."""
    batches = vectors(4, 4, 3)
    twin, runs = fit_plain(make, batches), fit_ranks(stage, make, batches)
    assert_trained_as(twin, runs)
    for run in runs:
        if twin.record and isinstance(twin.record[0], float):
            assert run.record == pytest.approx(twin.record, abs=1e-10)
        else:
            assert run.record == twin.record


# Gradients of parameters by `torch.autograd.grad`


class AsksAutograd(Manual):
    """Takes gradients of all parameters without a backward; keeps them."""

    create_graph = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = F.mse_loss(self(x), y)
        parameters = list(self.parameters())
        grads = torch.autograd.grad(loss, parameters, create_graph=self.create_graph, retain_graph=True)
        self.record.append([grad.detach().clone() for grad in grads])
        self.record.append(all(p.grad is None for p in parameters))
        if self.create_graph:
            loss = loss + 0.1 * sum(grad.square().sum() for grad in grads)
        self.manual_backward(loss)
        optimizer.step()


class Penalizes(AsksAutograd):
    """The penalty is on those gradients: backward of a backward."""

    create_graph = True


class AsksWithoutGradMode(AsksAutograd):
    """The graph is there all the same; a weight that the loss does not use has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = F.mse_loss(self(x), y)
        parameters = list(self.parameters())
        with torch.no_grad():
            grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        assert [grad is None for grad in grads] == [p is self.unused for p in parameters]
        self.record.append([grad for grad in grads if grad is not None])
        self.record.append(all(p.grad is None for p in parameters))
        # Of some parameters alone: the others have no gradient, and are not stepped.
        self.manual_backward(loss, inputs=parameters[4:9])
        assert [p.grad is None for p in parameters] == [not 4 <= i < 9 for i in range(len(parameters))]
        optimizer.step()


@pytest.mark.parametrize("make", [AsksAutograd, Penalizes])
@pytest.mark.parametrize("stage", STAGES)
def test_autograd_grad_gives_whole_local_gradients(stage: int, make: type[AsksAutograd]) -> None:
    """As under data parallelism: whole, of this rank's batch, and `p.grad` untouched."""
    batches = vectors(3, 4, 3)
    runs = fit_ranks(stage, make, batches)
    expected = fit_ranks(0, make, batches, strategy="ddp")
    assert_same_on_all_ranks(runs)
    assert_close(runs[0].live, expected[0].live)
    for run, data_parallel in zip(runs, expected):
        torch.testing.assert_close(run.record[::2], data_parallel.record[::2], rtol=0, atol=1e-10)
        assert run.record[1::2] == [True] * 3
        assert all(type(grad) is Tensor for grads in run.record[::2] for grad in grads)


@pytest.mark.parametrize("stage", STAGES)
def test_autograd_grad_needs_no_grad_mode_and_backward_takes_inputs(stage: int) -> None:
    """Local gradients, which average to the twin's; then a backward into five parameters alone."""
    batches = vectors(3, 4, 3)
    twin, runs = fit_plain(AsksWithoutGradMode, batches), fit_ranks(stage, AsksWithoutGradMode, batches)
    assert_trained_as(twin, runs)
    for number in range(0, 6, 2):
        means = [sum(grads) / 2 for grads in zip(*(run.record[number] for run in runs), strict=True)]
        torch.testing.assert_close(means, twin.record[number], rtol=0, atol=1e-10)
        assert not torch.equal(runs[0].record[number][0], runs[1].record[number][0])
    assert all(run.record[1::2] == twin.record[1::2] == [True] * 3 for run in runs)


# Comparisons


class Compares(Manual):
    """Looks for a parameter among others by value, as Lightning's finetuning callbacks do."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        parameters = list(self.parameters())
        engine = engine_of(self)
        if engine is not None:
            engine.collectives.reset_counts()
        self.record.append([[torch.equal(p, q) for q in parameters[:4]] for p in parameters])
        self.record.append(torch.equal(parameters[2], parameters[2].detach() + 0))
        self.record.append({} if engine is None else dict(engine.collectives.nbytes))
        super().training_step(batch, batch_idx)

    def edit(self, parameters: list[Tensor]) -> None:
        parameters[6].copy_(parameters[2])


@pytest.mark.parametrize("stage", STAGES)
def test_comparing_parameters_moves_none_of_them(stage: int) -> None:
    """`torch.equal` exchanges an answer of one byte for each pair that is cut alike, in grad mode too."""
    batches = vectors(3, 4, 3)
    strategy = ZeROStrategy(stage, units=["Linear"])
    twin, runs = fit_plain(Compares, batches), fit_ranks(stage, Compares, batches, strategy=strategy)
    assert_trained_as(twin, runs)
    for run in runs:
        for number in (0, 1, 3, 4, 6, 7):
            assert run.record[number] == twin.record[number]
        for sent in run.record[2::3]:
            assert not set(sent) - {"norm", "lockstep"}, sent


# Groups and schedules


class Scheduled(Regression):
    """Matrices and the rest in groups of their own under one cycle; a third group joins, and layers freeze, midway."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, WIDTH), *(Block(WIDTH) for _ in range(9)), nn.Linear(WIDTH, 3))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.net[1:](self.net[0](x) * self.scale)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.net.parameters() if p.ndim > 1]
        rest = [p for p in self.net.parameters() if p.ndim < 2]
        optimizer = torch.optim.AdamW([{"params": matrices}, {"params": rest, "weight_decay": 0.0}], weight_decay=0.3)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.05, 0.01], total_steps=12)
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]

    def on_train_epoch_start(self) -> None:
        optimizer = self.optimizers()
        if self.current_epoch == 1:
            cycle = {"lr": 0.03, "initial_lr": 0.03, "max_lr": 0.03, "min_lr": 1e-4, "betas": (0.9, 0.95)}
            optimizer.add_param_group({"params": [self.scale], **cycle, "max_momentum": 0.95, "base_momentum": 0.85})
            self.net[4:7].requires_grad_(False)
        elif self.current_epoch == 2:
            self.net[4:7].requires_grad_(True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.record.append([(len(g["params"]), g["lr"], g["betas"]) for g in optimizer.param_groups])
        self.record.append([p.grad is None for p in self.parameters()])


@pytest.mark.parametrize("stage", STAGES)
def test_groups_follow_their_schedules_and_may_change(stage: int) -> None:
    """Learning rates and momenta by group and step; frozen layers neither decay nor move."""
    batches = vectors(4, 4, 3)
    twin = fit_plain(Scheduled, batches, max_epochs=3)
    runs = fit_ranks(stage, Scheduled, batches, max_epochs=3)
    assert_trained_as(twin, runs)
    assert [len(groups) for groups in twin.record[::2]] == [2] * 4 + [3] * 8
    assert all(run.record == twin.record for run in runs)
