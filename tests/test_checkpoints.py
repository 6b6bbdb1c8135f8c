"""A checkpoint belongs to the model, not to the run that wrote it: any run reads what any other wrote.

writer     2 steps of 6 rows, whatever the ranks    ->  a file, or a directory
reader     the same weights and optimizer state, bit for bit, and the next loss of a run that never stopped
"""

from __future__ import annotations

import copy
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from counting import peak
from distributed import run_ranks, whole_values
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import register_implementation
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint
from rows import launched
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

import lightning_zero
from lightning_zero import CheckpointError, ZeROStrategy
from lightning_zero.checkpoint import directory, file, places, replacing
from lightning_zero.checkpoint.directory import is_directory
from lightning_zero.checkpoint.stored import StoredTensor

FORMS = ("full", "sharded")
ROWS = 6
"""Of a step, over all ranks."""


class Net(LightningModule):
    """Odd sizes, a tied and a frozen weight, a buffer, a parameter without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(9)))
        self.blocks[2][0].bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 11)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.losses: list[float] = []

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens))))

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(tokens).float(), (tokens + 1) % 11)
        self.losses.append(float(loss.detach()))
        return loss

    def on_train_batch_start(self, *_: Any) -> None:
        # Statistics of a batch are those of a rank: they would tell how many ranks there are.
        self.norm.eval()
        self.norm.running_mean.add_(0.01)

    def configure_optimizers(self) -> Any:
        blocks = [p for p in self.blocks.parameters() if p.requires_grad]
        others = [*self.embed.parameters(), *self.norm.parameters(), self.head.bias, self.unused]
        groups = [{"params": blocks, "weight_decay": 0.1}, {"params": others}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, fused=True)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7), "interval": "step"}]


def data(rank: int, world_size: int) -> DataLoader[Any]:
    """Two batches of this rank."""
    generator = torch.Generator().manual_seed(1)
    steps = [torch.randint(11, (ROWS,), generator=generator) for _ in range(2)]
    return DataLoader([step.chunk(world_size)[rank] for step in steps], batch_size=None)  # type: ignore[arg-type]


def make_trainer(strategy: Any, world_size: int, **arguments: Any) -> Trainer:
    quiet = {
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "use_distributed_sampler": False, "max_epochs": 1,
    }  # fmt: skip
    return Trainer(accelerator="cpu", devices=world_size, strategy=strategy, **{**quiet, **arguments})  # type: ignore[arg-type]


def built() -> Net:
    torch.manual_seed(0)
    return Net()


@dataclass
class Way:
    """How a run trains."""

    strategy: Callable[[str], Any]
    world_size: int = 2
    precision: Any = "32-true"


WAYS = {
    "ddp": Way(lambda form: "ddp_find_unused_parameters_true"),
    "one process": Way(lambda form: "auto", 1),
    "zero1": Way(lambda form: ZeROStrategy(1, state_dict_type=form)),
    "zero2": Way(lambda form: ZeROStrategy(2, state_dict_type=form)),
    "zero3": Way(lambda form: ZeROStrategy(3, state_dict_type=form)),
    "zero3 on 3": Way(lambda form: ZeROStrategy(3, state_dict_type=form), 3),
    "zero3 on 1": Way(lambda form: ZeROStrategy(3, state_dict_type=form), 1),
    "offload": Way(lambda form: ZeROStrategy(3, offload="cpu", state_dict_type=form)),
    "bf16-mixed": Way(lambda form: ZeROStrategy(2, state_dict_type=form), precision="bf16-mixed"),
}
PLAIN = ("ddp", "one process")


def written(way: str, form: str, path: Path) -> Path:
    """A checkpoint of two steps; the file or directory is ``path``."""

    def on_rank(rank: int) -> None:
        how = WAYS[way]
        with launched(rank):
            trainer = make_trainer(how.strategy(form), how.world_size, precision=how.precision)
            trainer.fit(built(), data(rank, how.world_size))
            trainer.save_checkpoint(path)

    run_ranks(WAYS[way].world_size, on_rank)
    return path


def read_plainly(path: Path) -> dict[str, Any]:
    """Without this package; a directory as Lightning's own tool makes one file of it."""
    if path.is_dir():
        return _format_checkpoint(_load_distributed_checkpoint(path))
    return torch.load(path, weights_only=True)  # type: ignore[no-any-return]


