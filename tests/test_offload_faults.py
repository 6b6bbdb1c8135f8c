"""What offload does when memory, disks or users fail: a clear error on the main thread, and no hang."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from distributed import run_ranks
from lightning.pytorch.callbacks import ModelCheckpoint
from offloading import Loop, Net, adamw, differences
from rows import launched, loader, make_trainer
from torch import Tensor, nn

import lightning_zero
from lightning_zero import HostMemory, MappedFile, OffloadError, OffloadTarget, ZeROStrategy
from lightning_zero.offload import page_lock

# A target that fails in the middle of a run


@dataclass(kw_only=True)
class Failing(HostMemory):
    """The ``nth`` call of ``method`` fails on rank ``rank``."""

    method: str = ""
    nth: int = -1
    rank: int = 0
    _calls: int = 0

    def _may_fail(self, method: str) -> None:
        if method != self.method or (torch.distributed.is_initialized() and torch.distributed.get_rank() != self.rank):
            return
        self._calls += 1
        if self._calls == self.nth:
            raise OSError("the cable was pulled")

    def to_device(self, out: Tensor, resting: Tensor) -> None:
        self._may_fail("to_device")
        super().to_device(out, resting)

    def to_rest(self, resting: Tensor, value: Tensor) -> None:
        self._may_fail("to_rest")
        super().to_rest(resting, value)

    def allocate(self, numel: int, dtype: torch.dtype, moves: bool) -> Tensor:
        self._may_fail("allocate")
        return super().allocate(numel, dtype, moves)


class Model(L.LightningModule):
    """A small model over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(tokens), tokens.flip(0))

    def configure_optimizers(self) -> Any:
        return adamw(self)[0]


STEPS = 6
BATCHES = [torch.randint(13, (5,), generator=torch.Generator().manual_seed(i)) for i in range(STEPS)]


def _fit(rank: int, offload: OffloadTarget | None, stage: int, world_size: int, folder: str) -> list[str]:
    """Train with a checkpoint after each step; the messages of what was raised, outermost first."""
    torch.manual_seed(0)
    module = Model()
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(
        ZeROStrategy(stage=stage, offload=offload, units=["Block"]),
        devices=world_size,
        callbacks=[saving],
        enable_checkpointing=True,
    )
    try:
        with launched(rank):
            trainer.fit(module, loader(BATCHES))
    except Exception as error:
        # Again: what is left must not be mistaken for a model that can be trained.
        if world_size == 1:
            with pytest.raises(RuntimeError, match="Build the module anew"):
                trainer.fit(module, loader(BATCHES))
        found: list[str] = []
        cause: BaseException | None = error
        while cause is not None:
            found.append(f"{type(cause).__name__}: {cause}")
            cause = cause.__cause__
        return found
    return []


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run without offload, after each step."""
    folder = tmp_path_factory.mktemp("straight")
    assert run_ranks(1, _fit, None, 1, 1, str(folder)) == [[]]
    return folder


# Groups with offloaded state: embedding and bias of the root, and of three blocks two. At set-up each brings its
# weights down and takes memory for them; in a step it moves once either way, and more memory is taken in the first one.
@pytest.mark.parametrize(
    ("world_size", "stage", "method", "nth", "saved"),
    [
        (1, 1, "to_device", 15, True),
        (1, 3, "to_rest", 15, True),
        (1, 1, "allocate", 15, False),
        (2, 3, "to_device", 15, True),
        (2, 1, "to_rest", 15, True),
        (2, 3, "allocate", 15, False),
    ],
)
def test_a_failure_in_the_background_ends_the_fit(
    world_size: int, stage: int, method: str, nth: int, saved: bool, tmp_path: Path, checkpoints: Path
) -> None:
    """With its cause and the name of what it met first; the last checkpoint is that of a run without failure."""
    target = Failing(method=method, nth=nth, rank=world_size - 1)
    messages = run_ranks(world_size, _fit, target, stage, world_size, str(tmp_path), journals_differ=True)
    outer, *_, inner = messages[-1]
    assert outer.startswith("OffloadError: offloaded state could not be updated, at `net.")
    assert "the cable was pulled" in outer and "resume from the last checkpoint" in outer
    assert inner == "OSError: the cable was pulled"
    # The others find that one is missing.
    assert all(messages), messages
    files = sorted(tmp_path.glob("*.ckpt"), key=lambda path: int(path.stem.removeprefix("step=")))
    assert saved == bool(files)
    assert len(files) < STEPS
    for path in files[-1:]:
        found, expected = (
            torch.load(folder / path.name, weights_only=True)["state_dict"] for folder in (tmp_path, checkpoints)
        )
        if world_size == 1:
            assert not differences(found, expected)
        Model().load_state_dict(found)


# What a user may get wrong


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ZeROStrategy(offload="gpu"), ValueError, r"offload='gpu' is unknown: expected None, 'cpu', 'disk'"),
        (lambda: ZeROStrategy(offload=object()), TypeError, r"is no `OffloadTarget`. Write `offload='cpu'`"),
        (lambda: ZeROStrategy(offload=HostMemory), TypeError, r"is no `OffloadTarget`"),
        (lambda: ZeROStrategy(stage=2, offload=HostMemory(parameters=True)), ValueError, r"needs stage 3"),
        (lambda: lightning_zero.shard(nn.Linear(2, 2), 1, offload=HostMemory(parameters=True)), ValueError, "stage 3"),
        (lambda: lightning_zero.shard(nn.Linear(2, 2), offload="nvme"), ValueError, "offload='nvme' is unknown"),
        (lambda: HostMemory(ratio=0), ValueError, r"ratio=0 must be above 0 and at most 1, or 'auto'"),
        (lambda: HostMemory(ratio=2), ValueError, r"ratio=2 must be above 0"),
        (lambda: HostMemory(ratio="half"), ValueError, r"ratio='half' must be"),
        (lambda: HostMemory(ratio=float("nan")), ValueError, r"ratio=nan must be"),
        (lambda: HostMemory(device_budget=10), ValueError, r"device_budget=10 is the bytes that ratio='auto' fills"),
        (lambda: HostMemory(ratio="auto", device_budget=-1), ValueError, r"device_budget=-1"),
        (lambda: HostMemory(optimizer=False), ValueError, r"offloads nothing. Write `offload=None`"),
        (lambda: MappedFile("/tmp", optimizer=False), ValueError, r"MappedFile\(optimizer=False"),
        (lambda: HostMemory("cpu"), TypeError, r"positional argument"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_to_write(
    make: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


# No room


class Large(nn.Module):
    """Ten units of 50 million elements that are never touched: 2 GB, of addresses alone."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.ParameterList([nn.Parameter(torch.empty(50_000_000))]) for _ in range(10))


