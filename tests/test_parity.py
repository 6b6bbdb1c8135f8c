"""Training sharded is training plain: every stage against one process that averages the ranks' losses.

A scenario is one function, run twice: on gloo ranks over a sharded model, and in one process over a plain one. `Run`
hides the difference, which is a mean of losses. Pooled buffers are poisoned with NaN before they are used again.
"""

from __future__ import annotations

import contextlib
import functools
import weakref

import pytest
import torch
import torch.nn.functional as F
from distributed import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import lightning_zero
from lightning_zero.engine import engine_of
from lightning_zero.sharded_parameter import ShardedParameter, ShardedTensor

STAGES = [0, 1, 2, 3]
EXACT = 1e-10
"""In float64 only the order of sums differs: a few 1e-16, grown by a handful of steps."""

VOCABULARY, WIDTH, BATCH = 11, 6, 3


class Block(nn.Module):
    """Residual; odd sizes, so that shards cut through rows, and a 0-dim parameter."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.odd = nn.Parameter(torch.randn(1, 3, 2) * 0.1)
        self.spare = nn.Linear(3, 5)
        self.uses_spare = False

    def forward(self, x):
        h = self.down(torch.tanh(self.up(self.norm(x)))) * self.scale
        if self.uses_spare:
            h = h + self.spare(x[:, :3]).sum() * 0.1
        return x + h + self.odd.reshape(-1)


class Net(nn.Module):
    """A small language-model-like net: root embedding and head, four blocks, a scalar temperature."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.temperature = nn.Parameter(torch.tensor(1.3))
        self.order = [0, 1, 2, 3]

    def forward(self, tokens):
        x = self.embed(tokens)
        for i in self.order:
            x = self.blocks[i](x)
        return self.head(x) * self.temperature


# Features: how the plain model is changed before anything else happens to it.


def tied(net):
    net.head.weight = net.embed.weight
    net.blocks[2].up.weight = net.blocks[0].up.weight  # across units: hoisted to the root
    net.blocks[3].norm = net.blocks[1].norm


def frozen(net):
    net.embed.requires_grad_(False)
    net.blocks[1].requires_grad_(False)
    net.blocks[2].up.weight.requires_grad_(False)
    net.blocks[3].scale.requires_grad_(False)


def unused(net):
    net.order = [0, 2, 3]  # block 1 is never called; `spare` is used nowhere but here
    net.blocks[3].uses_spare = True


def reused(net):
    net.order = [0, 1, 0, 2, 3, 3]


def backwards(net):
    net.order = [3, 2, 1, 0]


def transposed(net):
    net.head.weight = nn.Parameter(torch.randn(WIDTH, VOCABULARY).to(net.head.weight).t())


def everything(net):
    frozen(net)
    tied(net)
    net.embed.requires_grad_(True)
    reused(net)
    net.blocks[2].uses_spare = True


FEATURES = [None, tied, frozen, unused, reused, backwards, transposed, everything]


def build(feature=None, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    net = Net().to(dtype)
    if feature is not None:
        feature(net)
    return net


def batch(rank, number):
    """Tokens and targets of one rank, shape (BATCH,) each."""
    generator = torch.Generator().manual_seed(1000 * rank + number)
    tokens = torch.randint(0, VOCABULARY, (2, BATCH), generator=generator)
    return tokens[0], tokens[1]


def cross_entropy(net, tokens, targets):
    return F.cross_entropy(net(tokens), targets)


class Run:
    """One run of a scenario, plain or sharded, and what it left behind.

    Args:
        model: plain, or sharded on this rank.
        rank: ``None`` for the plain twin.
        world_size: ranks that the twin stands for.
    """

    def __init__(self, model, rank, world_size):
        self.model = model
        self.rank = rank
        self.ranks = range(world_size) if rank is None else [rank]
        self.world_size = world_size
        self.losses = []
        self.records = []
        self._numbers = iter(range(10**6))

    @property
    def plain(self):
        return self.rank is None

    def loss(self, loss=cross_entropy, number=None):
        """Mean over the ranks of this process, with a graph."""
        number = next(self._numbers) if number is None else number
        total = 0.0
        for rank in self.ranks:
            with_rank = functools.partial(loss, rank=rank) if "rank" in loss.__code__.co_varnames else loss
            total = total + with_rank(self.model, *batch(rank, number))
        mean = total / len(self.ranks)
        self.losses.append(float(mean.detach()))
        return mean

    def joint_loss(self, loss=cross_entropy):
        """As `loss`, in one forward over the joined batch: for forwards that write. Same value for a mean loss."""
        number = next(self._numbers)
        pieces = [batch(rank, number) for rank in self.ranks]
        value = loss(self.model, *(torch.cat(part) for part in zip(*pieces)))
        self.losses.append(float(value.detach()))
        return value

    def accumulating(self):
        return torch.enable_grad() if self.plain else lightning_zero.no_sync(self.model)

    def record(self, value):
        """Note a value that must be the same on the twin and on every rank."""
        if isinstance(value, torch.Tensor):
            value = value.whole() if hasattr(value, "whole") else value
            value = value.detach().clone()
        self.records.append(value)

    def result(self):
        gradients = {name: None if p.grad is None else whole(p.grad) for name, p in self.model.named_parameters()}
        if not self.plain:
            assert all(isinstance(p, ShardedParameter) for p in self.model.parameters()), "not at rest"
        weights = {name: whole(p) for name, p in self.model.named_parameters()}
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        return {
            "losses": self.losses,
            "weights": weights,
            "gradients": gradients,
            "records": self.records,
            "buffers": buffers,
        }


def whole(tensor):
    value = tensor.whole() if isinstance(tensor, ShardedTensor) else tensor
    return value.detach().clone().contiguous()


def _on_rank(rank, world_size, scenario, stages, make, units):
    results = []
    for stage in stages:
        # Another seed on each rank: rank 0's weights are the truth.
        model = make(seed=rank)
        lightning_zero.shard(model, stage=stage, units=units)
        engine = engine_of(model)
        assert len(engine.units) >= 3
        engine.pool.poison = True
        run = Run(model, rank, world_size)
        scenario(run)
        results.append(run.result())
    return results


def compare(scenario, stage=3, world_size=2, make=build, tolerance=EXACT, units=("Block",)):
    """``scenario`` leaves the same losses, weights, gradients, records and buffers as one plain process.

    Args:
        stage: one, or several, which the same ranks try one after another.
    """
    stages = stage if isinstance(stage, list | tuple) else [stage]
    twin = Run(make(seed=0), None, world_size)
    scenario(twin)
    expected = twin.result()
    ranks = run_ranks(world_size, _on_rank, world_size, scenario, stages, make, units)
    for number, stage in enumerate(stages):
        _assert_as(expected, [results[number] for results in ranks], tolerance, f"stage {stage}")
    return expected


def _assert_as(expected, ranks, tolerance, where):
    losses = torch.tensor([result["losses"] for result in ranks], dtype=torch.float64).mean(0)
    assert_close(losses, torch.tensor(expected["losses"], dtype=torch.float64), tolerance, f"{where}: losses")
    for rank, result in enumerate(ranks):
        for kind in ("gradients", "weights", "buffers"):
            assert result[kind].keys() == expected[kind].keys(), where
            for name, value in expected[kind].items():
                assert_close(result[kind][name], value, tolerance, f"{where}, rank {rank}: {kind} of {name}")
        assert len(result["records"]) == len(expected["records"]), where
        for number, (got, wanted) in enumerate(zip(result["records"], expected["records"])):
            assert_close(got, wanted, tolerance, f"{where}, rank {rank}: record {number}")


def assert_close(got, wanted, tolerance, what):
    if not isinstance(wanted, torch.Tensor):
        assert type(got) is type(wanted) and got == wanted, f"{what}: {got!r}, expected {wanted!r}"
        return
    assert got is not None, f"{what}: None, expected a tensor"
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), what
    if wanted.numel() == 0:
        return
    error = (got.double() - wanted.double()).abs().max().item()
    assert error <= tolerance * max(1.0, wanted.double().abs().max().item()), f"{what}: off by {error}"


