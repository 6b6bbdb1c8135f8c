"""Offload where threads, ranks and modules end, differ, or meet: what ordinary training does not come to."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks, whole_values
from torch import Tensor, nn

import lightning_zero
from lightning_zero import HostMemory, MappedFile, OffloadError, OffloadTarget
from lightning_zero.checkpoint.one_file import shard_optimizer_state
from lightning_zero.engine import Engine, _engines_of, engine_of
from lightning_zero.gradients import _Descent
from lightning_zero.lane import Background, Lane
from lightning_zero.offload import page_lock

WORLD_SIZE = 2
DEPTH = 4
WIDTH = 16


class Block(nn.Module):
    """One unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """A call takes the blocks on its path."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: Tensor, path: tuple[int, ...] = tuple(range(DEPTH))) -> Tensor:
        x = self.inward(x)
        for number in path:
            x = self.blocks[number](x)
        return x


def sharded(stage: int, offload: OffloadTarget | str | None) -> Any:
    """The same net on all ranks."""
    torch.manual_seed(0)
    return lightning_zero.shard(Net(), stage, [Block], offload=offload)


def engine(model: nn.Module) -> Engine:
    """Of ``model``."""
    found = engine_of(model)
    assert found is not None
    return found


def batch(step: int, rank: int = 0) -> Tensor:
    """Another one in each step on each rank."""
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The same implementation with and without offload."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """A collective."""
    return {name: value.detach().clone() for name, value in lightning_zero.unshard(model).state_dict().items()}


def same(found: Any, expected: Any) -> bool:
    """To the last bit, in lists and dictionaries of tensors."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return torch.equal(found, expected) if isinstance(expected, Tensor) else bool(found == expected)


# Ranks that differ


@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_take_different_blocks_and_step_inside_the_training_step(stage: int) -> None:
    """Gathers that one rank has begun and the other has not come before reductions and writes, on both.

    Each rank steps twice in a training step, as manual optimization does: once with one block and once with three.
    """

    def on_rank(rank: int, offload: str | None) -> dict[str, Tensor]:
        model = sharded(stage, offload)
        engine(model).has_steps = True
        optimizer = sgd(model)
        for step in range(2):
            with engine(model).training_step():
                for half in range(2):
                    path = (0,) if (rank + half) % 2 else (0, 1, 2)
                    optimizer.zero_grad()
                    model(batch(2 * step + half, rank), path).square().mean().backward()
                    optimizer.step()
        return whole_weights(model)

    assert same(run_ranks(WORLD_SIZE, on_rank, "cpu"), run_ranks(WORLD_SIZE, on_rank, None))


