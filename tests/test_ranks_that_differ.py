"""Ranks that differ: unequal numbers of batches, sentences of unequal length, forwards on one rank alone."""

from __future__ import annotations

import datetime
import logging
import time
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from distributed import run_ranks
from lightning.pytorch.callbacks import BasePredictionWriter
from rows import launched, loader, make_trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from transformers import GPT2Config, GPT2LMHeadModel

import lightning_zero
from lightning_zero import ZeROStrategy, watch
from lightning_zero.engine import engine_of
from lightning_zero.watch import RanksDifferError

STAGES = (1, 2, 3)


def network() -> nn.Sequential:
    """Units of a few layers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 5), *(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(9)), nn.Linear(5, 1)
    )


class Model(L.LightningModule):
    """Logs a mean over all batches of all ranks, as a value and as a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.metric = MeanMetric()
        self.seen: list[Any] = []

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.net(x).square().mean()

    def validation_step(self, x: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        out = self.net(x)
        self.seen.append(out.sum().item())
        self.log("value", out.mean(), sync_dist=True, batch_size=len(x))
        self.metric(out)
        self.log("metric", self.metric)

    test_step = validation_step

    def predict_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.net(x)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def data(batches: int, seed: int = 0) -> list[Tensor]:
    return list(torch.randn(batches, 2, 3, generator=torch.Generator().manual_seed(seed)))


def strategy_of(stage: int) -> ZeROStrategy:
    return ZeROStrategy(stage=stage, timeout=datetime.timedelta(seconds=15))


# Evaluation


def _evaluated(rank: int, stage: int, loop: str, lengths: list[list[int]]) -> Any:
    module = Model()
    loaders = [loader(data(of_ranks[rank], seed=10 * i + rank)) for i, of_ranks in enumerate(lengths)]
    with launched(rank):
        trainer = make_trainer(strategy_of(stage), num_sanity_val_steps=0)
        if loop == "fit":
            trainer.fit(module, loader(data(2, seed=99)), loaders)
        else:
            getattr(trainer, loop)(module, loaders, verbose=False)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith(("v", "m"))}
    return module.seen, metrics, module.state_dict()


@pytest.mark.parametrize("loop", ["validate", "test", "fit"])
@pytest.mark.parametrize("lengths", [[[2, 5]], [[5, 2]], [[3, 1], [1, 2], [2, 2]]], ids=["2-5", "5-2", "three loaders"])
@pytest.mark.parametrize("stage", STAGES)
def test_unequal_numbers_of_batches_are_evaluated_to_the_end(stage: int, loop: str, lengths: list[list[int]]) -> None:
    """Every rank sees all of its batches, and what is logged is the mean over all of them."""
    ranks = run_ranks(2, _evaluated, stage, loop, lengths)
    plain = network()
    plain.load_state_dict({name.removeprefix("net."): value for name, value in ranks[0][2].items()})
    outputs: dict[int, list[list[float]]] = {}
    for rank, (seen, _, _) in enumerate(ranks):
        batches = [x for i, of_ranks in enumerate(lengths) for x in data(of_ranks[rank], seed=10 * i + rank)]
        expected = [plain(x).sum().item() for x in batches]
        assert seen == pytest.approx(expected, abs=1e-5)
        position = 0
        for i, of_ranks in enumerate(lengths):
            outputs.setdefault(i, []).append(expected[position : position + of_ranks[rank]])
            position += of_ranks[rank]
    for _, metrics, _ in ranks:
        assert len(metrics) == 2 * len(lengths)
        for i in range(len(lengths)):
            suffix = "" if len(lengths) == 1 else f"/dataloader_idx_{i}"
            every = [value / 2 for of_rank in outputs[i] for value in of_rank]  # two rows a batch
            assert metrics[f"value{suffix}"] == pytest.approx(sum(every) / len(every), abs=1e-5)


