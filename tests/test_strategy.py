"""What a user of the Trainer meets: names, both packages, checkpoints that DDP reads, errors that say what to type."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning_pytorch
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_zero
from lightning_zero import PytorchLightningZeROStrategy, ZeROStrategy, host
from lightning_zero.sharded_parameter import ShardedParameter
from lightning_zero.unit import ReplacedParameterError
from lightning_zero.units import UnknownUnitError

STAGES = (1, 2, 3)


def network() -> nn.Sequential:
    """Eleven layers, so that units exist."""
    return nn.Sequential(
        nn.Linear(3, 5), *(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(9)), nn.Linear(5, 2)
    )


class Model(lightning_pytorch.LightningModule):
    """A small regression; AdamW with a schedule."""

    def __init__(self, fail_on_rank: int = -1) -> None:
        super().__init__()
        self.net = network()
        self.register_buffer("steps_seen", torch.zeros(()))
        self.fail_on_rank = fail_on_rank

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_rank == self.fail_on_rank and batch_idx == 1:
            raise ZeroDivisionError("this rank is unlucky")
        self.steps_seen += 1
        loss = F.mse_loss(self.net(batch[:, :3]), batch[:, 3:])
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("held_out", F.mse_loss(self.net(batch[:, :3]), batch[:, 3:]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class OtherPackageModel(pytorch_lightning.LightningModule):
    """The same for `pytorch_lightning`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[:, :3]), batch[:, 3:])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows(batches: int = 4) -> DataLoader[Any]:
    """``batches`` batches of 2 rows for each of 2 ranks."""
    data = torch.randn(4 * batches, 5, generator=torch.Generator().manual_seed(3))
    return DataLoader(data, batch_size=2)  # type: ignore[arg-type]


def trainer(strategy: Any, package: Any = lightning_pytorch, **options: Any) -> Any:
    """A quiet Trainer on two CPU processes for one epoch."""
    quiet = {
        "devices": 2,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
    }
    return package.Trainer(accelerator="cpu", strategy=strategy, **{**quiet, **options})


def fresh(**options: Any) -> Model:
    """The model with the same initial weights every time."""
    torch.manual_seed(5)
    return Model(**options)


