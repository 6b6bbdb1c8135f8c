"""R8. Weights used outside their module's forward, methods that are not forward, and ``generate`` from hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rows import (
    STAGES,
    Block,
    Regression,
    Run,
    assert_trained_as,
    fit_plain,
    fit_ranks,
    setup_module,  # noqa: F401
    teardown_module,  # noqa: F401
    tokens,
    trunk,
    vectors,
)
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_zero import ZeROStrategy


class Penalized(Regression):
    """An L2 penalty on every parameter: units', the root's, a frozen block's, and a layer's that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), *(Block(5) for _ in range(9)), nn.Linear(5, 3))
        self.net[2].requires_grad_(False)
        self.uncalled = nn.Linear(3, 3)

    def penalty(self) -> Tensor:
        return sum(p.pow(2).sum() for p in self.parameters())  # type: ignore[return-value]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        before = self.penalty()
        loss = F.mse_loss(self(x), y)
        after = self.penalty()
        self.record.append([before.item(), after.item()])
        return loss + 0.04 * before + 0.06 * after

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("stage", STAGES)
def test_d1_a_penalty_on_all_weights_has_full_value_and_gradient(stage: int, tmp_path: Path) -> None:
    """D1: 0.1 times the sum of squares in the loss, partly taken before the forward and partly after it."""
    twin = fit_plain(Penalized, vectors(3, 4, 3))
    runs = fit_ranks(stage, Penalized, vectors(3, 4, 3), tmp_path / "last.ckpt")
    assert_trained_as(twin, runs, tmp_path / "last.ckpt", Penalized)
    for run in runs:
        for found, expected in zip(run.record, twin.record, strict=True):
            assert found == pytest.approx([expected[0]] * 2, rel=1e-12)


class Net(nn.Module):
    """Has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 5))
        self.blocks = trunk(5)
        self.out = nn.Linear(5, 3)

    def embed(self, x: Tensor) -> Tensor:
        return x @ self.w

    def head(self, h: Tensor) -> Tensor:
        # Past the forward of the last block, a unit's.
        return self.out(self.blocks[:-1](h) + torch.tanh(F.linear(h, self.blocks[-1].linear.weight)))


class NoForward(LightningModule):
    """Calls methods of its net from steps and hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.record: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net.head(self.net.embed(x)), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note("validation_step")

    def note(self, where: str) -> None:
        x = torch.linspace(-1, 1, 8).view(2, 4)
        self.record.append((where, self.net.head(self.net.embed(x)).detach().flatten().tolist()))

    def on_train_start(self) -> None:
        self.note("on_train_start")

    def on_train_batch_start(self, *_: Any) -> None:
        self.note("on_train_batch_start")

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.note("on_train_batch_end")

    def on_validation_epoch_end(self) -> None:
        self.note("on_validation_epoch_end")

    def on_train_end(self) -> None:
        self.note("on_train_end")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.mark.parametrize("stage", STAGES)
def test_d4_methods_other_than_forward_train_and_answer(stage: int, tmp_path: Path) -> None:
    """D4: `net.embed` and `net.head` from `training_step`, `validation_step` and hooks; each answer is the twin's."""
    data = {"batches": vectors(3, 4, 3), "validation": vectors(1, 4, 3)}
    twin = fit_plain(NoForward, **data)
    runs = fit_ranks(stage, NoForward, checkpoint=tmp_path / "last.ckpt", **data)
    assert_trained_as(twin, runs, tmp_path / "last.ckpt", NoForward)
    # Twice in the sanity check, and then: start, two for each of 3 batches, two of validation, end.
    assert len(twin.record) == 2 + 1 + 2 * 3 + 2 + 1
    for run in runs:
        for (where, found), (expected_where, expected) in zip(run.record, twin.record, strict=True):
            assert where == expected_where
            assert found == pytest.approx(expected, abs=1e-10), where


