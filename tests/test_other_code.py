"""Modules that do unusual things with their weights train sharded as they do plain: equal to 1e-10 in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lightning_zero
from lightning_zero.engine import engine_of
from lightning_zero.unit import ReplacedParameterError
from lightning_zero.whole_parameter import ConcealedParameter

WORLD_SIZE = 2
STAGES = (0, 1, 2, 3)


class Product(torch.autograd.Function):
    """A custom function sees the parameter object itself: nothing of ours stands between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


class CustomFunction(nn.Module):
    """Custom functions on weights of the root and of units."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        x = Product.apply(x, self.weight)
        for layer in self.layers:
            x = torch.tanh(Product.apply(x, layer.weight) + layer(x))
        return Product.apply(x, self.weight).sum()


class Checkpointed(nn.Module):
    """The user's own checkpointing around units, with dropout."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_() @ self.weight
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x.sum()


class Recurrent(nn.Module):
    """LSTMs keep a list of their weights, taken when they were built."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(4, 4, 2)
        self.layers = nn.ModuleList(nn.LSTM(4, 4) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.first(x.unsqueeze(0))
        for layer in self.layers:
            x = x + layer(x)[0]
        return x.sum()


class Attention(nn.Module):
    """MultiheadAttention reads the weights of a child that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(4, 2, batch_first=True)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True) for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(0)
        x = self.first(x, x, x)[0]
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).sum()


class Parametrized(nn.Module):
    """Weight and spectral norm compute a weight from parameters; channels-last weights; BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.computed = nn.utils.weight_norm(nn.Linear(4, 4))
        self.conv = nn.Conv2d(1, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 3, 3, padding=1)), nn.BatchNorm2d(3))
            for _ in range(9)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.computed(self.linear(x)).reshape(1, 1, -1, 4))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


class GradientPenalty(nn.Module):
    """Backward through a backward: weights are needed once more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        x = y = x.clone().requires_grad_()
        for layer in self.layers:
            y = layer(y)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.sum() + gradient.pow(2).sum()


class KeepsWeights(nn.Module):
    """Weights, views of them and results, kept from inside a unit's forward and used after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        kept: list[tuple[Tensor, Tensor, Tensor]] = []

        def keep(layer: Any, *_: Any) -> None:
            weight = layer[0].weight
            kept.append((weight, weight.t(), weight.pow(2)))

        handles = [layer.register_forward_hook(keep) for layer in self.layers]
        for layer in self.layers:
            x = layer(x)
        for handle in handles:
            handle.remove()
        return x.sum() + sum(a.pow(2).sum() + (b * b).sum() + c.sum() for a, b, c in kept)


class Conjugate(nn.Module):
    """Lazy conjugates of complex weights are saved for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.complex128) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        x = (x * self.scale) * self.scale.conj()
        for layer in self.layers:
            x = x + 0.1 * layer(x) * layer.bias.conj()
        return x.real.pow(2).sum()


class Hooked(nn.Module):
    """Hooks that were on parameters before they were sharded; the handle of one still removes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(12))
        self.handles = [layer[0].weight.register_hook(lambda grad: 2 * grad) for layer in self.layers]
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        self.count += 1
        # In the first forward of the second step; the twin runs two forwards a step.
        if self.count == (2 if self.sharded else 3):
            self.handles[3].remove()
        return x.sum()

    @property
    def sharded(self) -> bool:
        return engine_of(self) is not None


class FreezesMidway(nn.Module):
    """A part is frozen through the optimizer's own parameters while the step has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(12))
        self.kept = [self.second.weight, self.layers[5][0].weight]

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.kept:
            parameter.requires_grad_(True)
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        for parameter in self.kept:
            parameter.requires_grad_(False)
        x = self.second(x)
        for layer in self.layers:
            x = layer(x)
        return x.sum()