def steps(run, optimizer, count=4, loss=cross_entropy, micro_batches=1, before_step=None, set_to_none=True):
    """``count`` ordinary training steps."""
    for _ in range(count):
        optimizer.zero_grad(set_to_none=set_to_none)
        for micro in range(micro_batches):
            if micro < micro_batches - 1:
                with run.accumulating():
                    (run.loss(loss) / micro_batches).backward()
            else:
                (run.loss(loss) / micro_batches).backward()
        if before_step is not None:
            before_step(run)
        optimizer.step()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9)


# Stages and features


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.__name__ if f else "plain")
def test_four_adamw_steps_equal_one_process(feature):
    """Decoupled decay moves a parameter with a zero gradient and not one with none: `grad is None` is kept too."""
    compare(lambda run: steps(run, adamw(run.model)), STAGES, make=functools.partial(build, feature))


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_any_number_of_ranks_equals_one_process(stage, world_size):
    """Ties, freezing, reuse, scalars and odd sizes together; on 4 ranks many fragments are empty."""
    compare(lambda run: steps(run, adamw(run.model), 3), stage, world_size, functools.partial(build, everything))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("feature", [None, everything], ids=["plain", "everything"])
def test_accumulation_equals_one_process(stage, feature):
    """Three micro-batches a step, the first two inside `no_sync`."""
    compare(lambda run: steps(run, adamw(run.model), 3, micro_batches=3), stage, make=functools.partial(build, feature))


