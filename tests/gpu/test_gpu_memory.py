"""Bytes that the GPU's allocator hands out, copies that it makes: rank 0 of 8, over a group that sends nothing."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from one_gpu import DEVICE, STAGES, shard
from torch import nn

from lightning_zero import PrecisionRecipe
from lightning_zero.collectives import _ALL_GATHER, _REDUCE_SCATTER

BLOCK = 512
"""Bytes: the allocator counts in multiples of it. All fragments of the models here are such multiples."""

TWO_BYTES = PrecisionRecipe(main=torch.float32, compute=torch.bfloat16, others=torch.bfloat16)


class Scale(nn.Module):
    """Two vectors and no product: a library for those would keep memory of its own."""

    def __init__(self, width):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return x * self.factor + self.shift


class Scales(nn.Module):
    """Six equal units and a root of half a unit."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.units = nn.ModuleList(Scale(width) for _ in range(6))

    def forward(self, x):
        x = x * self.gain
        for unit in self.units:
            x = unit(x)
        return x


def step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()


def allocated():
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("recipe", [None, TWO_BYTES], ids=["fp32", "two-byte gathers"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_of_8_holds_what_is_planned_to_the_byte(fake, stage, recipe):
    """After a step, gradients still there. Only a GPU's allocator counts bytes of everything, whoever holds them."""
    width = 1 << 16
    x = torch.ones(1, width, device=DEVICE)
    before = allocated()
    model, engine = shard(Scales(width), stage, units=["Scale"], precision=recipe)
    placeholders = BLOCK * len(engine.groups)
    planned = engine.planned_bytes()
    built = allocated()
    assert built - before == planned.parameters + placeholders
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        step(model, optimizer, x)
    # What the next step needs is gathered already, and free buffers wait for it.
    engine.rest()
    engine.pool.trim()
    assert allocated() - before == planned.total + placeholders
    optimizer.zero_grad()
    engine.pool.trim()
    assert allocated() - before == planned.parameters + planned.optimizer + placeholders


def test_stage_3_holds_the_root_two_units_and_two_gradients_at_the_peak(fake):
    """Above what rests: the root and its gradient, two units whole and their gradients, the gradients that autograd
    holds, and a reduced shard of one unit. NCCL receives in place, where gloo takes a further buffer."""
    width = 1 << 20
    unit, root = 4 * 2 * width, 4 * width
    x = torch.ones(1, width, device=DEVICE)
    before = allocated()
    model, engine = shard(Scales(width), 3, units=["Scale"])
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        step(model, optimizer, x)
    engine.rest()
    engine.pool.trim()
    rest = allocated() - before
    # The loss's graph holds the input of each product, and a few results are under way.
    activations = 4 * width * (len(engine.units) + 4)
    torch.cuda.reset_peak_memory_stats()
    optimizer.zero_grad()
    model(x).mean().backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert rest + root + unit < peak <= rest + 2 * root + 4 * unit + unit + unit // 8 + activations
    del optimizer


@pytest.mark.parametrize("stage", STAGES)
def test_steps_take_no_memory_from_the_driver(fake, stage):
    """From the fourth step on: buffers come back in time, and nothing fragments. A CPU's allocator does not tell."""
    x = torch.ones(1, 1 << 20, device=DEVICE)
    model, _ = shard(Scales(1 << 20), stage, units=["Scale"])
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        step(model, optimizer, x)
    before = torch.cuda.memory_stats()["num_device_alloc"]
    for _ in range(8):
        step(model, optimizer, x)
    assert torch.cuda.memory_stats()["num_device_alloc"] == before


# Copies.


class Done:
    """A collective that has ended."""

    def wait(self):
        pass


@contextmanager
def nothing_sent():
    """The fake group copies where a real one sends; here nothing is copied but by the engine."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (_ALL_GATHER, _REDUCE_SCATTER):
            patch.setattr(dist, name, lambda *_, **__: Done())
        yield


def copies(run):
    """Names of the device-to-device copies that the GPU made while ``run`` ran."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if is_copy(event.name)]


def is_copy(name):
    return name.startswith("Memcpy DtoD")


def test_a_copy_is_seen_in_the_trace():
    """The test below has teeth: on a CPU a trace tells operations, not copies."""
    x = torch.ones(1 << 20, device=DEVICE)
    assert len(copies(x.clone)) == 1


@pytest.mark.parametrize("recipe", [None, TWO_BYTES], ids=["fp32", "two-byte gathers"])
@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_copied_around_collectives(fake, stage, recipe):
    """A step moves each local gradient once, into the flat buffer that is reduced, and copies nothing else: neither
    weights out of a gather nor gradients into or out of a reduction. Only a GPU's trace shows copies apart from casts.
    """
    x = torch.ones(2, 1 << 16, device=DEVICE)
    model, engine = shard(Scales(1 << 16), stage, units=["Scale"], precision=recipe)
    engine.pool.poison = False
    optimizer = torch.optim.AdamW(model.parameters())
    with nothing_sent():
        for _ in range(3):
            step(model, optimizer, x)
        found = copies(lambda: step(model, optimizer, x))
    assert len(found) <= len(list(model.parameters()))
