"""`Trainer(strategy="zero3_offload")` trains, resumes, validates and tests as without offload, to the last bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from distributed import run_ranks
from lightning.pytorch.callbacks import EMAWeightAveraging
from offloading import differences
from rows import Block, launched, loader, make_trainer, read_checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_zero import HostMemory, MappedFile, ZeROStrategy

VOCABULARY, WIDTH = 13, 6
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


class Model(L.LightningModule):
    """Nine blocks over tokens, a frozen one, running statistics; a rate that is scheduled at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(9))
        self.blocks[4].requires_grad_(False)
        self.statistics = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.seen: list[float] = []

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.statistics(x))

    def _loss(self, tokens: Tensor) -> Tensor:
        loss = F.cross_entropy(self(tokens).float(), tokens.flip(0))
        self.seen.append(float(loss))
        return loss

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return self._loss(tokens)

    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        self.log("validation", self._loss(tokens), sync_dist=True)

    def test_step(self, tokens: Tensor, batch_idx: int) -> None:
        self.log("test", self._loss(tokens), sync_dist=True)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)
        # As offload asks for where the user has no wish. With `fused=True` Lightning clips nothing in mixed precision.
        optimizer.param_groups[0]["fused"] = True
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def _batches(rank: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(VOCABULARY, (4,), generator=generator) for _ in range(count)]