@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_without_no_sync_equals_one_process(stage):
    """Plain torch accumulates whatever one forgets to say."""

    def scenario(run):
        optimizer = adamw(run.model)
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(3):
                (run.loss() / 3).backward()
            optimizer.step()

    compare(scenario, stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_by_norm_between_backward_and_step(stage, norm_type):
    """The norm is that of the whole gradient, the same number on every rank."""

    def clip(run):
        run.record(nn.utils.clip_grad_norm_(run.model.parameters(), 0.05, norm_type=norm_type))

    compare(lambda run: steps(run, sgd(run.model), before_step=clip), stage, make=functools.partial(build, unused))


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_by_value(stage):
    """Elementwise, so on fragments."""

    def clip(run):
        nn.utils.clip_grad_value_(run.model.parameters(), 0.01)

    compare(lambda run: steps(run, sgd(run.model), before_step=clip), stage, make=functools.partial(build, unused))


def regularised(net, tokens, targets):
    penalty = sum(p.square().sum() for p in net.parameters() if p.requires_grad)
    return cross_entropy(net, tokens, targets) + 1e-2 * penalty


def regularised_before(net, tokens, targets):
    penalty = sum(p.abs().sum() + p.norm() for p in net.parameters() if p.requires_grad)
    return 1e-2 * penalty + cross_entropy(net, tokens, targets)


@pytest.mark.parametrize("loss", [regularised, regularised_before])
@pytest.mark.parametrize("feature", [None, everything], ids=["plain", "everything"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_regulariser_over_all_parameters(stage, feature, loss):
    """Resting parameters in a differentiable operation, units that forward does not call among them."""
    compare(lambda run: steps(run, adamw(run.model), 3, loss), stage, make=functools.partial(build, feature))


def per_rank(net, tokens, targets, rank):
    # Another path on each rank, another set of parameters without a gradient.
    net.order = [0, 1, 2] if rank else [0, 3]
    return cross_entropy(net, tokens, targets)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_may_use_different_parameters(stage):
    """What some rank used gets the mean over all, with zeros from the others, whole weights resting everywhere."""
    compare(lambda run: steps(run, adamw(run.model), loss=per_rank), stage)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_one_rank_may_use_again_what_none_used_before(stage, world_size):
    """Block 2 is used by all, then by none, then by the last rank alone. All blocks are of one size: a reduction of
    the wrong one shows only in the values."""

    def on_and_off(net, tokens, targets, rank):
        used = {"all": True, "none": False, "last": rank == world_size - 1}[net.users]
        net.order = [0, 1, 2, 3] if used else [0, 1, 3]
        return cross_entropy(net, tokens, targets)

    def scenario(run):
        optimizer = adamw(run.model)
        for users in ("all", "all", "all", "none", "none", "last", "last", "none", "all"):
            run.model.users = users
            steps(run, optimizer, 1, on_and_off)

    compare(scenario, stage, world_size)


@pytest.mark.parametrize("stage", STAGES)
def test_the_graph_may_change_from_step_to_step(stage):
    """Recorded orders are hints: another path only costs a prefetch."""

    def scenario(run):
        optimizer = adamw(run.model)
        for order in [[0, 1, 2, 3], [3, 1], [0, 1, 2, 3], [2], [0, 0, 3, 2], [1, 2, 3]]:
            run.model.order = order
            optimizer.zero_grad()
            run.loss().backward()
            optimizer.step()

    compare(scenario, stage)


# Optimizers


def _matrices(model):
    return [p for p in model.parameters() if p.ndim == 2]


OPTIMIZERS = {
    "AdamW": (adamw, ("default", "foreach", "fused")),
    "SGD": (sgd, ("default", "foreach", "fused")),
    "Nesterov": (
        lambda m, **k: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, **k),
        ("default", "foreach", "fused"),
    ),
    "Adagrad": (lambda m, **k: torch.optim.Adagrad(m.parameters(), lr=1e-2, **k), ("default", "foreach", "fused")),
    "RMSprop": (
        lambda m, **k: torch.optim.RMSprop(m.parameters(), lr=1e-3, momentum=0.5, centered=True, **k),
        ("default", "foreach"),
    ),
    "Adam amsgrad": (
        lambda m, **k: torch.optim.Adam(m.parameters(), lr=1e-2, amsgrad=True, weight_decay=0.1, **k),
        ("default", "foreach", "fused"),
    ),
    "NAdam": (lambda m, **k: torch.optim.NAdam(m.parameters(), lr=1e-2, **k), ("default", "foreach")),
    "RAdam": (lambda m, **k: torch.optim.RAdam(m.parameters(), lr=1e-2, **k), ("default", "foreach")),
    "Adamax": (lambda m, **k: torch.optim.Adamax(m.parameters(), lr=1e-2, **k), ("default", "foreach")),
    "Adadelta": (lambda m, **k: torch.optim.Adadelta(m.parameters(), lr=1e-1, **k), ("default", "foreach")),
    "ASGD": (lambda m, **k: torch.optim.ASGD(m.parameters(), lr=1e-2, **k), ("default", "foreach")),
    "Rprop": (lambda m, **k: torch.optim.Rprop(m.parameters(), lr=1e-3, **k), ("default", "foreach")),
    "Adafactor": (lambda m, **k: torch.optim.Adafactor(m.parameters(), lr=1e-2, **k), ("default", "foreach")),
    "Muon": (lambda m, **k: torch.optim.Muon(_matrices(m), lr=1e-2, **k), ("default",)),
}
IMPLEMENTATIONS = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}, "loop": {"foreach": False}}


def _optimizer_cases():
    for name, (_, kinds) in OPTIMIZERS.items():
        for kind in (*kinds, *(["loop"] if "foreach" in kinds else [])):
            yield name, kind


def _optimizer(name, kind):
    make, _ = OPTIMIZERS[name]
    if name in ("AdamW", "SGD"):
        cls = getattr(torch.optim, name)
        extra = {"lr": 1e-2, "weight_decay": 0.1} if name == "AdamW" else {"lr": 0.1, "momentum": 0.9}
        return lambda model: cls(model.parameters(), **extra, **IMPLEMENTATIONS[kind])
    return lambda model: make(model, **IMPLEMENTATIONS[kind])


