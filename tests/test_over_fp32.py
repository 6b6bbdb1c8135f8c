"""A model of bf16 weights over fp32 main weights: code computes in bf16, and what keeps state sees every digit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_zero
from lightning_zero import PrecisionRecipe

WIDTH = 6
OVER_FP32 = PrecisionRecipe(main=torch.float32)
TINY = 2.0**-14
"""Beside 1, bf16 rounds it away."""


class Net(nn.Module):
    """Units, and a root whose weights are met at rest: looked up, expanded, transposed, added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH)
        self.token = nn.Parameter(torch.randn(1, WIDTH))
        self.positions = nn.Parameter(torch.randn(4, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(1, -1), self.table(ids)]) * self.token.view(-1).reshape(1, WIDTH)
        x = self.norm(x + self.positions[ids.new_tensor([0, 2, 1])] + self.positions[:3].t().contiguous().t())
        x = x @ self.blocks[1].weight.t() + F.linear(x, self.blocks[2].weight)
        for block in self.blocks:
            x = torch.tanh(block(x)) * 2
        x = x.clone()
        return x.add_(self.token)


def built(rank: int, stage: int, offload: str | None = None) -> nn.Module:
    torch.manual_seed(0)
    net = Net().to(torch.bfloat16)
    return lightning_zero.shard(net, stage=stage, precision=OVER_FP32, offload=offload, units=[nn.Linear])


MODES: dict[str, Any] = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def _forwards(rank: int, stage: int, offload: str | None) -> list[dict[str, Tensor]]:
    net = built(rank, stage, offload)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    ids, found = torch.tensor([1, 3]), []
    for _ in range(2):
        of = {"with gradients": net(ids)}
        of["with gradients"].sum().backward()
        for name, mode in MODES.items():
            with mode():
                of[name] = net(ids)
                of[f"{name}, past the module"] = Net.forward(net, ids)
        found.append({name: value.detach().clone() for name, value in of.items()})
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("offload", [None, "cpu"])
def test_a_forward_without_gradients_is_that_with_them_to_the_last_bit(offload: str | None) -> None:
    """In an evaluation, and in a plain loop that never calls the module; before and after a step."""

    def on_rank(rank: int) -> Any:
        return [_forwards(rank, stage, offload) for stage in (1, 2, 3)]

    for stages in run_ranks(2, on_rank):
        for step in (of for found in stages for of in found):
            expected = step["with gradients"]
            assert expected.dtype is torch.bfloat16
            for name, value in step.items():
                assert torch.equal(value, expected), name
                assert value.dtype is torch.bfloat16, name


def _digits(rank: int, stage: int) -> Any:
    net = built(rank, stage)
    parameter = net.blocks[0].bias
    with torch.no_grad():
        parameter.fill_(1)
        parameter.add_(TINY)
        average = torch.zeros(WIDTH).add_(parameter)
        parameter[:2].add_(TINY)
        copied = parameter.clone().whole(), parameter.float().whole(), parameter.detach().whole()
        stated = net.state_dict()["blocks.0.bias"].whole()
        computed = parameter * 1
    return average, copied, stated, computed


def test_copies_and_writes_have_every_digit() -> None:
    """Of 1 + 2 ** -14, and twice that where a view wrote; what computes gets 1, in bf16."""
    expected = torch.full((WIDTH,), 1 + TINY)
    written = torch.tensor([1 + 2 * TINY] * 2 + [1 + TINY] * (WIDTH - 2))
    for stages in run_ranks(2, lambda rank: [_digits(rank, stage) for stage in (1, 2, 3)]):
        for average, copied, stated, computed in stages:
            assert torch.equal(average, expected)
            for value in (*copied, stated):
                assert torch.equal(value, written)
            assert torch.equal(computed, torch.ones(WIDTH, dtype=torch.bfloat16))


def _stepped(rank: int, stage: int, foreach: bool) -> Tensor:
    net = built(rank, stage)
    parameter = net.blocks[0].bias
    with torch.no_grad():
        parameter.fill_(1).add_(TINY)
    optimizer = torch.optim.SGD([parameter], lr=1.0, weight_decay=0.5, foreach=foreach)

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.no_grad():
            net(torch.tensor([1, 3]))
        loss = net(torch.tensor([1, 3])).sum() * 0
        loss.backward()
        return loss

    optimizer.step(closure)
    return parameter.detach().whole()


def test_optimizers_compute_with_main_weights() -> None:
    """SGD's decay reads the weight into a new tensor: half of 1 + 2 ** -14 is left; after a closure's forwards too."""

    def on_rank(rank: int) -> Any:
        return [_stepped(rank, stage, foreach) for stage in (1, 3) for foreach in (False, True)]

    for values in run_ranks(2, on_rank):
        for value in values:
            assert torch.equal(value, torch.full((WIDTH,), (1 + TINY) / 2))
