"""Ranks end their program at different times: the first one to go takes nothing from those that still work."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from distributed import run_ranks
from torch import nn

import lightning_zero

STAGES = [0, 1, 2, 3]
WIDTH = 1500
"""Large enough that a gather is still under way when the fastest rank returns."""


def _train(rank, stage):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
    lightning_zero.shard(model, stage=stage)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, WIDTH)).sum().backward()
        if number == 1 and rank == 1:
            time.sleep(0.5)
        optimizer.step()
    return True


@pytest.mark.parametrize("stage", STAGES)
def test_a_function_that_ends_after_its_last_step(stage):
    """The model goes with the function, and its process at once; rank 1 is half a second behind."""
    assert run_ranks(3, _train, stage) == [True] * 3


SCRIPT = """
import datetime, sys, time
import torch, torch.distributed as dist
from torch import nn
import lightning_zero

torch.set_num_threads(1)
rank, store, destroys = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=20))
model = lightning_zero.shard(nn.Sequential(nn.Linear(1500, 1500), nn.Linear(1500, 3)), stage=1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for number in range(2):
    model(torch.ones(2, 1500)).sum().backward()
    if number == 1 and rank == 1:
        time.sleep(0.5)
    optimizer.step()
if destroys:
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("destroys", [False, True])
def test_a_script_that_ends_after_its_last_step(tmp_path, destroys):
    """The model is a global: it lives until the interpreter exits."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    root = str(Path(lightning_zero.__file__).parents[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store"), str(destroys)],
            env={"PYTHONPATH": root, "PATH": ""},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=60)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], errors
    assert not any("Error" in error for error in errors), errors