@pytest.mark.parametrize(("name", "kind"), list(_optimizer_cases()))
def test_torch_optimizers_equal_one_process(name, kind):
    """Also those that look at a whole tensor, row or matrix: Adafactor and Muon. Muon computes in bf16."""
    tolerance = 1e-2 if name == "Muon" else EXACT
    make = functools.partial(build, unused)
    compare(lambda run: steps(run, _optimizer(name, kind)(run.model), 4), (1, 3), make=make, tolerance=tolerance)


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "RMSprop", "Adafactor"])
def test_optimizers_equal_one_process_at_the_other_stages(name):
    """With gradients accumulated and clipped on the way."""

    def clip(run):
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)

    compare(
        lambda run: steps(run, _optimizer(name, "default")(run.model), 3, micro_batches=2, before_step=clip), (0, 2)
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_lbfgs_equals_one_process(stage):
    """Closures evaluate several times within a step; it flattens and rewrites parameters itself."""

    def scenario(run):
        optimizer = torch.optim.LBFGS(run.model.parameters(), lr=0.3, max_iter=4, history_size=3)

        def closure():
            optimizer.zero_grad()
            loss = run.loss(number=0)
            loss.backward()
            # The mean over ranks: LBFGS decides on it, alike on every rank.
            if run.plain:
                return loss.detach()
            return engine_of(run.model).collectives.all_reduce(loss.detach().clone()) / run.world_size

        for _ in range(2):
            optimizer.step(closure)

    compare(scenario, stage, tolerance=1e-9)


@pytest.mark.parametrize("kind", ["foreach", "fused", "loop"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_group_for_each_parameter(stage, kind):
    """On 3 ranks a small parameter lies on one; the others step nothing and still know that it changed."""

    def scenario(run):
        groups = [{"params": [p], "lr": 0.01 * (1 + i % 3)} for i, p in enumerate(run.model.parameters())]
        steps(run, torch.optim.AdamW(groups, weight_decay=0.1, **IMPLEMENTATIONS[kind]), 3)

    compare(scenario, stage, 3)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_over_one_small_parameter(stage):
    """Only `scale` of one block is trained: its fragment is empty on the other ranks, whose copies are stale too."""

    def scenario(run):
        optimizer = torch.optim.SGD([run.model.blocks[1].scale], lr=0.1, foreach=True)
        steps(run, optimizer, 3)

    compare(scenario, stage, 3)


@pytest.mark.parametrize("stage", [1, 3])
def test_two_optimizers_that_alternate(stage):
    """As in a GAN; each steps its half, gradients of both arrive in every backward."""

    def scenario(run):
        parameters = list(run.model.parameters())
        optimizers = [torch.optim.AdamW(parameters[::2], lr=0.01), torch.optim.SGD(parameters[1::2], lr=0.1)]
        for number in range(4):
            optimizer = optimizers[number % 2]
            optimizer.zero_grad()
            run.loss().backward()
            optimizer.step()

    compare(scenario, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_zeroing_gradients_in_place(stage):
    """`set_to_none=False`: a parameter that is no longer used keeps a zero gradient, and decays."""

    def scenario(run):
        optimizer = adamw(run.model)
        steps(run, optimizer, 2, set_to_none=False)
        run.model.order = [0, 2]
        steps(run, optimizer, 2, set_to_none=False)

    compare(scenario, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_that_falls_out_of_use_loses_its_gradient(stage):
    """`set_to_none=True`: afterwards it is None and the optimizer leaves the parameter alone."""

    def scenario(run):
        optimizer = adamw(run.model)
        steps(run, optimizer, 2)
        run.model.order = [0, 2]
        steps(run, optimizer, 2)
        run.record(run.model.blocks[1].scale.grad is None)
        run.model.order = [3, 1]
        steps(run, optimizer, 2)

    compare(scenario, stage)


# fp32


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_fp32_equals_one_process_up_to_summation_order(stage, world_size):
    """Losses, gradients and SGD weights within 1e-6 after four steps."""
    make = functools.partial(build, everything, torch.float32)
    compare(lambda run: steps(run, sgd(run.model)), stage, world_size, make, tolerance=1e-6)


# Where the initial values come from


def _from_meta(seed):
    if seed:
        with torch.device("meta"):
            return Net().double()
    return build()


@pytest.mark.parametrize("stage", STAGES)
def test_other_ranks_may_be_on_meta(stage):
    """Only rank 0 has the values, so only one copy of the model is ever initialized."""
    compare(lambda run: steps(run, adamw(run.model), 2), stage, make=_from_meta)


def _with_buffers(seed):
    net = build(seed=seed)
    for i, block in enumerate(net.blocks):
        block.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64) if i == 1 else block.norm
        block.register_buffer("noise", torch.randn(3, dtype=torch.float64))
    net.register_buffer("count", torch.tensor(seed))
    return net


def _count(net, tokens, targets):
    net.count += 1
    return (net.blocks[0].noise.sum() + net.count) * cross_entropy(net, tokens, targets)


@pytest.mark.parametrize("stage", STAGES)
def test_rank_0s_buffers_are_the_truth(stage):
    """Constants differ by rank before; a counter advances alike on every rank."""

    def make(seed):
        net = build(seed=seed)
        net.blocks[0].register_buffer("noise", torch.randn(3, dtype=torch.float64))
        net.register_buffer("count", torch.tensor(float(seed)))
        return net

    def scenario(run):
        steps_joint(run, adamw(run.model), 3, _count)

    compare(scenario, stage, make=make)


def steps_joint(run, optimizer, count, loss):
    for _ in range(count):
        optimizer.zero_grad()
        run.joint_loss(loss).backward()
        optimizer.step()


def _batch_norm(rank, stage):
    model = _with_buffers(seed=rank)
    lightning_zero.shard(model, stage=stage, units=["Block"])
    optimizer = adamw(model)
    means = []
    for number in range(3):
        optimizer.zero_grad()
        cross_entropy(model, *batch(rank, number)).backward()
        optimizer.step()
        means.append(model.blocks[1].norm.running_mean.clone())
    with torch.no_grad():
        model.eval()
    engine_of(model).share_buffers()
    return means, model.blocks[1].norm.running_mean.clone()


@pytest.mark.parametrize("stage", [1, 3])
def test_batch_norm_statistics_are_rank_0s_before_each_forward(stage):
    """As DDP does: every rank updates its own, and rank 0's replace them at the next forward."""
    (means, shared), (other_means, other_shared) = run_ranks(2, _batch_norm, stage)
    assert not torch.equal(means[-1], other_means[-1])
    assert torch.equal(shared, other_shared) and torch.equal(shared, means[-1])


# Units


def _units_whole(rank, stage):
    model = build(seed=rank)
    lightning_zero.shard(model, stage=stage, units=["Block"])
    engine = engine_of(model)
    peaks = {"forward": 0, "backward": 0}

    def look(when):
        peaks[when] = max(peaks[when], sum(unit.numel_whole > 0 for unit in engine.units))

    for unit, block in zip(engine.units, model.blocks):
        block.up.register_forward_hook(lambda *_: look("forward"))
        for group in unit.groups:
            for parameter in group.parameters:
                parameter.register_hook(lambda _: look("backward"))
    optimizer = adamw(model)
    for number in range(4):
        optimizer.zero_grad()
        cross_entropy(model, *batch(rank, number)).backward()
        at_rest = sum(unit.numel_whole > 0 for unit in engine.units)
        optimizer.step()
    return len(engine.units), peaks, at_rest


@pytest.mark.parametrize(("stage", "peak", "rest"), [(0, 4, 4), (1, 4, 4), (2, 4, 4), (3, 2, 0)])
def test_at_stage_3_two_of_four_units_are_whole_at_the_peak(stage, peak, rest):
    """The one that computes and the one gathered ahead; at rest none. Elsewhere all rest whole."""
    for units, peaks, at_rest in run_ranks(2, _units_whole, stage):
        assert units == 4
        assert peaks == {"forward": peak, "backward": peak}
        assert at_rest == rest


# Writes at rest


def _write(parameter, how):
    with torch.no_grad():
        if how == "mul_":
            parameter.mul_(1.1)
        elif how == "setitem":
            parameter[0] = 0.25
        elif how == "slice":
            parameter[1:, 2:4].add_(1.0)
        elif how == "transposed":
            parameter.t().copy_(torch.arange(parameter.numel(), dtype=parameter.dtype).view(parameter.t().shape) / 50)
        elif how == "mask":
            parameter[parameter > 0] = 0.0
        elif how == "init":
            # Not a constant: logits would be equal, and the temperature's gradient noise, which Adam scales.
            nn.init.eye_(parameter)
        elif how == "view flat":
            parameter.view(-1)[3::2].mul_(-1)
        elif how == "copy_":
            parameter.copy_(torch.linspace(-1, 1, parameter.numel(), dtype=parameter.dtype).view(parameter.shape))
        elif how == "itself":
            parameter.add_(parameter.flip(0)).sub_(parameter.mean())
        elif how == "foreach":
            torch._foreach_mul_([parameter, parameter[0]], 1.2)
        elif how == "rows":
            parameter.div_(parameter.norm(dim=1, keepdim=True))
        elif how == "index_add":
            parameter.index_add_(0, torch.tensor([0, 1]), torch.ones(2, parameter.shape[1], dtype=parameter.dtype))
        elif how == "addmm":
            rows, columns = parameter.shape
            parameter.addmm_(torch.ones(rows, 2, dtype=parameter.dtype), torch.ones(2, columns, dtype=parameter.dtype))
        elif how == "out":
            torch.mul(parameter, 1.5, out=parameter)
    if how == "data clamp":
        parameter.data.clamp_(-0.1, 0.1)
    elif how == "data =":
        parameter.data = torch.linspace(-1, 1, parameter.numel(), dtype=parameter.dtype).view(parameter.shape)
    elif how == "data[0]":
        parameter.data[0].fill_(0.125)
    elif how == "detach":
        parameter.detach().mul_(0.9)
    elif how == "data view":
        parameter.data.t()[1:3].mul_(2)
    elif how == "chunk":
        for piece in parameter.data.chunk(2, 0):
            piece.add_(0.1)


WRITES = [
    "mul_", "setitem", "slice", "transposed", "mask", "init", "view flat", "copy_", "itself", "foreach", "rows",
    "index_add", "addmm", "out", "data clamp", "data =", "data[0]", "detach", "data view", "chunk",
]  # fmt: skip


@pytest.mark.parametrize("how", WRITES)
def test_a_write_at_rest_is_never_lost(how):
    """To a unit's weight and to the root's, before the first step and between steps; each is read back at once."""

    def scenario(run):
        optimizer = adamw(run.model)
        for _ in range(2):
            for parameter in (run.model.blocks[1].up.weight, run.model.head.weight):
                _write(parameter, how)
                run.record(parameter)
            steps(run, optimizer, 1)

    compare(scenario, (1, 3), 3)


@pytest.mark.parametrize("how", ["mul_", "setitem", "transposed", "data clamp", "data ="])
def test_a_write_at_rest_is_never_lost_at_the_other_stages(how):
    """The same, on two ranks."""

    def scenario(run):
        optimizer = adamw(run.model)
        steps(run, optimizer, 1)
        _write(run.model.blocks[2].down.weight, how)
        _write(run.model.embed.weight, how)
        run.record(run.model.embed.weight)
        steps(run, optimizer, 2)

    compare(scenario, (0, 2))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_write_between_backward_and_step(stage):
    """Constraints are applied there, gradients are edited there."""

    def constrain(run):
        run.model.blocks[0].up.weight.data.clamp_(-0.2, 0.2)
        run.model.blocks[0].up.weight.grad.mul_(0.5)
        run.model.blocks[1].down.weight.grad[0] = 0.0
        run.model.blocks[2].down.weight.grad = None
        run.model.embed.weight.grad = torch.ones_like(run.model.embed.weight)
        run.model.head.weight.grad.add_(run.model.head.weight, alpha=0.1)

    compare(lambda run: steps(run, adamw(run.model), 3, before_step=constrain), stage, 3)


@pytest.mark.parametrize("stage", [1, 3])
def test_reading_at_rest_gives_whole_values(stage):
    """Norms, sums, slices, matmuls, comparisons: as on the plain model, after a step."""

    def scenario(run):
        steps(run, adamw(run.model), 1)
        with torch.no_grad():
            for p in (run.model.blocks[3].up.weight, run.model.embed.weight, run.model.blocks[0].scale):
                for value in (
                    p.norm(), p.sum(), p.mean(), p.max(), p.min(), p.abs().max(), (p > 0).any(), (p < 9).all(),
                    p.norm(1), p.norm(float("inf")), p.std() if p.ndim else p, p.square().sum(), p * 2 + 1,
                    p.reshape(-1)[:2], p.t() if p.ndim == 2 else p, p @ p.t() if p.ndim == 2 else p, p.sum(-1),
                    p.argmax(), torch.stack([p, p]).sum(0), torch.equal(p, p), p.isnan().any(),
                    torch.tensor(p.tolist()), p.cumsum(0).sum() if p.ndim else p, p.sort().values if p.ndim else p,
                    p.norm(dim=0) if p.ndim else p,
                ):  # fmt: skip
                    run.record(value)
            run.record(nn.utils.parameters_to_vector(run.model.blocks[1].parameters()))
            run.record(torch.nn.utils.get_total_norm([p.grad for p in run.model.parameters() if p.grad is not None]))

    compare(scenario, stage, 3)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_exponential_moving_average_kept_beside_the_model(stage):
    """`deepcopy`, then elementwise updates of resting parameters from resting parameters, plain and foreach."""

    def scenario(run):
        averages = [p.detach().clone() for p in run.model.parameters()]
        optimizer = adamw(run.model)
        for _ in range(3):
            steps(run, optimizer, 1)
            with torch.no_grad():
                for average, p in zip(averages[:9], run.model.parameters()):
                    average.lerp_(p, 0.1)
                torch._foreach_lerp_(averages[9:], list(run.model.parameters())[9:], 0.2)
        for average in averages:
            run.record(average)

    compare(scenario, stage)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_list_operation_whose_operands_are_cut_differently(stage):
    """On 3 ranks some hold nothing of what is written, and are still needed to give the others whole values."""

    def scenario(run):
        optimizer = adamw(run.model)
        net = run.model
        for _ in range(2):
            steps(run, optimizer, 1)
            with torch.no_grad():
                torch._foreach_add_([net.blocks[0].scale], [net.temperature])
                torch._foreach_sub_([net.blocks[1].norm.bias], [net.blocks[2].norm.weight], alpha=0.1)
                torch._foreach_mul_([net.blocks[1].up.weight], [net.blocks[3].norm.weight])
            for p in net.parameters():
                run.record(p)

    compare(scenario, stage, 3)


# Writes inside a forward


class Rescaling(nn.Module):
    """Writes its own weights in forward, as spectral normalisation or weight standardisation of old do."""

    def __init__(self, block, how):
        super().__init__()
        self.block = block
        self.how = how

    def forward(self, x):
        weight = self.block.up.weight
        with torch.no_grad():
            if self.how == "mul_":
                weight.mul_(0.9)
            elif self.how == "row":
                weight[0].fill_(0.1)
            elif self.how == "copy":
                weight.copy_(weight.clamp(-0.2, 0.2))
            elif self.how == "view":
                weight.t()[1].add_(0.5)
        if self.how == "data":
            weight.data.mul_(0.9)
        elif self.how == "data view":
            weight.data[1:].clamp_(-0.1, 0.1)
        elif self.how == "data =":
            weight.data = weight.data * 0.8
        return self.block(x)


@pytest.mark.parametrize("how", ["mul_", "row", "copy", "view", "data", "data view", "data ="])
def test_a_write_in_a_forward_is_kept_and_backward_sees_it(how):
    """The unit is freed, gathered again for backward and stepped: the written value is the one that went on."""

    def make(seed):
        net = build(seed=seed)
        net.blocks[1] = Rescaling(net.blocks[1], how)
        return net

    def scenario(run):
        steps_joint(run, adamw(run.model), 3, cross_entropy)

    compare(scenario, STAGES, make=make, units=["Rescaling", "Block"])


# Inside one step


@pytest.mark.parametrize("stage", STAGES)
def test_a_second_forward_after_a_step_inside_one_training_step(stage):
    """Manual optimization: the second forward computes with the stepped weights, and so does its backward."""

    def scenario(run):
        optimizer = adamw(run.model)
        context = functools.partial(torch.enable_grad) if run.plain else engine_of(run.model).step
        for _ in range(3):
            with context():
                for _ in range(2):
                    optimizer.zero_grad()
                    run.loss().backward()
                    run.record(nn.utils.clip_grad_norm_(run.model.parameters(), 0.1))
                    optimizer.step()
                    run.model.head.weight.data.clamp_(-0.5, 0.5)
                run.record(run.loss().detach() if run.world_size == 1 else 0)

    compare(scenario, stage)


def resting_matmul(net, tokens, targets):
    # Uses weights outside their modules' forwards, before, between and after them.
    features = net.embed.weight.mean(0) + net.blocks[2].up.weight.sum(0)
    logits = net(tokens) + (features @ net.head.weight.t()) * net.blocks[0].scale
    return F.cross_entropy(logits, targets) + (net.blocks[3].down.weight @ net.blocks[1].up.weight).square().mean()


@pytest.mark.parametrize("in_step", [False, True], ids=["plain loop", "in a step"])
@pytest.mark.parametrize("stage", STAGES)
def test_resting_weights_in_the_loss(stage, in_step):
    """Each takes part in autograd as in plain torch, whether or not its unit's forward ran."""

    def scenario(run):
        optimizer = adamw(run.model)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.enable_grad() if run.plain or not in_step else engine_of(run.model).step():
                loss = run.loss(resting_matmul)
            loss.backward()
            optimizer.step()

    compare(scenario, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_two_backwards_before_a_step_add(stage):
    """Of two losses of two forwards."""

    def scenario(run):
        optimizer = adamw(run.model)
        for _ in range(3):
            optimizer.zero_grad()
            first, second = run.loss(), run.loss()
            first.backward()
            second.backward()
            optimizer.step()

    compare(scenario, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_retain_graph_and_backward_again(stage):
    """The second backward opens the units again, and adds."""

    def scenario(run):
        optimizer = adamw(run.model)
        for _ in range(3):
            optimizer.zero_grad()
            loss = run.loss()
            loss.backward(retain_graph=True)
            run.record(run.model.blocks[2].up.weight.grad)
            loss.backward()
            optimizer.step()

    compare(scenario, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_by_autograd_grad_of_the_input(stage):
    """A penalty on the input's gradient, without a double backward."""

    def saliency(net, tokens, targets):
        x = net.embed(tokens).detach().requires_grad_(True)
        h = x
        for i in net.order:
            h = net.blocks[i](h)
        loss = F.cross_entropy(net.head(h), targets)
        (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
        return loss + gradient.square().sum().detach()

    compare(lambda run: steps(run, adamw(run.model), 3, saliency), stage)


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_penalty_through_create_graph(stage):
    """Backward of a backward: units stay whole until the ordinary backward ends."""

    def penalised(net, tokens, targets):
        x = net.embed(tokens)
        h = x
        for i in net.order:
            h = net.blocks[i](h)
        loss = F.cross_entropy(net.head(h), targets)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()

    compare(lambda run: steps(run, adamw(run.model), 3, penalised), stage)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_checkpointed_blocks(stage, use_reentrant):
    """Recompute enters the windows again, inside backward."""

    def checkpointed(net, tokens, targets):
        x = net.embed(tokens)
        for i in net.order:
            x = torch.utils.checkpoint.checkpoint(net.blocks[i], x, use_reentrant=use_reentrant)
        return F.cross_entropy(net.head(x), targets)

    compare(lambda run: steps(run, adamw(run.model), 3, checkpointed), stage, make=functools.partial(build, reused))


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_between_steps(stage):
    """Under no_grad and under inference_mode; training goes on as if it had not been."""

    def scenario(run):
        optimizer = adamw(run.model)
        for number in range(3):
            run.model.eval()
            with torch.no_grad() if number % 2 else torch.inference_mode():
                run.loss()
            run.model.train()
            steps(run, optimizer, 1)

    compare(scenario, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_freezing_and_unfreezing_between_steps(stage):
    """`requires_grad` is read afresh at each forward."""

    def scenario(run):
        optimizer = adamw(run.model)
        steps(run, optimizer, 1)
        run.model.blocks[1].requires_grad_(False)
        run.model.embed.weight.requires_grad = False
        steps(run, optimizer, 2)
        run.model.requires_grad_(True)
        steps(run, optimizer, 2)

    compare(scenario, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_frozen_at_first_is_trained_later(stage):
    """Gradual unfreezing: its group was built as frozen."""

    def scenario(run):
        optimizer = adamw(run.model)
        steps(run, optimizer, 2)
        run.model.requires_grad_(True)
        steps(run, optimizer, 2)

    compare(scenario, stage, make=functools.partial(build, frozen))


@pytest.mark.parametrize("stage", STAGES)
def test_hooks_on_parameters_and_gradients(stage):
    """A tensor hook sees local gradients, which average to the plain one; an accumulate hook sees the parameter."""

    def scenario(run):
        seen = []
        weight = run.model.blocks[1].up.weight
        weight.register_hook(lambda gradient: gradient * 2)
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p is weight))
        steps(run, adamw(run.model), 3)
        run.record(seen)

    compare(scenario, stage)


# Failures that plain torch has too


def _stepped_graph(rank, stage, write):
    model = lightning_zero.shard(build(seed=rank), stage=stage, units=["Block"])
    return _backward_after(model, rank, write)


def _backward_after(model, rank, write):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = (cross_entropy(model, *batch(rank, number)) for number in range(2))
    first.backward()
    if write == "step":
        optimizer.step()
    elif write == "unit":
        with torch.no_grad():
            model.blocks[2].down.weight.mul_(2)
    else:
        with torch.no_grad():
            model.head.weight.mul_(2)
    try:
        second.backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return False


@pytest.mark.parametrize("write", ["step", "unit", "root"])
@pytest.mark.parametrize("stage", STAGES)
def test_backward_through_a_graph_whose_weights_changed_raises(stage, write):
    """As autograd does for in-place changes: never a gradient of weights that are gone."""
    assert _backward_after(build(), 0, write), "plain torch does not raise"
    assert run_ranks(2, _stepped_graph, stage, write) == [True, True]


class Stumble(RuntimeError):
    """Raised on purpose."""


class Failing(torch.autograd.Function):
    """Identity; its backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise Stumble("backward")


def failing_in_forward(net, tokens, targets):
    handle = net.blocks[2].down.register_forward_pre_hook(_stumble)
    try:
        return cross_entropy(net, tokens, targets)
    finally:
        handle.remove()


def _stumble(*_):
    raise Stumble("forward")


def failing_in_backward(net, tokens, targets):
    handle = net.blocks[1].register_forward_hook(lambda module, args, out: Failing.apply(out))
    try:
        return cross_entropy(net, tokens, targets)
    finally:
        handle.remove()


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("in_step", [False, True], ids=["plain loop", "in a step"])
@pytest.mark.parametrize("stage", STAGES)
def test_good_steps_follow_an_exception(stage, in_step, where):
    """The failed batch is skipped, gradients are cleared, and training goes on as if it had not been."""
    bad = failing_in_forward if where == "forward" else failing_in_backward

    def scenario(run):
        optimizer = adamw(run.model)
        for number in range(5):
            optimizer.zero_grad()
            context = torch.enable_grad() if run.plain or not in_step else engine_of(run.model).step()
            try:
                with context:
                    run.loss(bad if number in (0, 2) else cross_entropy, number=number).backward()
            except Stumble:
                continue
            optimizer.step()
        run.losses = run.losses[-3:]

    compare(scenario, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_good_steps_follow_an_exception_whose_traceback_is_kept(stage):
    """A notebook keeps the last traceback, and with it the graph and the frames of the failed step."""

    def scenario(run):
        kept = []
        optimizer = adamw(run.model)
        for number in range(3):
            optimizer.zero_grad()
            try:
                run.loss(failing_in_backward if number == 1 else cross_entropy, number=number).backward()
            except Stumble as error:
                kept.append(error)
                continue
            optimizer.step()
        run.losses = []

    compare(scenario, stage)


@pytest.mark.parametrize("keeps_error", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_graph_of_before_a_failed_backward_still_has_its_gradients(stage, keeps_error):
    """Two forwards, the backward of one fails, gradients are cleared, and the other's are averaged as ever."""

    def scenario(run):
        errors = []
        optimizer = adamw(run.model)
        for number in range(0, 6, 2):
            good, bad = run.loss(number=number), run.loss(failing_in_backward, number=number + 1)
            try:
                bad.backward()
            except Stumble as error:
                errors.append(error if keeps_error else None)
            optimizer.zero_grad()
            good.backward()
            optimizer.step()
        run.record(len(errors))

    compare(scenario, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_a_hook_on_a_gradient_may_run_a_backward(stage):
    """Both backwards are over when the outer one returns: rank 0 alone can read a gradient, which sends nothing."""

    def scenario(run):
        optimizer = adamw(run.model)
        parameter = next(run.model.parameters())
        calls = []

        def once_more(parameter):
            calls.append(parameter)
            if len(calls) % 2:
                with torch.enable_grad():
                    run.loss(number=len(calls)).backward()

        parameter.register_post_accumulate_grad_hook(once_more)
        for number in range(3):
            optimizer.zero_grad()
            run.loss(number=10 + number).backward()
            run.record(len(calls))
            if run.rank in (None, 0):
                assert parameter.grad.shape == parameter.shape
            optimizer.step()
        run.losses = []

    compare(scenario, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_a_hook_on_a_plain_parameter_may_run_a_backward(stage):
    """In the middle of a backward of something else."""

    def scenario(run):
        optimizer = adamw(run.model)
        other = torch.nn.Linear(2, 2)
        for number in range(2):
            optimizer.zero_grad()
            loss = run.loss(number=number)
            handle = other.weight.register_post_accumulate_grad_hook(lambda parameter, loss=loss: loss.backward())
            other(torch.ones(1, 2)).sum().backward()
            handle.remove()
            optimizer.step()

    compare(scenario, stage)


@pytest.mark.parametrize("where", ["checkpoint", "hook"])
@pytest.mark.parametrize("stage", STAGES)
def test_what_fails_late_in_a_backward_leaves_nothing(stage, where):
    """After a reentrant checkpoint's own backward, or in a hook when gradients are published; then they are cleared."""

    def stumbles(gradient):
        raise Stumble

    def failing(net, tokens, targets):
        # In fp64, as a checkpoint wants an input with a gradient.
        start = torch.ones((), dtype=torch.float64, requires_grad=True) * 1
        start.register_hook(stumbles)
        return checkpoint(lambda one: one * cross_entropy(net, tokens, targets), start, use_reentrant=True)

    def scenario(run):
        optimizer = adamw(run.model)
        third = list(run.model.parameters())[2]
        for number in range(0, 6, 2):
            good = run.loss(number=number)
            handle = third.register_post_accumulate_grad_hook(stumbles) if where == "hook" else None
            with contextlib.suppress(Stumble):
                run.loss(failing if where == "checkpoint" else cross_entropy, number=number + 1).backward()
                raise AssertionError("it did not fail")
            if handle is not None:
                handle.remove()
            optimizer.zero_grad()
            good.backward()
            optimizer.step()

    compare(scenario, stage)


# The model as an object


def _gathered(rank, world_size, stage, write):
    make = functools.partial(build, seed=0)
    if write:
        make = _rescaled
    model = lightning_zero.shard(make(), stage=stage, units=["Rescaling", "Block"] if write else ["Block"])
    run = Run(model, rank, world_size)
    optimizer = adamw(model)
    values = []
    for _ in range(2):
        steps_joint(run, optimizer, 1, cross_entropy)
        with lightning_zero.gathered(model):
            assert not any(isinstance(p, ShardedTensor) for p in model.parameters())
            values.append([whole(p) for p in model.parameters()])
        assert all(isinstance(p, ShardedParameter) for p in model.parameters())
    return values


def _rescaled():
    net = build()
    net.blocks[1] = Rescaling(net.blocks[1], "mul_")
    return net


@pytest.mark.parametrize("write", [False, True], ids=["stepped", "written in forward"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_gathered_reads_whole_weights_after_steps(stage, world_size, write):
    """What a step, or a forward, wrote before is not a write inside `gathered`."""
    twin = Run(_rescaled() if write else build(), None, world_size)
    optimizer = adamw(twin.model)
    ranks = run_ranks(world_size, _gathered, world_size, stage, write)
    for number in range(2):
        steps_joint(twin, optimizer, 1, cross_entropy)
        for values in ranks:
            for (name, wanted), got in zip(twin.model.named_parameters(), values[number], strict=True):
                assert_close(got, wanted.detach(), EXACT, name)


def _write_gathered(rank, stage, writeback):
    model = lightning_zero.shard(build(), stage=stage, units=["Block"])
    before = whole(model.head.weight)
    try:
        with lightning_zero.gathered(model, writeback=writeback), torch.no_grad():
            model.head.weight.fill_(rank + 2.0)
            model.blocks[1].up.weight[0] = rank + 3.0
        error = ""
    except RuntimeError as raised:
        error = str(raised)
    loss = cross_entropy(model, *batch(0, 0))
    return error, torch.equal(whole(model.head.weight), before), whole(model.head.weight), loss.detach()


@pytest.mark.parametrize("stage", STAGES)
def test_gathered_keeps_rank_0s_writes_when_asked(stage):
    """On every rank, and the next forward computes with them."""
    twin = build()
    with torch.no_grad():
        twin.head.weight.fill_(2.0)
        twin.blocks[1].up.weight[0] = 3.0
    loss = cross_entropy(twin, *batch(0, 0)).detach()
    for error, _, head, got in run_ranks(2, _write_gathered, stage, True):
        assert error == ""
        assert torch.equal(head, twin.head.weight.detach())
        assert_close(got, loss, EXACT, "loss")


@pytest.mark.parametrize("stage", STAGES)
def test_a_write_inside_gathered_is_refused_with_the_name_and_keeps_nothing(stage):
    """Values would differ between ranks; the error says how to keep rank 0's."""
    for error, unchanged, _, _ in run_ranks(2, _write_gathered, stage, False):
        assert "was written inside `gathered(module)`" in error and "writeback=True" in error
        assert unchanged


def _released(rank, stage):
    model = build(everything, seed=rank)
    parameters = list(model.parameters())
    lightning_zero.shard(model, stage=stage, units=["Block"])
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters], "identity"
    optimizer = adamw(model)
    for number in range(2):
        optimizer.zero_grad()
        cross_entropy(model, *batch(rank, number)).backward()
        optimizer.step()
    lightning_zero.unshard(model)
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters], "identity"
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert "forward" not in vars(model) and all("forward" not in vars(block) for block in model.blocks)
    loss = cross_entropy(model, *batch(0, 99))
    loss.backward()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    alive = weakref.ref(model)
    del model, parameters, optimizer, loss
    return weights, alive() is None


@pytest.mark.parametrize("stage", STAGES)
def test_unshard_gives_the_trained_plain_model_back(stage):
    """Plain parameters, the same objects, the trained values; and the module dies with its last reference."""
    twin = Run(build(everything), None, 2)
    steps(twin, adamw(twin.model), 2)
    for weights, died in run_ranks(2, _released, stage):
        assert died
        for name, parameter in twin.model.named_parameters():
            assert_close(weights[name], parameter.detach(), EXACT, name)
