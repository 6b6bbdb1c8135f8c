"""R2. Trained and frozen parameters mix freely: frozen values are saved, restored and never touched."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rows import (
    STAGES,
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
    tokens,
    trunk,
    vectors,
)
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_zero import ZeROStrategy


class LoraBlock(nn.Module):
    """A frozen Linear and a trained update of rank 2, which starts at zero, as LoRA has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.lora_a = nn.Linear(width, 2, bias=False)
        self.lora_b = nn.Linear(2, width, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.lora_b(self.lora_a(x)))


class LoraStack(Regression):
    """The optimizer gets all parameters, frozen ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(LoraBlock(5) for _ in range(9)), nn.Linear(5, 3))

    def on_train_batch_end(self, *_: Any) -> None:
        frozen = [p for p in self.parameters() if not p.requires_grad]
        optimizer = self.optimizers().optimizer
        self.record.append([p.grad is None and p not in optimizer.state for p in frozen])


@pytest.mark.parametrize("stage", STAGES)
def test_b1_frozen_weights_beside_lora_never_change(stage: int, tmp_path: Path) -> None:
    """B1: under a weight decay of 0.1 they keep every bit, and have neither gradient nor optimizer state."""
    twin = fit_plain(LoraStack, vectors(3, 5, 3))
    runs = fit_ranks(stage, LoraStack, vectors(3, 5, 3), tmp_path / "last.ckpt")
    assert_trained_as(twin, runs, tmp_path / "last.ckpt", LoraStack)
    torch.manual_seed(0)
    for name, start in LoraStack().state_dict().items():
        assert torch.equal(runs[0].after[name], start) == (".base." in name), name
    assert all(run.record == [[True] * 18] * 3 for run in runs)
    assert {"net.4.base.weight", "net.4.lora_a.weight"} <= runs[0].in_units


class SixLoraLayers(Regression):
    """Six layers are more than an eighth each unless named, so the units are."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(LoraBlock(5) for _ in range(6)), nn.Linear(5, 3).requires_grad_(False))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


@pytest.mark.parametrize("stage", STAGES)
def test_b6_one_step_moves_the_lora_weights_of_every_layer(stage: int) -> None:
    """B6: all six, each where the twin moves it."""
    runs = fit_ranks(stage, SixLoraLayers, vectors(1, 5, 3), strategy=ZeROStrategy(stage, units=[LoraBlock]))
    assert_trained_as(fit_plain(SixLoraLayers, vectors(1, 5, 3)), runs)
    assert all(runs[0].after[f"net.{i}.lora_b.weight"].any() for i in range(6))


class FrozenConstants(Regression):
    """One block and one layer are frozen at known constants, different in each module that is made; so is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), *(Block(5) for _ in range(9)), nn.Linear(5, 3))
        self.register_buffer("scale", torch.tensor([0.5, 2.0, 1.0]))
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        for frozen, value in ((self.net[0], 0.25), (self.net[5], -0.125)):
            frozen.requires_grad_(False)
            for parameter in frozen.parameters():
                nn.init.constant_(parameter, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale


class OtherConstants(FrozenConstants):
    """The same module before a checkpoint is loaded: every value differs."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.add_(7)


@cache
def constants_twin(folder: Path) -> tuple[Run, dict[str, Any]]:
    twin = fit_plain(FrozenConstants, vectors(3, 4, 3), checkpoint=folder / "plain.ckpt")
    return twin, read_checkpoint(folder / "plain.ckpt")