class Writer(BasePredictionWriter):
    """Gathers the number of predictions itself, as writers of one file do."""

    def __init__(self) -> None:
        super().__init__("epoch")
        self.counts: list[int] = []

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        torch.distributed.all_gather(counts, torch.tensor([sum(len(p) for p in predictions)]))
        self.counts = [int(count) for count in counts]


def _predicted(rank: int, stage: int) -> Any:
    module, writer = Model(), Writer()
    rows = torch.cat(data(7))[:13]
    with launched(rank):
        trainer = make_trainer(strategy_of(stage), callbacks=[writer], use_distributed_sampler=True)
        predictions = trainer.predict(module, DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
        held = engine_of(module)
    assert held is None
    return torch.cat(predictions), writer.counts


@pytest.mark.parametrize("stage", STAGES)
def test_predictions_cover_the_data_however_it_divides(stage: int) -> None:
    """13 rows on two ranks: Lightning gives 7 to the first and 6 to the second."""
    (first, counts), (second, others) = run_ranks(2, _predicted, stage)
    assert counts == others == [7, 6]
    rows = torch.cat(data(7))[:13]
    expected = network()(rows)
    assert torch.allclose(torch.stack([*first, *second]).sort(0)[0], expected.sort(0)[0], atol=1e-6)


# Generation

EOS = 3


def language_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(n_layer=9, n_head=2, n_embd=8, vocab_size=17, n_positions=32, eos_token_id=EOS)
    ).eval()


def generated(model: GPT2LMHeadModel, rank: int, number: int = 0) -> list[int]:
    """Ends after 2 tokens on rank 0, after 7 on rank 1, and the other way round for odd numbers."""
    length = (2, 7)[(rank + number) % 2]
    prompt = torch.tensor([[5, 6 + rank, 7 + number]])

    class EndsAt:
        """A logits processor."""

        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            scores[:, EOS] = float("inf") if ids.shape[1] - prompt.shape[1] == length - 1 else -float("inf")
            return scores

    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=10, do_sample=False, pad_token_id=EOS,
        logits_processor=[EndsAt()],
    )  # fmt: skip
    return out[0].tolist()


