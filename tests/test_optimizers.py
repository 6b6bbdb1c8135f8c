"""Optimizers beyond a plain step: their state in files, their options, and optimizers that torch does not have."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from distributed import run_ranks, whole_values
from test_parity import (
    EXACT,
    OPTIMIZERS,
    STAGES,
    Run,
    adamw,
    assert_close,
    batch,
    build,
    compare,
    cross_entropy,
    steps,
    unused,
    whole,
)
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import lightning_zero
from lightning_zero.checkpoint.one_file import shard_optimizer_state
from lightning_zero.engine import engine_of
from lightning_zero.sharded_parameter import ShardedTensor

# State in files


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=3, history_size=3)


MAKERS = {name: make for name, (make, _) in OPTIMIZERS.items()} | {"LBFGS": lbfgs}


def go(run, optimizer, numbers):
    """One step for each number, on the batch of that number."""
    for number in numbers:

        def closure(number=number):
            optimizer.zero_grad()
            loss = run.loss(number=number)
            loss.backward()
            if run.plain:
                return loss.detach()
            return engine_of(run.model).collectives.all_reduce(loss.detach().clone()) / run.world_size

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def _stops_and_resumes(rank, name, stage):
    model = lightning_zero.shard(build(unused, seed=rank), stage=stage, units=["Block"])
    optimizer = MAKERS[name](model)
    go(Run(model, rank, 2), optimizer, range(2))
    saved = whole_values(model.state_dict()), whole_values(optimizer.state_dict())

    resumed = lightning_zero.shard(build(unused, seed=7), stage=stage, units=["Block"])
    resumed.load_state_dict(saved[0])
    optimizer = MAKERS[name](resumed)
    # Torch loads step counters as they are, without a copy.
    optimizer.load_state_dict(shard_optimizer_state(optimizer, copy.deepcopy(saved[1])))
    go(Run(resumed, rank, 2), optimizer, range(2, 4))
    kinds = {
        key for state in optimizer.state.values() for key, value in state.items() if isinstance(value, ShardedTensor)
    }
    return saved, {key: whole(p) for key, p in resumed.named_parameters()}, kinds


ONE_FOR_EACH_ELEMENT = {
    "AdamW": {"exp_avg", "exp_avg_sq"},
    "SGD": {"momentum_buffer"},
    "Adam amsgrad": {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    "Adagrad": {"sum"},
    "Muon": {"momentum_buffer"},
    "Adafactor": {"variance"},
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("stage", [1, 3])
def test_optimizer_state_goes_through_a_file_both_ways(stage, name):
    """Two sharded steps, whole state, loaded into plain torch and into another sharded run: two more steps of either
    end where four plain ones do. What is as large as the parameter is sharded again."""
    tolerance = {"Muon": 1e-2, "LBFGS": 1e-8}.get(name, EXACT)
    straight = Run(build(unused), None, 2)
    go(straight, MAKERS[name](straight.model), range(4))
    plain = Run(build(unused, seed=5), None, 2)
    optimizer = MAKERS[name](plain.model)
    results = run_ranks(2, _stops_and_resumes, name, stage)
    weights, state = results[0][0]
    plain.model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    go(plain, optimizer, range(2, 4))
    for key, expected in straight.result()["weights"].items():
        assert_close(plain.result()["weights"][key], expected, tolerance, f"plain: {key}")
        for rank, (_, resumed, kinds) in enumerate(results):
            assert_close(resumed[key], expected, tolerance, f"rank {rank}: {key}")
            assert kinds >= ONE_FOR_EACH_ELEMENT.get(name, set())


# Options


def _message(model, options, loss):
    try:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, **options)
        for _ in range(2):
            loss().backward()
            optimizer.step()
    except (RuntimeError, AssertionError, ValueError) as error:
        return type(error).__name__, str(error)
    return None


def _message_on_rank(rank, stage, options):
    model = lightning_zero.shard(build(), stage=stage, units=["Block"])
    return _message(model, options, lambda: cross_entropy(model, *batch(rank, 0)))


@pytest.mark.parametrize(
    "options",
    [{"capturable": True}, {"differentiable": True}, {"foreach": True, "fused": True}],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("stage", STAGES)
def test_what_torch_refuses_is_refused_in_its_words(stage, options):
    """Capturing on a CPU, differentiable steps of leaves, contradictions: the plain model's own error."""
    plain = build()
    expected = _message(plain, options, lambda: cross_entropy(plain, *batch(0, 0)))
    assert expected is not None
    assert run_ranks(2, _message_on_rank, stage, options) == [expected] * 2


