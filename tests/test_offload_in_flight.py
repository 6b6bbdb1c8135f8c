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


def test_a_backward_that_is_faster_than_transfers_does_not_fill_the_device():
    """Gradients of one unit arrive, those of one are being reduced, and those of `IN_FLIGHT` leave.

    Without a limit those of all 12 units wait on the device.
    """
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)))
    lightning_zero.shard(model, stage=3, units=["Linear"], offload=SlowLink())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
    engine = engine_of(model)
    assert len(engine.units) == UNITS
    unit_bytes = 4 * (WIDTH * WIDTH + WIDTH)
    assert engine.pool.nbytes == (2 + IN_FLIGHT) * unit_bytes
