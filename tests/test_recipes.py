"""Precision recipes in training: the numerics of DDP in every precision of the Trainer, and what each field changes."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from distributed import run_ranks
from lightning.pytorch.plugins import MixedPrecision
from rows import launched, loader, make_trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric

import lightning_zero
from lightning_zero import PrecisionRecipe, ZeROStrategy
from lightning_zero.engine import engine_of
from lightning_zero.precision import RECIPES

STAGES = (1, 2, 3)
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-true", "64-true")
WIDTH, VOCABULARY = 8, 11


class Block(nn.Module):
    """Products, a norm, a buffer of angles as rotary positions have; a gated one switches autocast off for a part."""

    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 13)
        self.down = nn.Linear(13, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 1) if gated else None
        self.register_buffer("inv_freq", torch.tensor([1.0, 0.12345678]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        out = self.down(torch.relu(self.up(h))) + self.inv_freq.sum()
        if self.gate is None:
            return x + out
        with torch.autocast("cpu", enabled=False):
            return x + torch.sigmoid(self.gate(h.float())) * out


class Model(L.LightningModule):
    """A residual stream over an embedding; running statistics; a head."""

    gated = False

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(self.gated) for _ in range(9))
        self.statistics = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.mean_loss = MeanMetric()
        self.seen: dict[str, Any] = {}

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.statistics(x))

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(tokens).float(), tokens)
        self.mean_loss(loss.detach())
        self.seen.setdefault("losses", []).append(float(loss))
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.eval()
        with torch.no_grad():
            self.seen["outside autocast"] = self(torch.arange(3)).dtype
        self.train()
        self.seen["buffers"] = {name: buffer.dtype for name, buffer in self.named_buffers()}
        self.seen["metric"] = self.mean_loss.mean_value.dtype

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-4)  # 1e-8 is zero in fp16


class Gated(Model):
    """Every block computes a part of it outside autocast."""

    gated = True


BATCHES = list(torch.randint(VOCABULARY, (3, 2, 4), generator=torch.Generator().manual_seed(1)))


def fitted(rank: int, strategy: Any, make: Any = Model, batches: Any = BATCHES, **arguments: Any) -> Any:
    """What ``rank`` has after a fit: weights, what the module saw, and the loss scale."""
    torch.manual_seed(0)
    module = make()
    with launched(rank):
        trainer = make_trainer(strategy, **arguments)
        trainer.fit(module, loader([batch[rank] for batch in batches]))
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return module.state_dict(), module.seen, scaler and scaler.get_scale()


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


# The Trainer's precisions


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_has_the_result_of_ddp_to_the_last_bit(precision: str) -> None:
    """The sum of two ranks' gradients has one order, and a narrow gather holds what DDP's autocast makes of fp32.

    Buffers, metrics, and what a forward outside autocast gives have the dtypes they have under DDP.
    """

    def on_rank(rank: int) -> Any:
        return [fitted(rank, strategy, precision=precision) for strategy in ("ddp", "zero1", "zero2", "zero3")]

    for (expected, seen, _), *sharded in run_ranks(2, on_rank):
        for found, seen_sharded, _ in sharded:
            assert seen_sharded == seen
            assert_equal(found, expected)


@pytest.mark.parametrize("stage", STAGES)
def test_a_part_outside_autocast_computes_in_fp32_on_rounded_weights(stage: int) -> None:
    """Where DDP has fp32 weights: the one difference, 2 ** -9 of a weight; `compute=torch.float32` has none."""

    def on_rank(rank: int) -> Any:
        exact = ZeROStrategy(stage=stage, recipe=PrecisionRecipe(compute=torch.float32))
        return [
            fitted(rank, strategy, Gated, precision="bf16-mixed")[:2] for strategy in ("ddp", f"zero{stage}", exact)
        ]

    for (expected, seen), (_, seen_rounded), (exact, seen_exact) in run_ranks(2, on_rank):
        assert_equal(exact, expected)
        assert seen_exact["losses"] == seen["losses"] != seen_rounded["losses"]
        for rounded, loss in zip(seen_rounded["losses"], seen["losses"], strict=True):
            assert abs(rounded - loss) < 2e-3 * loss


@pytest.mark.parametrize("precision, dtype", [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)])
def test_buffers_keep_the_dtype_they_need(precision: str, dtype: torch.dtype) -> None:
    """Angles and running statistics stay fp32 in the mixed recipes; "true" converts them, as under DDP."""

    def on_rank(rank: int) -> Any:
        return fitted(rank, "zero3", precision=precision)[1]

    for seen in run_ranks(2, on_rank):
        assert seen["buffers"]["blocks.3.inv_freq"] is dtype
        assert seen["buffers"]["statistics.running_var"] is dtype
        assert seen["metric"] is dtype


# Loss scaling


class Overflowing(Model):
    """At its second step rank 1's loss is infinite."""

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(tokens, batch_idx)
        return loss * float("inf") if batch_idx == 1 and self.global_rank == 1 else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.setdefault("norms", []).append(
            float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None]))
        )


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("stage", STAGES)
def test_all_ranks_skip_a_step_together_and_halve_the_scale(stage: int, clip: float | None) -> None:
    """fp16 with a dynamic scale of 4: the step with an infinity on one rank is skipped by all; the scale is 2 after.

    Gradients are unscaled before they are clipped, and before hooks see them. Equal to DDP to the last bit, for fp16
    gathers as well.
    """

    def on_rank(rank: int) -> Any:
        return [
            fitted(
                rank,
                strategy,
                Overflowing,
                plugins=[MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=4.0))],
                gradient_clip_val=clip,
            )
            for strategy in ("ddp", f"zero{stage}")
        ]

    for (expected, seen, scale), (found, seen_sharded, scale_sharded) in run_ranks(2, on_rank):
        assert scale == scale_sharded == 2.0
        norms = zip(seen_sharded["norms"], seen["norms"], strict=True)
        finite = [(a, b) for a, b in norms if b < float("inf")]
        assert len(finite) == 2
        assert all(abs(a - b) < 1e-6 for a, b in finite)
        if clip is None:
            assert_equal(found, expected)
        else:
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


