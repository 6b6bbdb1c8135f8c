"""In the place of DDP: what a project's hooks and callbacks see and do, against Lightning's own DDPStrategy."""

from __future__ import annotations

import io
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from distributed import run_ranks
from lightning.pytorch.strategies import DDPStrategy
from rows import launched, loader, make_trainer
from torch import Tensor, nn

from lightning_zero import ZeROStrategy
from lightning_zero.sharded_parameter import RawMemoryError

STAGES = (1, 2, 3)


class Normed(L.LightningModule):
    """Batch statistics of each rank's own data; validation uses the running ones."""

    def __init__(self, manual: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = not manual
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor | None:
        loss: Tensor = self.net(x).square().mean()
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, x: Tensor, batch_idx: int) -> None:
        self.log("own", self.net(x).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _buffers(rank: int, manual: bool, batches: int) -> list[Any]:
    found = []
    for stage in (None, *STAGES):
        module = Normed(manual)
        data = list(torch.randn(6, 4, 4, generator=torch.Generator().manual_seed(rank)))
        with launched(rank):
            strategy = DDPStrategy() if stage is None else ZeROStrategy(stage=stage)
            trainer = make_trainer(
                strategy, accumulate_grad_batches=1 if manual else batches, max_epochs=2, check_val_every_n_epoch=1
            )
            trainer.fit(module, loader(data), loader(data[:1]))
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        found.append((buffers, float(trainer.callback_metrics["own"])))
    return found


@pytest.mark.parametrize(
    ("manual", "batches"), [(False, 1), (False, 2), (True, 1)], ids=["auto", "accumulate", "manual"]
)
def test_buffers_are_those_of_ddp_on_each_rank(manual: bool, batches: int) -> None:
    """Under manual optimization DDP never sends rank 0's: statistics stay each rank's own."""
    ranks = run_ranks(2, _buffers, manual, batches)
    for (expected, own), *of_stages in ranks:
        for buffers, logged in of_stages:
            assert logged == pytest.approx(own, abs=1e-5)
            for name, value in expected.items():
                assert torch.allclose(buffers[name], value, rtol=0, atol=1e-5), name
    first, second = (found[0][0] for found in ranks)
    assert torch.equal(first["net.1.running_mean"], second["net.1.running_mean"]) is not manual


class Reads(L.Callback):
    """On rank 0 alone: pickles the weights and looks at them as arrays, as callbacks that log do."""

    def __init__(self) -> None:
        self.saved = b""
        self.arrays: dict[str, Any] = {}
        self.refused: list[str] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if not trainer.is_global_zero:
            return
        try:
            file = io.BytesIO()
            torch.save(pl_module.state_dict(), file)
            self.saved = file.getvalue()
            self.arrays = {name: p.detach().numpy().copy() for name, p in pl_module.named_parameters()}
        except RawMemoryError as error:
            self.refused.append(str(error))


def _read(rank: int, stage: int) -> Any:
    module, reads = Normed(False), Reads()
    data = list(torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(rank)))
    with launched(rank):
        make_trainer(ZeROStrategy(stage=stage), callbacks=[reads]).fit(module, loader(data))
    return reads, {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("stage", [1, 2])
def test_where_whole_values_rest_rank_0_saves_and_reads_them_alone(stage: int) -> None:
    """After the only step, so what it saw is what the module holds in the end; the file is an ordinary one."""
    (reads, after), (nothing, _) = run_ranks(2, _read, stage)
    assert reads.refused == []
    assert nothing.saved == b""
    loaded = torch.load(io.BytesIO(reads.saved), weights_only=True)
    assert list(loaded) == list(after)
    for name, value in after.items():
        assert type(loaded[name]) in (Tensor, nn.Parameter)
        assert torch.equal(loaded[name], value), name
    for name, array in reads.arrays.items():
        assert torch.equal(torch.from_numpy(array), after[name]), name


def test_at_stage_3_an_error_names_the_way() -> None:
    """A rank holds a part alone."""
    reads, _ = run_ranks(2, _read, 3)[0]
    (error,) = reads.refused
    assert "with lightning_zero.gathered(module)" in error


class Mine(Exception):
    """Of the user."""


class Fails(L.LightningModule):
    """Raises in validation, while a variable holds a view of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.layer(x).square().mean()

    def validation_step(self, x: Tensor, batch_idx: int) -> None:
        held = [self.layer(x), self.layer.weight[0], *self.parameters()]
        if held:
            raise Mine("in validation")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fails(rank: int, world_size: int) -> list[str]:
    found = []
    for stage in STAGES:
        with launched(rank):
            try:
                data = loader([torch.ones(2, 4)])
                make_trainer(ZeROStrategy(stage=stage), devices=world_size).fit(Fails(), data, data)
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_users_exception_comes_out_as_it_is(world_size: int) -> None:
    """Whatever its traceback holds, and whether or not the module can be made whole after it."""
    assert run_ranks(world_size, _fails, world_size) == [["Mine: in validation"] * 3] * world_size
