"""R10, R11, R12. A resumed run is the one that never stopped; checkpoints are complete; exports are never empty."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from distributed import run_ranks
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from rows import launched
from safetensors.torch import load_file
from test_checkpoints import FORMS, Net, built, data, make_trainer
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_zero
from lightning_zero import CheckpointError, PrecisionRecipe, ZeROStrategy

STAGES = (1, 2, 3)


# R10


class Resumed(Net):
    """OneCycle, which moves learning rates and momenta at each step; dropout would need a state of its own."""

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=8)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def eight(rank: int) -> DataLoader[Any]:
    """Batches of an epoch of four steps, with accumulation."""
    generator = torch.Generator().manual_seed(rank)
    return DataLoader([torch.randint(11, (3,), generator=generator) for _ in range(8)], batch_size=None)  # type: ignore[arg-type]


PRECISIONS: dict[str, dict[str, Any]] = {
    "32-true": {},
    # Main weights are in the file, and not made again of what was rounded.
    "bf16-true": {"recipe": PrecisionRecipe(main=torch.float32)},
    "bf16-mixed": {},
    "16-mixed": {},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_k4_k5_a_resumed_run_is_the_straight_one(precision: str, form: str, tmp_path: Path) -> None:
    """Adam, OneCycle, clipping, accumulation, a loss scaler: losses and weights to the last bit."""

    def fit(rank: int, epochs: int, path: Path | None) -> Any:
        torch.manual_seed(0)
        module = Resumed()
        keep = ModelCheckpoint(tmp_path, filename="{epoch}", auto_insert_metric_name=False, save_top_k=-1)
        strategy = ZeROStrategy(2, state_dict_type=form, **PRECISIONS[precision])
        arguments: dict[str, Any] = {
            "max_epochs": epochs, "precision": precision, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2,
            "callbacks": [keep], "enable_checkpointing": True,
        }  # fmt: skip
        with launched(rank):
            make_trainer(strategy, 2, **arguments).fit(module, eight(rank), ckpt_path=path)
        return module

    def on_rank(rank: int) -> tuple[bool, bool]:
        straight = fit(rank, 2, None)
        again = fit(rank, 2, tmp_path / "0.ckpt")
        equal = all(torch.equal(a, b) for a, b in zip(straight.state_dict().values(), again.state_dict().values()))
        return straight.losses[8:] == again.losses and len(again.losses) == 8, equal

    assert run_ranks(2, on_rank) == [(True, True)] * 2


@pytest.mark.parametrize("stage", STAGES)
def test_k11_a_plain_optimizer_loads_what_was_saved(stage: int, tmp_path: Path) -> None:
    """Groups and numbers of parameters are the user's, frozen ones among them."""

    class Everything(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(
                [{"params": self.blocks.parameters()}, {"params": [*self.norm.parameters(), self.unused]}]
            )

    def on_rank(rank: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = Everything()
        with launched(rank):
            trainer = make_trainer(ZeROStrategy(stage), 2)
            trainer.fit(module, data(rank, 2))
            trainer.save_checkpoint(tmp_path / "x.ckpt")
        return dict(module.state_dict())

    state, _ = run_ranks(2, on_rank)
    checkpoint = torch.load(tmp_path / "x.ckpt", weights_only=True)
    module = Everything()
    module.load_state_dict(state)
    optimizer = module.configure_optimizers()
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        has_state = parameter.requires_grad and parameter is not module.unused
        assert (index in checkpoint["optimizer_states"][0]["state"]) == has_state
        assert not has_state or optimizer.state[parameter]["exp_avg"].shape == parameter.shape


# R11


class SavesAlone(Callback):
    """Rank 0 alone asks for a checkpoint, which takes all ranks."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_rank == 0:
            trainer.save_checkpoint("never.ckpt")


@pytest.mark.parametrize("form", FORMS)
def test_j1_a_checkpoint_that_one_rank_asks_for_ends_in_an_error(form: str, tmp_path: Path) -> None:
    """At the time limit of the process group, on each rank that waits; nothing hangs for ever."""

    def on_rank(rank: int) -> str:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), dist.group.WORLD)
        started = time.monotonic()
        try:
            with launched(rank):
                make_trainer(ZeROStrategy(3, state_dict_type=form), 2, callbacks=[SavesAlone()]).fit(
                    built(), data(rank, 2)
                )
        except Exception as error:
            return f"{time.monotonic() - started < 15} {type(error).__name__}"
        return "ended"

    for outcome in run_ranks(2, on_rank):
        assert outcome.startswith("True ")


@pytest.mark.parametrize("form", FORMS)
def test_j9_each_checkpoint_of_a_run_is_as_good_as_the_first(form: str, tmp_path: Path) -> None:
    """The one of step k holds what a run of k steps ends with."""

    def fit(rank: int, steps: int, *callbacks: Callback) -> dict[str, Tensor]:
        module = built()
        options = {"callbacks": list(callbacks), "enable_checkpointing": bool(callbacks)}
        with launched(rank):
            trainer = make_trainer(ZeROStrategy(3, state_dict_type=form), 2, max_epochs=-1, max_steps=steps, **options)
            trainer.fit(module, data(rank, 2))
        return dict(module.state_dict())

    def on_rank(rank: int) -> list[bool]:
        keep = ModelCheckpoint(tmp_path, "{step}", auto_insert_metric_name=False, save_top_k=-1, every_n_train_steps=1)
        fit(rank, 3, keep)
        found = []
        for step in (1, 2, 3):
            straight = fit(rank, step)
            loaded = Net()
            with launched(rank):
                trainer = make_trainer(ZeROStrategy(1), 2)
                trainer.validate(loaded, data(rank, 2), ckpt_path=tmp_path / f"{step}.ckpt", verbose=False)
            found.append(all(torch.equal(value, loaded.state_dict()[name]) for name, value in straight.items()))
        return found

    Net.validation_step = lambda self, tokens, batch_idx: None  # type: ignore[method-assign,assignment,return-value]
    try:
        assert run_ranks(2, on_rank) == [[True] * 3] * 2
    finally:
        del Net.validation_step


def test_k6_a_path_that_is_no_checkpoint_says_what_it_is(tmp_path: Path) -> None:
    """A folder of checkpoints, and nothing at all."""

    def on_rank(rank: int) -> list[str]:
        errors = []
        (tmp_path / "folder" / "epoch=0.ckpt").mkdir(parents=True, exist_ok=True)
        for path in (tmp_path / "folder", tmp_path / "nothing.ckpt"):
            try:
                with launched(rank):
                    make_trainer(ZeROStrategy(3), 2).fit(built(), data(rank, 2), ckpt_path=path)
            except (CheckpointError, FileNotFoundError) as error:
                errors.append(str(error))
        return errors

    for folder, nothing in run_ranks(2, on_rank):
        assert "is a directory without checkpoint" in folder and "epoch=0.ckpt" in folder
        assert "not found" in nothing and "nothing.ckpt" in nothing


# R12


class Tuning(LightningModule):
    """A Hugging Face model."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": 17, "n_positions": 16}
        self.model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes))

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


