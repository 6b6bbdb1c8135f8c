"""Custom functions that save weights and differentiate in their own backward: gradients of one plain process.

apply(x, *weights)     the parameters themselves: nothing of ours stands between
backward               run(x) once more, and `autograd.grad` with respect to what was saved
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from distributed import run_ranks
from rank_pool import RankPool
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import lightning_zero
from lightning_zero.engine import engine_of

WORLD_SIZE = 2

Run = Callable[..., Tensor]


class Again(torch.autograd.Function):
    """Computes again in backward, as CompVis' checkpoint and adjoint solvers do.

    Weights are saved, or else kept on the context; ``substitutes`` says that the run takes them as arguments.
    """

    @staticmethod
    def forward(ctx: Any, run: Run, saves: bool, substitutes: bool, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.run, ctx.substitutes = run, substitutes
        ctx.save_for_backward(x, *(weights if saves else ()))
        ctx.kept = () if saves else weights
        with torch.no_grad():
            return run(x, *weights) if substitutes else run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        weights = [*weights, *ctx.kept]
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run(x, *weights) if ctx.substitutes else ctx.run(x)
        return None, None, None, *torch.autograd.grad(out, (x, *weights), grad, allow_unused=True)


class ByModule(torch.autograd.Function):
    """Asks for gradients of what the module's parameters are in backward."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.module(x)
        return None, *torch.autograd.grad(out, (x, *ctx.module.parameters()), grad)


def again(block: nn.Module, x: Tensor, saves: bool = True, substitutes: bool = False) -> Tensor:
    """The block by `Again`, past its window, with its parameters as they are."""
    names = [name for name, _ in block.named_parameters()]

    def substituted(x: Tensor, *weights: Tensor) -> Tensor:
        return functional_call(block, dict(zip(names, weights, strict=True)), (x,))

    return Again.apply(substituted if substitutes else block, saves, substitutes, x, *block.parameters())


class Inner(nn.Module):
    """A block that applies `Again` to a part of itself: in its window, to leaves."""

    def __init__(self, saves: bool) -> None:
        super().__init__()
        self.part, self.saves = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), saves
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept = list(self.part.parameters())
        return again(self.part, x, self.saves)


def is_block(module: nn.Module) -> bool:
    """Whether it is a unit: a block of `Saving`."""
    return isinstance(module, nn.Sequential | Inner)


class Saving(nn.Module):
    """Five blocks through ``call``, and a weight of the root."""

    def __init__(
        self, call: Callable[[nn.Module, Tensor], Tensor], block: Callable[[], nn.Module] | None = None
    ) -> None:
        super().__init__()
        self.call = call
        self.first = nn.Linear(4, 4)
        make = block or (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        self.layers = nn.ModuleList(make() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.call(self.first, x)
        for layer in self.layers:
            x = self.call(layer, x)
        return x.pow(2).sum()


class Kept(Saving):
    """Leaves from inside windows that have closed."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        for layer in self.layers:
            x = Again.apply(layer.part, True, False, x, *layer.kept)
        return x.pow(2).sum()


MODULES: dict[str, Callable[[], nn.Module]] = {
    "saved at rest": lambda: Saving(again),
    "kept at rest": lambda: Saving(lambda block, x: again(block, x, saves=False)),
    "saved at rest, substituted": lambda: Saving(lambda block, x: again(block, x, substitutes=True)),
    "kept at rest, substituted": lambda: Saving(lambda block, x: again(block, x, saves=False, substitutes=True)),
    "saved in a window": lambda: Saving(lambda block, x: block(x), lambda: Inner(True)),
    "kept in a window": lambda: Saving(lambda block, x: block(x), lambda: Inner(False)),
    "of a window that closed": lambda: Kept(again, lambda: Inner(True)),
    "by module": lambda: Saving(lambda block, x: ByModule.apply(block, x, *block.parameters())),
    "under checkpoint": lambda: Saving(lambda block, x: checkpoint(again, block, x, use_reentrant=False)),
    "under checkpoint, substituted": lambda: Saving(
        lambda block, x: checkpoint(again, block, x, True, True, use_reentrant=False)
    ),
    "in a window, under checkpoint": lambda: Saving(
        lambda block, x: checkpoint(block, x, use_reentrant=False), lambda: Inner(True)
    ),
}


def _trained(model: nn.Module, ranks: list[int]) -> dict[str, Tensor]:
    """Two steps on the mean loss of ``ranks``; the values after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        optimizer.zero_grad()
        for rank in ranks:
            torch.manual_seed(10 * step + rank)
            (model(torch.randn(3, 4).requires_grad_()) / len(ranks)).backward()
        optimizer.step()
    if engine_of(model) is not None:
        lightning_zero.unshard(model)
    return model.state_dict()


def _twin(rank: int, name: str) -> dict[str, Tensor]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return _trained(MODULES[name](), [0, 1])


def _sharded(rank: int, name: str) -> list[dict[str, Tensor]]:
    torch.set_default_dtype(torch.float64)
    found = []
    for way in WAYS:
        torch.manual_seed(0)
        model = lightning_zero.shard(MODULES[name](), units=is_block, **way)
        engine = engine_of(model)
        assert engine is not None
        engine.pool.poison = True
        found.append(_trained(model, [rank]))
    return found


WAYS: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 3},
    {"stage": 3, "offload": "cpu"},
    {"stage": 3, "activation_checkpointing": "full"},
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Forked once for all modules."""
    pool = RankPool(WORLD_SIZE, _sharded)
    yield pool
    pool.close()


@pytest.mark.parametrize("name", MODULES)
def test_weights_that_a_function_saved_get_their_gradients(name: str, ranks: RankPool) -> None:
    """At every stage, with offload, and recomputed, as in one plain process; reused buffers are poisoned."""
    ranks.start(name)
    (expected,) = run_ranks(1, _twin, name)
    for found in ranks.collect():
        for way, values in zip(WAYS, found, strict=True):
            torch.testing.assert_close(values, expected, rtol=0, atol=1e-10, msg=lambda text, way=way: f"{way}: {text}")


@pytest.mark.parametrize("name", ["saved at rest", "saved in a window"])
def test_weights_that_were_written_after_a_function_saved_them_are_noticed(name: str) -> None:
    """In backward, as autograd does; the function would compute with others than its forward did."""

    def on_rank(rank: int, stage: int) -> None:
        model = lightning_zero.shard(MODULES[name](), stage=stage, units=is_block)
        loss = model(torch.randn(3, 4))
        with torch.no_grad():
            next(model.layers[3].parameters()).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    for stage in (1, 3):
        run_ranks(WORLD_SIZE, on_rank, stage)
