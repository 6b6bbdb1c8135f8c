"""Whatever data parallelism saves: objects of a checkpoint that hold modules, parameters, or methods of modules."""

from __future__ import annotations

import pickletools
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from rows import launched, make_trainer, vectors
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_zero import ZeROStrategy


class Quantiles(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.scale.note = "of the user"  # type: ignore[attr-defined]
        self.levels = nn.Parameter(torch.tensor([1, 5, 9]), requires_grad=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((x - y).mul(self.levels) * self.scale).square().mean()


class Forecaster(LightningModule):
    """Takes its parts as arguments, and keeps them as hyperparameters."""

    def __init__(self, loss: nn.Module, net: nn.Module) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.loss, self.net = loss, net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net(batch[0].unsqueeze(0))[0].squeeze(0), batch[1])  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Net(nn.Module):
    """Blocks that are units, and a recurrent module."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)))
        self.rnn = nn.GRU(4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.rnn(self.blocks(x).tanh())


class Keeper(Callback):
    """Holds of the module what it can."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.module: Any = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.module = pl_module
        trainer.save_checkpoint(self.folder / "x.ckpt")
        self.module = None

    def state_dict(self) -> dict[str, Any]:
        if self.module is None:
            return {}
        net = self.module.net
        return {
            "again": net,
            "weight": net.blocks[0].weight,
            "method": net.blocks[1].extra_repr,
            "call": partial(F.linear, bias=net.blocks[2].bias),
            "views": {"x": (net.blocks[3].weight.detach()[0],)},
            "set": Held(net.blocks[4].weight.detach().view(-1)),
            "forward": net.blocks[5].forward,
        }


class Held:
    """An object of some class."""

    def __init__(self, value: Any) -> None:
        self.value = value


def train(rank: int, folder: Path, strategy: Any) -> None:
    torch.manual_seed(rank)
    folder.mkdir(exist_ok=True)
    logger = CSVLogger(folder)
    batches = [(x.chunk(2)[rank].float(), y.chunk(2)[rank].float()) for x, y in vectors(2, 4, 3)]
    trainer = make_trainer(strategy, [Keeper(folder)], logger=logger)
    trainer.fit(Forecaster(Quantiles(), Net()), DataLoader(batches, batch_size=None))


WAYS: dict[str, Any] = {
    "ddp": lambda: "ddp",
    **{f"zero{stage}": partial(ZeROStrategy, stage) for stage in (1, 2, 3)},
    "directory": partial(ZeROStrategy, 3, state_dict_type="sharded"),
    "directory, in the background": partial(ZeROStrategy, 1, state_dict_type="sharded", async_save=True),
    "in the background": partial(ZeROStrategy, 3, async_save=True),
    "offload": partial(ZeROStrategy, 2, offload="cpu"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each way wrote its checkpoint, in one group of ranks."""
    found = tmp_path_factory.mktemp("objects")

    def on_rank(rank: int) -> None:
        with launched(rank):
            for name, strategy in WAYS.items():
                train(rank, found / name, strategy())

    run_ranks(2, on_rank)
    return found


def read(path: Path) -> tuple[dict[str, Any], bytes]:
    """Hyperparameters and the callback's state, and the pickle that they are in."""
    file = path / "meta.pt" if path.is_dir() else path
    loaded = torch.load(file, weights_only=False)
    with zipfile.ZipFile(file) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        return {**loaded["hyper_parameters"], **loaded["callbacks"]["Keeper"]}, archive.read(name)


def assert_same(found: Any, expected: Any) -> None:
    """Of types, values and notes of the user; training is exact to fp32 rounding."""
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert found.requires_grad == expected.requires_grad
        assert vars(found) == vars(expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, tuple | list):
        for mine, theirs in zip(found, expected, strict=True):
            assert_same(mine, theirs)
    elif isinstance(expected, nn.Module):
        assert_same(dict(found.named_parameters()), dict(expected.named_parameters()))
        for mine, theirs in zip(found.modules(), expected.modules(), strict=True):
            assert list(vars(mine)) == list(vars(theirs))
    elif isinstance(expected, partial | Held):
        kind = "keywords" if isinstance(expected, partial) else "__dict__"
        assert_same(getattr(found, kind), getattr(expected, kind))


@pytest.mark.parametrize("way", [way for way in WAYS if way != "ddp"])
def test_objects_are_written_as_data_parallelism_writes_them(way: str, folder: Path) -> None:
    """Whole, plain, shared where they were shared, and without a class of this package in the pickle."""
    (found, pickled), (expected, _) = read(folder / way / "x.ckpt"), read(folder / "ddp" / "x.ckpt")
    names = [text for _, text, _ in pickletools.genops(pickled) if isinstance(text, str)]
    assert "torch.nn.parameter Parameter" in names or "torch._utils _rebuild_parameter" in names
    assert not any(name.startswith("lightning_zero") and " " in name for name in names)
    if "directory" in way:  # it is in the ranks' files
        assert list(found.pop("weight")) == ["lightning_zero.tensor"]
        del expected["weight"]
    assert list(found) == list(expected)
    for name in expected:
        assert_same(found[name], expected[name])
    net = found["net"]
    assert found["again"] is net
    assert "weight" not in found or found["weight"] is net.blocks[0].weight
    assert found["method"].__self__ is net.blocks[1] and found["forward"].__self__ is net.blocks[5]


@pytest.mark.parametrize("way", ["zero1", "zero3"])
def test_a_file_loads_as_the_module_that_it_is_of(way: str, folder: Path) -> None:
    """And its hyperparameters share memory with its weights, as under data parallelism: they are in the file once."""
    path = folder / way / "x.ckpt"
    module = Forecaster.load_from_checkpoint(path, weights_only=False)
    expected = Forecaster.load_from_checkpoint(folder / "ddp" / "x.ckpt", weights_only=False)
    torch.testing.assert_close(dict(module.state_dict()), dict(expected.state_dict()), rtol=1e-5, atol=1e-5)
    loaded = torch.load(path, weights_only=False)
    net = loaded["hyper_parameters"]["net"]
    assert net.rnn.weight_ih_l0.data_ptr() == loaded["state_dict"]["net.rnn.weight_ih_l0"].data_ptr()


def test_loggers_tell_of_modules_what_they_tell_under_data_parallelism(folder: Path) -> None:
    """All but memory addresses, which are in the bytes of storages."""
    files = {way: next((folder / way).glob("**/hparams.yaml")).read_text().splitlines() for way in WAYS}
    keys = {way: tuple(line for line in lines if ":" in line) for way, lines in files.items()}
    assert len(keys["ddp"]) > 10 and set(keys.values()) == {keys["ddp"]}


class Unpicklable:
    """Says so."""

    def __reduce__(self) -> Any:
        raise ValueError("no such thing")


def test_errors_are_told_on_every_rank(tmp_path: Path) -> None:
    """In rank 0's words; and where ranks hold different things, on each rank."""

    def on_rank(rank: int) -> list[str]:
        errors: list[str] = []

        class Saves(Callback):
            kept: Any = None

            def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
                weight = pl_module.net.blocks[0].weight  # type: ignore[union-attr]
                for kept in (Unpicklable(), [Held(weight)] * (1 + rank) if rank else None, Held(pl_module)):
                    self.kept = kept
                    try:
                        trainer.save_checkpoint(tmp_path / "x.ckpt")
                    except Exception as error:
                        errors.append(str(error))

            def state_dict(self) -> Any:
                return {"kept": self.kept}

        with launched(rank):
            batches = [(torch.ones(2, 4), torch.ones(2, 3))]
            trainer = make_trainer("zero3", [Saves()])
            trainer.fit(Forecaster(Quantiles(), Net()), DataLoader(batches, batch_size=None))
        return errors

    for errors in run_ranks(2, on_rank):
        unpicklable, different = errors
        assert "was not written" in unpicklable and "no such thing" in unpicklable
        assert "Fill it alike on every rank" in different