@dataclass(kw_only=True)
class Crowded(HostMemory):
    """A host with ``free`` bytes, where nothing is ever allocated."""

    free: tuple[int, ...] = ()

    def free_bytes(self) -> int:
        return self.free[torch.distributed.get_rank()]

    def allocate(self, numel: int, dtype: torch.dtype, moves: bool) -> Tensor:
        raise AssertionError("there is no room, as was known before")


def _asks_for_too_much(rank: int, target: OffloadTarget) -> str:
    with pytest.raises(OffloadError) as caught:
        lightning_zero.shard(Large(), 3, ["ParameterList"], offload=target)
    return str(caught.value)


def test_too_little_memory_is_told_before_any_is_taken() -> None:
    """Main weights and gradients are 8 bytes an element, 4 GB of both ranks together."""
    for message in run_ranks(2, _asks_for_too_much, Crowded(free=(10**9, 10**9))):
        assert "main weights and gradients of 2 ranks on this host need 4.000 GB, and 1.000 GB are free" in message
        # Of ten units two are a fifth, and three are too many.
        assert "`Crowded(ratio=0.2)`" in message


def test_too_little_memory_on_one_host_is_told_on_all() -> None:
    first, second = run_ranks(2, _asks_for_too_much, Crowded(free=(10**10, 10**9)))
    assert "Crowded on another host has no room" in first
    assert "need 4.000 GB, and 1.000 GB are free" in second


def _fits(rank: int, ratio: float) -> bool:
    try:
        lightning_zero.shard(Large(), 3, ["ParameterList"], offload=Crowded(free=(10**9, 10**9), ratio=ratio))
    except OffloadError:
        return False
    except AssertionError:
        return True
    raise AssertionError("it never allocated")


def test_the_ratio_that_is_told_fits_and_a_larger_one_does_not() -> None:
    assert run_ranks(2, _fits, 0.2) == [True, True]
    assert run_ranks(2, _fits, 0.21) == [False, False]


