"""What policies of activation checkpointing promise: training to the last bit as without one, and less kept for it.

    policy        what a block keeps        forwards of a block in one step
    none          all                       1
    full          its inputs                2
    selective     and costly results        2
    offload       all, on the host          1

Each case is a model that looks at its blocks in one way. Policies are tried one after another in the same ranks, which
began from the same seed, so parameters, gradients and losses are equal bit by bit, dropout included.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from distributed import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from twin import Outcome, build, sgd, shard, train

import lightning_zero
from lightning_zero import OffloadActivations, Recompute, Selective
from lightning_zero.activation import COSTLY, activation_policies, chosen_policies
from lightning_zero.precision import RECIPES

WHOLE_AND_SHARDED = (1, 3)
"""To a policy a stage is where weights rest. The widest model is tried at every stage."""
WIDTH = 6


def small() -> OffloadActivations:
    """Moves everything: no tensor here has the default's 64 KiB."""
    return OffloadActivations(min_bytes=1)


Policies = dict[str, Callable[[], Any]]

POLICIES: Policies = {
    "full": lambda: "full",
    "selective": lambda: "selective",
    "offload": small,
    "full and offload": lambda: ("full", small()),
    "selective and offload": lambda: ("selective", small()),
    "every second": lambda: Recompute(every=2),
    "classes": lambda: {Block},
    "class names": lambda: {"Block"},
    "a class in units": lambda: {nn.LayerNorm},
}
MAIN: Policies = {name: POLICIES[name] for name in ("full", "selective", "offload", "full and offload")}
RECOMPUTED = MAIN.keys() - {"offload"}

forwards = [0]
"""Of blocks, so far."""


class Block(nn.Module):
    """Residual, with dropout; it counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        forwards[0] += 1
        return self.residual(x)

    def residual(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.norm(self.up(x)).tanh()))


class Net(nn.Module):
    """Three blocks and a root around them; its loss on data that a seed gives."""

    def __init__(self, block: Callable[[], nn.Module] = Block, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, seed: int) -> Tensor:
        tokens = torch.randint(11, (2, 4), generator=torch.Generator().manual_seed(seed))
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), tokens.flatten())

    def logits(self, tokens: Tensor) -> Tensor:
        return self.head(self.trunk(self.embed(tokens)))

    def trunk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


Loop = Callable[[nn.Module, int, torch.optim.Optimizer], Any]
STEPS = 2


def usual(module: nn.Module, rank: int, optimizer: torch.optim.Optimizer) -> Outcome:
    return train(module, [rank], optimizer, STEPS)


def left(outcome: Any) -> dict[str, Any]:
    """Everything that an outcome holds, by name."""
    return {
        **{f"loss {i}": torch.tensor(loss) for i, loss in enumerate(outcome.losses)},
        **{f"gradient of {name}": value for name, value in outcome.gradients.items()},
        **{f"live {name}": value for name, value in outcome.live.items()},
        **{f"after: {name}": value for name, value in outcome.after.items()},
    }


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names of what differs in a bit, or exists on one side only."""
    assert list(found) == list(expected)
    return [
        name
        for name, value in expected.items()
        if (found[name] is None) != (value is None)
        or (value is not None and not (found[name].dtype is value.dtype and torch.equal(found[name], value)))
    ]


