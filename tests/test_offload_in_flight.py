"""How much of what is about to leave the device is there at a time."""

from __future__ import annotations

import time

import torch
from torch import nn

import lightning_zero
from lightning_zero.engine import engine_of
from lightning_zero.lane import IN_FLIGHT

WIDTH, UNITS = 32, 12


class SlowLink(lightning_zero.HostMemory):
    """Each transfer from the device takes longer than the backward of a unit."""

    def to_rest(self, resting, value):
        time.sleep(0.02)
        super().to_rest(resting, value)


def sharded(target):
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)))
    lightning_zero.shard(model, stage=3, units=["Linear"], offload=target)
    assert len(engine_of(model).units) == UNITS
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_backward_that_is_faster_than_transfers_does_not_fill_the_device():
    """Gradients of one unit arrive, those of one are being reduced, and those of `IN_FLIGHT` leave.

    Without a limit those of all 12 units wait on the device.
    """
    model, optimizer = sharded(SlowLink())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
    unit_bytes = 4 * (WIDTH * WIDTH + WIDTH)
    assert engine_of(model).pool.nbytes == (2 + IN_FLIGHT) * unit_bytes


def test_micro_batches_move_their_sum_once_a_step():
    """4 bytes a parameter, whatever waited for transfers of the step before."""
    model, optimizer = sharded(lightning_zero.HostMemory())
    nbytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    for step in range(1, 4):
        optimizer.zero_grad()
        with lightning_zero.no_sync(model):
            model(torch.ones(1, WIDTH)).sum().backward()
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        assert lightning_zero.moved_bytes(model).to_rest == step * nbytes