MODULES: dict[str, Callable[[], nn.Module]] = {
    "custom function": CustomFunction,
    "checkpoint": lambda: Checkpointed(use_reentrant=False),
    "reentrant checkpoint": lambda: Checkpointed(use_reentrant=True),
    "LSTM": Recurrent,
    "attention": Attention,
    "parametrized": Parametrized,
    "gradient penalty": GradientPenalty,
    "kept weights": KeepsWeights,
    "conjugate": Conjugate,
    "hooks": Hooked,
    "freezing midway": FreezesMidway,
}


def train(model: nn.Module, ranks: list[int]) -> dict[str, Tensor]:
    """Three steps of SGD with momentum on the mean loss of ``ranks``; then all whole values."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        for rank in ranks:
            torch.manual_seed(10 * step + rank)
            (model(torch.randn(3, 4)) / len(ranks)).backward()
        optimizer.step()
    if engine_of(model) is not None:
        lightning_zero.unshard(model)
    return model.state_dict()


def on_rank(rank: int, name: str, stage: int | None, ranks: list[int] | None) -> dict[str, Tensor]:
    """A sharded rank, or with ``stage=None`` the plain twin of all ranks."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = MODULES[name]()
    if stage is not None:
        lightning_zero.shard(model, stage=stage)
        engine = engine_of(model)
        assert engine is not None
        engine.pool.poison = True
    return train(model, [rank] if ranks is None else ranks)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", MODULES)
def test_it_trains_as_in_one_plain_process(name: str, stage: int) -> None:
    """Parameters of all names after three steps; reused buffers are poisoned, so that a stale read would show."""
    # Power iteration and BatchNorm count forwards: there both ranks, and the twin, see rank 0's data alone.
    stateful = name == "parametrized"
    (expected,) = run_ranks(1, on_rank, name, None, [0] if stateful else [0, 1])
    for result in run_ranks(WORLD_SIZE, on_rank, name, stage, [0] if stateful else None):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-10)


def test_recurrent_weights_are_not_laid_out_anew_while_they_are_sharded() -> None:
    """`flatten_parameters`, which forwards call for cuDNN, would ask for raw memory; later it is torch's again."""
    model = nn.Sequential(nn.LSTM(3, 3), nn.Linear(3, 1))
    lightning_zero.shard(model, stage=3)
    assert type(model[0]).flatten_parameters is not model[0].flatten_parameters
    model[0].flatten_parameters()
    lightning_zero.unshard(model)
    assert model[0].flatten_parameters.__func__ is nn.LSTM.flatten_parameters


# Attributes that are exchanged


class Teacher(nn.Module):
    """Two layers; the second one's weight is used past its module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: Tensor, teacher: nn.Module | None = None) -> Tensor:
        if teacher is not None:
            return torch.func.functional_call(self.layers[0], dict(teacher.named_parameters()), (x,))
        second: Any = self.layers[1]
        return F.linear(self.layers[0](x), second.weight, second.bias)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_block_computes_with_the_parameters_of_another_module(stage: int) -> None:
    """`functional_call` puts them in the place of the sharded ones for the time of a call."""

    def on_rank(rank: int) -> bool:
        model = lightning_zero.shard(Teacher(), stage=stage, units=["Linear"])
        teacher, x = nn.Linear(3, 3), torch.ones(2, 3)
        model(x).sum().backward()
        return torch.equal(model(x, teacher), teacher(x))

    assert run_ranks(2, on_rank) == [True, True]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_parameter_that_was_replaced_is_noticed_where_no_forward_uses_it(stage: int) -> None:
    """Its module is never called, and the replacement would be trained on each rank alone."""

    def on_rank(rank: int) -> str:
        model = lightning_zero.shard(Teacher(), stage=stage, units=["Linear"])
        model.layers[1].weight = nn.Parameter(torch.ones(3, 3))
        with pytest.raises(ReplacedParameterError) as caught:
            model(torch.ones(2, 3))
        assert all(type(p) is not ConcealedParameter for p in model.parameters())
        return str(caught.value)

    assert all("`layers.1.weight` was replaced" in message for message in run_ranks(2, on_rank))
