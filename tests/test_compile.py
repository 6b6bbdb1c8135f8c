"""`torch.compile` in, around and on parts of a sharded module: it trains as the plain twin without a compiler does.

    window of a unit    | forward of its modules: a graph |
    outside windows     graphs too, that end where a window opens or a resting parameter is used

A graph that kept what was true of weights when it was traced would be wrong from the second step on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
import torch._dynamo
from distributed import run_ranks
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.compile import from_compiled, to_uncompiled
from rows import Regression, assert_trained_as, fit_plain, fit_ranks, mean_losses, trunk, vectors
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager, eager
from torch._dynamo.utils import get_compilation_metrics
from torch.nn import functional as F
from twin import EXACT, WORLD_SIZE, Outcome, assert_close, build, sgd, shard, train

import lightning_zero
from lightning_zero.engine import engine_of
from lightning_zero.precision import RECIPES
from lightning_zero.windowed_forward import WindowedForward

STAGES = (1, 3)
"""To a compiler a stage is where weights rest, whole or sharded. The longest way is tried at every stage."""
STEPS = 4
DEPTH = 9


class Graphs:
    """A back end that counts graphs and their runs."""

    def __init__(self, backend: Callable[..., Any] = eager) -> None:
        self._backend = backend
        self.count = 0
        self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any], **_: Any) -> Callable[..., Any]:
        self.count += 1
        compiled = self._backend(graph, inputs)

        def run(*args: Any) -> Any:
            self.runs += 1
            return compiled(*args)

        return run


class Block(nn.Module):
    """Looks at its weights in the ways that modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        scale = 0.1 * weight.detach().norm() + weight.shape[0] if weight.requires_grad else 100
        return x + torch.tanh(self.linear(self.norm(x)) * scale) + 0.01 * (x.to(weight.dtype) @ weight.t())


