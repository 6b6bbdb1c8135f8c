"""Transforms of `torch.func` on and through sharded modules: values and gradients of one plain process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from distributed import run_ranks
from rank_pool import RankPool
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import lightning_zero
from lightning_zero.engine import engine_of

WORLD_SIZE = 2
WAYS: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 3},
    {"stage": 3, "offload": "cpu"},
    {"stage": 3, "activation_checkpointing": "full"},
    {"stage": 3, "activation_checkpointing": "offload"},
]


class Transformed(nn.Module):
    """A net that ``loss`` transforms, and weights of the root; the units are blocks."""

    def __init__(self, loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)), nn.Linear(4, 4))
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.net, self.first(x)) + self.net(x).pow(2).sum()


def _per_sample(net: nn.Module, x: Tensor) -> Tensor:
    """Clipped norms of gradients of each sample."""
    weights = {name: p.detach() for name, p in net.named_parameters()}

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(net, weights, (row[None],)).pow(2).sum()

    gradients = vmap(grad(loss), in_dims=(None, 0))(weights, x)
    return sum(g.flatten(1).norm(dim=1).clamp(max=1).sum() for g in gradients.values())


def _of_own_weights(net: nn.Module, x: Tensor) -> Tensor:
    """A gradient with respect to the parameters as they are, which is trained through."""

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return functional_call(net, weights, (x,)).pow(2).sum()

    return sum(g.pow(2).sum() for g in grad(loss)(dict(net.named_parameters())).values())


def _pushed_back(net: nn.Module, x: Tensor) -> Tensor:
    out, pull = vjp(net, x)
    return out.sum() + pull(torch.ones_like(out))[0].pow(2).sum()


def _under_hooks(net: nn.Module, x: Tensor) -> Tensor:
    """Hooks of others, which keep weights themselves."""
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return net(x).pow(3).sum()


LOSSES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "grad": lambda net, x: grad(lambda x: net(x).pow(2).sum())(x).pow(2).sum(),
    "vmap(grad)": lambda net, x: vmap(grad(lambda row: net(row).pow(2).sum()))(x).pow(2).sum(),
    "per-sample gradients": _per_sample,
    "grad of own weights": _of_own_weights,
    "vmap": lambda net, x: vmap(net)(x).pow(2).sum(),
    "jacrev": lambda net, x: jacrev(net)(x).pow(2).sum(),
    "jacfwd": lambda net, x: jacfwd(net)(x).pow(2).sum(),
    "hessian": lambda net, x: hessian(lambda x: net(x).pow(2).sum())(x[0]).pow(2).sum(),
    "jvp": lambda net, x: jvp(net, (x,), (torch.ones_like(x),))[1].pow(2).sum(),
    "vjp": _pushed_back,
    "identity hooks": _under_hooks,
}


def _trained(model: nn.Module, ranks: list[int]) -> dict[str, Tensor]:
    """Two steps on the mean loss of ``ranks``; the values after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(2):
        optimizer.zero_grad()
        for rank in ranks:
            torch.manual_seed(10 * step + rank)
            (model(torch.randn(3, 4)) / len(ranks)).backward()
        optimizer.step()
    if engine_of(model) is not None:
        lightning_zero.unshard(model)
    return model.state_dict()


def _twin(rank: int, name: str) -> dict[str, Tensor]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return _trained(Transformed(LOSSES[name]), [0, 1])


def _sharded(rank: int, name: str) -> list[dict[str, Tensor]]:
    torch.set_default_dtype(torch.float64)
    found = []
    for way in WAYS:
        torch.manual_seed(0)
        model = Transformed(LOSSES[name])
        lightning_zero.shard(model, units=lambda m: isinstance(m, nn.Sequential) and len(m) == 2, **way)
        engine = engine_of(model)
        assert engine is not None
        engine.pool.poison = True
        found.append(_trained(model, [rank]))
    return found


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Forked once for all transforms."""
    pool = RankPool(WORLD_SIZE, _sharded)
    yield pool
    pool.close()


@pytest.mark.parametrize("name", LOSSES)
def test_a_transform_gives_what_it_gives_in_one_plain_process(name: str, ranks: RankPool) -> None:
    """At each stage, with offload and activation checkpointing; reused buffers are poisoned."""
    ranks.start(name)
    (expected,) = run_ranks(1, _twin, name)
    for found in ranks.collect():
        for way, values in zip(WAYS, found, strict=True):
            torch.testing.assert_close(values, expected, rtol=0, atol=1e-10, msg=lambda text, way=way: f"{way}: {text}")


def test_hooks_of_others_are_refused_as_ever_and_ours_are_back_after_a_transform() -> None:
    """A transform in a step finds ours alone, or raises; after it weights are saved as places again."""

    def on_rank(rank: int) -> list[int]:
        model = Transformed(lambda net, x: grad(lambda x: net(x).sum())(x).sum())
        lightning_zero.shard(model, units=lambda m: isinstance(m, nn.Sequential) and len(m) == 2, stage=3)
        model(torch.ones(2, 4)).backward()
        with saved_tensors_hooks(lambda t: t, lambda t: t), pytest.raises(RuntimeError, match="saved tensor hooks"):
            model(torch.ones(2, 4))
        loss = model(torch.ones(2, 4))
        engine = engine_of(model)
        assert engine is not None
        held = sum(unit.is_whole for unit in engine.units)
        loss.backward()
        return [held, sum(unit.is_whole for unit in engine.units)]

    # All four are held by the graph that the transform left, until backward has used it.
    assert run_ranks(WORLD_SIZE, on_rank) == [[4, 0]] * WORLD_SIZE
