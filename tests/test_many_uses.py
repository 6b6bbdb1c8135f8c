"""A weight that one forward uses often, in mixed precision: its gradients add up as under data parallelism."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from distributed import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_zero
from lightning_zero.engine import engine_of
from lightning_zero.precision import RECIPES

WIDTH, USES, MICRO_BATCHES = 8, 16, 2
NARROW = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
SCALE = 2.0**6
"""Of the loss, as a GradScaler's: fp16 holds the small gradients."""


class Net(nn.Module):
    """Products whose gradients are mostly of one sign, so that a sum in two bytes loses many of them.

    Args:
        used: the forward from an input of shape (USES, 2, WIDTH).
    """

    def __init__(self, used: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.cell, self.first = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 1)
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.table = nn.Embedding(USES, WIDTH)
        self.head = nn.Linear(WIDTH, USES, bias=False)
        self.head.weight = self.table.weight
        self.used = used

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(self.used(self, x)) - 1).square().mean()


def recurrent_cell(net: Net, x: Tensor) -> Tensor:
    state = x[0]
    for part in x:
        state = torch.tanh(net.cell(state) + part)
    return state


def shared_head(net: Net, x: Tensor) -> Tensor:
    return torch.stack([net.cell(part) for part in x])


def message_passing(net: Net, x: Tensor) -> Tensor:
    """Along a ring of nodes, by a product that the layer's own forward does not do."""
    for _ in range(USES):
        x = x.roll(1, 0) + 0.1 * torch.tanh(nn.functional.linear(x, net.first.weight))
    return x


def tied_layers(net: Net, x: Tensor) -> Tensor:
    """An embedding and a head that share a weight, and a layer whose weight another one uses too."""
    rows = net.table(torch.arange(USES))
    return torch.stack([net.head(net.first(part + rows[i]) @ net.first.weight) for i, part in enumerate(x)])


def convolution(net: Net, x: Tensor) -> Tensor:
    return torch.stack([net.conv(part.t()) for part in x])


def attention(net: Net, x: Tensor) -> Tensor:
    return torch.stack([net.attention(part, part, part)[0] for part in x])


def recomputed(net: Net, x: Tensor, reentrant: bool) -> Tensor:
    """The second forward uses the weight again, and only its uses have a gradient."""
    parts = x.clone().requires_grad_().chunk(4)
    return torch.stack([checkpoint(partial(shared_head, net), part, use_reentrant=reentrant) for part in parts])


FORWARDS = {
    "recurrent cell": recurrent_cell,
    "shared head": shared_head,
    "message passing": message_passing,
    "tied layers": tied_layers,
    "convolution": convolution,
    "attention": attention,
    "recomputed": partial(recomputed, reentrant=False),
    "recomputed, reentrant": partial(recomputed, reentrant=True),
}


def loss_of(net: nn.Module, rank: int, micro_batch: int, precision: str) -> Tensor:
    """As Lightning computes it: its autocast has no cache, so each use casts by itself."""
    x = torch.randn(USES, 2, WIDTH, generator=torch.Generator().manual_seed(10 * rank + micro_batch))
    with torch.autocast("cpu", NARROW[precision], cache_enabled=False):
        loss: Tensor = net(x) * SCALE
    return loss


def built(used: Callable[[Net, Tensor], Tensor], stage: int | None, precision: str) -> nn.Module:
    torch.manual_seed(0)
    net = Net(used)
    if stage is not None:
        lightning_zero.shard(net, stage=stage, precision=RECIPES[precision], units=[nn.Linear])
        engine = engine_of(net)
        assert engine is not None and any(group.dtypes.narrow for group in engine.groups) is (stage > 0)
    return net


def gradients(net: nn.Module) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return {name: grad.whole() if hasattr(grad, "whole") else grad for name, grad in grads.items()}


def expected_gradients(used: Callable[[Net, Tensor], Tensor], precision: str) -> dict[str, Tensor]:
    """The sum over micro-batches of the mean of two ranks' gradients, each of a plain module."""
    total: dict[str, Tensor] = {}
    for micro_batch in range(MICRO_BATCHES):
        nets = [built(used, None, precision) for _ in range(2)]
        for rank, net in enumerate(nets):
            loss_of(net, rank, micro_batch, precision).backward()
        first, second = map(gradients, nets)
        mean = {name: (first[name] + second[name]) / 2 for name in first}
        total = {name: total[name] + mean[name] for name in mean} if total else mean
    return total


@pytest.mark.parametrize("name", FORWARDS)
def test_gradients_of_many_uses_are_those_of_data_parallelism_to_the_last_bit(name: str) -> None:
    """16 uses in each of two micro-batches, at each stage."""

    def on_rank(rank: int) -> None:
        for precision in NARROW:
            expected = expected_gradients(FORWARDS[name], precision)
            for stage in range(4):
                net = built(FORWARDS[name], stage, precision)
                for micro_batch in range(MICRO_BATCHES):
                    loss_of(net, rank, micro_batch, precision).backward()
                found = gradients(net)
                assert found.keys() == expected.keys()
                # A part that is reduced on its own, as a reentrant checkpoint's, is summed in another order.
                order = 1e-5 if "reentrant" in name else 0.0
                for key, value in expected.items():
                    where = f"`{key}` at stage {stage} in {precision}"
                    torch.testing.assert_close(found[key], value, rtol=order, atol=order, msg=where)

    run_ranks(2, on_rank)


def test_hooks_and_requests_see_the_sum_of_many_uses_once() -> None:
    """In fp32, as under data parallelism; with a graph that is kept, at each backward."""

    def observed(net: nn.Module, rank: int) -> list[Tensor]:
        seen: list[Tensor] = []
        net.cell.weight.register_hook(lambda grad: seen.append(grad.clone()))
        loss = loss_of(net, rank, 0, "bf16-mixed")
        loss.backward(retain_graph=True)
        loss.backward()
        loss = loss_of(net, rank, 1, "bf16-mixed")
        seen += torch.autograd.grad(loss, [net.cell.bias])
        return seen

    def on_rank(rank: int) -> Any:
        plain = observed(built(shared_head, None, "bf16-mixed"), rank)
        return plain, [observed(built(shared_head, stage, "bf16-mixed"), rank) for stage in (1, 2, 3)]

    for plain, sharded in run_ranks(2, on_rank):
        for found in sharded:
            assert len(found) == len(plain) == 3
            for one, other in zip(found, plain, strict=True):
                assert one.dtype is torch.float32
                assert torch.equal(one, other)