class Product(Block):
    """Uses its weights in its parts alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """Blocks in units, and a root around them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 5)
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def penalized(y: Tensor, expected: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """A loss that takes weights, of the root and of a unit."""
    return F.mse_loss(y, expected) + 0.1 * (y @ first).pow(2).mean() + 0.1 * second.pow(2).sum()


class Model(nn.Module):
    """The net and its loss on data of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.loss = penalized

    def forward(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        x, y = torch.randn(2, 4, 3, generator=generator).to(self.net.embed.weight.dtype)
        return self.step(x, y)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        net = self.net
        # At rest, before any forward.
        before = self.loss(x @ net.embed.weight.t(), x @ net.embed.weight.t(), net.head.weight.t(), net.embed.bias)
        return before + self.loss(net(x), y, net.head.weight, net.layers[4].linear.weight)


# What is compiled, before the model is sharded


def _net_wrapped(model: Any, backend: Graphs) -> None:
    model.net = torch.compile(model.net, backend=backend)


def _net_in_place(model: Any, backend: Graphs) -> None:
    model.net.compile(backend=backend)


def _blocks_in_place(model: Any, backend: Graphs) -> None:
    for layer in model.net.layers:
        layer.compile(backend=backend, fullgraph=True)


def _blocks_wrapped(model: Any, backend: Graphs) -> None:
    for i, layer in enumerate(model.net.layers):
        model.net.layers[i] = torch.compile(layer, backend=backend, fullgraph=True)


def _method_of_class(model: Any, backend: Graphs) -> None:
    kind = type("Compiled", (Block,), {"forward": torch.compile(Block.forward, backend=backend, fullgraph=True)})
    for layer in model.net.layers:
        layer.__class__ = kind


def _loss(model: Any, backend: Graphs) -> None:
    model.loss = torch.compile(model.loss, backend=backend)


def _step(model: Any, backend: Graphs) -> None:
    model.step = torch.compile(model.step, backend=backend)


def _all_in_place(model: Any, backend: Graphs) -> None:
    model.compile(backend=backend)


BLOCKS = DEPTH * STEPS
WAYS: dict[str, tuple[Callable[[Any, Graphs], None], int]] = {
    # And how often graphs run at least.
    "net": (_net_wrapped, BLOCKS),
    "net in place": (_net_in_place, BLOCKS),
    "blocks": (_blocks_wrapped, BLOCKS),
    "blocks in place": (_blocks_in_place, BLOCKS),
    "method": (_method_of_class, BLOCKS),
    "loss": (_loss, STEPS),
    "step": (_step, BLOCKS),
    "all in place": (_all_in_place, BLOCKS),
}


@cache
def expected() -> Outcome:
    """The twin, which nobody compiles."""

    def twin(_: int) -> Outcome:
        model = build(Model, 0, torch.float64)
        return train(model, range(WORLD_SIZE), sgd(model), STEPS)

    (outcome,) = run_ranks(1, twin)
    return outcome  # type: ignore[no-any-return]


def recompile_no_more(optimizer: torch.optim.Optimizer) -> None:
    """A graph traced after the second step is an error."""
    steps = iter(range(STEPS))

    def stepped(*_: Any) -> None:
        torch._dynamo.config.error_on_recompile = next(steps) >= 1

    optimizer.register_step_post_hook(stepped)


def plain_names(values: dict[str, Any]) -> dict[str, Any]:
    """Without the part that `torch.compile` adds to names."""
    return {name.replace("_orig_mod.", ""): value for name, value in values.items()}


def assert_trained(outcomes: list[tuple[Outcome, int, int]], runs: int, names: list[str]) -> None:
    """Losses, gradients and weights are the twin's, and graphs ran."""
    twin = expected()
    losses = torch.tensor([outcome.losses for outcome, *_ in outcomes], dtype=torch.float64).mean(0)
    torch.testing.assert_close(losses, torch.tensor(twin.losses, dtype=torch.float64), rtol=0, atol=EXACT)
    for outcome, _, ran in outcomes:
        assert_close(plain_names(outcome.gradients), twin.gradients, EXACT)
        assert_close(plain_names(outcome.live), twin.live, EXACT)
        assert_close(plain_names(outcome.after), twin.after, EXACT)
        assert list(outcome.after) == names
        assert ran >= runs


@pytest.mark.parametrize(
    ("way", "stage"), [*((way, 3) for way in WAYS), *product(("step", "blocks in place"), (0, 1)), ("step", 2)]
)
def test_what_was_compiled_before_trains_sharded(way: str, stage: int) -> None:
    """Blocks run as graphs, nothing is traced anew after the second step, names are those of the compiled module."""
    compile_part, runs = WAYS[way]

    def on_rank(rank: int) -> tuple[Outcome, int, int]:
        graphs = Graphs()
        model = build(Model, rank, torch.float64)
        compile_part(model, graphs)
        optimizer = sgd(shard(model, stage))
        recompile_no_more(optimizer)
        outcome = train(model, [rank], optimizer, STEPS)
        return outcome, graphs.count, graphs.runs

    compiled = Model()
    compile_part(compiled, Graphs())
    assert_trained(run_ranks(WORLD_SIZE, on_rank), runs, list(compiled.state_dict()))


@pytest.mark.parametrize(("way", "stage"), [("blocks in place", 3), ("all in place", 1)])
def test_what_is_compiled_after_trains_sharded(way: str, stage: int) -> None:
    """As before, where the module is sharded first."""
    compile_part, runs = WAYS[way]

    def on_rank(rank: int) -> tuple[Outcome, int, int]:
        graphs = Graphs()
        model = shard(build(Model, rank, torch.float64), stage)
        compile_part(model, graphs)
        optimizer = sgd(model)
        recompile_no_more(optimizer)
        outcome = train(model, [rank], optimizer, STEPS)
        return outcome, graphs.count, graphs.runs

    assert_trained(run_ranks(WORLD_SIZE, on_rank), runs, list(Model().state_dict()))


@pytest.mark.parametrize("stage", STAGES)
def test_a_graph_of_forward_and_backward_holds_no_weights(stage: int) -> None:
    """Where the compiler differentiates blocks itself, the weights that it saves are places in buffers, as without it.

    One graph serves all blocks, at stage 3 one unit is whole after a forward, and the pool is as large as ever.
    """

    def on_rank(rank: int, compiled: bool) -> tuple[tuple[Outcome, int, int], int, int]:
        graphs = Graphs(aot_eager)
        model = build(Model, rank, torch.float64)
        if compiled:
            _blocks_in_place(model, graphs)
        optimizer = sgd(shard(model, stage))
        engine = engine_of(model)
        assert engine is not None
        whole = []
        model.register_forward_hook(lambda *_: whole.append(sum(unit.numel_whole > 0 for unit in engine.units)))
        outcome = train(model, [rank], optimizer, STEPS)
        return (outcome, graphs.count, graphs.runs), max(whole), engine.pool.nbytes

    compiled = run_ranks(WORLD_SIZE, on_rank, True)
    assert_trained([outcome for outcome, *_ in compiled], BLOCKS, list(Model().state_dict()))
    assert all(count == 1 for (_, count, _), *_ in compiled)
    for found, plain in zip(compiled, run_ranks(WORLD_SIZE, on_rank, False), strict=True):
        assert found[1:] == plain[1:]


@pytest.mark.parametrize("stage", STAGES)
def test_weights_gathered_for_autocast_stay_in_the_graph(stage: int) -> None:
    """Under bf16 autocast a block is one graph, whose losses are those without a compiler to the last bit."""

    def on_rank(rank: int, compiled: bool) -> list[float]:
        model: Any = build(Model, 0, torch.float32)
        model.net.layers = nn.ModuleList(Product() for _ in range(DEPTH))
        graphs = Graphs(aot_eager)
        if compiled:
            _blocks_in_place(model, graphs)
        lightning_zero.shard(model, stage=stage, precision=RECIPES["bf16-mixed"])
        optimizer = sgd(model)
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(10 * step + rank)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(model(0).item())
        # One for training and one without gradients.
        assert graphs.count == 2 * compiled and graphs.runs == compiled * (BLOCKS + DEPTH)
        return losses

    assert run_ranks(WORLD_SIZE, on_rank, True) == run_ranks(WORLD_SIZE, on_rank, False)


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_may_compile_at_different_times(stage: int) -> None:
    """Rank 1 traces anew, for another batch size, between two micro-batches, while the first one's gradients wait."""

    def on_rank(rank: int, compiled: bool) -> dict[str, Tensor]:
        model: Any = shard(build(Net, 0, torch.float64), stage)
        graphs = Graphs()
        for layer in model.layers if compiled else ():
            layer.compile(backend=graphs)
        optimizer = sgd(model)
        for step in range(2):
            with lightning_zero.no_sync(model):
                model(torch.full((2, 3), 0.1 * rank)).sum().backward()
            before = graphs.count
            model(torch.full((2 + 3 * rank, 3), 0.2)).sum().backward()
            assert graphs.count - before == (compiled and rank == 1 and step == 0)
            optimizer.step()
            optimizer.zero_grad()
        return dict(lightning_zero.unshard(model).state_dict())

    for found, expected in zip(
        run_ranks(WORLD_SIZE, on_rank, True), run_ranks(WORLD_SIZE, on_rank, False), strict=True
    ):
        assert_close(found, expected, 0)


# Through the Trainer


class Whole(Regression):
    """Weights of the root before and after the blocks, and a penalty over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.net = trunk(4, DEPTH)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(self.embed(x)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y) + 0.01 * sum(p.pow(2).sum() for p in self.parameters())


class NetInside(Whole):
    """Compiles its net by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net.compile(backend="eager")


def compiled_whole() -> LightningModule:
    """As Lightning unwraps what `torch.compile` makes of a LightningModule."""
    return from_compiled(torch.compile(Whole(), backend="eager"))  # type: ignore[arg-type]


class _NoRecompile(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        torch._dynamo.config.error_on_recompile = trainer.global_step >= 2


def setup_module() -> None:
    """What this file builds is float64, and so in the ranks it forks."""
    torch.set_default_dtype(torch.float64)


def teardown_module() -> None:
    """The default again."""
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("make", [compiled_whole, NetInside], ids=["LightningModule", "net inside"])
def test_the_trainer_trains_compiled_modules(make: Callable[[], LightningModule], stage: int, tmp_path: Any) -> None:
    """Live, after fit, and in the checkpoint, which loads in a plain process."""
    batches = vectors(4, 4, 4)
    twin = fit_plain(Whole, batches)
    runs = fit_ranks(stage, make, batches, tmp_path / "c.ckpt", callbacks=[_NoRecompile()])
    assert_trained_as(twin, runs, tmp_path / "c.ckpt", Whole)
    assert mean_losses(runs) == pytest.approx(twin.losses, abs=EXACT)


def test_a_compiled_lightning_module_is_itself_again_after_fit() -> None:
    """It computes compiled as before, and can be taken back to what it was."""

    def on_rank(rank: int) -> bool:
        graphs = Graphs()
        module: Any = from_compiled(torch.compile(Whole(), backend=graphs))  # type: ignore[arg-type]
        lightning_zero.shard(module, stage=3)
        lightning_zero.unshard(module)
        x = torch.ones(2, 4)
        found = module(x)
        compiled = graphs.runs == 1
        return compiled and torch.equal(found, to_uncompiled(module)(x)) and graphs.runs == 1

    assert run_ranks(WORLD_SIZE, on_rank) == [True, True]


def test_a_graph_of_all_blocks_cannot_be_had() -> None:
    """The error says where the graph would have to end."""

    def on_rank(rank: int) -> str:
        model = shard(build(Net, rank, torch.float64), 3)
        try:
            torch.compile(model, backend="eager", fullgraph=True)(torch.ones(2, 3))
        except torch._dynamo.exc.Unsupported as error:
            return str(error)
        return ""

    for message in run_ranks(WORLD_SIZE, on_rank):
        assert "`fullgraph=True`" in message and "lightning_zero" in message


def test_a_compiler_does_not_see_how_a_window_is_entered_and_left() -> None:
    """It compiles the forward inside alone: lines of ours that it could not trace were named in the window's place."""

    class Window:
        def __enter__(self) -> None:
            torch.ones(2).sum()

        def __exit__(self, *exc: object) -> None:
            torch.ones(2).sum()

    def on_rank(rank: int) -> list[str]:
        block = Block()
        WindowedForward(block, Window)
        torch.compile(block, backend="eager")(torch.ones(2, 5))
        return [str(compiled.co_name) for compiled in get_compilation_metrics()]

    assert run_ranks(1, on_rank) == [["forward"]]


# `compile=`: the forwards of units, one graph for equal ones


class Dropping(Product):
    """With dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(super().forward(x))


class Dropped(nn.Module):
    """Blocks that drop, in units, and a loss on data of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.net.layers = nn.ModuleList(Dropping() for _ in range(DEPTH))

    def forward(self, seed: int) -> Tensor:
        return self.net(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))).tanh().square().mean()