@pytest.mark.parametrize("stage", [1, 2])
def test_one_rank_looks_at_a_block_in_the_training_step(stage: int) -> None:
    """Without gradients it asks the others for nothing: what they gather in training, it gathers in the same order."""

    def on_rank(rank: int, offload: str | None) -> dict[str, Tensor]:
        model = sharded(stage, offload)
        engine(model).has_steps = True
        optimizer = sgd(model)
        for step in range(2):
            with engine(model).training_step():
                # Another one than in the last step: what follows it is not known yet.
                x = model.blocks[(step + rank) % 2](batch(step, rank))
                if rank == 0:
                    with torch.no_grad():
                        model.blocks[3](x)
                model.blocks[3](model.blocks[2](x)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole_weights(model)

    assert same(run_ranks(WORLD_SIZE, on_rank, "cpu"), run_ranks(WORLD_SIZE, on_rank, None))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_rank_0_alone_looks_at_weights_after_a_step(stage: int) -> None:
    """Where whole weights rest it may, as without offload; the other rank serves when it comes to its next step."""

    def on_rank(rank: int, offload: str | None) -> tuple[dict[str, Tensor], list[Tensor]]:
        model, seen = sharded(stage, offload), []
        optimizer = sgd(model)
        for step in range(2):
            optimizer.zero_grad()
            model(batch(step, rank)).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                weight = model.blocks[1].linear.weight
                seen += [weight.norm(), weight.sum(), weight.min(), model(batch(9))] if rank == 0 else []
        return whole_weights(model), seen

    for found, expected in zip(run_ranks(WORLD_SIZE, on_rank, "cpu"), run_ranks(WORLD_SIZE, on_rank, None)):
        assert same(list(found), list(expected))


@pytest.mark.parametrize("stage", [1, 2])
def test_an_optimizer_that_takes_norms_of_weights(stage: int) -> None:
    """Adafactor's steps depend on them: they are added up as without offload, whole, not rank by rank."""

    def on_rank(rank: int, offload: str | None) -> dict[str, Tensor]:
        model = sharded(stage, offload)
        optimizer = torch.optim.Adafactor(model.parameters())
        for step in range(3):
            optimizer.zero_grad()
            model(batch(step, rank)).square().mean().backward()
            optimizer.step()
        return whole_weights(model)

    assert same(run_ranks(WORLD_SIZE, on_rank, "cpu"), run_ranks(WORLD_SIZE, on_rank, None))


# Modules that end


@dataclass(kw_only=True)
class Collecting(HostMemory):
    """Collects garbage in the background, as Python does in whatever thread it is due."""

    may_collect: threading.Event = field(default_factory=threading.Event)
    closed: threading.Event = field(default_factory=threading.Event)

    def to_device(self, out: Tensor, resting: Tensor) -> None:
        super().to_device(out, resting)
        if threading.current_thread() is not threading.main_thread():
            assert self.may_collect.wait(20)
            gc.collect()

    def close(self) -> None:
        super().close()
        self.closed.set()


def test_a_module_is_collected_in_the_background() -> None:
    """Its target is given back, its thread ends, and who still holds weights of it reads what was queued."""
    target = Collecting()
    model = sharded(3, target)
    model.cycle = [model]
    average = copy.deepcopy(model)
    del average.cycle
    before = [weight.whole().clone() for weight in average.parameters()]
    optimizer = sgd(model)
    model(batch(0)).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1.0)
    after = engine(model).background
    reference = weakref.ref(model)
    del model, optimizer
    target.may_collect.set()
    assert target.closed.wait(20)
    assert reference() is None and after is not None and after.failure is None
    changed = [not torch.equal(a.whole(), b) for a, b in zip(average.parameters(), before, strict=True)]
    assert all(changed)


# Interrupts


def test_an_interrupt_while_the_main_thread_waits() -> None:
    """The user sees the interrupt, and nothing was lost: what the background did goes on."""
    model = sharded(3, "cpu")
    optimizer = sgd(model)
    model(batch(0)).square().mean().backward()
    optimizer.step()
    began, may_end = threading.Event(), threading.Event()
    lane = model.inward.weight.lane
    lane.wait()
    lane.add(lambda: (began.set(), may_end.wait(20)))
    lane.begin()
    assert began.wait(20)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            engine(model).finish_updates()
    finally:
        signal.signal(signal.SIGALRM, before)
    may_end.set()
    twin = sharded(3, None)
    optimizer = sgd(twin)
    twin(batch(0)).square().mean().backward()
    optimizer.step()
    assert same(whole_weights(model), whole_weights(twin))