def _opens_on_rank_0_alone(rank: int, folder: str) -> str:
    with pytest.raises(OffloadError) as caught:
        lightning_zero.shard(Net(), 3, offload=MappedFile(folder if rank == 0 else "/no/such/directory"))
    return str(caught.value)


def test_a_target_that_cannot_be_used_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(2, _opens_on_rank_0_alone, str(tmp_path))
    assert first == "MappedFile cannot be used on another rank, which says why."
    assert "cannot be kept in '/no/such/directory'" in second


def _has_no_room_for_moments(rank: int) -> str:
    loop = Loop(rank, 3, "fp32", HostMemory())
    numel = sum(p.slicing.own.numel for p in loop.module.parameters() if p.requires_grad)
    # Two moments of 4 bytes on each of 2 ranks: one byte is missing.
    HostMemory.free_bytes = lambda self: 2 * 8 * numel - 1
    loop.backward()
    with pytest.raises(OffloadError) as caught:
        loop.optimizers[0].step()
    assert not loop.optimizers[0].state
    HostMemory.free_bytes = lambda self: 2 * 8 * 10**6
    other = Loop(rank, 3, "fp32", HostMemory())
    other.train()
    return str(caught.value)


def test_too_little_memory_for_the_optimizer_is_told_before_its_first_step() -> None:
    for message in run_ranks(2, _has_no_room_for_moments):
        assert "the state of AdamW of 2 ranks on this host" in message


# Disks


def _full_disk(rank: int, folder: str) -> None:
    def allocate(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    allocate_really = os.posix_fallocate
    full = pytest.raises(OffloadError, match=r"No space left on device.*Name a directory with room on a local disk")

    loop = Loop(rank, 1, "fp32", MappedFile(folder))
    os.posix_fallocate = allocate
    with full:
        loop.backward()
    os.posix_fallocate = allocate_really
    loop.optimizers[0].zero_grad()
    loop.backward()
    # The optimizer's state finds no room in the background: who waits for it is told.
    os.posix_fallocate = allocate
    loop.step()
    with full:
        loop.loss()
    with full:
        Loop(rank, 1, "fp32", MappedFile(folder))


def test_a_full_disk_is_told_with_what_to_do(tmp_path: Path) -> None:
    run_ranks(1, _full_disk, str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("folder", ["/proc", "/no/such/directory", "/dev/null"])
def test_a_directory_that_cannot_be_written_is_told(folder: str) -> None:
    with pytest.raises(OffloadError, match=rf"cannot be kept in '{folder}'"):
        lightning_zero.shard(nn.Linear(2, 2), offload=MappedFile(folder))


def _in_one_directory(rank: int, folder: str) -> list[dict[str, Any]]:
    """Two runs at once, whose directory is removed on the way, and one without offload."""
    loops = [Loop(rank, 3, "fp32", offload) for offload in (MappedFile(folder), MappedFile(folder), None)]
    for step in range(4):
        for loop in loops:
            loop.train()
        assert step > 1 or not os.listdir(folder)
        if step == 1:
            shutil.rmtree(folder)
    return [loop.outcome() for loop in loops]


def test_runs_share_a_directory_and_need_it_no_longer_once_they_have_their_memory(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    ((first, second, expected),) = run_ranks(1, _in_one_directory, str(folder))
    assert not differences(first, expected) and not differences(second, expected)


# Page-locked memory


def _without_page_locks(rank: int) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    class OnDevice(HostMemory):
        def open(self, device: torch.device) -> None:
            super().open(torch.device("cuda"))

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_zero").addHandler(handler)
    lightning_zero.offload.page_lock = lambda tensor: "cudaErrorMemoryAllocation"
    loops = [Loop(rank, 3, "fp32", offload) for offload in (OnDevice(), None)]
    for loop in loops:
        loop.train(2)
    found, expected = (loop.outcome() for loop in loops)
    return found, expected, messages


def test_without_page_locked_memory_training_goes_on_with_one_warning() -> None:
    ((found, expected, messages),) = run_ranks(1, _without_page_locks)
    assert not differences(found, expected)
    assert len(messages) == 1 and "cudaErrorMemoryAllocation" in messages[0] and "ulimit -l" in messages[0]
    assert callable(page_lock)
