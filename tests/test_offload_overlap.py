"""What offload does beside the computation, by the order of events.

    main thread    step returned | forward 0 | forward 1 | ... | backward 1 | backward 0
    background        update 0, up 0 | update 1, up 1 | ...        down 1     down 0

Every event may be made to wait for another one. Where that never comes, as where a step did its work before it
returned, the waiting one gives up and says so.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from distributed import run_ranks
from offloading import poison
from torch import Tensor, nn

import lightning_zero.lane
from lightning_zero import HostMemory
from lightning_zero.engine import engine_of
from lightning_zero.lane import Lane

BLOCKS, WIDTH = 4, 6
PATIENCE = 15.0
"""Seconds after which an event counts as never coming."""

Event = tuple[str, int]


class Journal:
    """Events in order, and which ones wait for which."""

    def __init__(self) -> None:
        self.events: list[Event | str] = []
        self._after: dict[Event, Event] = {}
        self._changed = threading.Condition()

    def let(self, event: Event, *, come_after: Event) -> None:
        """From now on ``event`` does not happen before ``come_after`` has."""
        self._after[event] = come_after

    def note(self, event: Event) -> None:
        """``event`` happens, if need be later."""
        with self._changed:
            before = self._after.get(event)
            if before is not None and not self._changed.wait_for(lambda: before in self.events, PATIENCE):
                self.events.append(f"{event} waited for {before} in vain")
            self.events.append(event)
            self._changed.notify_all()

    def forget(self) -> None:
        """Begin anew."""
        self.events.clear()
        self._after.clear()

    def assert_order(self, *events: Event) -> None:
        """``events`` happened, once each and in this order, and none waited in vain."""
        assert not [event for event in self.events if isinstance(event, str)], self.events
        assert [event for event in self.events if event in events] == list(events), self.events


class Block(nn.Module):
    """Each has another size, by which its transfers are known."""

    def __init__(self, number: int, journal: Journal) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8 * (number + 1), bias=False)
        self.down = nn.Linear(8 * (number + 1), WIDTH, bias=False)
        self._number = number
        self._journal = journal

    def forward(self, x: Tensor) -> Tensor:
        self._journal.note(("forward", self._number))
        out = x + self.down(torch.tanh(self.up(x)))
        if out.requires_grad:
            out.register_hook(lambda _: self._journal.note(("backward", self._number)))
        return out


@dataclass(kw_only=True)
class Watched(HostMemory):
    """Notes what moves."""

    journal: Journal
    number_of: dict[int, int] = field(default_factory=dict)
    """The unit of a transfer of so many elements."""

    def to_device(self, out: Tensor, resting: Tensor) -> None:
        super().to_device(out, resting)
        if resting.numel() in self.number_of:
            self.journal.note(("up", self.number_of[resting.numel()]))

    def to_rest(self, resting: Tensor, value: Tensor) -> None:
        super().to_rest(resting, value)
        if resting.numel() in self.number_of:
            self.journal.note(("down", self.number_of[resting.numel()]))


class Loop:
    """Steps of a model of `Block`s that note their events.

    Args:
        stage: of ZeRO.
    """

    def __init__(self, stage: int) -> None:
        self.journal = Journal()
        torch.manual_seed(0)
        blocks = [Block(number, self.journal) for number in range(BLOCKS)]
        self.module = nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks)
        target = Watched(journal=self.journal)
        lightning_zero.shard(self.module, stage, ["Block"], offload=target)
        self.engine = engine_of(self.module)
        assert self.engine is not None
        poison(self.engine)
        target.number_of.update(
            {unit.groups[0].layout.shard_numel: number for number, unit in enumerate(self.engine.units)}
        )
        self.optimizer = torch.optim.AdamW(self.module.parameters(), fused=True)
        for _ in range(2):
            self.forward_and_backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.engine.finish_updates()
        self.journal.forget()

    def forward_and_backward(self) -> None:
        self.module(torch.ones(2, WIDTH)).sum().backward()

    @contextmanager
    def noting_updates(self) -> Iterator[None]:
        """Context of a step of the optimizer: the first operation that it queues for a unit is the update of it."""
        units = {unit.groups[0].lane: number for number, unit in enumerate(self.engine.units)}
        add = Lane.add
        pending = set(units)

        def noting(lane, operation) -> None:
            if lane in pending:
                pending.discard(lane)
                add(lane, lambda: self.journal.note(("update", units[lane])))
            add(lane, operation)

        Lane.add = noting
        try:
            yield
        finally:
            Lane.add = add
        assert not pending


SETTINGS = [(1, 1), (2, 1), (1, 3), (2, 3)]
"""World size and stage."""


def _steps_beside_the_next_forward(rank: int, stage: int) -> None:
    loop = Loop(stage)
    journal = loop.journal
    loop.forward_and_backward()
    loop.engine.finish_updates()
    journal.forget()
    journal.let(("update", 0), come_after=("step returned", 0))
    for number in range(1, BLOCKS):
        journal.let(("update", number), come_after=("forward", number - 1))
    with loop.noting_updates():
        loop.optimizer.step()
    journal.note(("step returned", 0))
    loop.forward_and_backward()
    expected: list[Event] = [("step returned", 0)]
    for number in range(BLOCKS):
        expected += [("update", number), ("up", number), ("forward", number)]
    journal.assert_order(*expected)


@pytest.mark.parametrize(("world_size", "stage"), SETTINGS)
def test_a_step_returns_before_it_is_done_and_units_wait_for_their_own_update(world_size: int, stage: int) -> None:
    """Unit k is updated while unit k - 1 computes: here it is not allowed earlier, and must not be needed earlier."""
    run_ranks(world_size, _steps_beside_the_next_forward, stage)


def _moves_beside_backward(rank: int, stage: int) -> None:
    loop = Loop(stage)
    journal = loop.journal
    last = BLOCKS - 1
    journal.let(("backward", 0), come_after=("down", last))
    loop.forward_and_backward()
    loop.engine.finish_updates()
    journal.assert_order(("backward", last), ("down", last), ("backward", 0), ("down", 0))
    assert all(("down", number) in journal.events for number in range(BLOCKS))


@pytest.mark.parametrize(("world_size", "stage"), SETTINGS)
def test_gradients_go_down_while_backward_runs(world_size: int, stage: int) -> None:
    """Backward of the first unit does not begin before gradients of the last one are where they rest."""
    run_ranks(world_size, _moves_beside_backward, stage)


def _reads_one(rank: int, stage: int) -> None:
    loop = Loop(stage)
    journal = loop.journal
    loop.forward_and_backward()
    loop.engine.finish_updates()
    journal.forget()
    journal.let(("update", 0), come_after=("read", 2))
    with loop.noting_updates():
        loop.optimizer.step()
    weight = loop.module[3].up.weight
    before = weight.handle.clone()
    found = weight.fragment.clone()
    journal.note(("read", 2))
    loop.engine.finish_updates()
    # By the thread that reads: the other one is at unit 0, and may not go on.
    journal.assert_order(("update", 2), ("read", 2), ("update", 0))
    assert found.numel() == 0 or not torch.equal(found, before)
    assert torch.equal(found, weight.fragment)


@pytest.mark.parametrize(("world_size", "stage"), [(1, 1), (2, 3)])
def test_a_reader_waits_for_what_it_reads_alone(world_size: int, stage: int) -> None:
    """It does itself what the background has not begun."""
    run_ranks(world_size, _reads_one, stage)


def _sums_three_backwards(rank: int, held_up: bool) -> list[Tensor]:
    """Without `no_sync`: the first gradients are at rest before the second backward; then transfers are held up."""
    lightning_zero.lane.IN_FLIGHT = 100
    loop = Loop(3)
    background = loop.engine.background
    go_on = threading.Event()
    for scale in (1.0, 1 / 3, 1e-3):
        loop.module(torch.full((2, WIDTH), scale)).square().sum().backward()
        if scale == 1.0:
            loop.engine.finish_updates()
            if held_up:
                background.submit(lambda: go_on.wait(PATIENCE))
    go_on.set()
    return [p.grad.fragment.clone() for p in loop.module.parameters()]


def test_when_transfers_begin_does_not_change_the_order_of_a_sum() -> None:
    """(a + b) + c, also where c arrives while b waits beside it."""
    for at_once, held_up in zip(*(run_ranks(2, _sums_three_backwards, held_up) for held_up in (False, True))):
        assert any(grad.numel() for grad in at_once)
        assert all(torch.equal(*pair) for pair in zip(at_once, held_up, strict=True))
