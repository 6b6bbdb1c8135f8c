"""Operands of operations on sharded tensors: what may differ between ranks gives each rank its own plain result.

Two ranks; every expected value is the same operation on plain tensors of that rank, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from lightning.pytorch import LightningModule
from rows import launched, loader, make_trainer
from test_at_rest import network
from torch import Tensor, nn

import lightning_zero
from lightning_zero.sharded_parameter import ShardedTensor

STAGES = [(1, None), (2, None), (3, None), (3, "cpu")]
F64 = torch.float64


def whole(value: Any) -> Any:
    """A plain copy of a sharded tensor, of the tensors of a list, or of anything else."""
    if isinstance(value, list | tuple):
        return [whole(item) for item in value]
    value = value.whole() if hasattr(value, "whole") else value
    return value.detach().clone() if isinstance(value, Tensor) else value


def local(rank: int, *shape: int, seed: int = 0) -> Tensor:
    """Data of one rank, around zero."""
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(10 * seed + rank))


def trained(stage: int, offload: str | None) -> nn.Sequential:
    """Sharded, with gradients."""
    model = lightning_zero.shard(network(), stage=stage, offload=offload)
    model(torch.ones(2, 5, dtype=F64)).square().sum().backward()
    return model


READS: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "r-": lambda a, b: b - a,
    "* alpha": lambda a, b: torch.add(a, b, alpha=3),
    "/": torch.div,
    ">": lambda a, b: a > b,
    "where": lambda a, b: torch.where(a > 0, a, b),
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=2) if isinstance(b, Tensor) else a,
    "lerp": lambda a, b: torch.lerp(a, a * 2, b),
    "clamp": lambda a, b: torch.clamp(a, min=b),
    "neg exp": lambda a, b: (-a).exp() + b,
    "view": lambda a, b: a.view(-1)[:5] + (b if getattr(b, "ndim", 0) < 2 else b[0]),
    "lists": lambda a, b: torch._foreach_mul([a, a], [b, b]),
    "one for all": lambda a, b: torch._foreach_mul([a, a], b if getattr(b, "ndim", 0) == 0 else 2.0),
}
"""Of a sharded tensor of shape (5, 5), and another operand."""


def _reads(rank: int, stage: int, offload: str | None) -> list[str]:
    model = trained(stage, offload)
    weight = model[0].weight
    assert weight.grad is not None
    tensors = {"parameter": weight, "copy": weight.detach().clone(), "gradient": weight.grad}
    operands: dict[str, Any] = {
        "cut alike": weight.detach() * 2, "cut otherwise": model[7].weight.detach(), "a number": 1.5,
        "of this rank": local(rank, 5, 5), "a scalar of this rank": local(rank), "a row": local(rank, 5),
        "a column": local(rank, 5, 1),
    }  # fmt: skip
    wrong = []
    with torch.no_grad():
        for (kind, a), (other, b), (name, operation) in (
            (x, y, z) for x in tensors.items() for y in operands.items() for z in READS.items()
        ):
            found = operation(a, b)
            expected = operation(whole(a), whole(b))
            pairs = zip(found, expected, strict=True) if isinstance(found, list | tuple) else [(found, expected)]
            if not all(torch.equal(whole(ours), plain) for ours, plain in pairs):
                wrong.append(f"{name} of {kind} and {other}")
    return wrong


@pytest.mark.parametrize(("stage", "offload"), STAGES)
def test_what_is_read_with_data_of_a_rank_is_that_ranks(stage: int, offload: str | None) -> None:
    """Each kind of operation, sharded tensor and operand."""
    assert run_ranks(2, _reads, stage, offload) == [[], []]


def _stays(rank: int, stage: int) -> Iterator[tuple[str, bool]]:
    model = trained(stage, None)
    weight = model[0].weight
    engine_bytes = weight.owner.collectives.nbytes  # type: ignore[attr-defined]
    engine_bytes.clear()
    with torch.no_grad():
        for name in ("+", "/", ">", "where", "addcmul", "neg exp", "lists"):
            found = READS[name](weight, weight.grad if name != "where" else weight.detach())
            yield name, all(isinstance(item, ShardedTensor) for item in (found if name == "lists" else [found]))
    yield "nothing is sent", not engine_bytes


@pytest.mark.parametrize("stage", (1, 3))
def test_what_is_alike_on_all_ranks_stays_on_fragments(stage: int) -> None:
    """Sharded tensors and numbers alone, without any traffic."""
    for found in run_ranks(2, lambda rank: dict(_stays(rank, stage))):
        assert all(found.values()), found


def _without_traffic(rank: int, stage: int) -> tuple[Tensor, bool]:
    model = trained(stage, None)
    weight = model[0].weight
    engine_bytes = weight.owner.collectives.nbytes  # type: ignore[attr-defined]
    engine_bytes.clear()
    with torch.no_grad():
        found = weight * local(rank, 5, 5) + weight * local(rank)
    return found, not engine_bytes


@pytest.mark.parametrize("stage", (1, 2))
def test_whole_values_that_rest_are_read_without_traffic(stage: int) -> None:
    """So rank 0 may do it alone, as under data parallelism."""
    weight = network()[0].weight.detach()
    for rank, (found, silent) in enumerate(run_ranks(2, _without_traffic, stage)):
        assert torch.equal(found, weight * local(rank, 5, 5) + weight * local(rank))
        assert silent


# Writes


WRITES: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "add_": lambda a, b, c: a.add_(b, alpha=2),
    "mul_ scalar": lambda a, b, c: a.mul_(c),
    "copy_": lambda a, b, c: a.copy_(b),
    "lerp_": lambda a, b, c: a.lerp_(b, 0.25),
    "addcmul_": lambda a, b, c: a.addcmul_(a, b),
    "masked_fill_": lambda a, b, c: a.masked_fill_(b > 0, 2.0),
    "out": lambda a, b, c: torch.add(b, b, out=a),
    "row": lambda a, b, c: a.add_(b[0]),
    "index": lambda a, b, c: a[1:3].copy_(b[1:3]),
    "lists": lambda a, b, c: torch._foreach_add_([a], [b]),
    "list rows": lambda a, b, c: torch._foreach_div_([a], [b.norm(dim=1, keepdim=True)]),
    "one for all": lambda a, b, c: torch._foreach_mul_([a], c),
}
"""Of a sharded tensor of shape (5, 5), a plain tensor, and a plain scalar."""


def _writes(rank: int, stage: int, offload: str | None) -> list[str]:
    model = trained(stage, offload)
    weight, b, c = model[0].weight, local(7, 5, 5), local(8)
    moment = torch.zeros_like(weight).add_(weight)
    wrong = []
    with torch.no_grad():
        for kind, a in (("parameter", weight), ("gradient", weight.grad), ("moment", moment)):
            for name, operation in WRITES.items():
                expected = whole(a)
                operation(expected, b, c)
                operation(a, b, c)
                if not torch.allclose(whole(a), expected, rtol=1e-14, atol=0):
                    wrong.append(f"{name} of {kind}")
    return wrong


@pytest.mark.parametrize(("stage", "offload"), STAGES)
def test_what_all_ranks_write_alike_is_written(stage: int, offload: str | None) -> None:
    """To parameters, gradients and moments, with plain operands that are the same everywhere."""
    assert run_ranks(2, _writes, stage, offload) == [[], []]


class Masked(torch.optim.Optimizer):
    """Arithmetic of a step with plain operands, as masks and bias corrections are."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.kinds: set[type] = set()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for p in self.param_groups[0]["params"]:
            mask = torch.ones_like(p, memory_format=torch.preserve_format).cumsum(-1) > 2
            update = torch.where(mask, p.grad, p.grad * torch.tensor(0.5)) / torch.tensor(2.0)
            self.kinds.add(type(update))
            p.sub_(update)
        return loss


