"""Sharded tensors in the files of torch.distributed.checkpoint: whole tensors under plain names, in pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from distributed import run_ranks
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import lightning_zero


class Odd(nn.Module):
    """Sizes that no number of ranks divides, a scalar, and memory that is not in the order of indices."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 9)
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(7, 5).t())
        self.scalar = nn.Parameter(torch.randn(()))
        self.blocks = nn.ModuleList([nn.Linear(9, 9) for _ in range(12)])


def whole_values(model):
    """A collective."""
    with lightning_zero.gathered(model):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def save(rank, folder, stage):
    torch.manual_seed(rank)
    model = lightning_zero.shard(Odd(), stage=stage)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    return whole_values(model)


def load(rank, folder, stage):
    torch.manual_seed(10 + rank)
    model = lightning_zero.shard(Odd(), stage=stage)
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    return whole_values(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_other_ranks_and_plain_torch_read_what_three_ranks_wrote(stage, tmp_path: Path) -> None:
    """Saved on 3 ranks; loaded on 2, on 1, and by a tool that knows nothing of ranks."""
    folder = str(tmp_path / "saved")
    written, *_ = run_ranks(3, save, folder, stage)
    for world_size in (2, 1):
        for read in run_ranks(world_size, load, folder, 4 - stage):
            assert list(read) == list(written)
            assert all(torch.equal(read[name], written[name]) for name in written)
    dcp_to_torch_save(folder, tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt")["model"]
    assert all(torch.equal(plain[name], written[name]) for name in written)