def sparse(seed):
    net = build(seed=seed)
    net.embed = nn.Embedding.from_pretrained(net.embed.weight.detach(), freeze=False, sparse=True)
    return net


@pytest.mark.parametrize("stage", STAGES)
def test_sparse_gradients_train_as_dense_ones(stage):
    """SGD takes either kind, with one result."""

    def scenario(run):
        steps(run, torch.optim.SGD(run.model.parameters(), lr=0.1), 3)
        run.record(run.model.embed.weight.grad.to_dense())
        run.model.embed.weight.grad = None

    compare(scenario, stage, make=sparse)


def _sparse_adam(rank, stage):
    model = lightning_zero.shard(sparse(rank), stage=stage, units=["Block"])
    optimizer = torch.optim.SparseAdam([model.embed.weight], lr=0.1)
    cross_entropy(model, *batch(rank, 0)).backward()
    optimizer.step()


@pytest.mark.parametrize("stage", STAGES)
def test_sparse_adam_is_refused(stage):
    """Sharded gradients are dense; torch's own words name the way out."""
    with pytest.raises(AssertionError, match="SparseAdam does not support dense gradients, please consider Adam"):
        run_ranks(2, _sparse_adam, stage)


# Optimizers that torch does not have


class Lamb(torch.optim.Optimizer):
    """Adam's direction, scaled for each parameter by the ratio of two norms (You 2019, algorithm 2)."""

    def __init__(self, params, lr=0.01, decay=0.1):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["mean"] = torch.zeros_like(p)
                    state["square"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["step"] += 1
                state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["square"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                mean = state["mean"] / (1 - 0.9 ** state["step"])
                square = state["square"] / (1 - 0.99 ** state["step"])
                update = mean / (square.sqrt() + 1e-6) + group["decay"] * p
                size, length = p.norm(), update.norm()
                ratio = torch.where((size > 0) & (length > 0), size / length, torch.ones_like(size))
                p.add_(update * ratio, alpha=-group["lr"])


class Lars(torch.optim.Optimizer):
    """A trust ratio in Python numbers, as older code has it, and a branch on it."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            size, slope = torch.norm(p.data).item(), torch.norm(p.grad.data).item()
            ratio = 0.02 * size / (slope + 0.1 * size + 1e-9) if size > 0 and slope > 0 else 1.0
            direction = p.grad.data.add(p.data, alpha=0.1).mul_(ratio)
            momentum = self.state[p].setdefault("momentum", torch.clone(direction).detach())
            momentum.mul_(0.9).add_(direction)
            p.data.add_(-self.param_groups[0]["lr"] * momentum)


class Lion(torch.optim.Optimizer):
    """The sign of an interpolation (Chen 2023, algorithm 2)."""

    def __init__(self, params, lr=0.003, decay=0.1):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.data.mul_(1 - group["lr"] * group["decay"])
                p.add_((momentum * 0.9 + p.grad * 0.1).sign_(), alpha=-group["lr"])
                momentum.lerp_(p.grad, 0.01)


class Adan(torch.optim.Optimizer):
    """Moments of gradients and of their differences, by lists (Xie 2022, algorithm 1)."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        grads = [p.grad for p in params]
        states = [self.state[p] for p in params]
        for state, g in zip(states, grads):
            if not state:
                state.update(m=torch.zeros_like(g), v=torch.zeros_like(g), n=torch.zeros_like(g), last=g.clone())
        m, v, n, last = ([state[key] for state in states] for key in ("m", "v", "n", "last"))
        change = torch._foreach_sub(grads, last)
        torch._foreach_lerp_(m, grads, 0.02)
        torch._foreach_lerp_(v, change, 0.08)
        torch._foreach_add_(change, grads)
        torch._foreach_mul_(n, 0.99)
        torch._foreach_addcmul_(n, change, change, 0.01)
        scale = torch._foreach_sqrt(n)
        torch._foreach_add_(scale, 1e-8)
        torch._foreach_addcdiv_(params, torch._foreach_add(m, v, alpha=0.92), scale, -self.param_groups[0]["lr"])
        torch._foreach_copy_(last, grads)


@pytest.mark.parametrize("kind", [Lamb, Lars, Lion, Adan])
@pytest.mark.parametrize("stage", STAGES)
def test_optimizers_of_others_equal_one_process(stage, kind):
    """Norms of each parameter, signs, differences, lists."""
    make = functools.partial(build, unused)
    compare(lambda run: steps(run, kind(run.model.parameters()), 4), stage, make=make)


class EightBit(torch.optim.Optimizer):
    """Hands addresses to a kernel, as optimizers in 8 bits do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        return [(p.data_ptr(), p.grad.data_ptr()) for p in self.param_groups[0]["params"]]


def _eight_bit(rank, stage):
    model = lightning_zero.shard(build(), stage=stage, units=["Block"])
    cross_entropy(model, *batch(rank, 0)).backward()
    try:
        EightBit([model.blocks[1].up.weight]).step()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_that_wants_addresses_is_refused_by_name(stage):
    """Instead of stepping memory that is not there."""
    for message in run_ranks(2, _eight_bit, stage):
        assert "`blocks.1.up.weight` is sharded" in message
        assert "`data_ptr()`" in message
        assert "lightning_zero.gathered" in message


# Averages by hand


AVERAGES = {
    "equal": {},
    "ema": {"avg_fn": get_ema_avg_fn(0.8)},
    "ema lists": {"multi_avg_fn": get_ema_multi_avg_fn(0.8), "use_buffers": True},
}


@pytest.mark.parametrize("name", AVERAGES)
@pytest.mark.parametrize("stage", STAGES)
def test_an_averaged_model_beside_the_sharded_one(stage, name):
    """Made after sharding it is a sharded copy: updated without any traffic, and usable on its own. The equal average
    divides by a tensor, of which nobody knows that it is alike on all ranks."""

    def scenario(run):
        average = AveragedModel(run.model, **AVERAGES[name])
        optimizer = adamw(run.model)
        for _ in range(3):
            steps(run, optimizer, 1)
            engine = engine_of(run.model)
            if engine is not None:
                engine.collectives.reset_counts()
            average.update_parameters(run.model)
            if engine is not None and stage:
                assert all(isinstance(p, ShardedTensor) for p in average.parameters())
                assert name == "equal" or not engine.collectives.nbytes
        for p in average.parameters():
            run.record(p)
        with torch.no_grad():
            run.record(average(batch(0, 50)[0]))

    compare(scenario, stage)


class KeepsItsAverage(nn.Module):
    """The average is a part of the module."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        self.average.requires_grad_(False)

    def forward(self, tokens):
        with torch.no_grad():
            teacher = self.average(tokens).softmax(-1)
        return self.net(tokens) + 0.1 * teacher


@pytest.mark.parametrize("stage", STAGES)
def test_an_averaged_model_inside_the_sharded_one(stage):
    """A teacher that follows its student, and is called in each forward."""

    def scenario(run):
        optimizer = torch.optim.AdamW(run.model.net.parameters(), lr=0.01)
        for _ in range(3):
            steps(run, optimizer, 1)
            run.model.average.update_parameters(run.model.net)

    compare(scenario, stage, make=lambda seed: KeepsItsAverage(build(seed=seed)))