def _steps(rank: int, stage: int) -> dict[str, Any]:
    model = trained(stage, None)
    weight = model[0].weight
    optimizer = Masked([weight])
    seen = {"before": whole(weight), "grad": whole(weight.grad)}

    @torch.no_grad()
    def closure() -> None:
        seen["in the closure"] = weight.detach().clone() + local(rank, 5, 5)

    optimizer.step(closure)
    with torch.no_grad():
        seen["behind it"] = weight + local(rank, 5, 5)
    return {**seen, "after": whole(weight), "kinds": optimizer.kinds}


@pytest.mark.parametrize("stage", (1, 3))
def test_an_optimizers_own_arithmetic_stays_on_fragments(stage: int) -> None:
    """Its closure is user code."""
    for rank, found in enumerate(run_ranks(2, _steps, stage)):
        grad = found["grad"]
        mask = torch.arange(5) >= 2  # the third column and those behind it
        assert torch.equal(found["after"], found["before"] - torch.where(mask, grad, grad * 0.5) / 2)
        assert found["kinds"] == {ShardedTensor}
        assert torch.equal(found["in the closure"], found["before"] + local(rank, 5, 5))
        assert torch.equal(found["behind it"], found["after"] + local(rank, 5, 5))


class Fails(torch.optim.Optimizer):
    """A step that an error ends."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        raise ValueError


def _after_a_step_that_failed(rank: int) -> Tensor:
    model = trained(3, None)
    with pytest.raises(ValueError):
        Fails(model.parameters()).step()
    model(torch.ones(2, 5, dtype=F64))
    with torch.no_grad():
        return model[0].weight + local(rank, 5, 5)


def test_a_step_that_failed_is_over() -> None:
    """At the latest at the next forward."""
    for rank, found in enumerate(run_ranks(2, _after_a_step_that_failed)):
        assert torch.equal(found, network()[0].weight.detach() + local(rank, 5, 5))


# Graphs


def _penalties(weight: Any, copy: Any, fisher: Any, x: Tensor, scale: Tensor) -> Tensor:
    """The distance to copies, and products of data with copies."""
    distance = (fisher * (weight - copy) ** 2).sum() + (weight * fisher).square().sum()
    return distance + (x * copy).sin().sum() + (copy * scale + x).square().mean()


def _graph(rank: int, stage: int, offload: str | None) -> tuple[Any, ...]:
    model = trained(stage, offload)
    weight = model[0].weight
    copy, fisher = weight.detach().clone(), weight.grad**2
    with torch.no_grad():
        weight.mul_(1.5)
    model.zero_grad()
    x, scale = local(rank, 5, 5).requires_grad_(), local(rank).requires_grad_()
    _penalties(weight, copy, fisher, x, scale).backward()
    return x.grad, scale.grad, whole(weight.grad), whole(copy), whole(fisher)


@pytest.mark.parametrize(("stage", "offload"), STAGES)
def test_gradients_through_operations_with_copies(stage: int, offload: str | None) -> None:
    """Those of data are of the rank's data; that of the weight is the mean."""
    for rank, (x_grad, scale_grad, weight_grad, copy, fisher) in enumerate(run_ranks(2, _graph, stage, offload)):
        grads = []
        for each in range(2):
            leaves = [(copy * 1.5).requires_grad_(), local(each, 5, 5).requires_grad_(), local(each).requires_grad_()]
            _penalties(leaves[0], copy, fisher, leaves[1], leaves[2]).backward()
            grads.append([leaf.grad for leaf in leaves])
        torch.testing.assert_close(x_grad, grads[rank][1], rtol=0, atol=1e-12)
        torch.testing.assert_close(scale_grad, grads[rank][2], rtol=0, atol=1e-12)
        torch.testing.assert_close(weight_grad, (grads[0][0] + grads[1][0]) / 2, rtol=0, atol=1e-12)