def _fit(rank: int, strategy: Any, make: type[Model] = Model, world_size: int = 2, **arguments: Any) -> dict[str, Any]:
    """What is there after a fit of 5 batches with validation in between, and after a test."""
    torch.manual_seed(0)
    module = make()
    path = arguments.pop("ckpt_path", None)
    save = arguments.pop("save", None)
    with launched(rank), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(strategy, devices=world_size, num_sanity_val_steps=1, **arguments)
        data = loader(_batches(rank, 5)), loader(_batches(10 + rank, 2))
        trainer.fit(module, *data, ckpt_path=path, weights_only=True)
        if save is not None:
            trainer.save_checkpoint(save)
        found = {name: value.clone() for name, value in module.state_dict().items()}
        found["metrics"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
        found["test"] = [float(metrics["test"]) for metrics in trainer.test(module, data[1], verbose=False)]
    assert not [str(w.message) for w in caught if "lr_scheduler" in str(w.message)]
    found["seen"] = module.seen
    return found


def _fit_in_all_ways(rank: int, precision: str, world_size: int, folder: str) -> list[str]:
    """Names of what differs, by strategy."""
    common = {"precision": precision, "gradient_clip_val": 0.1, "accumulate_grad_batches": 2, "world_size": world_size}
    others: dict[int, list[Any]] = {
        1: [MappedFile(folder)],
        2: [HostMemory(ratio=0.5)],
        3: [HostMemory(parameters=True)],
    }
    wrong = []
    for stage, targets in others.items():
        expected = _fit(rank, f"zero{stage}", **common)
        # Parameters alone may differ between the two in when they are there, and the rest in where.
        strategies = [f"zero{stage}_offload", *(ZeROStrategy(stage=stage, offload=target) for target in targets)]
        for strategy in strategies[:: 1 if precision != "bf16-true" else 2]:
            found = _fit(rank, strategy, **common)
            wrong += [f"{strategy!r}: {key}" for key in differences(found, expected)]
    return wrong


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_fit_ends_where_it_ends_without_offload(precision: str, tmp_path: Path) -> None:
    """Clipped, accumulated, validated in between, tested afterwards; nobody is told to step schedulers later."""
    for wrong in run_ranks(2, _fit_in_all_ways, precision, 2, str(tmp_path)):
        assert not wrong


def _fits_alone(rank: int, folder: str) -> list[str]:
    expected = _fit(rank, "zero2", world_size=1, gradient_clip_val=0.1, accumulate_grad_batches=2)
    wrong = []
    for offload in (HostMemory(), MappedFile(folder, ratio=0.5), HostMemory(parameters=True)):
        strategy = ZeROStrategy(stage=3, offload=offload)
        found = _fit(rank, strategy, world_size=1, gradient_clip_val=0.1, accumulate_grad_batches=2)
        wrong += [f"{offload!r}: {key}" for key in differences(found, expected)]
    return wrong


def test_one_process_offloads(tmp_path: Path) -> None:
    ((),) = run_ranks(1, _fits_alone, str(tmp_path))


# Resume


def _resumes(rank: int, folder: str) -> list[str]:
    """One epoch, saved; a second one from there, with another strategy: two epochs at once."""
    at = Path(folder)
    offload = "zero3_offload"
    straight = _fit(rank, "zero1", max_epochs=2, save=at / "straight.ckpt")
    wrong = []
    disk = ZeROStrategy(stage=2, offload=MappedFile(folder))
    for first, second in (("zero1", offload), (offload, "zero2"), (offload, disk), ("ddp", "zero1_offload")):
        name = f"{first}, then {second!r}"
        _fit(rank, first, max_epochs=1, save=at / "first.ckpt")
        resumed = _fit(rank, second, max_epochs=2, ckpt_path=at / "first.ckpt", save=at / "second.ckpt")
        # Losses of the second epoch: of 5 batches, and of 2 in validation and in the test.
        straight["seen"], resumed["seen"] = straight["seen"][-9:], resumed["seen"][-9:]
        wrong += [f"{name}: {key}" for key in differences(resumed, straight)]
        torch.distributed.barrier()
        saved, expected = (_state(at / f"{file}.ckpt") for file in ("second", "straight"))
        wrong += [f"{name}, saved: {key}" for key in differences(saved, expected)]
        torch.distributed.barrier()
    return wrong


def _state(path: Path) -> dict[str, Any]:
    """Weights and the optimizer's state in a checkpoint, by name."""
    checkpoint = read_checkpoint(path)
    (state,) = checkpoint["optimizer_states"]
    moments = {f"{i}.{key}": value for i, values in state["state"].items() for key, value in values.items()}
    return {**checkpoint["state_dict"], **moments, "groups": state["param_groups"]}


def test_runs_resume_with_offload_and_without(tmp_path: Path) -> None:
    """A checkpoint knows nothing of where state rested; that of plain data parallelism serves too."""
    for wrong in run_ranks(2, _resumes, str(tmp_path)):
        assert not wrong


# Other loops


class Gan(Model):
    """Two optimizers by hand; one of them is stepped twice a batch, and weights are clamped as Wasserstein's are."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, tokens: Tensor, batch_idx: int) -> None:
        even, odd = self.optimizers()
        for optimizer in (even, odd, even):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self._loss(tokens))
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        with torch.no_grad():
            for p in self.blocks[3].parameters():
                p.clamp_(-0.3, 0.3)

    def configure_optimizers(self) -> Any:
        groups = [[p for block in self.blocks[i::2] for p in block.parameters()] for i in range(2)]
        return [
            torch.optim.RMSprop([*groups[0], *self.embed.parameters()], lr=0.01),
            torch.optim.Adam([*groups[1], *self.head.parameters()], lr=0.01, fused=True),
        ]


def _other_loops(rank: int) -> list[str]:
    wrong = []
    runs: dict[str, Any] = {
        "GAN": lambda strategy: _fit(rank, strategy, Gan),
        "average": lambda strategy: _fit(rank, strategy, callbacks=[EMAWeightAveraging(decay=0.5)]),
    }
    for name, run in runs.items():
        expected = run("zero3")
        for offload in (HostMemory(ratio=0.7), HostMemory(parameters=True)):
            found = run(ZeROStrategy(stage=3, offload=offload))
            wrong += [f"{name}, {offload!r}: {key}" for key in differences(found, expected)]
    return wrong


def test_manual_optimization_and_averages_are_those_without_offload() -> None:
    for wrong in run_ranks(2, _other_loops):
        assert not wrong
