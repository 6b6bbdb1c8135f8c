"""Lightning's callbacks: each does under sharding what it does in one process, or is refused before training."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.model_summary import ModelSummary
from rows import (
    STAGES,
    WORLD_SIZE,
    Block,
    Regression,
    Run,
    assert_close,
    assert_trained_as,
    fit_plain,
    fit_ranks,
    read_checkpoint,
    setup_module,  # noqa: F401
    teardown_module,  # noqa: F401
    vectors,
)
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_zero import held_bytes
from lightning_zero.sharded_parameter import ShardedTensor

WIDTH = 17


class Model(Regression):
    """Nine residual blocks between two layers, one of them frozen, and a buffer that averages meet."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, WIDTH), *(Block(WIDTH) for _ in range(9)), nn.Linear(WIDTH, 3))
        self.net[3].requires_grad_(False)
        self.register_buffer("count", torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.record.append(loss.item())
        self.log("val", loss, sync_dist=True)


def whole(tensor: Tensor) -> Tensor:
    """A plain copy: a collective where ``tensor`` is sharded."""
    return (tensor.whole() if isinstance(tensor, ShardedTensor) else tensor).detach().clone()


def fit_both(
    stage: int, make: Any, callbacks: Any, steps: int = 4, folder: Path | None = None, **arguments: Any
) -> tuple[Any, list[Any]]:
    """The twin's run and the ranks', each with callbacks of its own."""
    validation = vectors(2, 4, 3) if arguments.pop("validates", False) else None
    common = {"validation": validation, **arguments}
    plain = {"checkpoint": folder / "plain.ckpt"} if folder else {}
    twin = fit_plain(make, vectors(steps, 4, 3), callbacks=callbacks(), **plain, **common)
    sharded = folder / "sharded.ckpt" if folder else None
    return twin, fit_ranks(stage, make, vectors(steps, 4, 3), sharded, callbacks=callbacks(), **common)


def assert_same_records(twin: Any, runs: Any) -> None:
    """What the ranks recorded, averaged, is what the twin did."""
    means = [sum(values) / WORLD_SIZE for values in zip(*(run.record for run in runs), strict=True)]
    assert means == pytest.approx(twin.record, abs=1e-10)
    assert twin.record


# Averages


class WatchesAverage(Callback):
    """Notes what the average holds at the end of training."""

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        averaging = next(c for c in trainer.callbacks if isinstance(c, WeightAveraging | StochasticWeightAveraging))
        average = averaging._average_model
        assert average is not None
        module.record = [held_bytes(average).parameters, {name: whole(p) for name, p in average.named_parameters()}]

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        averaging = next(c for c in trainer.callbacks if isinstance(c, WeightAveraging | StochasticWeightAveraging))
        average = averaging._average_model
        assert average is not None
        assert all(type(p) is nn.Parameter for p in average.parameters())
        module.record.append({name: p.detach().clone() for name, p in average.named_parameters()})


AVERAGES = {
    "ema": lambda: EMAWeightAveraging(decay=0.7, update_starting_at_step=1),
    "ema without buffers": lambda: EMAWeightAveraging(decay=0.7, use_buffers=False),
    "equal weights": lambda: WeightAveraging(),
    "swa": lambda: StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1, annealing_epochs=1),
}


@pytest.mark.parametrize("name", AVERAGES)
@pytest.mark.parametrize("stage", STAGES)
def test_an_average_of_weights_is_that_of_one_process_and_sharded(stage: int, name: str) -> None:
    """Values at the end of training, live and after fit; together the ranks hold one copy of the average."""
    twin, runs = fit_both(stage, Model, lambda: [AVERAGES[name](), WatchesAverage()], max_epochs=2)
    assert_trained_as(twin, runs)
    for run in runs:
        assert_close(run.record[1], twin.record[1])
        assert_close(run.record[2], run.record[1], tolerance=0)
    whole_bytes = twin.record[0]
    assert whole_bytes == 8 * sum(p.numel() for p in Model().parameters())
    assert sum(run.record[0] for run in runs) == whole_bytes
    assert max(run.record[0] for run in runs) < 0.6 * whole_bytes