# Moments


class InEachMoment(LightningModule):
    """Unbatched data plus a position, wherever a LightningModule is called; what it should be beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.pos, self.net = nn.Parameter(torch.randn(5, 5, dtype=F64)), network()
        self.seen: dict[str, tuple[Tensor, Tensor]] = {}

    def look(self, moment: str, x: Tensor) -> None:
        with torch.no_grad():
            value = whole(self.pos)
            inside = self.net[0].weight
            self.seen[moment] = x + self.pos, x + value
            self.seen[f"{moment}, of a unit"] = x.addcmul(inside, x), x.addcmul(whole(inside), x)
            self.seen[f"{moment}, of a copy"] = x * self.copy, x * whole(self.copy)
            if self.pos.grad is not None:
                self.seen[f"{moment}, of a gradient"] = x * self.pos.grad, x * whole(self.pos.grad)

    def on_fit_start(self) -> None:
        self.copy = self.pos.detach().clone()
        self.look("before", local(self.global_rank, 5, 5))

    def training_step(self, x: Tensor, i: int) -> Tensor:
        self.look("training step, before units", x)
        loss = self.net(x + self.pos).square().mean()
        self.look("training step, after units", x)
        return loss

    def on_after_backward(self) -> None:
        self.look("on_after_backward", local(self.global_rank, 5, 5))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.look("on_before_optimizer_step", local(self.global_rank, 5, 5))

    def on_train_batch_end(self, outputs: Any, x: Tensor, i: int) -> None:
        self.look("on_train_batch_end", x)

    def validation_step(self, x: Tensor, i: int) -> None:
        self.look("validation, before units", x)
        self.net(x)
        self.look("validation, after units", x)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def _moments(rank: int, stage: int, offload: str | None) -> tuple[int, list[str]]:
    module = InEachMoment()
    data = loader([local(rank, 5, 5, seed=seed) for seed in (1, 2)])
    with launched(rank):
        make_trainer(lightning_zero.ZeROStrategy(stage=stage, offload=offload)).fit(module, data, data)
    return len(module.seen), [
        moment for moment, (found, right) in module.seen.items() if type(found) is not Tensor or (found != right).any()
    ]


@pytest.mark.parametrize(("stage", "offload"), STAGES)
def test_data_of_a_rank_meets_sharded_tensors_in_each_moment(stage: int, offload: str | None) -> None:
    """Parameters of the root and of a unit, copies and gradients."""
    for number, wrong in run_ranks(2, _moments, stage, offload):
        assert not wrong
        assert number == 8 * 3 + 5  # of the moments five see a gradient


# Lists


def _of_one_rank(rank: int, stage: int) -> list[tuple[Tensor, Tensor]]:
    model = lightning_zero.shard(network(), stage=stage)
    pairs = list(zip(model.parameters(), network().parameters(), strict=True))
    pairs = [(weight, plain.detach()) for weight, plain in pairs if weight.slicing.fragments[0].numel == 0]
    assert len(pairs) > 1
    norms = [torch.full(plain[..., :1].shape, 2.0, dtype=F64) for _, plain in pairs]
    with torch.no_grad():
        torch._foreach_div_([weight for weight, _ in pairs], norms)
    return [(whole(weight), plain / 2) for weight, plain in pairs]


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_lists_of_which_a_rank_holds_nothing(stage: int) -> None:
    """Operands that broadcast take all ranks to make whole: each finds so, whatever lies on it."""
    for found in run_ranks(2, _of_one_rank, stage):
        assert all(torch.equal(weight, plain) for weight, plain in found)


class Momentum(nn.Module):
    """A stem in the root, which is whole in a training step, and blocks; an average of both follows by lists."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(5, 5, dtype=F64), network()
        self.average = nn.ParameterList(nn.Parameter(torch.zeros_like(p), False) for p in self.followed())

    def followed(self) -> list[Tensor]:
        return [*self.stem.parameters(), *self.blocks.parameters()]

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(self.stem(x))
        with torch.no_grad():
            both = [*self.average, *self.stem.parameters()]  # at rest, and leaves
            torch._foreach_mul_(both, 2.0)
            torch._foreach_add_(list(self.average), self.followed(), alpha=0.5)
        return y


