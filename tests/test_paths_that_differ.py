"""Ranks that go different ways through one model in training: exact, or an error on all of them in seconds."""

from __future__ import annotations

import datetime
import time
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from distributed import run_ranks
from rows import launched, loader, make_trainer
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import lightning_zero
from lightning_zero import ZeROStrategy, watch
from lightning_zero.engine import engine_of
from lightning_zero.watch import RanksDifferError

WIDTH = 6
PATHS = ["towers", "experts", "layer drop", "heads", "all at rank 0", "one at rank 1"]


class Block(nn.Module):
    """A frozen base and an adapter, which some forwards leave out: two groups of one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, adapts: bool = True) -> Tensor:
        x = x + torch.tanh(self.base(self.norm(x)))
        return x + 0.3 * torch.tanh(self.adapter(x)) if adapts else x


class Net(nn.Module):
    """Text and image towers, experts, layers that drop out, two heads: each rank uses what its batch needs."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.ModuleList(Block() for _ in range(4))
        self.image = nn.ModuleList(Block() for _ in range(3))
        self.experts = nn.ModuleList(Block() for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(2))
        self.never = Block()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, path: str, rank: int, step: int) -> Tensor:
        first = rank == 0
        uses_image = path != "towers" or (rank + step) % 3 == 0
        dropped = (rank + step) % 4 if path == "layer drop" else -1
        experts = [(rank + step) % 4, (2 * rank + step) % 3] if path == "experts" else [0]
        if path == "all at rank 0" and not first:
            return self.heads[1](x)
        if path == "one at rank 1" and not first:
            return self.heads[0](self.text[3](x))
        for number, block in enumerate(self.text):
            if number != dropped:
                x = block(x, adapts=(number + rank) % 2 == 0)
        for block in self.image if uses_image else ():
            x = block(x)
        for number in experts:
            x = self.experts[number](x)
        if self.training:
            with torch.no_grad():
                self.seen += 1
        return self.heads[(rank + step) % 2 if path == "heads" else 0](x)


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(rank: int, step: int, number: int = 0) -> Tensor:
    seed = 100 * rank + 10 * step + number
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


STEPS, MICRO_BATCHES = 2, 2


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)


def twin(path: str, world_size: int) -> tuple[dict[str, Tensor], list[str]]:
    """One process that averages the losses of all ranks; and which parameters ever had a gradient."""
    model = net()
    optimizer = _optimizer(model)
    had: set[str] = set()
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(MICRO_BATCHES):
            for rank in range(world_size):
                (model(batch(rank, step, number), path, rank, step).square().mean() / world_size).backward()
        clip_grad_norm_(model.parameters(), 0.5)
        had |= {name for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}, sorted(had)


