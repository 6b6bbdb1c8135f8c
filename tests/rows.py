"""Trains a row of the case list on two sharded ranks, and its twin: one plain device with both ranks' data.

    batches     [(x0 of both ranks, y0 of both ranks), ...]      rank r takes the r-th half of every tensor
    twin        the whole tensors: a mean over them is the average of the ranks' means

Everything is float64 unless a row says otherwise, so the two differ by rounding only: 1e-10.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from distributed import run_ranks
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_zero import gathered
from lightning_zero.engine import engine_of

STAGES = (1, 2, 3)
WORLD_SIZE = 2
TOLERANCE = 1e-10

Batches = Sequence[Any]


def setup_module() -> None:
    """Pytest calls this before a file that imports it: what it builds is float64, and so in the ranks it forks."""
    torch.set_default_dtype(torch.float64)


def teardown_module() -> None:
    """The default again."""
    torch.set_default_dtype(torch.float32)


# Modules and data


class Block(nn.Module):
    """A residual block: in a ``Sequential`` of nine it is at most 1/8 of the parameters, hence part of a unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def trunk(width: int, depth: int = 9) -> nn.Sequential:
    """Blocks enough that a model with little else has units."""
    return nn.Sequential(*(Block(width) for _ in range(depth)))


class Regression(LightningModule):
    """Learns y from x through ``net``; AdamW over everything, with a weight decay that would move unused weights."""

    def __init__(self) -> None:
        super().__init__()
        self.record: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[operator,no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


def vectors(steps: int, inputs: int, outputs: int, rows: int = 3) -> list[tuple[Tensor, Tensor]]:
    """``steps`` batches (x, y) of ``rows`` rows for each rank, all different."""
    generator = torch.Generator().manual_seed(1)
    dtype = torch.float64
    return [
        (
            torch.randn(WORLD_SIZE * rows, inputs, generator=generator, dtype=dtype),
            torch.randn(WORLD_SIZE * rows, outputs, generator=generator, dtype=dtype),
        )
        for _ in range(steps)
    ]


def tokens(steps: int, vocabulary: int, length: int = 5, rows: int = 1) -> list[Tensor]:
    """``steps`` batches of token ids, shape (ranks * rows, length); the highest id occurs in each."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(vocabulary, (WORLD_SIZE * rows, length), generator=generator) for _ in range(steps)]
    for ids in batches:
        ids[0, 0] = vocabulary - 1
    return batches


def share(batches: Batches, rank: int) -> list[Any]:
    """What ``rank`` sees of ``batches``."""
    return [
        batch.chunk(WORLD_SIZE)[rank]
        if isinstance(batch, Tensor)
        else tuple(tensor.chunk(WORLD_SIZE)[rank] for tensor in batch)
        for batch in batches
    ]


def loader(batches: Batches) -> DataLoader[Any]:
    """Serves ``batches`` as they are."""
    return DataLoader(list(batches), batch_size=None)  # type: ignore[arg-type]


# Running


@dataclass
class Run:
    """What one rank, or the twin, saw of a fit."""

    live: dict[str, Tensor] = field(default_factory=dict)
    """Whole parameters at the end of training, before the strategy gives the module back."""
    after: dict[str, Tensor] = field(default_factory=dict)
    """``state_dict()`` of the module after fit."""
    losses: list[float] = field(default_factory=list)
    record: list[Any] = field(default_factory=list)
    """The module's ``record``."""
    metrics: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    in_units: set[str] = field(default_factory=set)
    """Names of the parameters that units hold; the others are the root's."""


def whole_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Plain copies of the parameters, sharded or not: a collective."""
    with gathered(module):
        return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


class _Poison(Callback):
    """A read of memory that was given back shows as NaN."""

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        engine = engine_of(module)
        if engine is not None:
            engine.pool.poison = True
            if engine.background is not None:
                engine.background.pool.poison = True

    on_validation_start = on_test_start = on_predict_start = on_fit_start


class _Recorder(Callback):
    def __init__(self, run: Run, checkpoint: Path | None) -> None:
        self._run = run
        self._checkpoint = checkpoint

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        engine = engine_of(module)
        if engine is not None:
            self._run.in_units = {name for unit in engine.units for group in unit.groups for name in group.names}

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        if outputs:  # manual optimization returns none
            self._run.losses.append(float(outputs["loss"]))

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._run.live = whole_parameters(module)
        if self._checkpoint is not None:
            trainer.save_checkpoint(self._checkpoint)


def make_trainer(strategy: Any = "auto", callbacks: Sequence[Callback] = (), **arguments: Any) -> Trainer:
    """A quiet Trainer on CPU; on ``WORLD_SIZE`` devices unless ``strategy`` is "auto"."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1 if strategy == "auto" else WORLD_SIZE,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "callbacks": [_Poison(), *callbacks],
    }
    return Trainer(strategy=strategy, **{**defaults, **arguments})