STORE = lightning_zero.OffloadActivations
POLICIES: dict[str, tuple[Any, int]] = {
    # And how often a block runs in a step.
    "none": (None, 1),
    "full": ("full", 2),
    "offload": (STORE(min_bytes=1), 1),
    "full and offload": (("full", STORE(min_bytes=1)), 2),
    "a part of units": ({nn.Dropout}, 1),
}


@pytest.mark.parametrize("stage", STAGES)
def test_units_are_compiled_inside_checkpointing(stage: int) -> None:
    """To the last bit of compiled training, dropout included; what is computed again runs as the same graph."""

    def trained(rank: int, policy: Any, graphs: Graphs | None) -> Outcome:
        compile = {"backend": graphs, "fullgraph": policy != {nn.Dropout}} if graphs else False
        model = build(Dropped, 0, torch.float32)
        shard(model, stage, [Dropping], activation_checkpointing=policy, compile=compile)
        torch.manual_seed(rank)
        optimizer = sgd(model)
        if graphs:
            recompile_no_more(optimizer)
        return train(model, [rank], optimizer, STEPS)

    def on_rank(rank: int) -> dict[str, tuple[int, int]]:
        plain, first = trained(rank, None, None), None
        counts = {}
        for name, (policy, _) in POLICIES.items():
            graphs = Graphs(aot_eager)
            found = trained(rank, policy, graphs)
            first = first or found
            # A compiler sums in its own order, which the same graph keeps.
            for expected, tolerance in ((plain, 1e-6), (first, 0 if graphs.count == 1 else 1e-6)):
                assert found.losses == pytest.approx(expected.losses, abs=tolerance, rel=0)
                assert_close(found.gradients, expected.gradients, tolerance)
                assert_close(found.after, expected.after, tolerance)
            counts[name] = graphs.count, graphs.runs
            torch._dynamo.reset()
        return counts

    for counts in run_ranks(WORLD_SIZE, on_rank):
        for name, (_, runs) in POLICIES.items():
            # A graph ends before dropout that is to be computed again, and one begins after it.
            graphs = 2 if name == "a part of units" else 1
            assert counts[name] == (graphs, graphs * runs * BLOCKS), name