# Master weights


def _small_steps(rank: int, stage: int) -> list[float]:
    moved = []
    for own, recipe in [
        (torch.float32, None),
        (torch.float32, RECIPES["bf16-mixed"]),
        (torch.bfloat16, None),
        (torch.bfloat16, PrecisionRecipe(main=torch.float32)),
    ]:
        model = nn.Linear(3, 5, bias=False).to(own)
        nn.init.constant_(model.weight, 1.0)
        lightning_zero.shard(model, stage=stage, precision=recipe)
        optimizer = torch.optim.SGD(model.parameters(), lr=5e-4)
        for _ in range(20 if own is torch.bfloat16 and recipe is None else 200):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=own is torch.float32 and recipe is not None):
                model(torch.ones(1, 3, dtype=own)).sum().backward()
            optimizer.step()
        with lightning_zero.gathered(model):
            moved.append(float(model.weight.detach().float().mean()))
    return moved


@pytest.mark.parametrize("stage", [1, 3])
def test_tiny_updates_are_not_lost(stage: int) -> None:
    """200 SGD steps of 5e-4 on a weight of 1 with a gradient of 1: it ends at 0.9.

    A bf16 weight of 1 has neighbors 2 ** -8 below and 2 ** -7 above: alone it never moves. With fp32 main weights it
    moves as in fp32.
    """
    for fp32, mixed, bf16, bf16_over_fp32 in run_ranks(2, _small_steps, stage):
        assert abs(fp32 - 0.9) < 1e-4
        assert mixed == fp32
        assert bf16 == 1.0
        assert bf16_over_fp32 == fp32