class Seen(Callback):
    """What a run finds when it goes on."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.state: Any = None

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        with lightning_zero.gathered(module):
            self.weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
        self.state = copy.deepcopy(whole_values(trainer.optimizers[0].state_dict()))


def resumed(way: str, paths: list[Path]) -> list[list[tuple[dict[str, Tensor], Any, list[float]]]]:
    """For each rank and path weights and optimizer state at the start, and losses of two more steps."""

    def on_rank(rank: int) -> list[Any]:
        found = []
        how = WAYS[way]
        for path in paths:
            seen, module = Seen(), Net()
            with launched(rank):
                trainer = make_trainer(
                    how.strategy("full"), how.world_size, precision=how.precision, max_epochs=2, callbacks=[seen]
                )
                trainer.fit(module, data(rank, how.world_size), ckpt_path=path)
            found.append((seen.weights, seen.state, module.losses))
        return found

    return run_ranks(WAYS[way].world_size, on_rank)


@cache
def losses_of_a_straight_run() -> list[float]:
    def on_rank(_: int) -> list[float]:
        module = built()
        make_trainer("auto", 1, max_epochs=2).fit(module, data(0, 1))
        return module.losses

    (losses,) = run_ranks(1, on_rank)
    return losses  # type: ignore[no-any-return]


def moments(state: Any) -> list[dict[str, Any]]:
    """State of each parameter in the order of groups: names and numbers of parameters differ between forms."""
    keys = [key for group in state["param_groups"] for key in group["params"]]
    return [dict(state["state"].get(key, {})) for key in keys]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """From every way of training, in each form that it has."""
    folder = tmp_path_factory.mktemp("written")
    return {
        (way, form): written(way, form, folder / f"{way} {form}.ckpt")
        for way in WAYS
        for form in (FORMS[:1] if way in PLAIN else FORMS)
    }


@pytest.mark.parametrize("reader", [way for way in WAYS if way not in PLAIN])
def test_every_run_goes_on_from_every_checkpoint(checkpoints: dict[tuple[str, str], Path], reader: str) -> None:
    """Weights and moments are those in the file bit by bit, and the next losses those of a run that never stopped."""
    found = resumed(reader, list(checkpoints.values()))
    for place, ((writer, form), path) in enumerate(checkpoints.items()):
        assert path.is_dir() == is_directory(path) == (form == "sharded")
        stored = read_plainly(path)
        for rank in found:
            weights, state, _ = rank[place]
            assert sorted(weights) == sorted(stored["state_dict"]), writer
            for name, value in weights.items():
                assert torch.equal(value, stored["state_dict"][name]), (writer, form, name)
            (expected,) = stored["optimizer_states"]
            assert [len(group["params"]) for group in state["param_groups"]] == [17, 5]
            assert [group["lr"] for group in state["param_groups"]] == [
                group["lr"] for group in expected["param_groups"]
            ]
            for mine, its in zip(moments(state), moments(expected), strict=True):
                assert mine.keys() == its.keys()
                for name, value in mine.items():
                    assert torch.equal(value, its[name]), (writer, form, name, value, its[name])
        mean = torch.tensor([rank[place][2] for rank in found]).mean(0).tolist()
        tolerance = 0.02 if "bf16-mixed" in (writer, reader) else 1e-5
        assert mean == pytest.approx(losses_of_a_straight_run()[2:], abs=tolerance), (writer, form)


@pytest.mark.parametrize("reader", PLAIN)
def test_plain_runs_go_on_from_files_and_from_directories_that_were_made_one(
    checkpoints: dict[tuple[str, str], Path], reader: str, tmp_path: Path
) -> None:
    """By Lightning's own tool."""
    paths = []
    for (writer, form), path in checkpoints.items():
        one = path
        if form == "sharded":
            one = tmp_path / f"{writer}.ckpt"
            torch.save(read_plainly(path), one)
        paths.append(one)
    found = resumed(reader, paths)
    for place, (writer, form) in enumerate(checkpoints):
        mean = torch.tensor([rank[place][2] for rank in found]).mean(0).tolist()
        tolerance = 0.02 if writer == "bf16-mixed" else 1e-5
        assert mean == pytest.approx(losses_of_a_straight_run()[2:], abs=tolerance), (writer, form)


