"""What checkpoints hold beside plain weights: buffers that differ, metrics, hooks' own things, nothing at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from distributed import run_ranks
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from rows import launched
from safetensors.torch import load_file
from test_checkpoints import FORMS, Net, built, data, make_trainer, read_plainly
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, SumMetric

import lightning_zero
from lightning_zero import CheckpointError, ZeROStrategy
from lightning_zero.checkpoint.reading import export_file, open_checkpoint
from lightning_zero.cli import main


class Extra(nn.Module):
    """State that is no tensor, and nested."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = {3: 1, "e": {}, "l": [{}, torch.ones(2)], "none": None}

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class Rich(Net):
    """Buffers that each rank has its own of, metrics, extra states, a weight without elements."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(6):
            self.register_buffer(f"own{number}", torch.zeros(3))
        self.total, self.all = SumMetric(), CatMetric()
        self.total.persistent(True)
        self.all.persistent(True)
        self.extra, self.nothing = Extra(), Extra()
        self.nothing.state = {}
        self.empty = nn.Parameter(torch.empty(0, 3))

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        self.total.update(1.0 + self.global_rank)
        self.all.update(torch.full((2,), 1.0 + self.global_rank))
        for number in range(6):
            getattr(self, f"own{number}").fill_(self.global_rank + 1)
        return super().training_step(tokens, batch_idx)


@pytest.mark.parametrize("form", FORMS)
def test_what_ranks_differ_in_is_that_of_rank_zero(form: str, tmp_path: Path) -> None:
    """In a directory as in a file; and what is read lives in memory of its own, wherever the file goes."""
    path = tmp_path / "x.ckpt"

    class Saves(Callback):
        def on_train_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.save_checkpoint(path)

    class Forgets(Callback):
        def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
            trainer.strategy.barrier()
            trainer.strategy.remove_checkpoint(path)
            trainer.strategy.barrier()
            self.mapped = str(path) in Path("/proc/self/maps").read_text()
            self.extra = module.extra.state, module.nothing.state  # type: ignore[union-attr]
            self.before = float(module.total.sum_value), torch.cat(module.all.value).tolist()  # type: ignore[union-attr,arg-type]

    def on_rank(rank: int) -> Any:
        torch.manual_seed(0)
        strategy = ZeROStrategy(3, state_dict_type=form)
        forgets, again = Forgets(), Rich()
        with launched(rank):
            make_trainer(strategy, 2, callbacks=[Saves()]).fit(Rich(), data(rank, 2))
            stored = read_plainly(path)["state_dict"] if rank == 0 else None
            trainer = make_trainer(ZeROStrategy(1), 2, max_epochs=2, callbacks=[forgets])
            trainer.fit(again, data(rank, 2), ckpt_path=path)
        return forgets.extra, forgets.before, forgets.mapped, float(again.total.sum_value), stored

    for rank, (extra, before, mapped, total, stored) in enumerate(run_ranks(2, on_rank)):
        state, nothing = extra
        assert nothing == {} and list(state) == [3, "e", "l", "none"] and state[3] == 1 and state["e"] == {}
        assert state["l"][0] == {} and torch.equal(state["l"][1], torch.ones(2)) and state["none"] is None
        assert before == (2.0, [1.0] * 4)
        assert total == 2.0 + 2 * (1 + rank)
        assert not mapped
        if stored is not None:
            assert [stored[f"own{number}"].tolist() for number in range(6)] == [[1.0] * 3] * 6


class Editing(Net):
    """Writes into what it loads, weights and moments."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["head.bias"].fill_(7)
        checkpoint["state_dict"]["unused"][1] = 9
        for state in checkpoint["optimizer_states"][0]["state"].values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].view(-1)[:2] = 3