class ConvExtractor(nn.Module):
    """Gives its layers out, as wav2vec-like feature extractors do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(3, 3, 3, padding=1) for _ in range(9))

    def get_layers(self) -> list[tuple[Tensor, Tensor]]:
        return [(layer.weight, layer.bias) for layer in self.layers]


class UsesLayersOfAnother(Regression):
    """The parent's forward convolves with weights that it got from a method of its child."""

    def __init__(self) -> None:
        super().__init__()
        self.extractor = ConvExtractor()
        self.out = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None].expand(-1, 3, -1)
        for weight, bias in self.extractor.get_layers():
            x = x + torch.tanh(F.conv1d(x, weight, bias, padding=1))
        return self.out(x.mean(1))


@pytest.mark.parametrize("stage", STAGES)
def test_d5_weights_that_a_method_hands_out_are_whole(stage: int, tmp_path: Path) -> None:
    """D5: the weights of a convolution keep their three dimensions wherever they are used, and their gradient."""
    twin = fit_plain(UsesLayersOfAnother, vectors(3, 5, 2))
    runs = fit_ranks(stage, UsesLayersOfAnother, vectors(3, 5, 2), tmp_path / "last.ckpt")
    assert_trained_as(twin, runs, tmp_path / "last.ckpt", UsesLayersOfAnother)