def _trained(rank: int, world_size: int, cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    found = []
    for path, how in cases:
        model = lightning_zero.shard(net(), units=[Block], **how)
        optimizer = _optimizer(model)
        had: set[str] = set()
        for step in range(STEPS):
            optimizer.zero_grad()
            for number in range(MICRO_BATCHES):
                model(batch(rank, step, number), path, rank, step).square().mean().backward()
            clip_grad_norm_(model.parameters(), 0.5)
            had |= {name for name, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
        engine = engine_of(model)
        assert engine is not None
        engine.meet("end")
        lightning_zero.unshard(model)
        found.append(({name: value.detach() for name, value in model.state_dict().items()}, sorted(had)))
    return found


@pytest.mark.parametrize(
    ("world_size", "how", "paths"),
    [
        (2, {"stage": 1}, PATHS),
        (2, {"stage": 2}, PATHS),
        (2, {"stage": 3}, ["heads"]),
        (2, {"stage": 3, "ranks_may_differ": True}, PATHS),
        (3, {"stage": 3, "ranks_may_differ": True}, PATHS),
        (2, {"stage": 3, "ranks_may_differ": True, "activation_checkpointing": "full"}, PATHS),
        (2, {"stage": 3, "ranks_may_differ": True, "offload": "cpu"}, PATHS),
    ],
    ids=["1", "2", "3 in parts of units", "3", "3 on three ranks", "3 full", "3 offload"],
)
def test_every_path_is_exact(world_size: int, how: dict[str, Any], paths: list[str]) -> None:
    """Heads in the root and adapters in blocks may differ without leave.

    Two clipped AdamW steps of two micro-batches, in float64: the twin sums in another order, 1e-10."""
    twins = [twin(path, world_size) for path in paths]
    for found in run_ranks(world_size, _trained, world_size, [(path, how) for path in paths]):
        for path, (values, had), (expected, expected_had) in zip(paths, found, twins, strict=True):
            assert had == expected_had, path
            for name, value in expected.items():
                assert (values[name] - value).abs().max() <= 1e-10, (path, name)


TRAINER_PATHS = ["towers", "layer drop", "all at rank 0"]


class Module(L.LightningModule):
    """Logs across ranks in each step, and validates with unequal numbers of batches."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.net = net()
        self.path = path

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(x, self.path, self.global_rank, batch_idx).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, x: Tensor, batch_idx: int) -> None:
        self.log("value", self.net(x, self.path, self.global_rank, batch_idx).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fitted(rank: int, world_size: int) -> list[Any]:
    found = []
    for path in TRAINER_PATHS:
        module = Module(path)
        strategy = ZeROStrategy(stage=3, units=["Block"], ranks_may_differ=True)
        train, validation = [batch(rank, i) for i in range(4)], [batch(rank, i) for i in range(1 + 2 * rank)]
        with launched(rank):
            trainer = make_trainer(strategy, devices=world_size, accumulate_grad_batches=2, gradient_clip_val=0.5)
            trainer.fit(module, loader(train), loader(validation))
        found.append({name: value.detach().clone() for name, value in module.net.state_dict().items()})
    return found


def test_a_trainer_lets_ranks_differ() -> None:
    """Two steps of two micro-batches, and validation, which trains nothing."""
    found = run_ranks(2, _fitted, 2)
    for i, path in enumerate(TRAINER_PATHS):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in (0, 2):
            optimizer.zero_grad()
            for number in (step, step + 1):
                for rank in range(2):
                    (model(batch(rank, number), path, rank, number).square().mean() / 4).backward()
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        for values in found:
            for name, value in dict(model.named_parameters()).items():
                assert (values[i][name] - value).abs().max() <= 1e-10, (path, name)


# Without it


def _diverges(rank: int, path: str, shared: bool) -> Any:
    group = torch.distributed.new_group([0, 1], timeout=datetime.timedelta(seconds=50), backend="gloo")
    watch.SUSPICION = 0.5
    model = lightning_zero.shard(net(), stage=3, units=[Block], process_group=group)
    other = lightning_zero.shard(net(), stage=3, units=[Block], process_group=group) if shared else model
    start = time.monotonic()
    try:
        for step in range(STEPS):
            if shared:  # ranks use two modules in different orders
                for each in (model, other) if rank == 0 else (other, model):
                    each(batch(rank, step), "all", 0, step).square().mean().backward()
            else:
                model(batch(rank, step), path, rank, step).square().mean().backward()
    except RuntimeError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "no error", "", 0.0


@pytest.mark.parametrize("path", [*(path for path in PATHS if path != "heads"), "two modules"])
def test_a_divergence_raises_on_every_rank_in_seconds(path: str) -> None:
    """The group's time limit is 50 s. The message says who waits for what, and names the way to be exact; heads that
    rest in the root diverge in nothing but reductions, and are exact."""
    for name, message, seconds in run_ranks(2, _diverges, path, path == "two modules", journals_differ=True):
        assert name == RanksDifferError.__name__, message
        assert seconds < 10
        if path != "two modules":
            assert "ranks_may_differ=True" in message