def test_a_forward_on_the_instance_is_compiled() -> None:
    """Libraries put theirs there; the module has it back afterwards."""
    model: Any = Dropped()
    for layer in model.net.layers:
        layer.forward = partial(Product.forward, layer)
    mine = model.net.layers[0].forward
    graphs = Graphs()
    lightning_zero.shard(model, units=[Dropping], compile={"backend": graphs})
    model(0).backward()
    assert graphs.runs == DEPTH
    lightning_zero.unshard(model)
    assert model.net.layers[0].forward is mine


@pytest.mark.parametrize("given", [1, "inductor", ["fullgraph"]])
def test_what_says_nothing_to_a_compiler_is_refused(given: Any) -> None:
    """By the function, and by the strategy when it is made."""
    with pytest.raises(TypeError, match=r"says nothing. Write `compile=True`, or arguments"):
        lightning_zero.shard(Dropped(), compile=given)
    with pytest.raises(TypeError, match=r"says nothing. Write `compile=True`, or arguments"):
        lightning_zero.ZeROStrategy(compile=given)


def test_nothing_to_compile_is_an_error() -> None:
    """And what would be compiled stays as it was."""
    linear = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"`Linear` has no units, so `compile` has nothing to compile"):
        lightning_zero.shard(linear, compile=True)
    assert engine_of(linear) is None and "forward" not in linear.__dict__


@pytest.mark.parametrize("classes", [None, {Dropped}], ids=["units", "what contains them"])
def test_selective_would_see_nothing_of_compiled_units(classes: Any) -> None:
    """Their parts are not computed again by a graph that is: they may be selective."""
    policy = lightning_zero.Selective(classes=classes)
    with pytest.raises(ValueError, match=r"a compiled `Drop\w+` shows none: the compiler itself decides"):
        lightning_zero.shard(Dropped(), units=[Dropping], activation_checkpointing=policy, compile=True)
    parts = lightning_zero.Selective(classes={nn.Linear})
    lightning_zero.shard(Dropped(), units=[Dropping], activation_checkpointing=parts, compile=True)