@pytest.mark.parametrize("form", FORMS)
def test_what_hooks_write_in_place_is_loaded(form: str, tmp_path: Path) -> None:
    """Whole and in part."""
    path = tmp_path / "x.ckpt"

    class Looks(Callback):
        def on_train_start(self, trainer: Trainer, module: Any) -> None:
            with lightning_zero.gathered(module):
                self.bias, self.unused = module.head.bias.detach().clone(), module.unused.detach().clone()
            (state,) = [trainer.strategy.optimizer_state(optimizer) for optimizer in trainer.optimizers]
            self.moments = list(state["state"].values())

    def on_rank(rank: int) -> Any:
        torch.manual_seed(0)
        looks = Looks()
        with launched(rank):
            trainer = make_trainer(ZeROStrategy(3, state_dict_type=form), 2)
            trainer.fit(built(), data(rank, 2))
            trainer.save_checkpoint(path)
            make_trainer(ZeROStrategy(3), 2, max_epochs=2, callbacks=[looks]).fit(
                Editing(), data(rank, 2), ckpt_path=path
            )
        return looks.bias, looks.unused, looks.moments

    for rank, (bias, unused, moments) in enumerate(run_ranks(2, on_rank)):
        assert torch.equal(bias, torch.full((11,), 7.0)) and unused.tolist() == [1.0, 9.0, 1.0]
        if rank == 0:
            assert len(moments) == 21
            assert all(float(state["exp_avg"].abs().max()) == 0 for state in moments)
            assert all(state["exp_avg_sq"].flatten()[:2].tolist() == [3.0, 3.0] for state in moments)


class WithoutOptimizer(Net):
    def configure_optimizers(self) -> Any:
        return None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_odd_contents_are_saved_and_loaded(form: str, asynchronous: bool, tmp_path: Path) -> None:
    """Views of weights, expanded and sparse tensors, dictionaries of other classes; and no optimizer at all."""

    class Kept(dict):  # type: ignore[type-arg]
        pass

    class Odd(WithoutOptimizer):
        seen: Any = None

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.mine = {"value": torch.zeros(2)}
            checkpoint["mine"] = {
                "view": self.head.weight.detach()[:3],
                "expanded": torch.ones(1).expand(4),
                "sparse": torch.eye(3).to_sparse(),
                "list": [self.mine["value"], (1, "two")],
            }

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0 and self.current_epoch == 0:
                self.trainer.save_checkpoint(tmp_path / "x.ckpt")
                self.mine["value"].fill_(99)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen = checkpoint["mine"]

    def on_rank(rank: int) -> bool:
        torch.manual_seed(0)
        module, again = Odd(), Odd()
        with launched(rank):
            strategy = ZeROStrategy(3, state_dict_type=form, async_save=asynchronous)
            make_trainer(strategy, 2).fit(module, data(rank, 2))
            trainer = make_trainer(ZeROStrategy(3), 2, max_epochs=2)
            trainer.fit(again, data(rank, 2), ckpt_path=tmp_path / "x.ckpt")
        assert again.seen["list"][0].tolist() == [0.0, 0.0] and again.seen["list"][1] == (1, "two")
        assert torch.equal(again.seen["view"], module.head.weight[:3])
        assert torch.equal(again.seen["sparse"].to_dense(), torch.eye(3))
        return again.seen["expanded"].tolist() == [1.0] * 4

    assert run_ranks(2, on_rank) == [True, True]


# Names and places


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_of_other_things_makes_no_room(form: str, tmp_path: Path) -> None:
    """Neither for a run nor for an export; an empty one does."""
    results = tmp_path / "results"
    results.mkdir()
    (results / "thesis.txt").write_text("years")
    (tmp_path / "empty").mkdir()

    def on_rank(rank: int) -> str:
        with launched(rank):
            trainer = make_trainer(ZeROStrategy(2, state_dict_type=form), 2)
            trainer.fit(built(), data(rank, 2))
            trainer.save_checkpoint(tmp_path / "empty")
            try:
                trainer.save_checkpoint(results)
            except CheckpointError as error:
                return str(error)
        return ""

    first, second = run_ranks(2, on_rank)
    assert "results` was not written: it is a folder, and no checkpoint. Name a file in it" in first
    assert "it is a folder, and no checkpoint" in second
    assert main(["export", str(tmp_path / "empty"), str(results), "--format", "ckpt"]) == 1
    assert (results / "thesis.txt").read_text() == "years"
    assert open_checkpoint(tmp_path / "empty")["global_step"] == 2


