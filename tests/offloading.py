"""Trains one small model with and without offload, on forked ranks, and compares bit by bit.

    Case(setting, act, optimizers)      `act(loop)` drives a `Loop`: backwards, steps, what user code does between them
    loop.outcome()                      parameters, gradients, optimizer state, and what `act` saw

Offload changes where state rests, hence nothing that is compared.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from distributed import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_zero
from lightning_zero import HostMemory, MappedFile, OffloadTarget, PrecisionRecipe
from lightning_zero.engine import Engine, engine_of
from lightning_zero.sharded_parameter import ShardedTensor

VOCABULARY, WIDTH = 13, 6

RECIPES = {
    "fp32": PrecisionRecipe(),
    "mixed": PrecisionRecipe(main=torch.float32, compute=torch.bfloat16),
    "mixed, narrow gradients": PrecisionRecipe(
        main=torch.float32, compute=torch.bfloat16, reduce=torch.bfloat16, main_grad=torch.bfloat16
    ),
    "bf16": PrecisionRecipe(),
}


@dataclass(kw_only=True)
class ArrayMemory(OffloadTarget):
    """A further target, as its author would write it: state rests in arrays of numpy's."""

    def allocate(self, numel: int, dtype: torch.dtype, moves: bool) -> Tensor:
        if not numel:
            return torch.empty(0, dtype=dtype)
        return torch.from_numpy(np.zeros(numel * dtype.itemsize, np.uint8)).view(dtype)


TARGETS: dict[str, Callable[[], OffloadTarget]] = {
    "HostMemory": HostMemory,
    "a half": lambda: HostMemory(ratio=0.5),
    "parameters too": lambda: HostMemory(parameters=True),
    "MappedFile": lambda: MappedFile(tempfile.gettempdir()),
    "a further one": ArrayMemory,
}


class Block(nn.Module):
    """Odd sizes, so that shards cut through rows; parameters of two dtypes in mixed precision; a 0-dim one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * self.scale


class Net(nn.Module):
    """Three units and a root; a tied embedding, a frozen layer, a frozen block, and a layer without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(3, 3)
        self.blocks[0].up.requires_grad_(False)
        self.blocks[1].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]


def trained(module: nn.Module) -> list[nn.Parameter]:
    """What an optimizer is given."""
    return [p for p in module.parameters() if p.requires_grad]


def adamw(module: nn.Module) -> list[torch.optim.Optimizer]:
    """One AdamW, fused."""
    return [torch.optim.AdamW(trained(module), lr=0.01, weight_decay=0.1, fused=True)]