def compare(
    make: Callable[[], nn.Module],
    stage: int,
    *,
    policies: Policies = MAIN,
    world_size: int = 2,
    units: Any = ("Block",),
    loop: Loop = usual,
    extra_forwards: dict[str, float] | None = None,
    **arguments: Any,
) -> None:
    """Under each policy training ends where it ends without one, bit by bit, on every rank, and the policy was at work.

    Args:
        extra_forwards: of blocks in a step, as a part of those without a policy; default: as many again where blocks
            are recomputed.
        arguments: of `lightning_zero.shard`.
    """

    def trained(rank: int, policy: Any) -> tuple[dict[str, Any], int]:
        forwards[0] = 0
        module = shard(build(make, 0, torch.float32), stage, units, activation_checkpointing=policy, **arguments)
        torch.manual_seed(rank + 5)  # dropout
        outcome = loop(module, rank, sgd(module))
        return left(outcome) if isinstance(outcome, Outcome) else outcome, forwards[0]

    def on_rank(rank: int) -> dict[str, Any]:
        plain, count = trained(rank, None)
        found: dict[str, Any] = {}
        for name, new in policies.items():
            policy = new()
            got, counted = trained(rank, policy)
            stores = [p for p in (policy if isinstance(policy, tuple) else (policy,)) if hasattr(p, "stash")]
            moved = [min(store.stash.bytes_to_host, store.stash.bytes_to_device) for store in stores]
            found[name] = differing(got, plain), counted / count - 1, moved
        return found

    for found in run_ranks(world_size, on_rank):
        for name, (different, extra, moved) in found.items():
            assert different == [], name
            expected = {**dict.fromkeys(RECOMPUTED, 1.0), **(extra_forwards or {})}.get(name)
            if name in RECOMPUTED or expected is not None:
                assert extra == pytest.approx(expected), name
            assert all(moved), name


class Words(NamedTuple):
    """A structure that torch knows."""

    first: Tensor
    second: Tensor | None


@dataclass
class Opaque:
    """A structure that torch does not look into."""

    value: Tensor
    factor: float = 0.5


class Wide(Block):
    """Takes and gives every kind of structure."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        *others: Any,
        mask: Tensor | None,
        flag: bool,
        cfg: dict[str, Any],
        words: Words,
        opaque: Opaque,
    ) -> Any:
        forwards[0] += 1
        assert mask is None and flag and others == ((1, "text"),) and words.second is None
        x = self.residual(x) + cfg["deep"]["bias"] * opaque.factor + words.first * opaque.value
        return {"x": x, "pair": (x * 2, None), "opaque": Opaque(x.mean()), "count": 3}


class Everything(Net):
    """Structures in and out, frozen layers and a frozen block, one block used twice, and one whose result is unused."""

    def __init__(self) -> None:
        super().__init__(Wide)
        self.bias = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.embed.requires_grad_(False)
        self.blocks[0].up.requires_grad_(False)
        self.blocks[0].norm.requires_grad_(False)
        self.blocks[1].requires_grad_(False)

    def trunk(self, x: Tensor) -> Tensor:
        first, *_ = self.blocks
        opaque = Opaque(torch.full((WIDTH,), 0.1))
        for block in (*self.blocks, first):
            cfg = {"deep": {"bias": self.bias}, "name": "cfg"}
            out = block(x, (1, "text"), mask=None, flag=True, cfg=cfg, words=Words(x, None), opaque=opaque)
            assert out["count"] == 3 and out["pair"][1] is None
            x, opaque = out["x"] + 0.1 * out["pair"][0], out["opaque"]
        first(x, (1, "text"), mask=None, flag=True, cfg=cfg, words=Words(x, None), opaque=opaque)
        return x


# Of five forwards in a step the last one's result is unused, so it is not computed again.
EVERYTHING = dict.fromkeys(RECOMPUTED, 4 / 5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_keeps_every_bit_under_every_policy(stage: int) -> None:
    """Dropout 0.5, frozen parts, arguments and results of any structure, a block used twice: two ranks, each stage."""
    # Blocks 0 and 2 of 0, 1, 2, 0: three of five.
    expected = {**EVERYTHING, "classes": 4 / 5, "class names": 4 / 5, "every second": 3 / 5, "a class in units": 0}
    policies = {**POLICIES, "classes": lambda: {Wide}, "class names": lambda: {"Wide"}}
    compare(Everything, stage, policies=policies, units=[Wide], extra_forwards=expected)


def test_training_keeps_every_bit_in_one_process() -> None:
    """Where nothing is shared there are units all the same."""
    compare(Everything, 3, units=[Wide], world_size=1, extra_forwards=EVERYTHING)


@pytest.mark.parametrize("policy", ["full", "offload"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offloaded_state_and_activations_go_together(stage: int, policy: str) -> None:
    """Main weights and optimizer state rest on the host too."""
    name = "full and offload" if policy == "full" else policy
    compare(Everything, stage, policies={name: POLICIES[name]}, units=[Wide], extra_forwards=EVERYTHING, offload="cpu")


class Lora(Block):
    """Frozen but for an update of rank 2."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.a = nn.Linear(WIDTH, 2, bias=False)
        self.b = nn.Linear(2, WIDTH, bias=False)

    def residual(self, x: Tensor) -> Tensor:
        return super().residual(x) + self.drop(self.b(self.a(x)))