def test_what_a_killed_run_left_is_nobodys_checkpoint(tmp_path: Path) -> None:
    """Its name holds none of the checkpoint's: schedulers look for names that hold a number, and take the highest."""
    part = lightning_zero.checkpoint.replacing.part_of(tmp_path / "hpc_ckpt_2.ckpt")
    assert part.parent == tmp_path and "ckpt" not in part.name and part.name.startswith(".")


def test_a_link_to_what_is_being_written_is_refused(tmp_path: Path) -> None:
    """Before training."""

    def on_rank(rank: int) -> str:
        keep = ModelCheckpoint(tmp_path, save_last="link")
        trainer = make_trainer(ZeROStrategy(3, async_save=True), 1, callbacks=[keep], enable_checkpointing=True)
        try:
            trainer.fit(built(), data(0, 1))
        except ValueError as error:
            return str(error)
        return ""

    (message,) = run_ranks(1, on_rank)
    assert message.startswith("`ModelCheckpoint(save_last='link')` links to") and "Write `save_last=True`" in message


# In the background


@pytest.mark.parametrize("form", FORMS)
def test_runs_follow_each_other_in_one_process(form: str, tmp_path: Path) -> None:
    """Each saves in the background, and after it; what was saved after a run is there on the next line."""

    def on_rank(rank: int) -> list[int]:
        found = []
        for number in range(4):
            keep = ModelCheckpoint(tmp_path / str(number), "{step}", every_n_train_steps=1, save_top_k=-1)
            strategy = ZeROStrategy(3, state_dict_type=form, async_save=True)
            with launched(rank):
                trainer = make_trainer(strategy, 2, callbacks=[keep], enable_checkpointing=True)
                trainer.fit(built(), data(rank, 2))
                trainer.save_checkpoint(tmp_path / f"{number}.ckpt")
            found.append(int(open_checkpoint(tmp_path / f"{number}.ckpt")["global_step"]))
        return found

    assert run_ranks(2, on_rank) == [[2, 2, 2, 2]] * 2
    assert sorted(os.listdir(tmp_path / "3")) == ["step=1.ckpt", "step=2.ckpt"]


def test_a_tied_weight_is_written_once(tmp_path: Path) -> None:
    """In the background as in the foreground."""

    class Tied(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(100, 100, bias=False)
            self.second = nn.Linear(100, 100, bias=False)
            self.second.weight = self.first.weight

        def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
            return self.second(self.first(x)).sum()

        def on_train_batch_end(self, *_: Any) -> None:
            self.trainer.save_checkpoint(tmp_path / "x.ckpt", weights_only=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters())

    def on_rank(rank: int) -> None:
        loader = DataLoader([torch.ones(1, 100)], batch_size=None)  # type: ignore[arg-type]
        with launched(rank):
            make_trainer(ZeROStrategy(3, async_save=True), 2).fit(Tied(), loader)

    run_ranks(2, on_rank)
    assert 40_000 < (tmp_path / "x.ckpt").stat().st_size < 60_000


# Exports


def test_an_export_leaves_nothing_of_the_one_before_it(tmp_path: Path) -> None:
    """And has the names of the model inside, as Hugging Face reads them."""

    class Tuning(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 7, "n_positions": 8}
            self.net = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes))

    torch.manual_seed(0)
    first, second = Tuning(), Tuning()
    out = tmp_path / "out"
    for module, arguments in ((first, ["--shard-gb", "1e-6"]), (second, [])):
        torch.save({"state_dict": module.state_dict()}, tmp_path / "x.ckpt")
        assert main(["export", str(tmp_path / "x.ckpt"), str(out), *arguments]) == 0
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    second.net.config.save_pretrained(out)
    read = hf.GPT2LMHeadModel.from_pretrained(out)
    assert all(torch.equal(value, read.state_dict()[name]) for name, value in second.net.state_dict().items())
    assert main(["export", str(tmp_path / "x.ckpt"), str(out), "--prefix", "net.transformer."]) == 0
    assert "wte.weight" in load_file(out / "model.safetensors")
    assert main(["export", str(tmp_path / "x.ckpt"), str(out), "--prefix", "model."]) == 1