def test_a_directory_of_fsdp2_is_read(checkpoints: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    """As `ModelParallelStrategy` lays it out: weights under "state_dict", optimizer state by name, from DTensors."""
    source, path = checkpoints["ddp", "full"], tmp_path / "fsdp2.ckpt"

    def on_rank(rank: int) -> None:
        rest = torch.load(source, weights_only=True)
        module = Net()
        for block in module.blocks:
            fully_shard(block)
        fully_shard(module)
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(module, rest.pop("state_dict"), options=options)
        ((optimizer,), _) = module.configure_optimizers()
        names = {id(p): name for name, p in module.named_parameters()}
        (state,) = rest.pop("optimizer_states")
        keys = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        for group in state["param_groups"]:
            group["params"] = [keys[key] for key in group["params"]]
        state["state"] = {keys[key]: values for key, values in state["state"].items()}
        # One weight has none: it got no gradient.
        strict = StateDictOptions(full_state_dict=True, strict=False)
        set_optimizer_state_dict(module, optimizer, state, options=strict)
        stored = {"state_dict": module.state_dict(), "optimizer_0": get_optimizer_state_dict(module, optimizer)}
        dcp.save(stored, checkpoint_id=path)
        if rank == 0:
            torch.save(rest, path / "meta.pt")

    run_ranks(2, on_rank)
    for weights, state, losses in (found for (found,) in resumed("zero3", [path])):
        stored = torch.load(source, weights_only=True)
        assert all(torch.equal(value, stored["state_dict"][name]) for name, value in weights.items())
        for mine, its in zip(moments(state), moments(stored["optimizer_states"][0]), strict=True):
            # FSDP2 keeps zeros for a weight that got no gradient.
            assert all(torch.equal(value, mine[name]) for name, value in its.items())
        assert len(losses) == 2


@pytest.mark.parametrize("stage", [1, 3])
def test_the_same_ranks_go_on_to_the_last_bit(stage: int, tmp_path: Path) -> None:
    """Losses and weights, from a directory and from a file."""

    def on_rank(rank: int) -> list[Any]:
        found = []
        for form in FORMS:
            with launched(rank):
                straight = built()
                keep = ModelCheckpoint(
                    tmp_path / form, filename="{epoch}", auto_insert_metric_name=False, save_top_k=-1
                )
                trainer = make_trainer(
                    ZeROStrategy(stage, state_dict_type=form),
                    2,
                    max_epochs=2,
                    callbacks=[keep],
                    enable_checkpointing=True,
                )
                trainer.fit(straight, data(rank, 2))
                again = Net()
                trainer = make_trainer(ZeROStrategy(stage), 2, max_epochs=2)
                trainer.fit(again, data(rank, 2), ckpt_path=tmp_path / form / "0.ckpt")
            equal = all(torch.equal(a, b) for a, b in zip(straight.state_dict().values(), again.state_dict().values()))
            found.append((equal, straight.losses[2:] == again.losses))
        return found

    assert run_ranks(2, on_rank) == [[(True, True)] * 2] * 2


# What callbacks keep


def test_averages_go_into_directories_in_parts(tmp_path: Path) -> None:
    """An average of weights that is kept sharded is written by all ranks, and is there again."""

    def fit(rank: int, form: str, path: Path | None) -> dict[str, Tensor]:
        module = built()
        keep = ModelCheckpoint(tmp_path / form, filename="{epoch}", auto_insert_metric_name=False, save_top_k=-1)
        callbacks = [EMAWeightAveraging(decay=0.5), keep]
        strategy = ZeROStrategy(3, state_dict_type=form)
        with launched(rank):
            trainer = make_trainer(strategy, 2, max_epochs=2, callbacks=callbacks, enable_checkpointing=True)
            trainer.fit(module, data(rank, 2), ckpt_path=path)
        return dict(module.state_dict())

    def on_rank(rank: int) -> list[bool]:
        found = []
        for form in FORMS:
            straight = fit(rank, form, None)
            again = fit(rank, form, tmp_path / form / "0.ckpt")
            found.append(all(torch.equal(value, again[name]) for name, value in straight.items()))
        return found

    assert run_ranks(2, on_rank) == [[True, True]] * 2


def test_hooks_of_modules_see_and_change_what_is_stored(tmp_path: Path) -> None:
    """They may rename, drop, compute and replace, on tensors that were not read yet."""

    class Renaming(Net):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            state = checkpoint["state_dict"]
            state["old.bias"] = state.pop("head.bias")
            checkpoint["mine"] = {"weight": self.embed.weight.detach(), "list": [1, ("two", 3.0)]}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            state = checkpoint["state_dict"]
            assert isinstance(state["old.bias"], StoredTensor)
            state["head.bias"] = state.pop("old.bias")
            state["unused"] = state["unused"] * 2
            assert checkpoint["mine"]["list"] == [1, ("two", 3.0)]
            assert torch.equal(checkpoint["mine"]["weight"] + 0, state["embed.weight"] + 0)
            # The second name of the tied weight.
            del state["head.weight"]
            self.strict_loading = False

    def on_rank(rank: int) -> bool:
        torch.manual_seed(0)
        module, again = Renaming(), Renaming()
        with launched(rank):
            trainer = make_trainer(ZeROStrategy(3, state_dict_type="sharded"), 2)
            path = tmp_path / "renamed.ckpt"
            trainer.fit(module, data(rank, 2))
            trainer.save_checkpoint(path)
            make_trainer(ZeROStrategy(3), 2).validate(again, data(rank, 2), ckpt_path=path, verbose=False)
        expected = {**module.state_dict(), "unused": 2 * module.unused.detach()}
        return all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())

    Renaming.validation_step = lambda self, tokens, batch_idx: None  # type: ignore[method-assign,assignment,return-value]
    assert run_ranks(2, on_rank) == [True, True]