class Loop:
    """A training loop of one rank.

    Args:
        rank: this one.
        stage: of ZeRO.
        recipe: a key of `RECIPES`.
        offload: where state rests, or ``None``.
        optimizers: makes them.
    """

    def __init__(
        self, rank: int, stage: int, recipe: str, offload: OffloadTarget | None, optimizers: Optimizers = adamw
    ) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.module = Net()
        if recipe == "bf16":
            self.module.bfloat16()
        lightning_zero.shard(self.module, stage, ["Block"], precision=RECIPES[recipe], offload=offload)
        poison(self.engine)
        self.mixed = recipe.startswith("mixed")
        self.optimizers = optimizers(self.module)
        self.seen: list[Any] = []
        self._batches = 0

    @property
    def engine(self) -> Engine:
        """Of the module."""
        engine = engine_of(self.module)
        assert engine is not None
        return engine

    def loss(self) -> Tensor:
        """Of the next batch."""
        self._batches += 1
        generator = torch.Generator().manual_seed(100 * self._batches + self.rank)
        tokens = torch.randint(VOCABULARY, (5,), generator=generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.mixed):
            return F.cross_entropy(self.module(tokens).float(), tokens.flip(0))

    def backward(self, waits: bool = False) -> None:
        """Of the next batch; under `no_sync` if its gradients wait for those of a later one."""
        with lightning_zero.no_sync(self.module) if waits else nullcontext():
            self.loss().backward()

    def backwards(self, micro_batches: int) -> None:
        """Of the next batches, which are one optimizer step."""
        for micro in range(micro_batches):
            self.backward(waits=micro < micro_batches - 1)

    def step(self, zero: bool = True) -> None:
        """Step all optimizers, and drop gradients."""
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers if zero else ():
            optimizer.zero_grad()

    def train(self, steps: int = 1, micro_batches: int = 1) -> None:
        """Plain steps."""
        for _ in range(steps):
            self.backwards(micro_batches)
            self.step()

    def see(self, *values: Any) -> None:
        """Have ``values``, as they are now, compared."""
        self.seen += [plain(value) for value in values]

    def outcome(self) -> dict[str, Any]:
        """Everything that offload must not change; the module is plain afterwards."""
        found: dict[str, Any] = {f"seen {i}": value for i, value in enumerate(self.seen)}
        names = {p: name for name, p in self.module.named_parameters()}
        for i, optimizer in enumerate(self.optimizers):
            for p, state in optimizer.state.items():
                found.update({f"{key} of {names.get(p)} in {i}": plain(value) for key, value in state.items()})
            found.update({f"group {i}.{j}": settings(group) for j, group in enumerate(optimizer.param_groups)})
        found.update({f"gradient of {name}": plain(p.grad) for p, name in names.items()})
        lightning_zero.unshard(self.module)
        found.update({name: value.clone() for name, value in self.module.state_dict().items()})
        return found


def poison(engine: Engine) -> None:
    """Have a read of a buffer that was given back show as NaN."""
    engine.pool.poison = True
    if engine.background is not None:
        engine.background.pool.poison = True


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters of a group, as they are now."""
    return {key: plain(value) for key, value in group.items() if key != "params"}


def plain(value: Any) -> Any:
    """A copy of what this rank holds of a value: of a sharded tensor its fragment, at the cost of no collective."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if not isinstance(value, Tensor):
        return value
    return (value.fragment if isinstance(value, ShardedTensor) else value).detach().clone()


@dataclass(frozen=True)
class Case:
    """One training that offload must not change."""

    name: str
    act: Callable[[Loop], None]
    optimizers: Optimizers = adamw
    stage: int = 3
    recipe: str = "fp32"


Outcomes = list[dict[str, dict[str, Any]]]


def outcomes(cases: Sequence[Case], world_size: int, target: str | None) -> Outcomes:
    """What every rank has at the end of each case, by its name. A target goes with the stages it is made for."""

    def on_rank(rank: int) -> dict[str, Any]:
        found = {}
        for case in cases:
            offload = None if target is None else TARGETS[target]()
            if offload is not None and offload.parameters and case.stage < 3:
                continue
            try:
                loop = Loop(rank, case.stage, case.recipe, offload, case.optimizers)
                case.act(loop)
                found[case.name] = loop.outcome()
            except Exception as error:
                error.add_note(f"in {case.name!r}")
                raise
        return found

    return run_ranks(world_size, on_rank)


def assert_equal(found: Outcomes, expected: Outcomes) -> None:
    """On every rank, to the last bit."""
    for rank, (own, others) in enumerate(zip(found, expected, strict=True)):
        wrong = [f"{case}: {key}" for case in own for key in differences(own[case], others[case])]
        assert own and not wrong, f"rank {rank}: {wrong[:20]} of {len(wrong)}"


def differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Where two outcomes are not equal."""
    missing = [f"{key} is on one side" for key in found.keys() ^ expected.keys()]
    return missing + [key for key in expected if key in found and not _same(found[key], expected[key])]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        # NaN where the other has NaN.
        return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_same(*pair) for pair in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool(a == b)


__all__ = [
    "RECIPES", "TARGETS", "VOCABULARY", "WIDTH", "ArrayMemory", "Block", "Case", "Loop", "Net", "Optimizers",
    "Outcomes", "adamw", "assert_equal", "differences", "outcomes", "plain", "poison", "settings", "trained",
]  # fmt: skip