def _frozen(rank: int, stage: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(7, 7) for _ in range(9)), nn.Linear(7, 3))
    model[:9].requires_grad_(False).to(torch.bfloat16)
    before = [parameter.clone() for parameter in model[:9].parameters()]
    lightning_zero.shard(model, stage=stage, precision=RECIPES["bf16-mixed"], units=[nn.Linear])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(2, 7) + rank).sum().backward()
        optimizer.step()
    engine = engine_of(model)
    assert engine is not None
    frozen = [group for group in engine.groups if not group.plan.trained]
    held = lightning_zero.held_bytes(model, [optimizer])
    with lightning_zero.gathered(model):
        after = [parameter.detach().clone() for parameter in model[:9].parameters()]
    return (
        all(map(torch.equal, before, after)),
        {(group.main_dtype, group.model_dtype) for group in frozen},
        any(list(group.gradients.buffers()) for group in frozen),
        sum(group.layout.total for group in frozen),
        held,
        engine.planned_bytes(),
    )


@pytest.mark.parametrize("stage", STAGES)
def test_a_frozen_base_is_held_once_in_its_own_dtype(stage: int) -> None:
    """2 bytes an element, whole up to stage 2 and a half at stage 3; no gradient, no optimizer state, never changed."""
    for unchanged, dtypes, has_gradients, numel, held, planned in run_ranks(2, _frozen, stage):
        assert unchanged
        assert dtypes == {(torch.bfloat16, torch.bfloat16)}
        assert not has_gradients
        head = 7 * 3 + 3
        padded = 32  # 21 and 3 elements, each padded to a multiple of 8
        base = 2 * numel if stage < 3 else numel
        whole = 2 * padded if stage < 3 else 0
        assert planned.parameters == base + whole + 4 * padded // 2
        assert planned.gradients == (4 * padded if stage == 1 else 4 * padded // 2)
        assert abs(planned.optimizer - 8 * head / 2) <= 8 * 8
        assert held == planned


# Fields


def _rounded_gradients(rank: int, stage: int, field: str, micro_batches: int) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(5, 7, bias=False)
    start = model.weight.detach().clone()
    lightning_zero.shard(model, stage=stage, precision=PrecisionRecipe(**{field: torch.bfloat16}))
    data = torch.randn(2, micro_batches, 5, generator=torch.Generator().manual_seed(4))
    for micro, x in enumerate(data[rank]):
        with lightning_zero.no_sync(model) if micro < micro_batches - 1 else torch.enable_grad():
            (model(x) * torch.arange(7)).sum().backward()
    read = model.weight.grad
    assert read is not None
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    with lightning_zero.gathered(model):
        return read.dtype, start - model.weight.detach(), data, start


@pytest.mark.parametrize("field", ["main_grad", "reduce", "gradient"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_two_byte_gradient_field_rounds_where_it_says_and_nowhere_else(stage: int, field: str) -> None:
    """One micro-batch. ``main_grad`` rounds the mean, ``reduce`` each rank's gradient before the sum and the sum,
    ``gradient`` and what follows from it too. The optimizer reads fp32 in every case."""
    for dtype, step, data, start in run_ranks(2, _rounded_gradients, stage, field, 1):
        own = [torch.outer(torch.arange(7.0), data[rank, 0]) for rank in range(2)]
        if field == "main_grad":
            mean = ((own[0] + own[1]) / 2).bfloat16()
        else:
            mean = (own[0].bfloat16() + own[1].bfloat16()) / 2
        assert dtype is torch.float32
        assert torch.equal(step, start - (start - mean.float()))
        assert not torch.equal(mean.float(), (own[0] + own[1]) / 2), "nothing was rounded"


@pytest.mark.parametrize("stage", [2, 3])
def test_micro_batches_add_up_in_a_two_byte_shard(stage: int) -> None:
    """Each mean is rounded as it joins."""
    for _, step, data, start in run_ranks(2, _rounded_gradients, stage, "main_grad", 3):
        total = torch.zeros(7, 5, dtype=torch.bfloat16)
        for micro in range(3):
            mean = (torch.outer(torch.arange(7.0), data[0, micro]) + torch.outer(torch.arange(7.0), data[1, micro])) / 2
            total = mean.bfloat16() if micro == 0 else total + mean.bfloat16()
        assert torch.equal(step, start - (start - total.float()))


# Narrow weights in other hands


def _uses(rank: int, stage: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4, bias=False))
    plain = [p.detach().clone() for p in model.parameters()]
    lightning_zero.shard(model, stage=stage, precision=RECIPES["bf16-mixed"])
    x, weight = torch.randn(2, 5), model[1].weight
    found = {
        "product at rest outside autocast": x @ weight.t(),
        "regularizer": weight.pow(2).sum(),
        "normalized": F.normalize(weight),
        "read": weight.detach().whole(),
    }
    with torch.autocast("cpu", torch.bfloat16):
        found["product at rest"] = x @ weight.t()
        found["regularizer under autocast"] = weight.pow(2).sum()
        found["call"] = model[1](x)
    with lightning_zero.gathered(model):
        found["gathered"] = model[1].weight.detach().clone()
        found["called in gathered"] = model[1](x).detach()
        file = str(type(pickle_round_trip(model[1].weight)))
    with lightning_zero.gathered(model, writeback=True), torch.no_grad():
        model[1].weight[0, 0] = 1 + 2**-20
    found["written"] = weight.detach().whole()
    return {key: value.detach().clone() for key, value in found.items()}, x, plain, file


def pickle_round_trip(parameter: Tensor) -> Any:
    import io

    buffer = io.BytesIO()
    torch.save(parameter, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("stage", STAGES)
def test_code_meets_a_narrow_weight_in_the_dtype_it_expects(stage: int) -> None:
    """Autocast's products take it as it is; everything else gets fp32; reads at rest and `gathered` are the main
    weights, every digit."""
    for found, x, plain, file in run_ranks(2, _uses, stage):
        weight = plain[2]
        rounded = weight.bfloat16().float()
        product = x.bfloat16() @ weight.bfloat16().t()
        expected = {
            "product at rest outside autocast": x @ rounded.t(),
            "regularizer": rounded.pow(2).sum(),
            "normalized": F.normalize(rounded),
            "read": weight,
            "product at rest": product,
            "regularizer under autocast": rounded.pow(2).sum(),
            "call": product,
            "gathered": weight,
            "called in gathered": x @ weight.t(),
            "written": torch.cat([torch.tensor([1 + 2**-20]), weight.flatten()[1:]]).view(4, 5),
        }
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert found[key].dtype == value.dtype, key
            assert torch.equal(found[key], value), key
        assert "Parameter" in file


def _trained_in_gathered(rank: int, stage: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    lightning_zero.shard(model, stage=stage, precision=RECIPES["bf16-mixed"])
    with lightning_zero.gathered(model):
        model(torch.ones(2, 6) * (rank + 1)).sum().backward()
    grad = model[1].bias.grad
    return grad is not None and grad.whole(), model[0].weight.grad is not None


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_inside_gathered_counts(stage: int) -> None:
    """The parameters there are others than the windows'; their gradients are the same ones."""
    for bias, has_weight in run_ranks(2, _trained_in_gathered, stage):
        assert torch.equal(bias, torch.full((4,), 2.0)), "two rows on each rank"
        assert has_weight


def _hooked(rank: int, stage: int) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    lightning_zero.shard(model, stage=stage, precision=RECIPES["bf16-mixed"])
    seen = []
    model.weight.register_hook(lambda grad: seen.append(grad.dtype) or grad * 2)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(1, 3)).sum().backward()
    return seen, model.weight.grad.whole()


@pytest.mark.parametrize("stage", STAGES)
def test_hooks_see_gradients_in_the_parameters_dtype(stage: int) -> None:
    """As under DDP, where autocast's cast widens them again."""
    for seen, grad in run_ranks(2, _hooked, stage):
        assert seen == [torch.float32]
        assert torch.equal(grad, torch.full((2, 3), 2.0))


class KeepsATarget(Model):
    """Copies and averages weights in the training step, as Q-learning does, and makes tensors of a weight's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.target, self.average = nn.Linear(WIDTH, VOCABULARY), nn.Linear(WIDTH, VOCABULARY)
        self.target.requires_grad_(False)
        self.average.requires_grad_(False)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(tokens, batch_idx)
        self.target.load_state_dict(self.head.state_dict())
        copied = copy.deepcopy(self.head)
        with torch.no_grad():
            for mine, other in zip(self.average.parameters(), self.head.parameters(), strict=True):
                mine.lerp_(other, 0.002)
        self.seen["dtypes"] = {
            self.head.weight.dtype,
            torch.zeros(1, dtype=self.head.weight.dtype).dtype,
            copied.weight.dtype,
            self.head.weight.data.dtype,
            self.head.weight.detach().dtype,
        }
        return loss


def test_weights_that_are_copied_in_a_step_keep_every_digit() -> None:
    """What copies, writes or asks for a dtype meets the main weight, not the 2 bytes that products take."""

    def on_rank(rank: int) -> Any:
        return [
            fitted(rank, strategy, KeepsATarget, precision="bf16-mixed")
            for strategy in ("ddp_find_unused_parameters_true", "zero1", "zero2", "zero3")
        ]

    for (expected, seen, _), *sharded in run_ranks(2, on_rank):
        assert seen["dtypes"] == {torch.float32}
        for found, seen_sharded, _ in sharded:
            assert seen_sharded["dtypes"] == seen["dtypes"]
            assert_equal(found, expected)


def _loaded_in_two_bytes(rank: int, stage: int) -> Any:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).bfloat16()
    lightning_zero.shard(model, stage=stage, precision=RECIPES["bf16-mixed"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    main = {parameter.dtype for parameter in model.parameters()}
    lightning_zero.unshard(model)
    return main, model(torch.ones(1, 3, dtype=torch.bfloat16)).dtype


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_loaded_in_two_bytes_has_fp32_main_weights_while_it_trains(stage: int) -> None:
    """And is what it was after that."""
    for main, after in run_ranks(2, _loaded_in_two_bytes, stage):
        assert main == {torch.float32}
        assert after is torch.bfloat16


def _nested(rank: int, stage: int) -> Any:
    model = lightning_zero.shard(
        nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), stage=stage, precision=RECIPES["bf16-mixed"]
    )
    with lightning_zero.gathered(model), lightning_zero.gathered(model[0], writeback=True), torch.no_grad():
        model[0].weight.fill_(1 + rank)
    return model[0].weight.detach().whole()


@pytest.mark.parametrize("stage", STAGES)
def test_gathered_inside_gathered_writes_back(stage: int) -> None:
    """Rank 0's values, and the outer one, which keeps nothing, finds nothing written."""
    for weight in run_ranks(2, _nested, stage):
        assert torch.equal(weight, torch.ones(3, 3))


def _read_in_a_write(rank: int, stage: int) -> Any:
    model = lightning_zero.shard(nn.Sequential(nn.Linear(3, 3)), stage=stage, precision=RECIPES["bf16-mixed"])
    with lightning_zero.gathered(model, writeback=True), torch.no_grad():
        model[0].weight.fill_(1 + rank)
        with lightning_zero.gathered(model):
            seen = model[0].weight.detach().clone()
    return seen, model[0].weight.detach().whole()


@pytest.mark.parametrize("stage", STAGES)
def test_reading_inside_a_gathered_that_writes_refuses_nothing(stage: int) -> None:
    """What was written before the inner one opened is the outer one's to keep."""
    for rank, (seen, weight) in enumerate(run_ranks(2, _read_in_a_write, stage)):
        assert torch.equal(seen, torch.full((3, 3), 1.0 + rank))
        assert torch.equal(weight, torch.ones(3, 3))
