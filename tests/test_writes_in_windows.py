"""Writes into weights, at each moment of a step, in each way, on weights of the root, of units and of both.

A momentum encoder is what such code has: frozen, used without gradient, and written all the time. Each step writes in
one way at every moment; ranks see the same data, so one plain process is the twin.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from distributed import run_ranks
from torch import Tensor, nn

import lightning_zero
from lightning_zero.precision import RECIPES

WORLD_SIZE = 2
WAYS: list[dict[str, Any]] = [{"stage": 1}, {"stage": 3}, {"stage": 3, "offload": "cpu"}]

Write = Callable[[Sequence[Tensor]], None]


def _each(change: Callable[[Tensor], Any]) -> Write:
    def write(weights: Sequence[Tensor]) -> None:
        for weight in weights:
            change(weight)

    return write


def _assign(weight: Tensor) -> None:
    weight.data = weight.data * 0.9


def _optimize(weights: Sequence[Tensor], **options: Any) -> None:
    for weight in weights:
        weight.grad = torch.full_like(weight, 0.1)
    torch.optim.SGD(weights, lr=0.1, momentum=0.9, **options).step()
    for weight in weights:
        weight.grad = None


def _by_vector(weights: Sequence[Tensor]) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(weights) * 0.9, weights)


WRITES: dict[str, Write] = {
    "mul_": _each(lambda weight: weight.mul_(0.9)),
    "copy_": _each(lambda weight: weight.copy_(torch.full(weight.shape, 0.3))),
    "data.mul_": _each(lambda weight: weight.data.mul_(0.9)),
    "data.copy_": _each(lambda weight: weight.data.copy_(weight.data * 0.8 + 0.1)),
    "data =": _each(_assign),
    "detach().add_": _each(lambda weight: weight.detach().add_(0.1)),
    "a view": _each(lambda weight: weight[0].mul_(0.5)),
    "out=": _each(lambda weight: torch.mul(weight, 0.9, out=weight)),
    "init": _each(lambda weight: nn.init.constant_(weight, 0.2)),
    "_foreach_mul_": lambda weights: torch._foreach_mul_(list(weights), 1.1),
    "_foreach_copy_": lambda weights: torch._foreach_copy_(list(weights), [torch.full(w.shape, 0.4) for w in weights]),
    "foreach SGD": lambda weights: _optimize(weights, foreach=True),
    "fused SGD": lambda weights: _optimize(weights, fused=True),
    "vector": _by_vector,
}

LISTS = ("root", "unit", "both")


class Momentum(nn.Module):
    """A net and its average: each with weights of the root and three units."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), *(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
        self.average = copy.deepcopy(self.net).requires_grad_(False)
        self.written: Callable[[], None] = lambda: None
        self.average[2].register_forward_hook(lambda *_: self.write())  # its own window is open

    @torch.no_grad()
    def write(self) -> None:
        self.written()

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        out.register_hook(lambda _: self.write())
        self.write()
        with torch.no_grad():
            target = self.average(x)
        return (out - target).pow(2).mean()


def _listed(model: Momentum, name: str) -> list[Tensor]:
    root, unit = list(model.average[0].parameters()), list(model.average[2].parameters())
    return {"root": root, "unit": unit, "both": [*root, *unit, *model.average[3].parameters()]}[name]


def _walked(rank: int, way: dict[str, Any] | None) -> list[tuple[str, Tensor]]:
    """After each step: what was written when, and the loss and sums of all weights."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Momentum()
    if way is not None:
        lightning_zero.shard(model, units=lambda m: isinstance(m, nn.Sequential) and len(m) == 2, **way)
    optimizer = torch.optim.SGD(model.net.parameters(), lr=0.1)
    found = []
    for listed, write in product(LISTS, WRITES):
        # Looked up at the moment: inside a window attributes are leaves.
        model.written = lambda write=write, listed=listed: WRITES[write](_listed(model, listed))
        optimizer.zero_grad()
        model.write()
        loss = model(torch.ones(2, 4))
        model.write()
        loss.backward()
        model.write()
        optimizer.step()
        sums = [p.detach().pow(2).sum() for p in model.parameters()]
        found.append((f"{write}, {listed}", torch.stack([loss.detach(), *sums])))
    return found


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_no_write_is_lost(way: dict[str, Any]) -> None:
    """The first that is, or that is seen too late, makes values differ from then on."""
    (expected,) = run_ranks(1, _walked, None)
    for found in run_ranks(WORLD_SIZE, _walked, way):
        for (cell, values), (_, wanted) in zip(found, expected, strict=True):
            torch.testing.assert_close(
                values, wanted, rtol=0, atol=1e-10, msg=lambda text, cell=cell: f"{cell}: {text}"
            )


# Moves that move nothing


class Moved(nn.Module):
    """Moves parts of itself to where they are, between two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
        self.layers[1][0].register_forward_hook(lambda layer, *_: layer.to("cpu").float() and None)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layers(self.first(x))
        for module in (self, self.first, self.layers[0]):
            module.to(x.device)
            module.cpu()
            module.to(torch.float32)
        self.first.weight.data = self.first.weight.data
        return (out * self.layers(self.first(x))).float().mean()


def _moved(rank: int, way: dict[str, Any] | None, narrow: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Moved()
    if way is not None:
        precision = RECIPES["bf16-mixed"] if narrow else None
        lightning_zero.shard(
            model, units=lambda m: isinstance(m, nn.Sequential) and len(m) == 2, precision=precision, **way
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            loss = model(torch.ones(2, 4))
        model.layers[1].to("cpu")
        loss.backward()
        model.to("cpu").float()
        optimizer.step()
    if way is not None:
        lightning_zero.unshard(model)
    return model.state_dict()


@pytest.mark.parametrize("narrow", [False, True])
def test_a_move_that_moves_nothing_writes_nothing(narrow: bool) -> None:
    """`module.to(device)` between forward and backward; narrow leaves, in autocast's dtype, do not cost digits."""
    (expected,) = run_ranks(1, _moved, None, narrow)
    for way in WAYS:
        for found in run_ranks(WORLD_SIZE, _moved, way, narrow):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