# Top k, last, links, and after fit


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("save_last", [True, "link"])
def test_model_checkpoint_keeps_the_best_and_the_last(form: str, save_last: Any, tmp_path: Path) -> None:
    """The others are removed, whichever form they have, and all that is left can be loaded."""

    class Scored(Net):
        def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
            self.log("score", torch.tensor([3.0, 1.0, 2.0, 4.0, 5.0, 6.0][self.global_step]))
            return super().training_step(tokens, batch_idx)

    def on_rank(rank: int) -> tuple[list[str], str]:
        torch.manual_seed(0)
        keep = ModelCheckpoint(
            tmp_path, filename="{step}", monitor="score", save_top_k=2, save_last=save_last, every_n_train_steps=1,
            auto_insert_metric_name=False,
        )  # fmt: skip
        strategy = ZeROStrategy(3, state_dict_type=form)
        with launched(rank):
            trainer = make_trainer(strategy, 2, max_epochs=2, callbacks=[keep], enable_checkpointing=True)
            trainer.fit(Scored(), data(rank, 2))
            names = sorted(os.listdir(tmp_path))
            for name in names:
                make_trainer(ZeROStrategy(1), 2, max_epochs=3).fit(Scored(), ckpt_path=tmp_path / name)
        return names, os.path.basename(keep.best_model_path)

    Scored.train_dataloader = lambda self: data(self.trainer.global_rank, 2)  # type: ignore[method-assign]
    assert run_ranks(2, on_rank) == [(["2.ckpt", "3.ckpt", "last.ckpt"], "2.ckpt")] * 2


def test_one_form_replaces_the_other(tmp_path: Path) -> None:
    """A directory where a file was, a file where a directory was, and a directory where one was."""

    def on_rank(rank: int) -> list[bool]:
        found = []
        for form in ("full", "sharded", "sharded", "full"):
            with launched(rank):
                trainer = make_trainer(ZeROStrategy(2, state_dict_type=form), 2)
                trainer.fit(built(), data(rank, 2))
                trainer.save_checkpoint(tmp_path / "x.ckpt")
            found.append((tmp_path / "x.ckpt").is_dir())
        return found

    assert run_ranks(2, on_rank) == [[False, True, True, False]] * 2
    assert os.listdir(tmp_path) == ["x.ckpt"]


