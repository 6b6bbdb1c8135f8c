"""One GPU in place of many: the sharded path of the engine on a machine that could only run it alone.

`OneOfMany`      a real NCCL group of one rank that counts as several: every gather and reduction is launched,
                 on NCCL's own stream, and every value is right, since the one shard is the whole
fixture `fake`   rank 0 of 8 over torch's fake group: an eighth of everything is held, and values mean nothing
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import lightning_zero
from lightning_zero.collectives import Collectives, Pending
from lightning_zero.engine import Engine, engine_of

DEVICE = torch.device("cuda", 0)
STAGES = [1, 2, 3]
MILLISECOND = 2_000_000
"""Cycles of an H200, about: how long a kernel of `torch.cuda._sleep` runs."""


class Several(int):
    """A world of 1 that says it is larger than 1: `Collectives.of` and the engine take one rank for "alone"."""

    def __new__(cls) -> Several:
        return super().__new__(cls, 1)

    def __eq__(self, other: object) -> bool:
        return False

    def __gt__(self, other: int) -> bool:
        return True

    __hash__ = int.__hash__


class OneOfMany(Collectives):
    """Collectives of one rank that counts as several. They are late by ``delay`` cycles of the GPU."""

    delay = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.world_size = Several()

    def all_gather(self, whole: Tensor, shard: Tensor, *args: Any, **kwargs: Any) -> Pending:
        with self._late(shard, whole) as source:
            return super().all_gather(whole, source, *args, **kwargs)

    def reduce_scatter(self, out: Tensor, whole: Tensor, *args: Any, **kwargs: Any) -> Pending:
        with self._late(whole, out) as source:
            return super().reduce_scatter(out, source, *args, **kwargs)

    @contextmanager
    def _late(self, source: Tensor, destination: Tensor) -> Iterator[Tensor]:
        """Launch from a stream that lags behind: who does not wait for the collective is ahead of it, and reads NaN."""
        if not self.delay:
            yield source
            return
        if source.data_ptr() == destination.data_ptr():
            # In place, one rank would have nothing to receive.
            source = source.clone()
        destination.fill_(float("nan"))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(self.delay)
            yield source


# What is trained.


class Block(nn.Module):
    """A residual MLP of odd sizes, so that flat buffers have padding."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Six units, of which a forward may skip some, and a root of two layers."""

    def __init__(self, width: int = 33, hidden: int = 65) -> None:
        super().__init__()
        self.first = nn.Linear(7, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(6))
        self.last = nn.Linear(width, 3)
        self.skipped: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            x = x if i in self.skipped else block(x)
        return self.last(x)


def inputs(number: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same numbers whenever asked, on the GPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=dtype).to(DEVICE)


def built(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    """A module on the host; always the same one."""
    torch.manual_seed(0)
    return make().to(dtype)


def shard(module: nn.Module, stage: int, **arguments: Any) -> tuple[nn.Module, Engine]:
    """``module``, sharded in several units as if other ranks were there, with reused buffers poisoned."""
    lightning_zero.shard(module, stage=stage, device=DEVICE, **arguments)
    engine = engine_of(module)
    assert engine is not None
    assert engine.placements is lightning_zero.STAGES[stage], "the sharded path is to be taken"
    engine.pool.poison = True
    return module, engine


def state(module: nn.Module) -> dict[str, Tensor]:
    """Whole parameters and buffers, copied to the host; the module is plain afterwards."""
    if engine_of(module) is not None:
        lightning_zero.unshard(module)
    return {name: value.detach().cpu() for name, value in module.state_dict().items()}


def assert_equal(found: Any, expected: Any, rtol: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol)
