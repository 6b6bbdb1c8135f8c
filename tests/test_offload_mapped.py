"""State in mapped files takes memory of the process only while it is worked on, and leaves nothing on the disk."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch
from distributed import run_ranks
from offloading import adamw
from torch import Tensor, nn

import lightning_zero
from lightning_zero import MappedFile

UNITS, WIDTH = 16, 512
MB = WIDTH * WIDTH * 4
"""Bytes of the weight of one unit, which has a gradient and two moments of this size too."""


IN_LANES = 2 * 5 * MB
"""Two threads work on a unit each: its weight, gradient, what is added to that, and two moments."""

ON_DEVICE = (3 + 4 + 3) * MB
"""Whole: the weight that computes, the one before and the one after; gradients: one that arrives, one in a reduction,
two that leave; and what an operation makes before it is copied to where it rests."""


class Net(nn.Module):
    """Looks at memory on the way through its units, forward and backward.

    Args:
        folder: where the files would be.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNITS))
        self.mapped: list[int] = []
        self.anonymous: list[int] = []
        self._folder = folder

    def forward(self, x: Tensor) -> Tensor:
        for number, unit in enumerate(self.units):
            x = x + torch.tanh(unit(x))
            if number % 4 == 3:
                self.look()
                if x.requires_grad:
                    x.register_hook(lambda _: self.look())
        return x

    def look(self) -> None:
        """Note bytes in memory."""
        mapped, anonymous = resident_bytes()
        self.mapped.append(mapped)
        self.anonymous.append(anonymous)
        assert not os.listdir(self._folder)


def resident_bytes() -> tuple[int, int]:
    """Bytes of this process in memory: of files without a name, and of no file; the rest is the code of libraries."""
    mapped = anonymous = 0
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first, *rest = line.split()
            if not first.endswith(":"):
                nameless = line.endswith("(deleted)\n")
            elif first == "Rss:" and nameless:
                mapped += 1024 * int(rest[0])
            elif first == "Anonymous:":
                anonymous += 1024 * int(rest[0])
    return mapped, anonymous


def _trains(rank: int, folder: str) -> None:
    # Freed memory goes back to the system, where it shows.
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD
    _, before = resident_bytes()
    net = lightning_zero.shard(Net(folder), 3, ["Linear"], offload=MappedFile(folder, parameters=True))
    optimizer = adamw(net)[0]
    net.look()
    assert net.mapped[-1] == 0
    for _ in range(2):
        net(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            net(torch.ones(2, WIDTH))
        lightning_zero.moved_bytes(net)  # waits for the background
        net.look()
        assert net.mapped[-1] == 0
    # Main weights and two moments; the pool keeps as many gradients.
    assert lightning_zero.held_bytes(net, [optimizer], "offloaded").total == 3 * UNITS * MB
    assert 0 < max(net.mapped) <= IN_LANES, max(net.mapped) / MB
    growth = max(net.anonymous) - before
    assert growth <= ON_DEVICE, growth / MB


def test_what_is_not_worked_on_takes_no_memory_and_no_file_is_left(tmp_path: Path) -> None:
    """64 MB of state, in training and in evaluation."""
    run_ranks(1, _trains, str(tmp_path))
    assert not os.listdir(tmp_path)
