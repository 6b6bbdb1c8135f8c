"""Tests of what only a GPU shows: `python -m pytest tests/gpu` on a machine with one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from one_gpu import DEVICE, OneOfMany

from lightning_zero.collectives import Collectives

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Skip all without a GPU; with one, come last: a process whose autograd has used a GPU cannot fork ranks."""
    mine = [item for item in items if HERE in item.path.parents]
    items[:] = [item for item in items if item not in mine] + mine
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        for item in mine:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: torch.cuda.is_available() is false"))


@pytest.fixture
def nccl(monkeypatch):
    """One rank over a real group that counts as several, as `shard` and the Trainer see it; its delay can be set."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    flags = dist.new_group([0], backend="gloo")
    OneOfMany.delay = 0
    monkeypatch.setattr(Collectives, "of", lambda group, device: OneOfMany(dist.group.WORLD, device, flags))
    yield OneOfMany
    dist.destroy_process_group()


@pytest.fixture
def fake(monkeypatch):
    """Rank 0 of 8 with nobody at the other end: shards of true size, values without meaning."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    monkeypatch.setattr(Collectives, "of", lambda group, device: Collectives(dist.group.WORLD, device))
    yield
    dist.destroy_process_group()