@pytest.mark.parametrize("stage", STAGES)
def test_b2_b3_a_checkpoint_holds_frozen_weights_and_buffers(
    stage: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """B2, B3: at every stage the keys, shapes and values of a plain checkpoint; constants come back from it."""
    twin, plain = constants_twin(tmp_path_factory.getbasetemp())
    runs = fit_ranks(stage, FrozenConstants, vectors(3, 4, 3), tmp_path / "last.ckpt")
    assert_trained_as(twin, runs, tmp_path / "last.ckpt", FrozenConstants)
    saved = read_checkpoint(tmp_path / "last.ckpt")
    assert_close(saved["state_dict"], plain["state_dict"])
    assert saved.keys() == plain.keys()
    loaded = OtherConstants.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert (loaded.net[0].weight == 0.25).all() and (loaded.net[5].linear.weight == -0.125).all()
    assert loaded.scale.tolist() == [0.5, 2.0, 1.0]


class OnlyTheEmbedding(Regression):
    """GPT-like; everything is frozen but one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(5, 1, 7, dropout=0.0, batch_first=True) for _ in range(9))
        )
        self.head = nn.Linear(5, 11)
        self.requires_grad_(False)
        self.embedding.requires_grad_(True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.head(self.blocks(self.embedding(batch[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@pytest.mark.parametrize("stage", STAGES)
def test_b4_all_but_one_tensor_may_be_frozen(stage: int, tmp_path: Path) -> None:
    """B4: only the embedding of a small transformer is trained."""
    twin = fit_plain(OnlyTheEmbedding, tokens(2, 11))
    runs = fit_ranks(stage, OnlyTheEmbedding, tokens(2, 11), tmp_path / "last.ckpt")
    assert_trained_as(twin, runs, tmp_path / "last.ckpt", OnlyTheEmbedding)
    torch.manual_seed(0)
    start = OnlyTheEmbedding().state_dict()
    moved = [name for name, value in runs[0].after.items() if not torch.equal(value, start[name])]
    assert moved == ["embedding.weight"]


class Distillation(Regression):
    """A frozen teacher in the same LightningModule; the optimizer knows the student only."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(4, 5), *(Block(5) for _ in range(9)), nn.Linear(5, 3))
        self.teacher = nn.Sequential(
            nn.Linear(4, 5), *(nn.Sequential(Block(5), nn.Dropout()) for _ in range(11)), nn.Linear(5, 3)
        )
        self.teacher.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.teacher.eval()
        with torch.no_grad():
            target = self.teacher(x)
        self.record.append(target.requires_grad)
        answer = self.student(x)
        return F.mse_loss(answer, target) + F.mse_loss(answer, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.student.parameters(), lr=0.01, weight_decay=0.1)


@pytest.mark.parametrize("stage", STAGES)
def test_b12_a_frozen_teacher_is_called_and_never_modified(stage: int, tmp_path: Path) -> None:
    """B12: in eval mode under `no_grad`; the student trains as in one process, the teacher keeps every bit."""
    twin = fit_plain(Distillation, vectors(3, 4, 3))
    runs = fit_ranks(stage, Distillation, vectors(3, 4, 3), tmp_path / "last.ckpt")
    assert_trained_as(twin, runs, tmp_path / "last.ckpt", Distillation)
    torch.manual_seed(0)
    for name, start in Distillation().teacher.state_dict().items():
        assert torch.equal(runs[0].after[f"teacher.{name}"], start)
    assert "teacher.5.0.linear.weight" in runs[0].in_units


class CopiedHead(Regression):
    """`configure_model` copies the head, as PEFT does for `modules_to_save`: the original freezes, the copy trains."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = trunk(5)
        self.head = nn.Linear(5, 3)
        self.trained_head: nn.Module | None = None

    def configure_model(self) -> None:
        if self.trained_head is None:
            self.requires_grad_(False)
            self.trained_head = copy.deepcopy(self.head).requires_grad_(True)
            self.adapter = LoraBlock(5)

    def forward(self, x: Tensor) -> Tensor:
        assert self.trained_head is not None
        return self.trained_head(self.adapter(self.blocks(x)))


@pytest.mark.parametrize("stage", STAGES)
def test_b11_modules_added_and_copied_in_configure_model_are_trained(stage: int, tmp_path: Path) -> None:
    """B11: a deep copy of the head and an adapter, both made in `configure_model`, train; their originals stay."""
    twin = fit_plain(CopiedHead, vectors(3, 5, 3))
    runs = fit_ranks(stage, CopiedHead, vectors(3, 5, 3), tmp_path / "last.ckpt")
    assert_trained_as(twin, runs, tmp_path / "last.ckpt", CopiedHead)
    assert not torch.equal(runs[0].after["trained_head.weight"], runs[0].after["head.weight"])
