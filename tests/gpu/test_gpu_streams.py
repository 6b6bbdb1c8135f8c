"""Every wait is there: with collectives, or computation, held back in their streams, values are those of plain ones.

On a CPU a collective has ended when `wait` returns, and kernels run in the order of the program. On a GPU both are
queued, in streams of their own, and a wait that is missing shows as a wrong value only if the other stream is late.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from one_gpu import DEVICE, MILLISECOND, STAGES, Net, assert_equal, built, inputs, shard, state

import lightning_zero
from lightning_zero.engine import engine_of


def trained(model, clip=None, micro_batches=1, skipped=frozenset()):
    """Losses of four AdamW steps and evaluations between them, and what was learned; the host never waits meanwhile."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        model.skipped = skipped if step % 2 else set()
        for micro_batch in range(micro_batches):
            last = micro_batch == micro_batches - 1
            seed = 10 * step + micro_batch
            with nullcontext() if last or engine_of(model) is None else lightning_zero.no_sync(model):
                loss = F.mse_loss(model(inputs(seed, 5, 7)), inputs(seed + 5, 5, 3)) / micro_batches
                loss.backward()
            losses.append(loss.detach())
        if clip is not None:
            losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).detach())
        optimizer.step()
        with torch.no_grad():
            losses.append(model(inputs(step, 5, 7)).sum())
    return [loss.cpu() for loss in losses], state(model)


def hold_back_computation(model):
    """Let every block be late in forward and in backward: what is sent must not be read before it is computed."""
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: torch.cuda._sleep(MILLISECOND))
        for parameter in block.parameters():
            parameter.register_hook(lambda _: torch.cuda._sleep(MILLISECOND))


def test_a_late_collective_is_seen_only_by_who_waits(nccl):
    """The tests below have teeth: a CPU's gather would be there before anyone could look."""
    nccl.delay = 20 * MILLISECOND
    module, engine = shard(built(Net), 3)
    whole, source = torch.zeros(1000, device=DEVICE), torch.ones(1000, device=DEVICE)
    torch.cuda.synchronize()
    pending = engine.collectives.all_gather(whole, source)
    too_early = whole.sum()
    pending.wait()
    in_time = whole.sum()
    assert torch.isnan(too_early).item()
    assert in_time.item() == 1000
    state(module)


@pytest.mark.parametrize("held_back", ["collectives", "computation"])
@pytest.mark.parametrize("stage", STAGES)
def test_late_streams_change_no_value(nccl, stage, held_back):
    """Prefetch in forward and backward, reductions beside the next unit's backward, refresh after the step: 1e-10 in
    float64. A CPU has no second stream that could be late."""
    expected = trained(built(Net).to(DEVICE))
    model, engine = shard(built(Net), stage, units=["Block"])
    if held_back == "collectives":
        nccl.delay = 3 * MILLISECOND
    else:
        hold_back_computation(model)
    assert len(engine.units) == 6
    assert_equal(trained(model), expected)
    assert engine.collectives.calls["gather"] and engine.collectives.calls["reduce"]


@pytest.mark.parametrize("stage", STAGES)
def test_late_streams_change_no_value_with_accumulation_and_clipping(nccl, stage):
    """The norm reads gradients right after their reduction; gradients of two backwards add up: 1e-10. A CPU has no
    second stream that could be late."""
    expected = trained(built(Net).to(DEVICE), clip=0.1, micro_batches=2)
    model, _ = shard(built(Net), stage, units=["Block"])
    nccl.delay = 3 * MILLISECOND
    assert_equal(trained(model, clip=0.1, micro_batches=2), expected)


@pytest.mark.parametrize("skipped", [{1}, {2, 4}, {5}, {0, 5}], ids=str)
def test_a_late_gather_that_nobody_used_overwrites_nothing(nccl, skipped):
    """A block that was gathered ahead and is skipped gives its buffer back before the gather has ended; gradients take
    buffers of that size: 1e-10. A CPU has no second stream that could be late."""
    expected = trained(built(Net).to(DEVICE), skipped=skipped)
    model, _ = shard(built(Net), 3, units=["Block"])
    nccl.delay = 3 * MILLISECOND
    assert_equal(trained(model, skipped=skipped), expected)


@pytest.mark.parametrize("stage", STAGES)
def test_reads_at_rest_wait_for_a_late_gather(nccl, stage):
    """A regularizer and a product right after the step, which began to gather: 1e-10. A CPU has no second stream
    that could be late."""

    def read(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        F.mse_loss(model(inputs(0, 5, 7)), inputs(1, 5, 3)).backward()
        optimizer.step()
        penalty = sum(parameter.pow(2).sum() for parameter in model.parameters())
        rows = (model.blocks[3].up.weight @ inputs(2, 33, 2)).detach()
        return [value.detach().cpu() for value in (penalty, rows)]

    expected = read(built(Net).to(DEVICE))
    model, _ = shard(built(Net), stage, units=["Block"])
    nccl.delay = 3 * MILLISECOND
    assert_equal(read(model), expected)
    state(model)


@pytest.mark.parametrize("stage", STAGES)
def test_the_host_never_waits_for_the_gpu(nccl, stage):
    """Two steps with torch raising at every synchronization: the host runs ahead, or nothing overlaps. On a CPU the
    host is the device."""
    model, _ = shard(built(Net), stage, units=["Block"])
    optimizer = torch.optim.AdamW(model.parameters())
    batches = [(inputs(seed, 5, 7), inputs(seed + 1, 5, 3)) for seed in range(4)]
    for number, (x, y) in enumerate(batches):
        if number == 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    state(model)
