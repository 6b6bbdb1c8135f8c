"""R15. Fit, validate, test and predict in any order, repeated, with one Trainer or several, in one script or two."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from rows import (
    STAGES,
    WORLD_SIZE,
    Block,
    Regression,
    assert_close,
    launched,
    loader,
    make_trainer,
    read_checkpoint,
    setup_module,  # noqa: F401
    share,
    teardown_module,  # noqa: F401
    vectors,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero.sharded_parameter import ShardedTensor


class Evaluates(LightningModule):
    """Has no ``configure_optimizers``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), *(Block(5) for _ in range(9)), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])  # type: ignore[no-any-return]


class Trains(Evaluates):
    """The same, with an optimizer."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    configure_optimizers = Regression.configure_optimizers


def is_plain(module: nn.Module) -> bool:
    """Whether nothing of the strategy is left in ``module``."""
    return all(type(p) is nn.Parameter and not isinstance(p, ShardedTensor) for p in module.parameters())


def on_ranks(stage: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """``function(strategy, rank, *args)`` on each rank; rank r sees its share of the batches."""

    def on_rank(rank: int) -> Any:
        torch.manual_seed(rank)
        with launched(rank):
            return function(f"zero{stage}", rank, *args)

    return run_ranks(WORLD_SIZE, on_rank)


def data(rank: int | None) -> DataLoader[Any]:
    """Two batches: of ``rank``, or of all ranks."""
    batches = vectors(2, 4, 3)
    return loader(batches if rank is None else share(batches, rank))


# Everything in a row


def everything(strategy: str, rank: int | None, folder: Path, new_trainers: bool) -> dict[str, Any]:
    """Fit, validate, test, predict, fit again; what was seen, and a checkpoint after each call."""
    module, found, batches = Trains(), {}, data(rank)
    trainer = make_trainer(strategy)
    for number, call in enumerate(("fit", "validate", "test", "predict", "fit")):
        if new_trainers and number:
            trainer = make_trainer(strategy)
        if not new_trainers and number == 4:
            trainer.fit_loop.max_epochs = 2
        result = getattr(trainer, call)(module, batches, **({} if call in ("fit", "predict") else {"verbose": False}))
        assert is_plain(module)
        found[f"{number} {call}"] = result
        if not new_trainers:
            trainer.save_checkpoint(folder / f"{number}.ckpt")
    found["state"] = {name: value.clone() for name, value in module.state_dict().items()}
    return found


@cache
def everything_twin(folder: Path, new_trainers: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    return everything("auto", None, folder, new_trainers)


@cache
def everything_on_ranks(stage: int, folder: Path, new_trainers: bool) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    return on_ranks(stage, everything, folder, new_trainers)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the twin's checkpoints are, and below it each stage's."""
    return tmp_path_factory.mktemp("everything")


@pytest.mark.parametrize("new_trainers", [False, True], ids=["one_trainer", "new_trainers"])
@pytest.mark.parametrize("stage", STAGES)
def test_m4_calls_in_a_row_are_those_of_one_process(stage: int, new_trainers: bool, folder: Path) -> None:
    """M4: fit, validate, test, predict, fit: metrics, predictions, and a second fit that goes on from the first."""
    twin = everything_twin(folder, new_trainers)
    both = everything_on_ranks(stage, folder / str(stage), new_trainers)
    for found in both:
        assert_close(found["state"], twin["state"])
        for call in ("1 validate", "2 test"):
            assert found[call] == [pytest.approx(twin[call][0], rel=1e-10)]
    for batch, expected in enumerate(twin["3 predict"]):
        parts = [found["3 predict"][batch] for found in both]
        torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("stage", STAGES)
def test_j3_a_checkpoint_may_be_saved_after_any_call(stage: int, folder: Path) -> None:
    """J3: after validate, test and predict it holds what it held after fit, optimizer state too: the twin's values."""
    everything_twin(folder, False)
    everything_on_ranks(stage, folder / str(stage), False)
    after_fit = read_checkpoint(folder / str(stage) / "0.ckpt")
    assert_close(after_fit["state_dict"], read_checkpoint(folder / "0.ckpt")["state_dict"])
    for number in (1, 2, 3):
        saved = read_checkpoint(folder / str(stage) / f"{number}.ckpt")
        assert_close(saved["state_dict"], after_fit["state_dict"], tolerance=0)
    for number in range(5):
        saved, expected = (read_checkpoint(path / f"{number}.ckpt") for path in (folder / str(stage), folder))
        assert saved.keys() == expected.keys()
        assert_same_optimizer_state(saved["optimizer_states"], expected["optimizer_states"])