def lora() -> Net:
    """No input of the first block asks for a gradient: reentrant checkpointing would train nothing there."""
    net = Net(Lora)
    net.embed.requires_grad_(False)
    return net


def tied() -> Net:
    """The head is the embedding."""
    net = Net()
    net.head.weight = net.embed.weight
    return net


class InPlace(Block):
    """Writes what it made itself."""

    def residual(self, x: Tensor) -> Tensor:
        y = self.up(x).mul_(1.5).relu_()
        y = self.drop(self.down(y))
        y += x
        return y


class Noisy(Block):
    """Draws random numbers by an operation that a test keeps, and others after it."""

    def residual(self, x: Tensor) -> Tensor:
        return self.drop(super().residual(x * torch.rand_like(x)))


class Nested(Block):
    """Checkpoints a part of itself."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def residual(self, x: Tensor) -> Tensor:
        return checkpoint(super().residual, x, use_reentrant=self.use_reentrant)


class Borrowing(Net):
    """Blocks take a weight of the root as an argument, and one of another block."""

    def __init__(self) -> None:
        super().__init__(Borrower)

    def trunk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.head.weight, self.blocks[0].down.bias)
        return x


class Borrower(Block):
    """Computes with weights that are not its own."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        forwards[0] += 1
        return self.residual(x) + (x @ weight.t()) @ weight * 0.1 + bias


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "LoRA": (lora, [Lora]),
    "tied weights": (tied, [Block]),
    "in-place operations": (lambda: Net(InPlace), [Block]),
    "weights as arguments": (Borrowing, [Block]),
}


@pytest.mark.parametrize("stage", WHOLE_AND_SHARDED)
@pytest.mark.parametrize("model", MODELS)
def test_models_train_to_the_last_bit(model: str, stage: int) -> None:
    """One difficulty each."""
    make, units = MODELS[model]
    compare(make, stage, units=units)


@pytest.mark.parametrize("stage", WHOLE_AND_SHARDED)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_block_may_checkpoint_a_part_of_itself(use_reentrant: bool, stage: int) -> None:
    """The user's own checkpointing, with dropout inside."""
    compare(lambda: Net(lambda: Nested(use_reentrant)), stage, units=[Nested])


@pytest.mark.parametrize("stage", WHOLE_AND_SHARDED)
def test_random_results_are_drawn_again(stage: int) -> None:
    """Were one kept, all numbers after it would be others than those of the first time."""
    save = [*COSTLY, torch.ops.aten.rand_like.default]
    compare(lambda: Net(Noisy), stage, units=[Noisy], policies={"selective": lambda: Selective(save=save)})


class Stack(nn.Module):
    """Blocks in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("stage", WHOLE_AND_SHARDED)
@pytest.mark.parametrize("classes", [{Stack}, {Stack, nn.LayerNorm}, {"Net"}], ids=["stack", "and a part", "the model"])
def test_what_contains_units_is_recomputed_as_one(classes: set[Any], stage: int) -> None:
    """Three stacks of two units each, and what is recomputed inside what is recomputed; or the whole model."""
    compare(lambda: Net(Stack), stage, policies={"full": lambda: classes})


# Loops


def two_losses(module: Any, rank: int, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """One graph, two backwards through a part of it; and a second graph."""
    for step in range(STEPS):
        optimizer.zero_grad()
        x = module.trunk(module.embed(torch.arange(4) + step + rank))
        x.mean().backward(retain_graph=True)
        module.head(x).square().mean().backward()
        module(10 * step + rank).backward()
        optimizer.step()
    return dict(lightning_zero.unshard(module).state_dict())


def accumulated(module: nn.Module, rank: int, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Three micro-batches a step."""
    for step in range(STEPS):
        optimizer.zero_grad()
        with lightning_zero.no_sync(module):
            module(10 * step + rank).backward()
            module(10 * step + rank + 5).backward()
        module(10 * step + rank + 7).backward()
        optimizer.step()
    return dict(lightning_zero.unshard(module).state_dict())