@pytest.mark.parametrize("stage", STAGES)
def test_validation_sees_the_average_and_training_goes_on_from_the_weights(stage: int) -> None:
    """Losses of validation epochs between training epochs, and of the sanity check before them."""
    averages = lambda: [EMAWeightAveraging(decay=0.7)]  # noqa: E731
    twin, runs = fit_both(stage, Model, averages, validates=True, max_epochs=3)
    assert_trained_as(twin, runs)
    assert_same_records(twin, runs)


class Normalized(Model):
    """Its batch statistics differ between ranks after each forward; a recurrent part and a tie for copies to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2] = nn.Sequential(self.net[2], nn.BatchNorm1d(WIDTH))
        self.net[6].linear.weight = self.net[5].linear.weight
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.net[:7](x)
        return self.net[7:](h + self.recurrent(h[:, None])[0][:, 0])  # type: ignore[no-any-return]


@cache
def normalized(strategy: str, name: str) -> list[Run]:
    """Ranks that train with an average and validate it."""
    common = {"validation": vectors(2, 4, 3), "num_sanity_val_steps": 0, "max_epochs": 3}
    return fit_ranks(0, Normalized, vectors(4, 4, 3), callbacks=[AVERAGES[name]()], strategy=strategy, **common)


@pytest.mark.parametrize("name", ["ema", "swa"])
@pytest.mark.parametrize("stage", STAGES)
def test_buffers_are_averaged_as_under_data_parallelism(stage: int, name: str) -> None:
    """Each rank validates rank 0's averaged statistics; SWA computes them anew in an epoch of its own."""
    expected = normalized("ddp_find_unused_parameters_true", name)
    for run, other in zip(normalized(f"zero{stage}", name), expected):
        assert run.record == pytest.approx(other.record, abs=1e-10)
        assert_close(run.after, other.after)