@pytest.mark.parametrize("when", ["after fit", "in a hook", "by save_pretrained", "by save_pretrained after fit"])
@pytest.mark.parametrize("stage", STAGES)
def test_a7_a8_l1_an_export_is_that_of_an_unsharded_model(stage: int, when: str, tmp_path: Path) -> None:
    """The tied head appears as it does there, each tensor has its values, and what is opened again has them too."""

    class Exports(Callback):
        def on_train_end(self, trainer: Trainer, module: Any) -> None:
            if when == "by save_pretrained":
                lightning_zero.save_pretrained(module, tmp_path / "ours")
            if when == "in a hook":
                with lightning_zero.gathered(module):
                    if trainer.is_global_zero:
                        module.model.save_pretrained(tmp_path / "ours")

    def on_rank(rank: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = Tuning()
        loader = DataLoader([torch.arange(8)[None] + rank], batch_size=None)  # type: ignore[arg-type]
        with launched(rank):
            trainer = make_trainer(ZeROStrategy(stage), 2, callbacks=[Exports()])
            trainer.fit(module, loader)
            trainer.save_checkpoint(tmp_path / "x.ckpt")
        if when == "after fit" and rank == 0:
            module.model.save_pretrained(tmp_path / "ours")
        if when == "by save_pretrained after fit":
            lightning_zero.save_pretrained(module.model, tmp_path / "ours")
        return dict(module.model.state_dict())

    trained, _ = run_ranks(2, on_rank)
    Tuning().model.save_pretrained(tmp_path / "plain")
    ours, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "plain"))
    assert ours.keys() == plain.keys()
    assert all(torch.equal(value, trained[name]) for name, value in ours.items())
    stored = torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"]
    again = hf.GPT2LMHeadModel.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(value, stored[f"model.{name}"]) for name, value in again.state_dict().items())
    head, embedding = stored["model.lm_head.weight"], stored["model.transformer.wte.weight"]
    assert head.untyped_storage().data_ptr() == embedding.untyped_storage().data_ptr()


@pytest.mark.parametrize("stage", STAGES)
def test_l1_nothing_empty_is_exported_in_silence(stage: int, tmp_path: Path) -> None:
    """Of sharded weights, without `gathered`: what is written is whole, or there is an error that names the way out."""

    def on_rank(rank: int) -> bool:
        torch.manual_seed(0)
        model = lightning_zero.shard(Tuning().model, stage=stage)
        try:
            model.save_pretrained(tmp_path / str(rank))
        except Exception as error:
            return "lightning_zero.gathered" in str(error) and "lightning_zero.save_pretrained" in str(error)
        found = load_file(tmp_path / str(rank) / "model.safetensors")
        whole = Tuning().model.state_dict()
        return all(value.shape == whole[name].shape for name, value in found.items())

    assert run_ranks(2, on_rank) == [True, True]