class Generates(L.LightningModule):
    """Generates in one hook."""

    def __init__(self, hook: str, alone: bool = False) -> None:
        super().__init__()
        self.model = language_model()
        self.seen: list[list[int]] = []
        self.alone = alone
        if hook != "training_step":
            setattr(self, hook, self._generate)
        self.inside = hook == "training_step"

    def _generate(self, *_: Any, **__: Any) -> None:
        if not self.alone or self.global_rank == 0:
            self.seen.append(generated(self.model, self.global_rank, len(self.seen)))

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        if self.inside:
            self._generate()
        return 0 * self.model(ids, labels=ids).loss

    def validation_step(self, ids: Tensor, batch_idx: int) -> None:
        self.log("loss", self.model(ids, labels=ids).loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


HOOKS = [
    "validation_step",
    "on_validation_epoch_end",
    "on_train_batch_start",
    "training_step",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
]


def _generates(rank: int, stage: int, hook: str, alone: bool) -> Any:
    module = Generates(hook, alone)
    ids = list(torch.arange(10).view(2, 1, 5))
    with launched(rank):
        make_trainer(strategy_of(stage)).fit(module, loader(ids), loader(ids))
    return module.seen, module.state_dict()


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("stage", STAGES)
def test_generation_ends_at_different_lengths_in_any_hook(stage: int, hook: str) -> None:
    """Two tokens on one rank, seven on the other; training goes on together. The weights never change: so the tokens
    are those of the plain model."""
    plain = language_model()
    for rank, (seen, after) in enumerate(run_ranks(2, _generates, stage, hook, False)):
        assert len(seen) >= 1
        assert seen == [generated(plain, rank, number) for number in range(len(seen))]
        for name, value in plain.state_dict().items():
            assert torch.equal(after[f"model.{name}"], value), name


@pytest.mark.parametrize(
    "hook",
    [
        "validation_step",
        "on_validation_epoch_end",
        "on_train_batch_start",
        "on_train_batch_end",
        "on_after_backward",
        "on_before_optimizer_step",
    ],
)
def test_generation_on_rank_zero_alone(hook: str) -> None:
    """As to log a sample: the other rank serves from wherever it waits next."""
    (seen, _), (nothing, _) = run_ranks(2, _generates, 3, hook, True)
    plain = language_model()
    assert seen == [generated(plain, 0, number) for number in range(len(seen))]
    assert seen
    assert nothing == []


# Training


def _uneven(rank: int, stage: int) -> Any:
    module = Model()
    start = time.monotonic()
    with launched(rank):
        try:
            make_trainer(strategy_of(stage)).fit(module, loader(data((3, 5)[rank])))
        except RuntimeError as error:
            return type(error).__name__, str(error), time.monotonic() - start
    return "no error", "", 0.0


@pytest.mark.parametrize("stage", STAGES)
def test_unequal_numbers_of_training_batches_raise_on_every_rank(stage: int) -> None:
    """At once, naming both places and the fix."""
    for name, message, seconds in run_ranks(2, _uneven, stage, journals_differ=True):
        assert name == RanksDifferError.__name__
        assert "the beginning of a training batch" in message
        assert "drop_last=True" in message
        assert seconds < 10


class Drops(nn.Module):
    """Leaves out one block, another one on each rank, or none on rank 1."""

    def __init__(self, rank: int, equal: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(300, 300) for _ in range(9))
        self.dropped = 4 + rank if equal else (4 if rank == 0 else -1)

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number != self.dropped:
                x = x + 0.1 * torch.tanh(block(x))
        return x


def _drops(rank: int, stage: int, equal: bool) -> Any:
    model = Drops(rank, equal)
    group = torch.distributed.new_group([0, 1], timeout=datetime.timedelta(seconds=30), backend="gloo")
    lightning_zero.shard(model, stage=stage, units=[nn.Linear], process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        x = torch.randn(2, 300, generator=torch.Generator().manual_seed(2 * number + rank))
        try:
            model(x).square().mean().backward()
        except RuntimeError as error:
            return type(error).__name__, str(error), number
        optimizer.step()
    with lightning_zero.gathered(model):
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("equal", [True, False], ids=["one block each", "one rank alone"])
@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_may_leave_out_different_blocks_where_weights_rest(stage: int, equal: bool) -> None:
    """LayerDrop. The twin averages the ranks' losses."""
    nets = [Drops(rank, equal) for rank in range(2)]
    for mine, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        other.data = mine.data
    for number in range(3):
        for rank, net in enumerate(nets):
            net.zero_grad()
            x = torch.randn(2, 300, generator=torch.Generator().manual_seed(2 * number + rank))
            net(x).square().mean().backward()
        for mine, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            grads = [p.grad for p in (mine, other) if p.grad is not None]
            mine.data.sub_(0.1 * sum(grads) / 2)
    for found in run_ranks(2, _drops, stage, equal):
        for value, expected in zip(found, nets[0].parameters(), strict=True):
            assert torch.allclose(value, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("equal", [True, False], ids=["one block each", "one rank alone"])
def test_different_blocks_at_stage_3_raise_on_every_rank_before_a_step(equal: bool) -> None:
    """The blocks have one size: each rank could compute with the other's weights, and nobody notice."""
    for name, message, number in run_ranks(2, _drops, 3, equal, journals_differ=True):
        assert name == RanksDifferError.__name__
        assert "rank 0 waits for the weights of `blocks.5" in message
        assert "ranks_may_differ=True" in message
        assert number == 0


# Waiting


def _waits_long(rank: int) -> list[str]:
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("lightning_zero").addHandler(Handler())
    watch.PATIENCE = 0.8
    model = lightning_zero.shard(network(), stage=3)
    x = torch.ones(2, 3)
    model(x).sum().backward()
    if rank == 1:
        time.sleep(2.5)
    model(x).sum().backward()
    return lines


def test_a_long_wait_is_told_once_with_what_the_others_do() -> None:
    """Rank 1 sleeps for 2.5 s before its second step; 0.8 s is called long here."""
    waiting, sleeping = run_ranks(2, _waits_long)
    assert sleeping == []
    (line,) = waiting
    assert line.startswith("rank 0 waits for the other ranks at the beginning of a training step, for ")
    assert "rank 1 computes; it last waited for" in line


def _recomputed_alone(rank: int, stage: int) -> Any:
    model = nn.Sequential(nn.Linear(5, 5, bias=False))
    lightning_zero.shard(model, stage=stage)
    resting = model[0].weight
    x = torch.full((2, 5), 1.0 + rank, requires_grad=True)
    y = model(x)
    z = checkpoint(lambda t: t @ resting if rank == 1 else t * 1, x, use_reentrant=True)
    (z.sum() + y.sum()).backward()
    assert resting.grad is not None
    return resting.grad.whole()


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_recomputation_brings_on_one_rank_alone(stage: int) -> None:
    """Autograd cannot announce it: it shows after the group was reduced, on rank 1 only.

    y = x w.T has the gradient sum over rows of x: 2 (1 + rank) in each element; z = x w on rank 1, with x = 2, 4 more.
    The mean of 2 and 4 + 4 is 5.
    """
    for grad in run_ranks(2, _recomputed_alone, stage):
        assert torch.equal(grad, torch.full((5, 5), 5.0))


def _samples_then_writes(rank: int, stage: int) -> Any:
    model = lightning_zero.shard(network(), stage=stage)
    x, samples = torch.ones(2, 3), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        if rank == 0:
            with torch.no_grad():
                samples.append(model(x))
                time.sleep(0.2)  # the other rank would be far ahead
                samples.append(model(x))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        if rank == 0:
            with torch.no_grad():
                samples.append(model(x))
    lightning_zero.unshard(model)
    return samples


@pytest.mark.parametrize("stage", STAGES)
def test_a_sample_on_rank_zero_sees_the_weights_of_its_time(stage: int) -> None:
    """All ranks write weights after it, and before the next one: no rank may write while another still needs the old
    values, nor wait for the others with new ones."""
    plain, expected = network(), []
    x, optimizer = torch.ones(2, 3), torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        plain(x).sum().backward()
        optimizer.step()
        expected += [plain(x), plain(x)]
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.mul_(0.5)
        expected.append(plain(x))
    samples, nothing = run_ranks(2, _samples_then_writes, stage)
    assert nothing == []
    for sample, value in zip(samples, expected, strict=True):
        assert torch.allclose(sample, value, rtol=0, atol=1e-6)


def _unequal_then_equal(rank: int, stage: int) -> float:
    model = lightning_zero.shard(network(), stage=stage)
    engine = engine_of(model)
    assert engine is not None
    x = torch.ones(2, 3)
    with torch.no_grad():
        for _ in range(1 if rank == 0 else 3):
            model(x)
        engine.meet("barrier")
        out = model(x).sum()
    torch.distributed.all_reduce(out)  # the user's own, after an equal number of forwards
    return out.item()


@pytest.mark.parametrize("stage", STAGES)
def test_what_ranks_did_before_a_meeting_asks_for_nothing_after_it(stage: int) -> None:
    """Else one rank would ask ahead for a block that nobody needs, while the other is at a collective of the user."""
    expected = 2 * network()(torch.ones(2, 3)).sum().item()
    assert run_ranks(2, _unequal_then_equal, stage) == pytest.approx([expected] * 2, abs=1e-5)


def _two_modules(rank: int, stage: int) -> bool:
    a, b = (lightning_zero.shard(network(), stage=stage) for _ in range(2))
    optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
    x = torch.ones(2, 3)
    for _ in range(2):
        if rank == 0:
            with torch.no_grad():
                a(x)
        optimizer.zero_grad()
        b(x).sum().backward()
        optimizer.step()
    return True


@pytest.mark.parametrize("stage", STAGES)
def test_a_sample_of_one_module_before_a_step_of_another(stage: int) -> None:
    """Ranks meet for all modules of their group."""
    assert run_ranks(2, _two_modules, stage) == [True, True]