@pytest.mark.parametrize("name", ["ema", "swa"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_holds_weights_and_average_whole(stage: int, name: str, tmp_path: Path) -> None:
    """The file is the twin's, entry by entry, without a type of ours in it; either goes on from it."""
    fit_both(stage, Model, lambda: [AVERAGES[name]()], folder=tmp_path, max_epochs=2)
    plain, sharded = (read_checkpoint(tmp_path / f"{kind}.ckpt") for kind in ("plain", "sharded"))
    assert plain.keys() == sharded.keys()
    for key in ("state_dict", "current_model_state", "averaging_state"):
        assert (key in plain) == (name == "ema" or key == "state_dict")
        if key in plain:
            assert_close(sharded[key], plain[key])
    if name == "swa":
        (saved,), (expected,) = (
            [state["average_model_state"] for callback, state in c["callbacks"].items() if "Stochastic" in callback]
            for c in (sharded, plain)
        )
        assert_close(saved, expected)


class SavesMidway(Callback):
    """After the first epoch, as `ModelCheckpoint` does."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("name", ["ema", "swa"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_run_goes_on_with_its_average(stage: int, name: str, tmp_path: Path) -> None:
    """One epoch, a checkpoint, three more epochs resumed from it: the straight run of four."""
    batches = vectors(3, 4, 3)

    def callbacks(*more: Callback) -> list[Callback]:
        return [AVERAGES[name](), *more, WatchesAverage()]

    twin = fit_plain(Model, batches, callbacks=callbacks(), max_epochs=4)
    saves = SavesMidway(tmp_path / "first.ckpt")
    fit_ranks(stage, Model, batches, callbacks=callbacks(saves), max_epochs=4)
    runs = fit_ranks(stage, Model, batches, callbacks=callbacks(), ckpt_path=tmp_path / "first.ckpt", max_epochs=4)
    assert_trained_as(twin, runs)
    for run in runs:
        assert_close(run.record[1], twin.record[1])


class KeepsAverage(Callback):
    """An average of the user's own, in lists, which a checkpoint keeps."""

    def __init__(self, ranks: range = range(WORLD_SIZE)) -> None:
        self.ranks = ranks

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.average = [p.detach().clone() for p in module.parameters()]

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        for average, parameter in zip(self.average, module.parameters(), strict=True):
            average.lerp_(parameter.detach(), 0.3)

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.global_rank in self.ranks:
            checkpoint["average"] = {"values": self.average, "first row": [self.average[0][0]]}


@pytest.mark.parametrize("stage", STAGES)
def test_what_a_callback_saves_is_whole(stage: int, tmp_path: Path) -> None:
    """Sharded tensors and views of them, wherever in the checkpoint."""
    fit_both(stage, Model, lambda: [KeepsAverage()], folder=tmp_path)
    plain, sharded = (read_checkpoint(tmp_path / f"{kind}.ckpt")["average"] for kind in ("plain", "sharded"))
    torch.testing.assert_close(sharded, plain, rtol=0, atol=1e-10)


def test_sharded_values_that_one_rank_alone_saves_are_refused(tmp_path: Path) -> None:
    """On both ranks, instead of a hang."""
    for ranks in (range(1), range(1, 2)):
        with pytest.raises(AssertionError, match=r"sharded tensors on rank 0.*alike on every rank"):
            fit_ranks(3, Model, vectors(1, 4, 3), tmp_path / "x.ckpt", callbacks=[KeepsAverage(ranks)])


# Freezing and unfreezing


class Unfreezes(BaseFinetuning):
    """The head alone, then the later blocks, then everything, in groups with learning rates of their own."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze([module.net[i] for i in range(7)])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group([module.net[i] for i in range(4, 7)], optimizer, lr=0.003)
        elif epoch == 2:
            self.unfreeze_and_add_param_group([module.net[i] for i in range(4)], optimizer)


class Finetuned(Model):
    """Trains what is not frozen, under a schedule."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def on_train_epoch_end(self) -> None:
        groups = self.optimizers().param_groups  # type: ignore[union-attr]
        self.record.append([(group["lr"], len(group["params"])) for group in groups])


@pytest.mark.parametrize("stage", STAGES)
def test_finetuning_unfreezes_and_adds_groups(stage: int, tmp_path: Path) -> None:
    """Blocks that were frozen when the model was sharded are trained, and their states saved."""
    twin, runs = fit_both(stage, Finetuned, lambda: [Unfreezes()], folder=tmp_path, max_epochs=4)
    assert_trained_as(twin, runs, tmp_path / "sharded.ckpt")
    assert [len(groups) for groups in twin.record] == [1, 2, 3, 3]
    assert all(run.record == twin.record for run in runs)
    plain, sharded = (read_checkpoint(tmp_path / f"{kind}.ckpt") for kind in ("plain", "sharded"))
    torch.testing.assert_close(sharded["optimizer_states"], plain["optimizer_states"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("stage", STAGES)
def test_finetuning_goes_on_after_a_checkpoint(stage: int, tmp_path: Path) -> None:
    """Two epochs, a checkpoint with two groups, two more epochs: as one process that did the same.

    Not as a straight run: Lightning freezes again what was unfrozen before the checkpoint.
    """
    fit_both(stage, Finetuned, lambda: [Unfreezes()], folder=tmp_path, max_epochs=2)
    batches, common = vectors(4, 4, 3), {"max_epochs": 4}
    twin = fit_plain(Finetuned, batches, callbacks=[Unfreezes()], ckpt_path=tmp_path / "plain.ckpt", **common)
    runs = fit_ranks(stage, Finetuned, batches, callbacks=[Unfreezes()], ckpt_path=tmp_path / "sharded.ckpt", **common)
    assert_trained_as(twin, runs)
    assert [len(groups) for groups in twin.record] == [3, 3]
    assert all(run.record == twin.record for run in runs)


class Backbone(Finetuned):
    """What `BackboneFinetuning` expects."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(*(Block(WIDTH) for _ in range(9)), nn.Linear(WIDTH, WIDTH))
        self.net = nn.Sequential(nn.Linear(4, WIDTH), self.backbone, nn.Linear(WIDTH, 3))


@pytest.mark.parametrize("stage", STAGES)
def test_a_backbone_is_unfrozen_at_its_epoch(stage: int) -> None:
    """And its learning rate grows from there."""
    callbacks = lambda: [BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_ratio_lr=0.2)]  # noqa: E731
    twin, runs = fit_both(stage, Backbone, callbacks, max_epochs=3)
    assert_trained_as(twin, runs)
    assert [len(groups) for groups in twin.record] == [1, 2, 2]
    assert all(run.record == twin.record for run in runs)


# Callbacks that watch, stop and schedule


class Watched(Model):
    """Trains fast enough to overfit, and logs what callbacks look at."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.record.append({name: float(norm) for name, norm in grad_norm(self, norm_type=2).items()})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val"}}


class Notes(Callback):
    """What the other callbacks came to."""

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        module.record += [trainer.current_epoch, trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"]]
        module.record += [str(ModelSummary(module, max_depth=-1))]
        for callback in trainer.callbacks:
            if isinstance(callback, EarlyStopping | ModelCheckpoint):
                module.record.append(float(getattr(callback, "best_score", getattr(callback, "best_model_score", 0))))


def watching(folder: Path) -> list[Callback]:
    """Most of what Lightning has to offer, at once."""
    return [
        EarlyStopping("val", min_delta=0.02, patience=1),
        ModelCheckpoint(folder, filename="best", monitor="val", enable_version_counter=False),
        GradientAccumulationScheduler({0: 1, 1: 2, 3: 3}),
        LearningRateMonitor(logging_interval="step", log_momentum=True),
        DeviceStatsMonitor(cpu_stats=False),
        Timer(duration="00:01:00:00"),
        LambdaCallback(on_before_zero_grad=lambda trainer, module, optimizer: module.record.append("zero")),
        Notes(),
    ]


@pytest.mark.parametrize("stage", STAGES)
def test_callbacks_that_watch_stop_and_schedule(stage: int, tmp_path: Path) -> None:
    """Early stopping, the best checkpoint, plateaus, growing accumulation, gradient norms and the summary."""
    common = {"validation": vectors(2, 4, 3), "max_epochs": 8, "num_sanity_val_steps": 0}
    common |= {"enable_checkpointing": True, "enable_progress_bar": True, "enable_model_summary": True}
    folders = [tmp_path / kind for kind in ("plain", "sharded")]
    loggers = [CSVLogger(folder, "", "") for folder in folders]
    twin = fit_plain(Watched, vectors(4, 4, 3), callbacks=watching(folders[0]), logger=loggers[0], **common)
    runs = fit_ranks(stage, Watched, vectors(4, 4, 3), callbacks=watching(folders[1]), logger=loggers[1], **common)
    assert_trained_as(twin, runs)
    assert twin.record[-6] < 8, "nothing stopped the twin"
    plain, sharded = (read_checkpoint(folder / "best.ckpt") for folder in folders)
    assert plain["epoch"] == sharded["epoch"]
    assert_close(sharded["state_dict"], plain["state_dict"])
    for key in ("best", "_last_lr", "num_bad_epochs"):
        mine, theirs = sharded["lr_schedulers"][0][key], plain["lr_schedulers"][0][key]
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)
    for run in runs:
        # Validation losses are each rank's own.
        seen, expected = ([item for item in r.record if not isinstance(item, float)] for r in (run, twin))
        assert len(seen) == len(expected)
        for mine, theirs in zip(seen, expected):
            assert mine == (pytest.approx(theirs, abs=1e-10) if isinstance(theirs, dict) else theirs)
        assert run.record[-2:] == pytest.approx(twin.record[-2:], abs=1e-10)


class Found(Model):
    """Has what the tuner looks for."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01
        self.batch_size = 2

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def on_train_end(self) -> None:
        self.record.append(self.lr)


@cache
def found(strategy: str) -> list[Run]:
    """Ranks that look for a learning rate and then train."""
    finder = LearningRateFinder(min_lr=1e-4, num_training_steps=16)
    with TemporaryDirectory() as folder:
        return fit_ranks(0, Found, vectors(18, 4, 3), callbacks=[finder], strategy=strategy, default_root_dir=folder)


@pytest.mark.parametrize("stage", STAGES)
def test_the_learning_rate_finder_finds_what_it_finds_under_data_parallelism(stage: int) -> None:
    """It tries on rank 0's loss, restores weights and optimizer, and trains with what it found."""
    for run, expected in zip(found(f"zero{stage}"), found("ddp")):
        assert expected.record[-1] != 0.01
        assert run.record == expected.record
        assert_close(run.after, expected.after)


REFUSED = {
    "ModelPruning": lambda _: ModelPruning("l1_unstructured", amount=0.5),
    "OnExceptionCheckpoint": lambda folder: OnExceptionCheckpoint(folder),
    "ModelCheckpoint": lambda folder: ModelCheckpoint(folder, save_on_exception=True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_before_training(name: str, tmp_path: Path) -> None:
    """On each rank, by name, with a way out."""
    with pytest.raises(AssertionError, match=f"ValueError: `{name}` .*(configure_model|every_n_train_steps)"):
        fit_ranks(2, Model, vectors(1, 4, 3), callbacks=[REFUSED[name](tmp_path)], enable_checkpointing=True)