# In the background


def waiting(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Writing takes until a file says that it may end."""
    own = replacing.take_place

    def take_place(part: Path, path: Path) -> None:
        while not (folder / "go").exists():
            time.sleep(0.005)
        own(part, path)

    for module in (file, places):
        monkeypatch.setattr(module, "take_place", take_place)


@pytest.mark.parametrize("form", FORMS)
def test_training_goes_on_while_a_checkpoint_is_written(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds what was there when it was saved; the one before it is not removed until it is complete; the next one,
    which finds the same buffers, waits."""
    events: list[str] = []

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
            step = trainer.global_step
            if step == 2:
                (tmp_path / "go").touch()
            trainer.save_checkpoint(tmp_path / f"{step}.ckpt")
            if step == 1:
                # It cannot be complete, and yet a step follows.
                events.append("complete" if (tmp_path / "1.ckpt").exists() else "begun")
            else:
                events.append("complete" if (tmp_path / f"{step - 1}.ckpt").exists() else "begun")
                trainer.strategy.barrier()  # rank 0 removes it when both have seen it
                trainer.strategy.remove_checkpoint(tmp_path / f"{step - 1}.ckpt")
            module.expected[step] = whole_values(module.state_dict())  # type: ignore[operator,index]

    def on_rank(rank: int) -> tuple[list[str], bool, list[str]]:
        waiting(monkeypatch, tmp_path)
        module = built()
        module.expected = {}  # type: ignore[assignment]
        strategy = ZeROStrategy(3, state_dict_type=form, async_save=True)
        with launched(rank):
            make_trainer(strategy, 2, max_epochs=2, callbacks=[Saves()]).fit(module, data(rank, 2))
        stored = read_plainly(tmp_path / "4.ckpt")["state_dict"]
        equal = all(torch.equal(value, stored[name]) for name, value in module.expected[4].items())  # type: ignore[index]
        return events, equal, sorted(path.name for path in tmp_path.glob("*.ckpt*"))

    assert run_ranks(2, on_rank) == [(["begun", "complete", "complete", "complete"], True, ["4.ckpt"])] * 2


@pytest.mark.parametrize("form", FORMS)
def test_what_fails_in_the_background_is_told_when_it_is_waited_for(form: str, tmp_path: Path) -> None:
    """On every rank, by the next save or the end of the run; what would have been removed stays."""

    def on_rank(rank: int) -> str:
        def full(*_: Any, **__: Any) -> Any:
            raise OSError(errno.ENOSPC, "No space left on device")

        class Fails(Callback):
            def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
                step = trainer.global_step
                while step == 2 and not (tmp_path / "1.ckpt").exists():
                    time.sleep(0.005)
                if step == 2 and rank == 0:
                    FileSystemWriter.write_data = full  # type: ignore[method-assign]
                    torch.save = full
                trainer.save_checkpoint(tmp_path / f"{step}.ckpt")
                if step == 2:
                    trainer.strategy.remove_checkpoint(tmp_path / "1.ckpt")

        strategy = ZeROStrategy(3, state_dict_type=form, async_save=True)
        try:
            with launched(rank):
                make_trainer(strategy, 2, callbacks=[Fails()]).fit(built(), data(rank, 2))
        except CheckpointError as error:
            return str(error)
        return ""

    assert all("2.ckpt` was not written" in message for message in run_ranks(2, on_rank))
    assert os.listdir(tmp_path) == ["1.ckpt"]


def test_a_script_that_ends_after_its_last_save_has_it_on_the_disk(tmp_path: Path) -> None:
    """Saved when the run is over."""
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from test_checkpoints import *\n"
        "trainer = make_trainer(ZeROStrategy(3, state_dict_type='sharded', async_save=True), 1)\n"
        "trainer.fit(built(), data(0, 1))\n"
        f"trainer.save_checkpoint({str(tmp_path / 'x.ckpt')!r})\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=Path(__file__).parents[1])
    assert read_plainly(tmp_path / "x.ckpt")["global_step"] == 2


# Whatever goes wrong


def model_of(path: Path) -> float:
    """A number that tells which weights are in the checkpoint."""
    return float(read_plainly(path)["state_dict"]["head.bias"].mean())


def save_once(path: Path, form: str, bias: float) -> None:
    """One process writes a checkpoint of a model whose bias says which one it is."""
    module = built()
    with torch.no_grad():
        module.head.bias.fill_(bias)
    trainer = make_trainer(ZeROStrategy(3, state_dict_type=form), 1, max_steps=0)
    trainer.fit(module, data(0, 1))
    trainer.save_checkpoint(path)


POINTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")


def killing(folder: Path, at: int) -> Callable[[], int]:
    """From now on this process kills itself when it touches ``folder`` for the ``at``-th time: before it opens,
    flushes, renames, makes or removes something there, and after. Returns what tells how often it did."""
    touched = [0]

    def touch() -> None:
        touched[0] += 1
        if touched[0] == at:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(event: str, args: tuple[Any, ...]) -> None:
        if event in POINTS and str(folder) in str(args[0]):
            touch()

    def around(module: Any, name: str) -> None:
        own = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            touch()
            result = own(*args, **kwargs)
            touch()
            return result

        setattr(module, name, call)

    sys.addaudithook(watched)
    around(os, "fsync")
    around(os, "replace")
    around(replacing, "_exchange")
    around(torch, "save")
    return lambda: touched[0]


@pytest.mark.parametrize("form", FORMS)
def test_a_run_that_is_killed_leaves_the_old_checkpoint_or_the_new_one(form: str, tmp_path: Path) -> None:
    """Whole, wherever it was killed; and what it left behind does not disturb the next one."""
    path = tmp_path / "x.ckpt"

    def save(_: int, bias: float, at: int) -> int:
        touched = killing(tmp_path, at)
        save_once(path, form, bias)
        return touched()

    run_ranks(1, save, 1.0, 0)
    (points,) = run_ranks(1, save, 1.0, 0)
    assert points > 10
    seen = set()
    for at in range(1, points + 1):
        before = model_of(path)
        with pytest.raises(AssertionError, match="rank 0 died"):
            run_ranks(1, save, before + 1, at)
        after = model_of(path)
        assert after in (before, before + 1)
        seen.add(after == before)
    assert seen == {True, False}
    run_ranks(1, save, 7.0, 0)
    assert model_of(path) == 7.0
    assert os.listdir(tmp_path) == ["x.ckpt"]


@pytest.mark.parametrize("rank_that_fails", [0, 1])
@pytest.mark.parametrize("form", FORMS)
def test_a_full_disk_is_an_error_on_every_rank(form: str, rank_that_fails: int, tmp_path: Path) -> None:
    """Which names the checkpoint; the one before it is as it was, and training may go on to save another."""
    if form == "full" and rank_that_fails == 1:
        pytest.skip("rank 0 alone writes a file")

    def on_rank(rank: int) -> list[str]:
        errors = []
        module = built()

        class Saves(Callback):
            def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
                own = FileSystemWriter.write_data, torch.save

                def full(*_: Any, **__: Any) -> Any:
                    raise OSError(errno.ENOSPC, "No space left on device")

                if trainer.global_step == 2 and rank == rank_that_fails:
                    FileSystemWriter.write_data = full  # type: ignore[method-assign]
                    torch.save = full
                try:
                    trainer.save_checkpoint(tmp_path / "x.ckpt")
                except CheckpointError as error:
                    errors.append(str(error))
                finally:
                    FileSystemWriter.write_data, torch.save = own  # type: ignore[method-assign]

        with launched(rank):
            trainer = make_trainer(ZeROStrategy(3, state_dict_type=form), 2, callbacks=[Saves()])
            trainer.fit(module, data(rank, 2))
        return errors

    for errors in run_ranks(2, on_rank):
        (error,) = errors
        assert "x.ckpt` was not written" in error and "One that was there before is as it was." in error
        assert "No space left on device" in error
    assert read_plainly(tmp_path / "x.ckpt")["global_step"] == 1
    assert os.listdir(tmp_path) == ["x.ckpt"]


def damaged(path: Path, how: str) -> str:
    """Damage the checkpoint; what the error will name."""
    if how == "a file ends early":
        part = next(path.glob("*.distcp")) if path.is_dir() else path
        part.write_bytes(part.read_bytes()[:-2000])
        return part.name
    if how == "a file is missing":
        part = next(path.glob("*.distcp"))
        part.unlink()
        return part.name
    if how == "no meta":
        (path / "meta.pt").unlink()
        return "meta.pt"
    (path / "meta.pt" if path.is_dir() else path).write_bytes(b"PK\x03\x04 what is this")
    return "meta.pt" if path.is_dir() else path.name


@pytest.mark.parametrize(
    ("form", "how"),
    [
        ("full", "a file ends early"), ("full", "nonsense"), ("sharded", "a file ends early"),
        ("sharded", "a file is missing"), ("sharded", "no meta"), ("sharded", "nonsense"),
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_named_and_nothing_of_it_is_loaded(form: str, how: str, tmp_path: Path) -> None:
    """Before the first weight is touched."""
    path = tmp_path / "x.ckpt"
    run_ranks(1, lambda _: save_once(path, form, 1.0))
    named = damaged(path, how)

    def on_rank(rank: int) -> tuple[str, bool]:
        module = built()
        before = {name: value.clone() for name, value in module.state_dict().items()}
        with launched(rank):
            try:
                make_trainer(ZeROStrategy(3), 2).fit(module, data(rank, 2), ckpt_path=path)
            except CheckpointError as error:
                return str(error), all(torch.equal(value, before[n]) for n, value in module.state_dict().items())
        return "", False

    for message, untouched in run_ranks(2, on_rank):
        assert named in message and "x.ckpt" in message
        assert untouched


def test_what_is_no_form_is_refused() -> None:
    """When the strategy is made."""
    with pytest.raises(ValueError, match="state_dict_type='local' is unknown: expected 'full', one file, or 'sharded'"):
        ZeROStrategy(state_dict_type="local")  # type: ignore[call-arg]


# Memory


class Large(LightningModule):
    """Eight blocks of 4 MB and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), fused=True)


UNIT = 4 * 1024 * 1025
PSI = 8 * UNIT
SMALL = 16 * 1024
"""Bytes of indices and flags."""


def watching() -> profile:
    """Context that notes what is allocated. Pages of files are not: they are everybody's."""
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


@pytest.mark.parametrize("form", FORMS)
def test_writing_and_reading_hold_no_more_than_they_must(form: str, tmp_path: Path) -> None:
    """Two ranks and 101 MB of weights and moments. A file is held by rank 0 alone, once; the rest is what
    gathering takes, and of a directory a unit. To read either a rank takes its shards and a unit."""
    path = tmp_path / "x.ckpt"

    class Watched(Callback):
        def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
            with watching() as saving:
                trainer.save_checkpoint(path)
            self.saving = peak(saving)

    class Reading(ZeROStrategy):  # type: ignore[misc,valid-type]
        def load_optimizer_state_dict(self, checkpoint: Any) -> None:
            with watching() as reading:
                super().load_optimizer_state_dict(checkpoint)
            self.reading = peak(reading)

        def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
            with watching() as reading:
                super().load_model_state_dict(checkpoint, strict)
            self.reading_weights = peak(reading)

    def on_rank(rank: int) -> tuple[int, int, int]:
        loader = DataLoader([torch.ones(1, 1024)] * 2, batch_size=None)  # type: ignore[arg-type]
        watched = Watched()
        with launched(rank):
            make_trainer(ZeROStrategy(3, state_dict_type=form), 2, callbacks=[watched]).fit(Large(), loader)
            strategy = Reading(3)
            make_trainer(strategy, 2, max_epochs=2).fit(Large(), loader, ckpt_path=path)
        return watched.saving, strategy.reading, strategy.reading_weights

    for rank, (saving, reading, weights) in enumerate(run_ranks(2, on_rank)):
        whole = 3 * PSI if form == "full" and rank == 0 else 0
        # Of a directory a rank writes its half of one unit.
        assert saving <= whole + (UNIT if form == "full" else UNIT / 2) + SMALL, rank
        # Two moments of a half of the weights; to read a piece of a directory takes one more.
        assert reading <= PSI + (0 if form == "full" else UNIT) + SMALL
        # Into the module, which is there.
        assert weights <= (0 if form == "full" else UNIT) + SMALL


# On a file system of fsspec


class Remote(LocalFileSystem):
    """A disk, of which Lightning does not know that it is local."""

    protocol = ("remote",)

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return super()._strip_protocol(str(path).removeprefix("remote://"))  # type: ignore[no-any-return]


register_implementation("remote", Remote)


class Names(Callback):
    """Saves under one name after each step, as `save_last` does."""

    def __init__(self, url: str) -> None:
        self.url = url

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.url)


def test_a_directory_on_a_remote_file_system(tmp_path: Path) -> None:
    """Written twice under one name, kept by `save_top_k`, and gone on from: losses are those of a straight run."""
    url = f"remote://{tmp_path}/remote"

    def on_rank(rank: int) -> list[float]:
        keeps = ModelCheckpoint(
            dirpath=url, filename="{step}", save_top_k=1, monitor="step", mode="max", every_n_train_steps=1
        )
        strategy = ZeROStrategy(3, state_dict_type="sharded")
        module = built()
        with launched(rank):
            trainer = make_trainer(strategy, 2, callbacks=[Names(f"{url}/same.ckpt"), keeps], enable_checkpointing=True)
            trainer.fit(module, data(rank, 2))
        module = Net()
        with launched(rank):
            trainer = make_trainer(ZeROStrategy(1), 2, max_epochs=2)
            trainer.fit(module, data(rank, 2), ckpt_path=f"{url}/same.ckpt")
        return module.losses

    losses = run_ranks(2, on_rank)
    folder = tmp_path / "remote"
    assert sorted(path.name for path in folder.iterdir()) == ["same.ckpt", "step=2.ckpt"]
    assert all(is_directory(path) for path in folder.iterdir())
    mean = torch.tensor(losses, dtype=torch.float64).mean(0)
    torch.testing.assert_close(mean.tolist(), losses_of_a_straight_run()[2:], rtol=1e-5, atol=0)


@pytest.mark.parametrize("call", ["mv", "rm", "makedirs"])
def test_a_remote_directory_that_is_not_finished_does_not_look_so(call: str, tmp_path: Path) -> None:
    """Wherever a call of the file system fails, what lies at the name or beside it is a whole checkpoint."""
    url = f"remote://{tmp_path}/x.ckpt"
    own = getattr(Remote, call)

    def on_rank(rank: int) -> int:
        module = lightning_zero.shard(built(), stage=3)
        sharded = {"state_dict": module.state_dict()}
        collectives = lightning_zero.engine.engine_of(module).collectives
        directory.save_directory(sharded, url, collectives)
        failures = 0
        for fails_at in range(30):
            calls = iter(range(1 << 30))

            def failing(*args: Any, calls: Any = calls, fails_at: int = fails_at, **kwargs: Any) -> Any:
                if next(calls) == fails_at and rank == 0:
                    raise OSError("the net is gone")
                return own(*args, **kwargs)

            setattr(Remote, call, failing)
            try:
                directory.save_directory(sharded, url, collectives)
                failed = False
            except CheckpointError as error:
                assert "x.ckpt" in str(error)
                failed = True
            setattr(Remote, call, own)
            whole = [tmp_path / "x.ckpt"] if rank == 0 else []
            assert all(is_directory(path) for path in whole), (call, fails_at)
            for path in whole:  # rank 0 alone looks: it begins the next save
                for value in directory.load_directory(path, True)["state_dict"].values():
                    value.read()
            directory.save_directory(sharded, url, collectives)
            failures += failed
        return failures

    assert min(run_ranks(2, on_rank)) > 0