def test_an_interrupt_in_the_middle_of_an_operation() -> None:
    """The user sees the interrupt; what was half done is not gone on with."""
    model = sharded(3, "cpu")
    lane = model.inward.weight.lane
    lane.add(lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        lane.wait()
    with pytest.raises(OffloadError, match=r"`inward\.\w+` or before: KeyboardInterrupt"):
        engine(model).finish_updates()
    engine(model).abandon()


# Children


@dataclass
class SlowFile(MappedFile):
    """Moves gradients so late that a fork comes before."""

    def to_rest(self, resting: Tensor, value: Tensor) -> None:
        time.sleep(0.02)
        super().to_rest(resting, value)


def test_a_child_that_is_forked_after_a_step(tmp_path: Path) -> None:
    """It computes with the new weights, and does nothing a second time to files that it shares with its parent."""
    model, twin = sharded(3, SlowFile(str(tmp_path))), sharded(3, None)
    for one in (model, twin):
        optimizer = sgd(one)
        one(batch(0)).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        expected = twin(batch(1))
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends a child that hangs
        with torch.no_grad():
            os._exit(0 if torch.equal(model(batch(1)), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert same(whole_weights(model), whole_weights(twin))


# Optimizers


@pytest.mark.parametrize(
    "make",
    [lambda p: torch.optim.Adam(p), lambda p: torch.optim.AdamW(p), lambda p: torch.optim.Adagrad(p, lr_decay=0.5)],
    ids=["Adam", "AdamW", "Adagrad"],
)
def test_step_counters_are_those_of_a_checkpoint_in_double_precision(make: Any) -> None:
    """The fused kernel reads them as float32 without a look. The default kernels differ from it by rounding alone."""
    torch.set_default_dtype(torch.float64)

    def train(offload: str | None, state: Any) -> tuple[dict[str, Tensor], Any]:
        model = sharded(3, offload)
        optimizer = make(model.parameters())
        if state is not None:
            optimizer.load_state_dict(shard_optimizer_state(optimizer, state))
        for step in range(2):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()
        return whole_weights(model), whole_values(optimizer.state_dict())

    _, state = train(None, None)
    found, expected = train("cpu", state), train(None, state)
    for name, value in expected[0].items():
        torch.testing.assert_close(found[0][name], value, rtol=0, atol=1e-14)


def test_step_counters_go_where_the_parameters_of_fused_steps_are() -> None:
    """A parameter that stays on a device in the same group has a counter on the host if its file was written so.

    A kernel of a GPU would read host memory; the meta device stands in for one here.
    """
    model = sharded(3, "cpu")
    elsewhere = nn.Parameter(torch.empty(3, device="meta"))
    optimizer = torch.optim.AdamW([*model.parameters(), elsewhere])
    optimizer.state[elsewhere]["step"] = torch.tensor(3.0)
    engine(model).before_optimizer_step(optimizer)
    assert optimizer.state[elsewhere]["step"].device == elsewhere.device


@pytest.mark.parametrize("options", [{}, {"dampening": 0.5}, {"nesterov": True}, {"maximize": True}], ids=str)
def test_a_first_gradient_may_come_after_momentum_began(options: dict[str, Any]) -> None:
    """Gradual unfreezing, in a closure: torch's fused SGD takes momenta of all its parameters, or begins all."""

    def train(offload: str | None) -> dict[str, Tensor]:
        model = sharded(3, offload)
        late = next(model.parameters()).requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, **options)
        for step in range(4):

            def closure(step: int = step) -> None:
                late.requires_grad_(step > 1)
                optimizer.zero_grad()
                model(batch(step)).square().mean().backward()

            optimizer.step(closure)
        return whole_weights(model)

    expected = train(None)
    for name, value in train("cpu").items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)


def test_a_step_that_raised_leaves_no_choice_behind() -> None:
    """The next step decides anew: a choice that stayed would pass for the user's."""
    model = sharded(3, "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def fails() -> None:
        raise KeyError("of the user")

    with pytest.raises(KeyError):
        optimizer.step(fails)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
    engine(model).before_optimizer_step(optimizer)
    assert optimizer.param_groups[0]["fused"] is None


def test_the_choice_of_a_fused_kernel_is_the_runs_and_not_the_users() -> None:
    """It holds while the optimizer steps; what others see, and a checkpoint keeps, is what the user asked for."""
    model = sharded(3, "cpu")
    groups = [{"params": [p]} for p in model.parameters()]
    groups[0]["foreach"] = True
    optimizer = torch.optim.AdamW(groups)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(group["fused"] for group in optimizer.param_groups))
    model(batch(0)).square().mean().backward()
    optimizer.step()
    assert seen == [None] + [True] * (len(groups) - 1)
    assert all(group["fused"] is None for group in optimizer.state_dict()["param_groups"])
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert optimizer.param_groups[-1]["fused"] is None


# Targets


def test_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    """As one that cannot be written: an error of offload, which says what to do."""
    with pytest.raises(OffloadError, match=r"No such file or directory.*on a local disk"):
        sharded(3, MappedFile(str(tmp_path / "nowhere")))


def test_a_gradient_leaves_while_its_bytes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked twice may have gone in between: each look at it here is followed by its departure."""
    model = sharded(3, "cpu")
    with lightning_zero.no_sync(model):
        model(batch(0)).square().mean().backward()
    looks = iter([torch.ones(3), None])
    monkeypatch.setattr(_Descent, "value", property(lambda _: next(looks)), raising=False)
    assert all(isinstance(buffer, Tensor) for buffer, _ in model.inward.weight.owner.gradients.buffers())


@dataclass(kw_only=True)
class Attentive(HostMemory):
    """Knows what was moved since it was last told to relax."""

    awake: set[int] = field(default_factory=set)

    def to_device(self, out: Tensor, resting: Tensor) -> None:
        self.awake.add(resting.data_ptr())
        super().to_device(out, resting)

    def to_rest(self, resting: Tensor, value: Tensor) -> None:
        self.awake.add(resting.data_ptr())
        super().to_rest(resting, value)

    def relax(self, resting: Tensor) -> None:
        self.awake.discard(resting.data_ptr())


@pytest.mark.parametrize("parameters", [False, True])
def test_nothing_stays_awake(parameters: bool) -> None:
    """After set-up, forwards and steps: what a mapped file holds takes no memory then."""

    def on_rank(rank: int) -> list[int]:
        target = Attentive(parameters=parameters)
        model = sharded(3, target)
        awake = [len(target.awake)]
        with torch.no_grad():
            model(batch(0))
        awake.append(len(target.awake))
        optimizer = sgd(model)
        model(batch(0)).square().mean().backward()
        optimizer.step()
        engine(model).finish_updates()
        return [*awake, len(target.awake)]

    assert run_ranks(WORLD_SIZE, on_rank) == [[0, 0, 0]] * WORLD_SIZE


def test_a_state_dict_is_loaded_piece_by_piece() -> None:
    """No copy of it waits to be written: a model that the host has no room for may come from a mapped file."""
    model = sharded(3, "cpu")
    loaded = {name: torch.ones_like(value) for name, value in Net().state_dict().items()}
    model.load_state_dict(loaded)
    assert not any(group.lane._queue for group in engine(model).groups)
    assert same(whole_weights(model), loaded)


# A GPU: what is asked of torch, as a CPU cannot show what comes of it


class Stream:
    """Stands for a stream of copies on the second GPU."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 1)
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1


def test_the_background_works_for_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread's device is the first one: what it page-locks would take memory there, for each rank."""
    devices: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: devices.append((threading.current_thread().name, d)))
    background = Background(HostMemory(), torch.device("cpu"))
    background.copies._stream = Stream()  # type: ignore[assignment]
    background.submit(lambda: None)
    background.close(waits=True)
    assert devices == [("lightning_zero.offload_0", torch.device("cuda", 1))]