def assert_same_optimizer_state(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Groups and state of plain optimizers, within 1e-10."""
    for mine, other in zip(found, expected, strict=True):
        assert mine["param_groups"] == other["param_groups"]
        assert mine["state"].keys() == other["state"].keys()
        for index, state in other["state"].items():
            assert_close(mine["state"][index], state)


# Evaluation alone


def evaluate(strategy: str, rank: int | None, checkpoint: Path | None) -> dict[str, Any]:
    """Validate, test and predict with a module that was never fit."""
    module, trainer, batches = Evaluates(), make_trainer(strategy), data(rank)
    arguments: dict[str, Any] = {"ckpt_path": checkpoint, "weights_only": True, "dataloaders": batches}
    found = {
        "validate": trainer.validate(module, verbose=False, **arguments),
        "test": trainer.test(module, verbose=False, **arguments),
        "predict": trainer.predict(module, **arguments),
    }
    assert is_plain(module)
    return {**found, "state": {name: value.clone() for name, value in module.state_dict().items()}}


@pytest.mark.parametrize("from_checkpoint", [False, True], ids=["as_built", "from_checkpoint"])
@pytest.mark.parametrize("stage", STAGES)
def test_m5_evaluation_needs_no_fit_and_no_optimizer(stage: int, from_checkpoint: bool, tmp_path: Path) -> None:
    """M5: `validate`, `test`, `predict` come first, on the module as rank 0 built it and from a plain checkpoint."""
    checkpoint = None
    if from_checkpoint:
        torch.manual_seed(7)
        plain = make_trainer()
        checkpoint = tmp_path / "plain.ckpt"
        plain.fit(Trains(), data(None))
        plain.save_checkpoint(checkpoint)
    torch.manual_seed(0)
    twin = evaluate("auto", None, checkpoint)
    both = on_ranks(stage, evaluate, checkpoint)
    for found in both:
        assert found["validate"] == [pytest.approx(twin["validate"][0], rel=1e-10)]
        assert found["test"] == [pytest.approx(twin["test"][0], rel=1e-10)]
        assert_close(found["state"], twin["state"], tolerance=0)
    for batch, expected in enumerate(twin["predict"]):
        parts = [found["predict"][batch] for found in both]
        torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=1e-10)


class Writes(BasePredictionWriter):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.rows: dict[int, Tensor] = {}
        self.epoch: list[int] = []

    def write_on_batch_end(
        self, trainer: Trainer, module: LightningModule, prediction: Tensor, batch_indices: Sequence[int] | None,
        batch: Any, batch_idx: int, dataloader_idx: int,
    ) -> None:  # fmt: skip
        assert batch_indices is not None
        self.rows.update(zip(batch_indices, prediction, strict=True))

    def write_on_epoch_end(
        self, trainer: Trainer, module: LightningModule, predictions: Any, batch_indices: Sequence[Any]
    ) -> None:
        self.epoch = [index for loader_indices in batch_indices for batch in loader_indices for index in batch]


def predict_and_write(strategy: str, rank: int | None, batch_size: int) -> tuple[dict[int, Tensor], list[int]]:
    """Predict 5 samples, as Lightning's own sampler spreads them over ranks."""
    writer = Writes()
    x = vectors(1, 4, 3)[0][0][:5]
    trainer = make_trainer(strategy, callbacks=[writer], use_distributed_sampler=True)
    trainer.predict(Evaluates(), DataLoader(TensorDataset(x), batch_size=batch_size), return_predictions=False)
    return writer.rows, writer.epoch


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_m6_predictions_of_two_ranks_cover_the_dataset_once(stage: int, batch_size: int) -> None:
    """M6: 5 samples: rank 0 predicts 0, 2, 4, in one batch more than rank 1, who predicts 1, 3; each as one process."""
    torch.manual_seed(0)
    expected, _ = predict_and_write("auto", None, batch_size)
    both = on_ranks(stage, predict_and_write, batch_size)
    assert [epoch for _, epoch in both] == [[0, 2, 4], [1, 3]]
    assert [list(rows) for rows, _ in both] == [[0, 2, 4], [1, 3]]
    for rows, _ in both:
        for index, row in rows.items():
            torch.testing.assert_close(row, expected[index], rtol=0, atol=1e-10)


# Scripts


class BringsItsData(Trains):
    """Its loaders serve each rank the rank's share."""

    def train_dataloader(self) -> DataLoader[Any]:
        return data(None if self.trainer.world_size == 1 else self.trainer.global_rank)

    val_dataloader = train_dataloader


def script(strategy: str, seed: int) -> dict[str, Tensor]:
    """A user's script: two Trainers, one after another, fit one module, and a third validates it."""
    torch.manual_seed(seed)
    module = BringsItsData()
    for _ in range(2):
        make_trainer(strategy).fit(module)
    trainer = make_trainer(strategy)
    trainer.validate(module, verbose=False)
    assert is_plain(module)
    return {**module.state_dict(), "val_loss": trainer.callback_metrics["val_loss"]}


@cache
def script_twin(seed: int) -> dict[str, Tensor]:
    return script("auto", seed)


@pytest.mark.parametrize("stage", STAGES)
def test_s6_trainers_follow_each_other_in_one_script(stage: int) -> None:
    """S6: each starts its own ranks, and the trained module is back in this process in between."""
    assert_close(script(f"zero{stage}_fork", seed=3), script_twin(3))


def _script_alone(strategy: str, seed: int) -> dict[str, Any]:
    # A new script finds no port of an earlier one.
    os.environ.pop("MASTER_PORT", None)
    return {name: value.tolist() for name, value in script(strategy, seed).items()}


@pytest.mark.parametrize("stage", STAGES)
def test_s6_two_scripts_run_at_once(stage: int) -> None:
    """S6: they take different ports, and neither sees the other."""
    seeds = (3, 4)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        jobs = [pool.submit(_script_alone, f"zero{stage}_fork", seed) for seed in seeds]
        results = [job.result(timeout=60) for job in jobs]
    for seed, result in zip(seeds, results):
        assert_close({name: torch.tensor(value) for name, value in result.items()}, script_twin(seed))