def test_a_directory_with_odd_contents_becomes_a_file(tmp_path: Path) -> None:
    """Extra states and metrics too."""

    def on_rank(rank: int) -> None:
        torch.manual_seed(0)
        with launched(rank):
            trainer = make_trainer(ZeROStrategy(3, state_dict_type="sharded"), 2)
            trainer.fit(Rich(), data(rank, 2))
            trainer.save_checkpoint(tmp_path / "x.ckpt")

    run_ranks(2, on_rank)
    export_file(tmp_path / "x.ckpt", tmp_path / "one.ckpt")
    found = Rich.load_from_checkpoint(tmp_path / "one.ckpt")
    assert float(found.total.sum_value) == 2.0 and list(found.extra.state) == [3, "e", "l", "none"]


# Pretrained


class Scaled(nn.Embedding):
    """As Gemma's: a weight and a buffer that is in no file."""

    def __init__(self) -> None:
        super().__init__(7, 4)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.register_buffer("kinds", torch.zeros(3, dtype=torch.int64), persistent=False)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = Scaled()

    def _init_weights(self, part: nn.Module) -> None:
        if isinstance(part, Scaled):
            part.weight.data.normal_()
            part.scale.fill_(2.0)
            part.kinds.zero_()


def test_computing_buffers_draws_no_weight_anew(tmp_path: Path) -> None:
    """Where a part has both."""
    values = torch.arange(28.0).view(7, 4)
    from safetensors.torch import save_file

    save_file({"embed.weight": values}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        module = Whole()
    lightning_zero.load_pretrained(module, tmp_path)
    assert torch.equal(module.embed.weight, values) and float(module.embed.scale) == 2.0
    assert module.embed.kinds.tolist() == [0, 0, 0]


def test_the_readme_s_lines_load_once(tmp_path: Path) -> None:
    """In a fresh process: what they import has not imported its parts when `configure_model` begins."""
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 7, "n_positions": 8}
    hf.GPT2LMHeadModel(hf.GPT2Config(**sizes)).save_pretrained(tmp_path / "hf")
    code = f"""
import torch, lightning.pytorch as L, lightning_zero
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

class Tuning(L.LightningModule):
    def configure_model(self):
        self.model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "hf")!r})
        on_meta = sum(p.is_meta for p in self.model.parameters())
        open({str(tmp_path)!r} + f"/{{self.global_rank}}", "w").write(str(on_meta))
    def training_step(self, x, i):
        return self.model(input_ids=x, labels=x).loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())

if __name__ == "__main__":
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="zero3_fork", max_steps=1, logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Tuning(), DataLoader([torch.arange(5)] * 4, batch_size=1))
"""
    (tmp_path / "run.py").write_text(code)
    subprocess.run([sys.executable, "-W", "ignore", tmp_path / "run.py"], check=True, timeout=120)
    numel = len(list(hf.GPT2LMHeadModel(hf.GPT2Config(**sizes)).parameters()))
    assert (tmp_path / "0").read_text() == "0" and (tmp_path / "1").read_text() == str(numel)


def test_a_class_that_cannot_be_sent_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    """As one that is defined in a function; nobody waits."""
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 7, "n_positions": 8}
    hf.GPT2LMHeadModel(hf.GPT2Config(**sizes)).save_pretrained(tmp_path)

    class Local(hf.GPT2LMHeadModel):
        pass

    class Tuning(LightningModule):
        def configure_model(self) -> None:
            self.model = Local.from_pretrained(tmp_path)

        def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
            return self.model(input_ids=x, labels=x).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters())

    def on_rank(rank: int) -> str:
        try:
            with launched(rank):
                make_trainer(ZeROStrategy(3), 2).fit(Tuning(), data(rank, 2))
        except Exception as error:
            return str(error)
        return ""

    first, second = run_ranks(2, on_rank)
    assert "Local" in first and second == "`from_pretrained` failed on rank 0, which says why."