def test_the_background_does_what_was_queued_when_it_began() -> None:
    """Behind, it finds that done by a reader; gradients that wait for those of further micro-batches stay queued."""
    background = Background(HostMemory(), torch.device("cpu"))
    lane, held_up, done = Lane("weight", background), threading.Event(), []
    background.submit(held_up.wait)
    lane.add(lambda: done.append("update"))
    lane.begin()
    lane.wait()
    lane.add(lambda: done.append("gradients"))
    held_up.set()
    background.close(waits=True)
    assert done == ["update"]
    lane.wait()
    assert done == ["update", "gradients"]


@pytest.mark.parametrize("has_thread", [False, True])
def test_memory_is_unlocked_when_no_gather_reads_it(has_thread: bool) -> None:
    """A gather waits on the device alone."""
    stream = Stream()

    @dataclass(kw_only=True)
    class Target(HostMemory):
        waits: int = 0

        def close(self) -> None:
            self.waits = stream.waits

    target = Target()
    background = Background(target, torch.device("cpu"))
    background.gathers._stream = stream  # type: ignore[assignment]
    if has_thread:
        background.submit(lambda: None)
    background.close(waits=True)
    assert target.waits == 1


def test_a_weight_is_written_when_no_gather_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of an earlier forward may come after the host has gone on to write, once for all that it writes."""

    class Position:
        def synchronize(self) -> None:
            read.append(float(weight.handle.sum()))

    read: list[float] = []
    model = sharded(3, HostMemory(parameters=True))
    weight = model.blocks[1].linear.weight
    with torch.no_grad():
        weight.fill_(1.0)
        monkeypatch.setattr(engine(model).background.gathers, "mark", Position)
        model(batch(0))
        weight.mul_(2.0)
        weight.mul_(2.0)
        assert weight.fragment.eq(4.0).all()
    assert read == [WIDTH * WIDTH]


def test_a_refusal_to_lock_pages_is_no_error_of_a_later_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA runtime keeps an error until it is asked for the last one, as torch does after each launch."""
    last = [712, 0]

    class Runtime:
        @staticmethod
        def cudaHostRegister(*_: int) -> int:
            return last[0]

    def launch(*_: Any, **__: Any) -> None:
        error = last.pop(0)
        if error:
            raise RuntimeError(f"CUDA error {error}")

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch, "ones", launch)
    assert page_lock(torch.empty(3)) == "712"
    assert last == [0]


# Several modules


def test_modules_of_one_optimizer_come_in_the_order_of_its_parameters() -> None:
    """Each gathers after a step: ranks that began with different modules would exchange the weights of two of them."""
    modules = [lightning_zero.shard(nn.Linear(2, 2)) for _ in range(20)]
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)
    assert list(_engines_of(optimizer)) == [engine_of(module) for module in modules]
