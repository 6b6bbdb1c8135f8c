"""Trains a module on two sharded ranks, and its twin: one plain process that averages the ranks' losses.

    make() -> module           built under seed 0 on rank 0 and in the twin; other ranks start elsewhere
    module(seed) -> loss       draws its own data; in step s rank r calls it with 10 s + r

What both leave behind is an `Outcome`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from distributed import run_ranks
from torch import Tensor, nn

import lightning_zero
from lightning_zero.engine import engine_of
from lightning_zero.units import UnitSpec

WORLD_SIZE = 2
EXACT = 1e-10
"""In float64 only the order of sums differs."""

Make = Callable[[], nn.Module]


@dataclass
class Outcome:
    """What training left behind."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    """Of the last step."""
    live: dict[str, Tensor] = field(default_factory=dict)
    """Whole parameters while the module is sharded."""
    after: dict[str, Tensor] = field(default_factory=dict)
    """``state_dict()`` of the plain module after that."""


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """Momentum, and a decay that would move parameters that get no gradient if theirs were zero."""
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Over everything, with a decay."""
    return torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)


def plain(value: Tensor) -> Tensor:
    """A copy of the whole value, dense: a collective where it is sharded."""
    whole = (value.whole() if hasattr(value, "whole") else value).detach()
    return whole.to_dense() if whole.is_sparse else whole.clone()


def train(module: nn.Module, ranks: Sequence[int], optimizer: torch.optim.Optimizer, steps: int) -> Outcome:
    """``steps`` steps on the mean loss of ``ranks``; the module is plain at the end."""
    outcome = Outcome()
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for rank in ranks:
            loss = module(10 * step + rank) / len(ranks)
            loss.backward()
            total += float(loss.detach())
        outcome.losses.append(total)
        if step == steps - 1:
            outcome.gradients = {n: None if p.grad is None else plain(p.grad) for n, p in module.named_parameters()}
        optimizer.step()
    with lightning_zero.gathered(module):
        outcome.live = {name: plain(p) for name, p in module.named_parameters()}
    if engine_of(module) is not None:
        lightning_zero.unshard(module)
    outcome.after = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return outcome


def build(make: Make, seed: int, dtype: torch.dtype) -> nn.Module:
    """The module under a seed and a default dtype, which stays for what the process builds later."""
    torch.set_default_dtype(dtype)
    torch.manual_seed(seed)
    return make()


def shard(module: nn.Module, stage: int, units: UnitSpec | None = None, **arguments: Any) -> nn.Module:
    """Sharded in at least two units, with reused buffers poisoned, so that a stale read would show."""
    lightning_zero.shard(module, stage=stage, units=units, **arguments)
    engine = engine_of(module)
    assert engine is not None and len(engine.units) >= 2, "the module is to be tried with units"
    engine.pool.poison = True
    return module


def compare(
    make: Make,
    stage: int,
    *,
    units: UnitSpec | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    steps: int = 3,
    dtype: torch.dtype = torch.float64,
    tolerance: float = EXACT,
    make_twin: Make | None = None,
) -> Outcome:
    """Losses, gradients and values on both ranks are those of the twin, which is returned.

    Args:
        make_twin: the twin, where it is another module; one call of it sees the data of all ranks.
    """

    def twin(_: int) -> Outcome:
        module = build(make_twin or make, 0, dtype)
        return train(module, [0] if make_twin else range(WORLD_SIZE), optimizer(module), steps)

    def on_rank(rank: int) -> Outcome:
        module = shard(build(make, rank, dtype), stage, units)
        return train(module, [rank], optimizer(module), steps)

    (expected,) = run_ranks(1, twin)
    outcomes = run_ranks(WORLD_SIZE, on_rank)
    losses = torch.tensor([outcome.losses for outcome in outcomes], dtype=torch.float64).mean(0)
    torch.testing.assert_close(losses, torch.tensor(expected.losses, dtype=torch.float64), rtol=0, atol=tolerance)
    for outcome in outcomes:
        assert_close(outcome.gradients, expected.gradients, tolerance)
        assert_close(outcome.live, expected.live, tolerance)
        assert_close(outcome.after, expected.after, tolerance)
    return expected


def assert_close(found: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float) -> None:
    """The same names, shapes, dtypes and absences, and values within ``tolerance``."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
            continue
        assert found[name] is not None, name
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=tolerance, msg=lambda message, name=name: f"`{name}`: {message}"
        )