def under_autocast(module: nn.Module, rank: int, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Backward is outside of it, as it should be; the second forward is inside."""
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(10 * step + rank)
        loss.backward()
        optimizer.step()
    return dict(lightning_zero.unshard(module).state_dict())


def penalized(module: Any, rank: int, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The gradient of a gradient."""
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.linspace(-1, 1, WIDTH).add(step + rank).requires_grad_()
        y = module.trunk(x[None, None])
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (y.mean() + gradient.square().sum()).backward()
        optimizer.step()
    return dict(lightning_zero.unshard(module).state_dict())


def evaluated(module: Any, rank: int, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Forwards without a backward between training steps, and one with one in evaluation mode."""
    found = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.no_grad():
            found[f"no_grad {step}"] = module(3)
        loss = module(10 * step + rank)
        module.eval()
        with torch.inference_mode():
            found[f"inference {step}"] = module(4).clone()
        # Nobody calls this one's backward.
        found[f"eval {step}"] = module(5).detach()
        module(6).backward()
        module.train()
        loss.backward()
        optimizer.step()
    return {**found, **lightning_zero.unshard(module).state_dict()}


@pytest.mark.parametrize("stage", WHOLE_AND_SHARDED)
def test_several_backwards_in_a_step(stage: int) -> None:
    """Two through one graph, which recomputes it twice: five forwards in all for two."""
    compare(Net, stage, loop=two_losses, extra_forwards=dict.fromkeys(RECOMPUTED, 3 / 2))


@pytest.mark.parametrize("stage", WHOLE_AND_SHARDED)
def test_accumulation(stage: int) -> None:
    """Gradients of micro-batches add up in the same order."""
    compare(Net, stage, loop=accumulated)


@pytest.mark.parametrize("stage", [0, *WHOLE_AND_SHARDED])
def test_mixed_precision(stage: int) -> None:
    """Forwards in backward run under the autocast of the first time, over the same narrow weights."""
    compare(Net, stage, loop=under_autocast, precision=RECIPES["bf16-mixed"])


@pytest.mark.parametrize("stage", WHOLE_AND_SHARDED)
def test_a_penalty_of_gradients(stage: int) -> None:
    """A backward through a backward: what is recomputed has a graph of its own, and each backward recomputes."""
    compare(Net, stage, loop=penalized, extra_forwards=dict.fromkeys(RECOMPUTED, 2.0))


@pytest.mark.parametrize("stage", WHOLE_AND_SHARDED)
def test_forwards_without_backward_are_as_they_were(stage: int) -> None:
    """Nothing is computed twice for them, or kept: of five forwards a step two are recomputed."""
    compare(Net, stage, loop=evaluated, extra_forwards=dict.fromkeys(RECOMPUTED, 2 / 5))


# What cannot be computed again


class Overwriting(Block):
    """Writes its input, which plain training forgives."""

    def residual(self, x: Tensor) -> Tensor:
        return self.up(x.add_(1))[..., :WIDTH]


@pytest.mark.parametrize("name", sorted(RECOMPUTED))
def test_an_input_that_is_written_is_an_error_in_backward(name: str) -> None:
    """Inside the forward or after it; without one the gradient would be wrong, in silence."""
    inside = lightning_zero.shard(Net(Overwriting), units=[Overwriting], activation_checkpointing=MAIN[name]())
    loss = inside(0)
    with pytest.raises(RuntimeError, match=r"an argument of shape \(2, 4, 6\) .* written in place"):
        loss.backward()

    after: Any = lightning_zero.shard(Net(), units=[Block], activation_checkpointing=MAIN[name]())
    x = torch.ones(3, WIDTH)
    loss = after.blocks[0](x).sum()
    x.add_(1)
    if name == "full and offload":
        loss.backward()  # its copy is as it was
    else:
        with pytest.raises(RuntimeError, match=r"an argument of shape \(3, 6\) .* written in place"):
            loss.backward()


class Scaled(nn.Module):
    """A block with a buffer that its result depends on, and one that each forward sets anew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("factor", torch.ones(()))
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards = self.forwards + 1
        return torch.tanh(self.linear(x)) * self.factor


def _with_substitutes(rank: int, stage: int | None, policies: list[str]) -> list[Any]:
    found = []
    for policy in policies:
        torch.manual_seed(0)
        model = nn.Sequential(*(Scaled() for _ in range(3)))
        weights = {"linear.weight": torch.randn(WIDTH, WIDTH), "linear.bias": torch.randn(WIDTH)}
        for weight in weights.values():
            weight.requires_grad_()
        x = torch.randn(2, WIDTH)
        if stage is not None:
            checkpointing = None if policy == "none" else POLICIES[policy]()
            lightning_zero.shard(model, stage=stage, units=[Scaled], activation_checkpointing=checkpointing)
        x = model[0](x)
        x = torch.func.functional_call(model[1], {**weights, "factor": torch.tensor(2.0)}, (x,))
        inside = {f"2.{name}": weight * 2 for name, weight in weights.items()}
        torch.func.functional_call(model, inside, (x,)).square().sum().backward()
        found.append(([weight.grad for weight in weights.values()], [block.forwards.item() for block in model]))
    return found


@pytest.mark.parametrize("stage", WHOLE_AND_SHARDED)
def test_what_stands_in_the_place_of_weights_and_buffers_does_so_in_the_second_forward(stage: int) -> None:
    """`functional_call` on a block, and on the whole model; backward comes when it is long over. The twin is plain. A
    buffer that a forward sets anew counts its first forward alone."""
    policies = ["none", *RECOMPUTED]
    ((expected, forwards),) = _with_substitutes(0, None, ["none"])
    for ranks in run_ranks(2, _with_substitutes, stage, policies):
        for policy, (grads, counted) in zip(policies, ranks, strict=True):
            assert counted == forwards, policy
            for grad, value in zip(grads, expected, strict=True):
                assert torch.allclose(grad, value, rtol=0, atol=1e-6), policy


def test_activations_that_wait_on_the_host_may_be_overwritten_on_the_device() -> None:
    """The copy is from the time when it was saved: gradients are those of the forward, where plain training raises."""
    gradients = []
    for overwritten in (False, True):
        torch.manual_seed(0)
        module: Any = lightning_zero.shard(Net(), units=[Block], activation_checkpointing=small())
        x = torch.ones(3, WIDTH)
        loss = module.blocks[0](x).sum()
        if overwritten:
            x.zero_()
        loss.backward()
        gradients.append(module.blocks[0].up.weight.grad.whole())
    assert torch.equal(*gradients)


# Which policy is where, and what is refused


def chosen(spec: Any, units: bool = True) -> dict[str, Any]:
    """Policies by the names of their modules, in a net of blocks."""
    net = Net()
    found = chosen_policies(net, list(net.blocks) if units else [], activation_policies(spec))
    return {name: found[module] for name, module in net.named_modules() if module in found}


def test_a_policy_stands_around_units_or_classes() -> None:
    """All, or each second one."""
    assert list(chosen("full")) == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(chosen(Recompute(every=2))) == ["blocks.0", "blocks.2"]
    assert list(chosen(Recompute(classes=Block, every=2), units=False)) == ["blocks.0", "blocks.2"]
    assert list(chosen({nn.LayerNorm, "Embedding"})) == ["embed", "blocks.0.norm", "blocks.1.norm", "blocks.2.norm"]
    assert chosen(None) == {}


def test_policies_that_meet_become_one() -> None:
    """Inputs of what is recomputed are offloaded; where one policy is alone it does its own work."""
    store = OffloadActivations()
    for spec in ((Recompute(every=2), store), (store, Recompute(every=2))):
        found = chosen(spec)
        assert found["blocks.1"] is store
        for name in ("blocks.0", "blocks.2"):
            assert isinstance(found[name], Recompute) and found[name].inputs is store
    found = chosen(("selective", OffloadActivations(classes={nn.LayerNorm}), {"Embedding"}))
    assert {name: type(policy) for name, policy in found.items()} == {
        "embed": Recompute,
        **{f"blocks.{i}": Selective for i in range(3)},
        **{f"blocks.{i}.norm": OffloadActivations for i in range(3)},
    }
    assert found["blocks.0"].inputs is None


NO_POLICY = "is no policy. Write `activation_checkpointing='full'`"
BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "unknown name": (lambda: "ful", ValueError, "'ful' is unknown: expected None, 'full', 'selective', 'offload'"),
    "true": (lambda: True, TypeError, f"True {NO_POLICY}"),
    "number": (lambda: 2, TypeError, f"2 {NO_POLICY}"),
    "class of policies": (lambda: Recompute, TypeError, NO_POLICY),
    "a class": (lambda: Block, TypeError, NO_POLICY),
    "classes in a list": (lambda: [Block], TypeError, NO_POLICY),
    "no classes": (set, ValueError, "must be module classes or their names. Write `classes={MyBlock}`"),
    "numbers for classes": (lambda: {3}, ValueError, "classes={3} must be module classes"),
    "class that is not there": (
        lambda: {nn.Conv2d}, ValueError, "no module of `Net` is a 'Conv2d'. It has ['Block', 'Dropout', 'Embedding',",
    ),
    "name that is not there": (lambda: {"Bloc"}, ValueError, "no module of `Net` is a 'Bloc'. It has ['Block', "),
    "every 0": (lambda: Recompute(every=0), ValueError, "every=0 must be a whole number of 1 or more"),
    "every true": (lambda: Recompute(every=True), ValueError, "every=True must be"),
    "every half": (lambda: Recompute(every=0.5), ValueError, "every=0.5 must be"),
    "save nothing": (lambda: Selective(save=()), ValueError, "keeps nothing but inputs. Write `Recompute()`"),
    "save a packet": (lambda: Selective(save=[torch.ops.aten.mm]), TypeError, "is no overload of an operation"),
    "save a name": (lambda: Selective(save="mm"), TypeError, "is no overload of an operation"),
    "twice": (lambda: ("full", "selective"), ValueError, "Recompute and Selective both apply to a `Block`"),
    "two stores": (lambda: ("offload", "offload"), ValueError, "OffloadActivations and OffloadActivations both apply"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_makes_no_sense_is_refused(name: str) -> None:
    """By an error that says what to write, before the module is touched."""
    new, error, message = BAD[name]
    net = Net()
    with pytest.raises(error, match=re.escape(message)):
        lightning_zero.shard(net, units=[Block], activation_checkpointing=new())
    assert lightning_zero.shard(net, units=[Block]) is net


@pytest.mark.parametrize("name", ["unknown name", "true", "every 0"])
def test_the_strategy_refuses_it_when_it_is_made(name: str) -> None:
    """Not when training begins."""
    new, error, message = BAD[name]
    with pytest.raises(error, match=re.escape(message)):
        lightning_zero.ZeROStrategy(activation_checkpointing=new())


def test_a_block_of_torch_script_is_refused() -> None:
    """Its forward is not Python."""
    net = Net()
    net.blocks[1] = torch.jit.script(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(ValueError, match=r"compiled by `torch\.jit`\. Give it the plain module"):
        lightning_zero.shard(net, activation_checkpointing={"Block", "RecursiveScriptModule"})


@pytest.mark.parametrize("new", [Recompute, Selective, small, lambda: Recompute(inputs=small(), classes={Block})])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda policy: pickle.loads(pickle.dumps(policy))])
def test_a_policy_reaches_spawned_processes(new: Callable[[], Any], copied: Callable[[Any], Any]) -> None:
    """As a part of the strategy it is pickled; a copy shares no stash."""
    policy = new()
    found = copied(policy)
    assert found == policy
    store = policy if isinstance(policy, OffloadActivations) else policy.inputs
    if store is not None:
        its = found if isinstance(policy, OffloadActivations) else found.inputs
        assert its.stash is not store.stash and its.stash.min_bytes == 1