class FusedCrossEntropy(torch.autograd.Function):
    """Computes its gradients in forward, as fused kernels do, from the weight itself."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        with torch.enable_grad():
            h, weight = h.detach().requires_grad_(), weight.detach().requires_grad_()
            loss = F.cross_entropy(h @ weight.t(), labels)
            grads = torch.autograd.grad(loss, (h, weight))
        ctx.save_for_backward(*grads)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        h, weight = ctx.saved_tensors
        return h * grad, weight * grad, None


class Lm(nn.Module):
    """The head is a unit by name, so its weight is gathered and freed like a block's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.blocks = trunk(5)
        self.lm_head = nn.Linear(5, 11, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.blocks(self.embedding(ids))


class ChunkedCrossEntropy(Regression):
    """The loss reads `self.lm.lm_head.weight`, chunk by chunk, and the head's forward is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = Lm()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        h, labels = self.lm(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        return sum(  # type: ignore[return-value]
            self.chunk_loss(hidden, label) * len(label) / len(labels)
            for hidden, label in zip(h.split(2), labels.split(2), strict=True)
        )

    def chunk_loss(self, h: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, self.lm.lm_head.weight), labels)


class FusedLoss(ChunkedCrossEntropy):
    """The chunk's loss is an ``autograd.Function``."""

    def chunk_loss(self, h: Tensor, labels: Tensor) -> Tensor:
        return FusedCrossEntropy.apply(h, self.lm.lm_head.weight, labels)  # type: ignore[no-any-return]


@pytest.mark.parametrize("units", [["Block"], ["Block", "Linear"]])
@pytest.mark.parametrize("make", [ChunkedCrossEntropy, FusedLoss])
@pytest.mark.parametrize("stage", STAGES)
def test_d6_a_weight_read_as_an_attribute_is_whole_and_trained(
    stage: int, make: type[Regression], units: list[str], tmp_path: Path
) -> None:
    """D6: in chunks, by torch's functions and by a custom one, with the head in the root and as a unit of its own."""
    twin = fit_plain(make, tokens(3, 11))
    strategy = ZeROStrategy(stage, units=units)
    runs = fit_ranks(stage, make, tokens(3, 11), tmp_path / "last.ckpt", strategy=strategy)
    assert_trained_as(twin, runs, tmp_path / "last.ckpt", make)
    assert ("lm.lm_head.weight" in runs[0].in_units) == ("Linear" in units)


class MixesUnits(Regression):
    """One operation takes the weights of several units: a product of two, and a variance over all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = trunk(5)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(x))

    def weights(self) -> list[Tensor]:
        return [block.linear.weight for block in self.blocks]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        weights = self.weights()
        return loss + (weights[1] @ weights[5]).pow(2).sum() + torch.stack(weights).var(0).sum()


class KeepsWeights(MixesUnits):
    """The weights are those that the blocks' forwards saw, kept until all units are closed."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept: list[Tensor] = []
        for block in self.blocks:
            handle = block.register_forward_hook(lambda block, *_: self.kept.append(block.linear.weight))
            x = block(x)
            handle.remove()
        return self.last(x)

    def weights(self) -> list[Tensor]:
        return self.kept


@pytest.mark.parametrize("make", [MixesUnits, KeepsWeights])
@pytest.mark.parametrize("stage", STAGES)
def test_d6_one_operation_may_mix_the_weights_of_several_units(
    stage: int, make: type[Regression], tmp_path: Path
) -> None:
    """D6: all of them are whole at once, as attributes at rest and as kept from inside the blocks' forwards."""
    twin = fit_plain(make, vectors(3, 5, 3))
    runs = fit_ranks(stage, make, vectors(3, 5, 3), tmp_path / "last.ckpt")
    assert_trained_as(twin, runs, tmp_path / "last.ckpt", make)
    assert {"blocks.1.linear.weight", "blocks.5.linear.weight"} <= runs[0].in_units


class BorrowsTheEmbedding(Regression):
    """The decoder multiplies with the transpose of the encoder's embedding, and owns nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.emb = nn.Embedding(11, 5)
        self.decoder = trunk(5)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        h = self.decoder(self.encoder.emb(batch[:, :-1]))
        logits = h @ self.encoder.emb.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@pytest.mark.parametrize("units", [None, ["Block", "Embedding"]])
@pytest.mark.parametrize("stage", STAGES)
def test_d8_another_modules_weight_needs_no_registration(stage: int, units: list[str], tmp_path: Path) -> None:
    """D8: `self.encoder.emb.weight.t()` in the decoder's output, with the embedding in the root and as a unit."""
    twin = fit_plain(BorrowsTheEmbedding, tokens(3, 11))
    strategy = ZeROStrategy(stage, units=units)
    runs = fit_ranks(stage, BorrowsTheEmbedding, tokens(3, 11), tmp_path / "last.ckpt", strategy=strategy)
    assert_trained_as(twin, runs, tmp_path / "last.ckpt", BorrowsTheEmbedding)


class Writer(LightningModule):
    """A tiny GPT-2 that continues its prompts greedily in every ``validation_step``."""

    def __init__(self) -> None:
        super().__init__()
        self.record: list[Any] = []
        config = GPT2Config(
            vocab_size=13, n_positions=16, n_embd=6, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=None,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        self.model = GPT2LMHeadModel(config)

    def write(self, prompts: Tensor) -> Tensor:
        return self.model.generate(prompts, max_new_tokens=5, do_sample=False, pad_token_id=0)  # type: ignore

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch, labels=batch).loss  # type: ignore[no-any-return]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.record.append(self.write(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class WritesFromCallbacks(Callback):
    """Generates wherever a callback may."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        module.record.append(module.write(batch))

    def on_validation_epoch_end(self, trainer: Trainer, module: Any) -> None:
        module.record.append(module.write(torch.tensor([[1, 2]])))


def written(make: type[Writer], stage: int | None) -> list[Run]:
    """Runs of two batches of training and one of validation."""
    data: dict[str, Any] = {"validation": tokens(1, 13, length=4), "callbacks": [WritesFromCallbacks()]}
    batches = tokens(2, 13, length=4)
    return [fit_plain(make, batches, **data)] if stage is None else fit_ranks(stage, make, batches, **data)


@pytest.mark.parametrize("stage", STAGES)
def test_d10_generate_writes_what_one_process_writes(stage: int) -> None:
    """D10: greedily 5 tokens, in `validation_step` and from callbacks, before and after training steps."""
    (twin,) = written(Writer, None)
    runs = written(Writer, stage)
    assert_trained_as(twin, runs)
    # The sanity check and validation: a step and the epoch's end each; and two batches.
    assert len(twin.record) == 2 * 2 + 2
    for expected, *parts in zip(twin.record, *(run.record for run in runs), strict=True):
        if len(expected) == 1:  # the prompt that all ranks share
            parts = parts[:1]
        assert torch.cat(parts).tolist() == expected.tolist()
    assert {tuple(ids.shape) for ids in runs[0].record} == {(1, 9), (1, 7)}