@contextmanager
def launched(rank: int) -> Iterator[None]:
    """Context in which Lightning finds this process to be ``rank`` of several that someone else started."""
    os.environ["LOCAL_RANK"] = str(rank)
    yield
    del os.environ["LOCAL_RANK"]


def fit_once(
    make: Callable[[], LightningModule],
    batches: Batches,
    strategy: Any,
    rank: int,
    checkpoint: Path | None,
    ckpt_path: Path | None = None,
    validation: Batches | None = None,
    **arguments: Any,
) -> Run:
    """Fit a new module and tell what this process saw."""
    run = Run()
    # Ranks start from different weights: rank 0's, which are the twin's, must win.
    torch.manual_seed(rank)
    module = make()
    callbacks = [*arguments.pop("callbacks", ()), _Recorder(run, checkpoint)]
    trainer = make_trainer(strategy, callbacks=callbacks, **arguments)
    # The checkpoints are ours, and hold hyperparameters and tensors only.
    val = None if validation is None else loader(validation)
    trainer.fit(module, loader(batches), val, ckpt_path=ckpt_path, weights_only=True)
    run.after = {name: value.detach().clone() for name, value in module.state_dict().items()}
    run.record = getattr(module, "record", [])
    run.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    run.steps = trainer.global_step
    return run


def fit_plain(make: Callable[[], LightningModule], batches: Batches, **arguments: Any) -> Run:
    """The twin: one device, the batches of all ranks."""
    return fit_once(make, batches, "auto", 0, arguments.pop("checkpoint", None), **arguments)


def fit_ranks(
    stage: int, make: Callable[[], LightningModule], batches: Batches, checkpoint: Path | None = None, **arguments: Any
) -> list[Run]:
    """Fit on two ranks at ``stage``; what each saw. ``checkpoint`` is written at the end of training."""
    strategy = arguments.pop("strategy", f"zero{stage}")
    validation = arguments.pop("validation", None)

    def on_rank(rank: int) -> Run:
        own = None if validation is None else share(validation, rank)
        with launched(rank):
            return fit_once(make, share(batches, rank), strategy, rank, checkpoint, validation=own, **arguments)

    return run_ranks(WORLD_SIZE, on_rank)


# Comparing


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = TOLERANCE) -> None:
    """The same names, shapes, dtypes, and values within ``tolerance``."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=tolerance, msg=lambda message, name=name: f"`{name}`: {message}"
        )


def assert_same_on_all_ranks(runs: Sequence[Run]) -> None:
    """Bit by bit."""
    for run in runs[1:]:
        assert_close(run.live, runs[0].live, tolerance=0)
        assert_close(run.after, runs[0].after, tolerance=0)


def assert_trained_as(
    twin: Run,
    runs: Sequence[Run],
    checkpoint: Path | None = None,
    make: type[LightningModule] | None = None,
    tolerance: float = TOLERANCE,
) -> None:
    """Sharded training ended where its twin did: live on every rank, after fit, in the checkpoint, and loaded from it.

    Args:
        make: loads ``checkpoint`` in this process, which knows no strategy.
    """
    assert runs[0].in_units, "the row is to be tried on a model with units"
    assert_same_on_all_ranks(runs)
    assert_close(runs[0].live, twin.live, tolerance)
    assert_close(runs[0].after, twin.after, tolerance)
    if checkpoint is None:
        return
    assert_close(read_checkpoint(checkpoint)["state_dict"], twin.after, tolerance)
    if make is not None:
        torch.manual_seed(1234)
        assert_close(make.load_from_checkpoint(checkpoint, weights_only=True).state_dict(), twin.after, tolerance)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The file as plain torch reads it."""
    return torch.load(path, weights_only=True)  # type: ignore[no-any-return]


def mean_losses(runs: Sequence[Run]) -> list[float]:
    """The ranks' losses, averaged, step by step."""
    return [sum(losses) / len(losses) for losses in zip(*(run.losses for run in runs), strict=True)]


__all__ = [
    "STAGES", "TOLERANCE", "WORLD_SIZE", "Block", "Regression", "Run", "assert_close", "assert_same_on_all_ranks",
    "assert_trained_as", "fit_once", "fit_plain", "fit_ranks", "launched", "loader", "make_trainer", "mean_losses",
    "read_checkpoint", "setup_module", "share", "teardown_module", "tokens", "trunk", "vectors",
    "whole_parameters",
]  # fmt: skip
