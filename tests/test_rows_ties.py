"""R1. Tied parameters stay tied: one shard, the sum of all uses' gradients, both names in the checkpoint."""

from __future__ import annotations

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
    assert_trained_as,
    fit_plain,
    fit_ranks,
    mean_losses,
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


class TiedLanguageModel(Regression):
    """Embedding and head are one tensor."""

    vocabulary = 11

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.vocabulary, 6)
        self.blocks = trunk(6)
        self.head = nn.Linear(6, self.vocabulary)
        self.head.weight = self.embedding.weight

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.record.append(self.head.weight is self.embedding.weight)
        logits = self.head(self.blocks(self.embedding(batch[:, :-1])))
        self.record.append(self.head.weight is self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def on_train_batch_end(self, *_: Any) -> None:
        self.record.append(self.head.weight is self.embedding.weight)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


@cache
def tied_twin(steps: int) -> Run:
    return fit_plain(TiedLanguageModel, tokens(steps, 11))


@pytest.mark.parametrize("stage", STAGES)
def test_a1_tied_embedding_and_head_train_as_one(stage: int, tmp_path: Path) -> None:
    """A1: the gradient is the sum of both uses; `head.weight is embedding.weight` before, in and after each step."""
    runs = fit_ranks(stage, TiedLanguageModel, tokens(3, 11), tmp_path / "last.ckpt")
    assert_trained_as(tied_twin(3), runs, tmp_path / "last.ckpt", TiedLanguageModel)
    assert all(run.record == [True] * 9 for run in runs)
    # The tensor has one entry in the optimizer: embedding, 9 blocks of 2, the head's bias.
    assert len(read_checkpoint(tmp_path / "last.ckpt")["optimizer_states"][0]["state"]) == 1 + 18 + 1


@pytest.mark.parametrize("stage", STAGES)
def test_a3_both_names_of_a_tied_weight_stay_bit_equal(stage: int, tmp_path: Path) -> None:
    """A3: after 10 steps, on every rank and in the checkpoint; the twin's values too."""
    runs = fit_ranks(stage, TiedLanguageModel, tokens(10, 11), tmp_path / "last.ckpt")
    assert_trained_as(tied_twin(10), runs)
    saved = read_checkpoint(tmp_path / "last.ckpt")["state_dict"]
    for state in (saved, *(run.after for run in runs)):
        assert torch.equal(state["embedding.weight"], state["head.weight"])
    # The file holds the tensor once.
    assert saved["embedding.weight"].data_ptr() == saved["head.weight"].data_ptr()


class OddVocabulary(TiedLanguageModel):
    vocabulary = 7


@pytest.mark.parametrize("stage", STAGES)
def test_a4_the_last_row_of_an_odd_tied_vocabulary_is_there(stage: int, tmp_path: Path) -> None:
    """A4: 7 rows on 2 ranks, and token 6 occurs in every batch."""
    batches = tokens(3, 7)
    assert all((ids == 6).any() for ids in batches)
    runs = fit_ranks(stage, OddVocabulary, batches, tmp_path / "last.ckpt")
    assert_trained_as(fit_plain(OddVocabulary, batches), runs, tmp_path / "last.ckpt", OddVocabulary)


class Branch(nn.Module):
    """Has its own layer, and one that another branch has too."""

    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.own = nn.Linear(5, 5)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(torch.tanh(self.own(x)))


class TwoBranches(Regression):
    """One Linear object is `branches.0.shared` and `branches.1.shared`; each branch is a unit."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(5, 3)
        self.trunk = trunk(5, depth=12)
        self.branches = nn.ModuleList([Branch(shared), Branch(shared)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        return self.branches[0](h) + self.branches[1](h) * 2


@pytest.mark.parametrize("stage", STAGES)
def test_a2_one_layer_in_two_branches_trains_as_one(stage: int, tmp_path: Path) -> None:
    """A2: both branches are in the loss; the checkpoint has the layer under both names."""
    twin = fit_plain(TwoBranches, vectors(3, 5, 3))
    strategy = ZeROStrategy(stage, units=["Branch", "Block"])
    runs = fit_ranks(stage, TwoBranches, vectors(3, 5, 3), tmp_path / "last.ckpt", strategy=strategy)
    assert_trained_as(twin, runs, tmp_path / "last.ckpt", TwoBranches)
    assert {"branches.0.shared.weight", "branches.1.shared.weight"} <= twin.after.keys()
    assert {"branches.0.shared.weight", "branches.1.own.weight"} <= runs[0].in_units


class SharedBias(Regression):
    """Two Linears, one nested in a block, share a bias and no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.blocks = trunk(5)
        self.blocks[4].linear.bias = self.first.bias
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)))


@pytest.mark.parametrize("stage", STAGES)
def test_a5_a_bias_alone_may_be_shared_across_levels(stage: int, tmp_path: Path) -> None:
    """A5: one bias belongs to a layer of the root and to a layer two levels down, in a unit."""
    twin = fit_plain(SharedBias, vectors(3, 4, 3))
    strategy = ZeROStrategy(stage, units=["Block"])
    runs = fit_ranks(stage, SharedBias, vectors(3, 4, 3), tmp_path / "last.ckpt", strategy=strategy)
    assert_trained_as(twin, runs, tmp_path / "last.ckpt", SharedBias)
    assert torch.equal(runs[0].after["first.bias"], runs[0].after["blocks.4.linear.bias"])
    assert "blocks.4.linear.weight" in runs[0].in_units and "first.bias" not in runs[0].in_units


class TiedEndsAndAnUnusedLayer(Regression):
    """The first and the last Linear share weight and bias, another layer is never called; float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), *(Block(4) for _ in range(9)), nn.Linear(4, 4))
        self.layers[-1].weight, self.layers[-1].bias = self.layers[0].weight, self.layers[0].bias
        self.unused = nn.Linear(4, 4)
        self.float()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.float())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1].float())


@cache
def tied_ends_twin(accumulate: int) -> Run:
    return fit_plain(TiedEndsAndAnUnusedLayer, vectors(5, 4, 4), accumulate_grad_batches=accumulate)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a6_g8_losses_agree_step_by_step(stage: int, accumulate: int) -> None:
    """A6, G8: float32 losses of five steps, 1e-6, also with accumulation; the unused layer is not decayed."""
    twin = tied_ends_twin(accumulate)
    runs = fit_ranks(stage, TiedEndsAndAnUnusedLayer, vectors(5, 4, 4), accumulate_grad_batches=accumulate)
    assert mean_losses(runs) == pytest.approx(twin.losses, abs=1e-6)
    assert len(twin.losses) == 5
    assert torch.equal(runs[0].after["unused.weight"], twin.after["unused.weight"])