def weights(model: nn.Module) -> Tensor:
    """All parameters in one row."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# Names and packages


@pytest.mark.parametrize("package", [lightning_pytorch, pytorch_lightning])
@pytest.mark.parametrize("stage", STAGES)
def test_the_import_registers_each_name_in_both_packages(package: Any, stage: int) -> None:
    """zero1, zero2, zero3, each with the launcher forms of DDP, in upper case too."""
    known = package.strategies.StrategyRegistry.available_strategies()
    assert {f"zero{stage}{form}" for form in ("", "_spawn", "_fork", "_notebook")} <= set(known)
    chosen = package.Trainer(accelerator="cpu", devices=2, strategy=f"ZeRO{stage}", logger=False).strategy
    assert chosen.stage == stage
    assert isinstance(chosen, package.strategies.DDPStrategy)


def test_a_second_import_changes_nothing() -> None:
    """Registering twice would raise in Lightning."""
    lightning_zero.strategy.register_strategies()


@pytest.mark.parametrize("stage", STAGES)
def test_the_other_package_trains_too(stage: int) -> None:
    """The same three steps as under its own DDP, in fp32 to the last digit that a sum of two allows."""
    torch.manual_seed(5)
    models = [OtherPackageModel(), OtherPackageModel()]
    models[1].load_state_dict(models[0].state_dict())
    for model, strategy in zip(models, ("ddp_fork", f"zero{stage}_fork")):
        trainer(strategy, pytorch_lightning).fit(model, rows())
    assert torch.allclose(weights(models[0]), weights(models[1]), rtol=0, atol=1e-7)


def test_a_strategy_of_the_other_package_is_refused_by_name() -> None:
    """Lightning prints the object, and the object says where it belongs."""
    with pytest.raises(ValueError, match=r"for `lightning.pytorch.Trainer`; the name strategy='zero2'"):
        pytorch_lightning.Trainer(accelerator="cpu", devices=2, strategy=ZeROStrategy(stage=2))
    with pytest.raises(ValueError, match=r"for `pytorch_lightning.Trainer`; the name strategy='zero3'"):
        lightning_pytorch.Trainer(accelerator="cpu", devices=2, strategy=PytorchLightningZeROStrategy())


@pytest.mark.parametrize("stage", STAGES)
def test_one_process_trains_as_ddp_on_one_process(stage: int) -> None:
    """devices=1: bit for bit."""
    alone, sharded = fresh(), fresh()
    for model, strategy in ((alone, "ddp_fork"), (sharded, f"zero{stage}_fork")):
        trainer(strategy, devices=1).fit(model, rows())
    assert torch.equal(weights(alone), weights(sharded))


def test_spawned_processes_train_and_bring_the_weights_back() -> None:
    """The strategy and the module survive pickling."""
    plain, sharded = fresh(), fresh()
    trainer("ddp_fork").fit(plain, rows())
    trainer("zero3_spawn").fit(sharded, rows())
    assert torch.allclose(weights(plain), weights(sharded), rtol=0, atol=1e-7)


@pytest.mark.parametrize("stage", STAGES)
def test_mixed_precision_has_the_numerics_of_ddp(stage: int) -> None:
    """Autocast over fp32 weights: the same casts, the same sums."""
    plain, sharded = fresh(), fresh()
    for model, strategy in ((plain, "ddp_fork"), (sharded, f"zero{stage}_fork")):
        trainer(strategy, precision="bf16-mixed").fit(model, rows())
    assert torch.allclose(weights(plain), weights(sharded), rtol=0, atol=1e-6)


class LooksOnRankZero(Model):
    """Calls itself between steps, on rank 0 alone, in training mode and with gradients on, as to log a picture."""

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == 0:
            self(torch.ones(1, 3))


@pytest.mark.parametrize("stage", [1, 2])
def test_a_forward_on_rank_zero_alone_sends_nothing(stage: int) -> None:
    """Whole values rest there, and buffers travel with training steps only: as under DDP."""
    plain, looking = fresh(), LooksOnRankZero()
    looking.load_state_dict(plain.state_dict())
    trainer("ddp_fork").fit(plain, rows())
    trainer(f"zero{stage}_fork").fit(looking, rows())
    assert torch.allclose(weights(plain), weights(looking), rtol=0, atol=1e-6)


# Checkpoints


def saving(folder: Path) -> dict[str, Any]:
    """Options that save every epoch as ``folder/{epoch}.ckpt``."""
    keep = ModelCheckpoint(folder, filename="{epoch}", auto_insert_metric_name=False, save_top_k=-1)
    return {"enable_checkpointing": True, "callbacks": [keep]}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("direction", ["ddp writes", "zero writes"])
def test_ddp_goes_on_from_a_zero_run_and_back(tmp_path: Path, stage: int, direction: str) -> None:
    """One epoch under one, the second under the other: weights, moments and learning rate of a straight DDP run."""
    straight = fresh()
    trainer("ddp_fork", max_epochs=2).fit(straight, rows())
    first, second = (
        ("ddp_fork", f"zero{stage}_fork") if direction == "ddp writes" else (f"zero{stage}_fork", "ddp_fork")
    )
    trainer(first, **saving(tmp_path)).fit(fresh(), rows())
    resumed = Model()
    trainer(second, max_epochs=2).fit(resumed, rows(), ckpt_path=tmp_path / "0.ckpt")
    assert torch.allclose(weights(straight), weights(resumed), rtol=0, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_has_the_layout_of_ddps(tmp_path: Path, stage: int) -> None:
    """Same keys, shapes and dtypes, in weights and in optimizer state; no type of this package inside."""
    for strategy in ("ddp_fork", f"zero{stage}_fork"):
        trainer(strategy, **saving(tmp_path / strategy)).fit(fresh(), rows())
    plain, sharded = (
        torch.load(tmp_path / strategy / "0.ckpt", weights_only=True) for strategy in ("ddp_fork", f"zero{stage}_fork")
    )
    assert plain.keys() == sharded.keys()

    def layout(value: Any) -> Any:
        if isinstance(value, Tensor):
            return tuple(value.shape), value.dtype, type(value), value.untyped_storage().nbytes()
        if isinstance(value, dict):
            return {key: layout(item) for key, item in value.items()}
        return [layout(item) for item in value] if isinstance(value, list | tuple) else value

    for key in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert layout(plain[key]) == layout(sharded[key]), key


def test_load_from_checkpoint_needs_no_package_of_ours(tmp_path: Path) -> None:
    """A process in which lightning_zero cannot be imported reads the trained weights."""
    model = fresh()
    trainer("zero3_fork", **saving(tmp_path)).fit(model, rows())
    code = (
        "import sys; sys.modules['lightning_zero'] = None\n"
        "import lightning.pytorch as L, torch\n"
        "from torch import nn\n"
        "class Model(L.LightningModule):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        layers = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(9)]\n"
        "        self.net = nn.Sequential(nn.Linear(3, 5), *layers, nn.Linear(5, 2))\n"
        "        self.register_buffer('steps_seen', torch.zeros(()))\n"
        f"model = Model.load_from_checkpoint({str(tmp_path / '0.ckpt')!r})\n"
        "print(sum(p.double().sum().item() for p in model.parameters()))\n"
    )
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    expected = sum(parameter.double().sum().item() for parameter in model.parameters())
    assert float(out.stdout.split()[-1]) == pytest.approx(expected, abs=1e-12)


def test_a_checkpoint_saved_after_fit_has_everything(tmp_path: Path) -> None:
    """The module is whole by then, the optimizer state still sharded: the file is that of the last epoch."""

    class SavesAfterFit(lightning_pytorch.Callback):
        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            assert not any(isinstance(parameter, ShardedParameter) for parameter in pl_module.parameters())
            trainer.save_checkpoint(tmp_path / "after.ckpt")

    options = saving(tmp_path)
    options["callbacks"].append(SavesAfterFit())
    trainer("zero3_fork", **options).fit(fresh(), rows())
    during, after = (torch.load(tmp_path / name, weights_only=True) for name in ("0.ckpt", "after.ckpt"))
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(during[key], after[key], rtol=0, atol=0)


def test_a_checkpoint_of_another_model_is_refused_with_its_names(tmp_path: Path) -> None:
    """Missing, unexpected and misshapen, each by its full name, then what to do."""
    model = fresh()
    state = {**model.state_dict(), "other.weight": torch.zeros(2)}
    del state["net.10.bias"]
    state["net.0.weight"] = torch.zeros(7, 7)
    torch.save({"state_dict": state, "pytorch-lightning_version": "2.6.6"}, tmp_path / "other.ckpt")
    with pytest.raises(Exception, match="Build the model as it was") as caught:
        trainer("zero3_fork").validate(model, rows(), ckpt_path=tmp_path / "other.ckpt")
    for name in ("net.10.bias", "other.weight", "net.0.weight"):
        assert name in str(caught.value)


def test_an_optimizer_of_other_groups_is_refused(tmp_path: Path) -> None:
    """The sizes of both are told."""

    class TwoGroups(Model):
        def configure_optimizers(self) -> Any:
            *some, last = self.parameters()
            return torch.optim.AdamW([{"params": some}, {"params": [last]}])

    trainer("zero2_fork", **saving(tmp_path)).fit(fresh(), rows())
    with pytest.raises(Exception, match=r"groups of \[22\] parameters, this one has \[21, 1\]"):
        trainer("zero2_fork", max_epochs=2).fit(TwoGroups(), rows(), ckpt_path=tmp_path / "0.ckpt")


# After fit


def test_a_host_without_room_keeps_the_module_at_rest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One warning says so and names `gathered`; values are still to be had."""
    monkeypatch.setattr(host, "free_host_bytes", lambda: 0)

    class Reads(lightning_pytorch.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            self.catching = warnings.catch_warnings(record=True)
            self.warned = self.catching.__enter__()
            warnings.simplefilter("always")

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            told = [str(warning.message) for warning in self.warned if "stay sharded" in str(warning.message)]
            resting = all(isinstance(parameter, ShardedParameter) for parameter in pl_module.parameters())
            with lightning_zero.gathered(pl_module):
                whole = weights(pl_module).clone()
            if trainer.is_global_zero:
                torch.save((resting, told, whole), tmp_path / "seen.pt")
            # The forked process hands the module's weights back, which only a whole one has.
            lightning_zero.unshard(pl_module)

    expected = fresh()
    trainer("ddp_fork").fit(expected, rows())
    trainer("zero3_fork", callbacks=[Reads()]).fit(fresh(), rows())
    resting, told, whole = torch.load(tmp_path / "seen.pt")
    assert resting
    assert len(told) == 1
    assert "lightning_zero.gathered" in told[0]
    assert torch.allclose(whole, weights(expected), rtol=0, atol=1e-6)


# Bad input


@pytest.mark.parametrize("stage", [4, -1, "3", None, True])
def test_an_unknown_stage_is_refused_at_construction(stage: Any) -> None:
    """The value is quoted."""
    with pytest.raises(ValueError, match=f"stage={stage!r} is unknown.*Write `stage=3`"):
        ZeROStrategy(stage=stage)


def test_an_unknown_argument_is_refused_at_construction() -> None:
    """A setting that cannot be honored is never silence."""
    with pytest.raises(TypeError, match="does not know 'bucket_size'"):
        ZeROStrategy(stage=3, bucket_size=3)


def test_arguments_of_ddp_without_a_meaning_are_accepted() -> None:
    """Existing projects pass them."""
    ZeROStrategy(stage=1, find_unused_parameters=True, static_graph=True, gradient_as_bucket_view=True)


def test_an_unknown_unit_class_is_refused_by_name() -> None:
    """At set-up, when the module is known."""
    with pytest.raises(Exception, match="no submodule of `Model` is a 'Blok'"):
        trainer(ZeROStrategy(units=["Blok"], start_method="fork")).fit(fresh(), rows())
    assert issubclass(UnknownUnitError, ValueError)


def test_mps_is_refused_with_the_way_out() -> None:
    """It has no collectives."""
    strategy = ZeROStrategy(parallel_devices=[torch.device("mps")])
    with pytest.raises(ValueError, match=r"MPS has not.*accelerator='cpu'"):
        strategy.setup_environment()


def test_a_parameter_replaced_after_set_up_is_refused_by_name() -> None:
    """It would silently not be trained."""

    class Replaces(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.net[0].bias = nn.Parameter(torch.zeros(5))

    with pytest.raises(Exception, match=r"`net.0.bias` was replaced after the model was sharded") as caught:
        trainer("zero3_fork").fit(Replaces(), rows())
    assert ReplacedParameterError.__name__ in str(caught.value)


@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_on_one_rank_ends_all_with_its_traceback(stage: int) -> None:
    """Within seconds, though the other rank waits for this one's gradients."""
    start = time.monotonic()
    with pytest.raises(Exception, match="this rank is unlucky"):
        trainer(f"zero{stage}_fork").fit(fresh(fail_on_rank=1), rows())
    assert time.monotonic() - start < 30  # a hang ends after the group's time limit of 30 minutes