def _momentum(rank: int, stage: int | None) -> list[Tensor]:
    torch.manual_seed(0)
    model = Momentum()
    if stage is not None:
        lightning_zero.shard(model, stage=stage)
    for _ in range(2):
        model(torch.ones(2, 5, dtype=F64)).sum().backward()
        with torch.no_grad():
            model(torch.ones(2, 5, dtype=F64))  # a step ends, and what it wrote is folded back
    return [whole(p) for p in model.parameters()]


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_lists_of_leaves_and_resting_parameters_are_written(stage: int) -> None:
    """In a forward the root's parameters are leaves, the blocks' rest."""
    expected = _momentum(0, None)
    for found in run_ranks(2, _momentum, stage):
        for ours, plain in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-12, atol=0)


# Collectives of user code


def _collectives(rank: int, stage: int) -> None:
    model = trained(stage, None)
    weight = model[0].weight
    for tensor in (weight.grad, weight.data):
        before = whole(tensor)
        dist.all_reduce(tensor)
        assert torch.equal(whole(tensor), before * 2)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True).wait()
        dist.broadcast(tensor, 0)
        assert torch.equal(whole(tensor), before * 2)
        gathered = [torch.empty(5, 5, dtype=F64) for _ in range(2)]
        dist.all_gather(gathered, tensor)
        assert all(torch.equal(each, before * 2) for each in gathered)
    with pytest.raises(RuntimeError, match=r"`0.weight` is sharded, and the collective `reduce_`"):
        dist.reduce(weight.grad, 0)
    assert not (weight.is_shared() or weight.is_pinned() or weight[0].is_shared())


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_collectives_of_user_code(stage: int) -> None:
    """On whole values, alike on all ranks, or refused."""
    run_ranks(2, _collectives, stage)


@pytest.mark.parametrize(("name", "package"), [("ZeroRedundancyOptimizer", "torch.distributed"), ("FusedAdam", "apex")])
def test_optimizers_that_cannot_step_shards_are_refused(name: str, package: str) -> None:
    """At the first step, of a class that says nothing itself."""
    kind = type(name, (torch.optim.SGD,), {"__module__": package})
    model = lightning_zero.shard(network(), stage=3)
    with pytest.raises(ValueError, match=rf"{name}` .*`torch.optim.Adam"):
        kind(model.parameters(), lr=0.1).step()
