"""A model and its training, written as plain data, and what becomes of them on sharded ranks and in one plain process.

    Example         sizes, stage, ranks; a tree of `Layer`, `Container`, `Same`; ties; a program of tuples
    build           the model that an example describes
    on_rank         trains it sharded, on one rank's data
    in_one_process  trains it plain, on all ranks' data: the twin
    Story           what either saw

An index in an example counts modulo what there is to choose from, so every example means something.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lightning_zero
from lightning_zero.engine import engine_of

VOCABULARY = 7
BATCH = 2


# The description


@dataclass(frozen=True)
class Layer:
    """Something that computes, of width ``Example.width``.

    Args:
        kind: a key of `KINDS`.
        dtype: of its parameters.
        size: an inner size, an index, or nothing, as the kind has it.
        only_rank: the one rank that calls it.
    """

    kind: str
    dtype: str = "float64"
    size: int = 1
    only_rank: int | None = None


@dataclass(frozen=True)
class Same:
    """The ``index``-th module that was finished before, under one more name."""

    index: int


@dataclass(frozen=True)
class Container:
    """Modules that are called one after the other.

    Args:
        kind: "Sequential", "ModuleList", "ModuleDict" or "Block".
        children: its modules.
        order: indices of the children in the order of their calls; some may come twice, some never.
        scale: whether it has a parameter itself. A "Sequential" has none.
        recomputes: whether the children's activations are recomputed in backward: "plain", "reentrant" or not.
    """

    kind: str
    children: tuple[Any, ...]
    order: tuple[int, ...] | None = None
    scale: bool = False
    recomputes: str | None = None


@dataclass(frozen=True)
class Example:
    """A model and its training."""

    seed: int
    world_size: int
    stage: int
    units: str
    width: int
    root: Container
    ties: tuple[int, ...]
    frozen: tuple[int, ...]
    hooked: tuple[int, ...]
    anchor: bool
    meta: bool
    asks: bool
    optimizer: str
    program: tuple[tuple[Any, ...], ...]


# From a description to a model


State = tuple[Tensor, Tensor, int]
"""What runs through the model: activations, tokens, and the rank they belong to."""


class Computes(nn.Module):
    """A layer: casts to its dtype, computes, and adds a bounded part to the activations."""

    def __init__(self, layer: Layer, width: int, dtype: torch.dtype, only_rank: int | None) -> None:
        super().__init__()
        self.only_rank = only_rank
        self.dtype = dtype
        self.calls = 0
        self.make(layer, width)

    def make(self, layer: Layer, width: int) -> None:
        raise NotImplementedError

    def compute(self, x: Tensor, tokens: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, state: State) -> State:
        x, tokens, rank = state
        if self.only_rank is not None and self.only_rank != rank:
            return state
        self.calls += 1
        out = self.compute(x.to(self.dtype), tokens)
        out = out.real + out.imag if out.is_complex() else out
        return x + 0.5 * torch.tanh(out.to(x.dtype)), tokens, rank


class LinearLayer(Computes):
    def make(self, layer, width):
        self.inner = nn.Linear(width, width, bias=layer.size % 2 == 1, dtype=self.dtype)
        if layer.size % 3 == 0:  # memory in another order than indices
            self.inner.weight = nn.Parameter(torch.randn(width, width, dtype=self.dtype).t())

    def compute(self, x, tokens):
        return self.inner(x)


class MLPLayer(Computes):
    def make(self, layer, width):
        self.up = nn.Linear(width, layer.size, dtype=self.dtype)
        self.down = nn.Linear(layer.size, width, dtype=self.dtype)

    def compute(self, x, tokens):
        return self.down(torch.tanh(self.up(x)))


class NormLayer(Computes):
    def make(self, layer, width):
        self.norm = nn.LayerNorm(width, dtype=self.dtype)

    def compute(self, x, tokens):
        return self.norm(x)


class ConvLayer(Computes):
    def make(self, layer, width):
        self.conv = nn.Conv1d(1, layer.size, 3, padding=1, dtype=self.dtype)

    def compute(self, x, tokens):
        return self.conv(x.unsqueeze(1)).mean(1)


class EmbeddingLayer(Computes):
    def make(self, layer, width):
        self.embedding = nn.Embedding(VOCABULARY, width, dtype=self.dtype)

    def compute(self, x, tokens):
        return self.embedding(tokens) + x


class RecurrentLayer(Computes):
    def make(self, layer, width):
        self.recurrent = nn.GRU(width, width, batch_first=True, dtype=self.dtype)

    def compute(self, x, tokens):
        return self.recurrent(x.unsqueeze(1))[0].squeeze(1)


class TensorLayer(Computes):
    """A parameter of some shape, which may be 0-dim or empty."""

    SHAPES = ((), (1,), (1, 3, 2), (0,), (5, 1, 1, 3), (3, 0), (17,))

    def make(self, layer, width):
        self.value = nn.Parameter(torch.randn(self.SHAPES[layer.size % len(self.SHAPES)], dtype=self.dtype))

    def compute(self, x, tokens):
        return x * 0.5 + self.value.sum() * x.sum(-1, keepdim=True)


class TransposedLayer(Computes):
    """A parameter whose memory is not in the order of its indices."""

    def make(self, layer, width):
        self.weight = nn.Parameter(torch.randn(width, layer.size, dtype=self.dtype).t())

    def compute(self, x, tokens):
        return F.linear(x, self.weight).mean(-1, keepdim=True) + x


class IntegerLayer(Computes):
    """A parameter that cannot be trained."""

    def make(self, layer, width):
        self.levels = nn.Parameter(torch.randint(5, (layer.size,)), requires_grad=False)

    def compute(self, x, tokens):
        return x + self.levels.sum() * 0.1


class RunningLayer(Computes):
    """A buffer that each forward changes."""

    def make(self, layer, width):
        self.register_buffer("mean", torch.zeros(width, dtype=self.dtype))

    def compute(self, x, tokens):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.25)
        return x - self.mean.clone()


class WritingLayer(Computes):
    """Sets its parameter right in its forward; the next forward would set it to the same."""

    def make(self, layer, width):
        self.how = layer.size % 3
        self.shift = nn.Parameter(torch.randn(width, dtype=self.dtype))

    def compute(self, x, tokens):
        with torch.no_grad():
            if self.how == 0:
                self.shift.clamp_(-0.5, 0.5)
            elif self.how == 1:
                self.shift.data[-1] = 0.25
            else:
                self.shift.data = self.shift.sign() * 0.5
        return x + self.shift[:]


class UnusedLayer(Computes):
    def make(self, layer, width):
        self.spare = nn.Linear(layer.size, width, dtype=self.dtype)

    def compute(self, x, tokens):
        return x


class _Sum(torch.autograd.Function):
    """A sum whose derivative is written by hand."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.shape = tensor.shape
        return tensor.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.expand(ctx.shape)


class ReadingLayer(Computes):
    """Computes with a parameter of another module, now and then in a custom autograd function."""

    def make(self, layer, width):
        self.index = layer.size
        self.source: list[tuple[nn.Module, str]] = []  # a list, lest the other module become its child

    def compute(self, x, tokens):
        module, attribute = self.source[0]
        parameter = getattr(module, attribute)
        value = _Sum.apply(parameter) if self.index % 2 else parameter.sum()
        return x + 0.1 * (value.real if value.is_complex() else value).to(x.dtype)


KINDS: dict[str, type[Computes]] = {
    "linear": LinearLayer,
    "mlp": MLPLayer,
    "tensor": TensorLayer,
    "norm": NormLayer,
    "embedding": EmbeddingLayer,
    "conv": ConvLayer,
    "transposed": TransposedLayer,
    "recurrent": RecurrentLayer,
    "integer": IntegerLayer,
    "running": RunningLayer,
    "writing": WritingLayer,
    "unused": UnusedLayer,
    "reading": ReadingLayer,
}

_ANY_DTYPE = ("linear", "mlp", "tensor", "unused")
_REAL_DTYPES = ("norm", "embedding", "transposed", "conv")


def _dtype(layer: Layer) -> torch.dtype:
    dtype = getattr(torch, layer.dtype)
    fits = layer.kind in _ANY_DTYPE or (layer.kind in _REAL_DTYPES and not dtype.is_complex)
    return dtype if fits else torch.float64


class Contains(nn.Module):
    """Calls its children in an order."""

    def __init__(self, container: Container, children: list[nn.Module], width: int) -> None:
        super().__init__()
        self.recomputes = container.recomputes
        self.order = range(len(children)) if container.order is None else [i % len(children) for i in container.order]
        self.hold(children)
        self.scale = nn.Parameter(torch.randn(width, dtype=torch.float64)) if container.scale else None

    def hold(self, children: list[nn.Module]) -> None:
        raise NotImplementedError

    def held(self, index: int) -> nn.Module:
        raise NotImplementedError

    def forward(self, state: State) -> State:
        for index in self.order:
            child = self.held(index)
            # A recomputed forward would change state once more, at a time that the twin does not share.
            stateless = not any(isinstance(module, RunningLayer | WritingLayer) for module in child.modules())
            if self.recomputes and stateless and torch.is_grad_enabled():
                state = self._recomputed(child, *state)
            else:
                state = child(state)
        x, tokens, rank = state
        return (x if self.scale is None else x + torch.tanh(x * self.scale)), tokens, rank

    def _recomputed(self, child: nn.Module, x: Tensor, tokens: Tensor, rank: int) -> State:
        def run(x: Tensor) -> Tensor:
            return child((x, tokens, rank))[0]

        return checkpoint(run, x, use_reentrant=self.recomputes == "reentrant"), tokens, rank


class ListHolder(Contains):
    def hold(self, children):
        self.items = nn.ModuleList(children)

    def held(self, index):
        return self.items[index]


class DictHolder(Contains):
    def hold(self, children):
        self.items = nn.ModuleDict({f"item{i}": child for i, child in enumerate(children)})

    def held(self, index):
        return self.items[f"item{index}"]


class Block(Contains):
    def hold(self, children):
        for i, child in enumerate(children):
            setattr(self, f"part{i}", child)

    def held(self, index):
        return getattr(self, f"part{index}")


class Chain(nn.Sequential):
    """An ``nn.Sequential`` that may call its children in another order."""

    def __init__(self, container: Container, children: list[nn.Module], width: int) -> None:
        super().__init__(*children)
        self.order = range(len(children)) if container.order is None else [i % len(children) for i in container.order]

    def forward(self, state: State) -> State:
        for index in self.order:
            state = self[index](state)
        return state


CONTAINERS: dict[str, Any] = {
    "Block": Block,
    "ModuleList": ListHolder,
    "Sequential": Chain,
    "ModuleDict": DictHolder,
}


class Model(nn.Module):
    """The whole; its forward gives the loss."""

    def __init__(self, body: nn.Module, anchor: bool) -> None:
        super().__init__()
        self.body = body
        self.anchor = nn.Parameter(torch.tensor(0.75, dtype=torch.float64)) if anchor else None
        self.reenters = any(getattr(module, "recomputes", None) == "reentrant" for module in self.modules())

    def forward(self, x: Tensor, tokens: Tensor, target: Tensor, rank: int) -> Tensor:
        # Reentrant recomputation has no gradient where its input has none.
        x = x.requires_grad_() if self.reenters and torch.is_grad_enabled() else x
        out = self.body((x, tokens, rank))[0]
        out = out if self.anchor is None else out * self.anchor
        return F.mse_loss(out, target)


class _Builder:
    def __init__(self, example: Example) -> None:
        self._example = example
        self._finished: list[nn.Module] = []
        self.differs = False
        """Whether ranks call different layers."""

    def module(self, node: Any) -> nn.Module:
        if isinstance(node, Same) and self._finished:
            return self._finished[node.index % len(self._finished)]
        if isinstance(node, Container):
            children = [self.module(child) for child in node.children]
            built = CONTAINERS[node.kind](node, children, self._example.width)
        else:
            layer = node if isinstance(node, Layer) else Layer("linear")
            built = KINDS[layer.kind](layer, self._example.width, _dtype(layer), self._only_rank(layer))
        self._finished.append(built)
        return built

    def _only_rank(self, layer: Layer) -> int | None:
        if layer.only_rank is None or self._example.world_size == 1:
            return None
        if layer.kind == "writing":  # ranks write alike
            return None
        self.differs = True
        return layer.only_rank % self._example.world_size


def slots(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Attributes that hold parameters and may hold others, or be read by others.

    A recurrent module keeps a list of its own. What a forward sets is another value in the twin's second forward.
    """
    return [
        (module, attribute)
        for module in model.modules()
        for attribute, parameter in module._parameters.items()
        if parameter is not None and not isinstance(module, nn.RNNBase | WritingLayer)
    ]


def _alike(a: Tensor, b: Tensor) -> bool:
    return a is not b and a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()


def _tie(model: nn.Module, index: int) -> None:
    places = slots(model)
    values = [getattr(module, attribute) for module, attribute in places]
    pairs = [(i, j) for j in range(len(places)) for i in range(j) if _alike(values[i], values[j])]
    if pairs:
        i, j = pairs[index % len(pairs)]
        setattr(*places[j], values[i])


def build(example: Example) -> Model:
    """The model that ``example`` describes; the same values each time."""
    torch.manual_seed(example.seed)
    builder = _Builder(example)
    body = builder.module(example.root)
    # A rank needs some gradient of its own, and an optimizer some parameter.
    model = Model(body, example.anchor or builder.differs or not any(True for _ in body.parameters()))
    for index in example.ties:
        _tie(model, index)
    parameters = list(model.parameters())
    for index in example.frozen if parameters else ():
        parameters[index % len(parameters)].requires_grad_(False)
    if builder.differs:
        model.anchor.requires_grad_(True)
    sources = [place for place in slots(model) if not isinstance(place[0], IntegerLayer)]
    for module in model.modules():
        if isinstance(module, ReadingLayer):
            if not sources:  # itself then
                module.own = nn.Parameter(torch.ones(3, dtype=torch.float64))
                sources = [(module, "own")]
            module.source.append(sources[module.index % len(sources)])
    return model


def _has_own_parameters(module: nn.Module) -> bool:
    return any(parameter is not None and parameter.numel() for parameter in module._parameters.values())


UNITS: dict[str, Callable[[nn.Module], bool] | None] = {
    "default": None,
    "blocks": lambda module: isinstance(module, Block),
    "layers": lambda module: isinstance(module, Computes),
    "leaves": _has_own_parameters,
    "odd names": lambda module: len(type(module).__name__) % 2 == 1,
}
"""Predicates; a class name says the same where there is one."""


def units_of(example: Example, model: nn.Module) -> Any:
    """What ``lightning_zero.shard`` gets as ``units``."""
    predicate = UNITS[example.units]
    inner = [module for module in model.modules() if module is not model]
    if predicate is None or not any(predicate(m) and sum(p.numel() for p in m.parameters()) for m in inner):
        return None
    if example.units == "blocks":
        return ["Block"]
    return predicate


def differs(example: Example, model: nn.Module) -> bool:
    """Whether ranks use different units: what one rank calls alone may be one, or all that backward needs of one."""
    return any(getattr(module, "only_rank", None) is not None for module in model.modules())


def hook(example: Example, parameters: list[nn.Parameter], odd: bool) -> None:
    """Put the hooks on gradients that ``example`` wants at odd, or at even, places."""
    for index in example.hooked if parameters else ():
        parameter = parameters[index % len(parameters)]
        if index % 2 == odd and parameter.requires_grad:
            parameter.register_hook(lambda grad: grad * 0.75)


# Features, seen on the model that was built


def tied(model: Model) -> bool:
    """Whether two attributes hold one parameter."""
    held = [getattr(module, attribute) for module, attribute in slots(model)]
    return len(set(held)) < len(held)


def partly_frozen(model: Model) -> bool:
    """Whether some parameters are frozen, and some are not."""
    flags = {parameter.requires_grad for parameter in model.parameters() if parameter.is_floating_point()}
    return len(flags) == 2


def reused(model: Model, forwards: int) -> bool:
    """Whether one forward called a layer twice."""
    return any(module.calls > forwards for module in model.modules() if isinstance(module, Computes))


# Training


@dataclass
class Story:
    """What one process saw.

    Args:
        losses: of each forward that counts; the mean over ranks is the twin's.
        seen: what was read on the way.
        grads: at the end.
        live: whole parameters at the end, while they are sharded.
        after: state dict after the way back.
        features: of the model.
    """

    losses: list[float] = field(default_factory=list)
    seen: list[tuple[str, Any]] = field(default_factory=list)
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    live: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    buffers: list[dict[str, Tensor]] = field(default_factory=list)
    features: set[str] = field(default_factory=set)
    dtypes: set[torch.dtype] = field(default_factory=set)


def _optimizer(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    # Torch's fused kernel takes no other dtypes, and mixes up elements where a gradient's strides are not its weight's.
    fusible = all(parameter.is_floating_point() and parameter.is_contiguous() for parameter in parameters)
    # A large epsilon: a gradient that is rounding noise must not become a step.
    adam: dict[str, Any] = {"lr": 0.02, "eps": 0.01, "weight_decay": 0.1}
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    if name == "sgd, decay, loop":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.5, nesterov=True, weight_decay=0.1, foreach=False)
    if name == "adamw, fused" and fusible:
        return torch.optim.AdamW(parameters, fused=True, **adam)
    return torch.optim.AdamW(parameters, foreach=name != "adamw, loop", **adam)


class _Session:
    """Runs the program of an example; below are the two ways to compute a loss."""

    def __init__(self, example: Example, model: Model, parameters: list[nn.Parameter]) -> None:
        self.example = example
        self.model = model
        self.parameters = parameters
        self.optimizer = _optimizer(example.optimizer, parameters)
        self.story = Story()
        self.batches = 0
        self.pending: list[Tensor] = []

    # What differs between ranks and twin

    def compute(self, number: int, accumulates: bool) -> Tensor:
        raise NotImplementedError

    def no_sync(self) -> Any:
        raise NotImplementedError

    def gathered(self, module: nn.Module, writeback: bool) -> Any:
        raise NotImplementedError

    writes = True
    """Whether this process writes what counts inside `gathered`."""

    # The program

    def run(self) -> Story:
        for step in self.example.program:
            name, *arguments = step
            getattr(self, f"do_{name}")(*arguments)
        self.do_backward("sum", False)
        return self.story

    def batch(self, number: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.example.seed * 1000 + number * 10 + rank)
        x, target = torch.randn(2, BATCH, self.example.width, generator=generator, dtype=torch.float64).unbind()
        return x, torch.randint(VOCABULARY, (BATCH,), generator=generator), target

    def next_loss(self, accumulates: bool = False) -> Tensor:
        self.batches += 1
        loss = self.compute(self.batches, accumulates)
        self.story.losses.append(loss.item())
        return loss

    def do_forward(self, accumulates: bool) -> None:
        with self.no_sync() if accumulates else nullcontext():
            self.pending.append(self.next_loss(accumulates))

    def do_penalty(self, weight: float) -> None:
        # Autograd would find changed what a forward sets.
        set_later = {module.shift for module in self.model.modules() if isinstance(module, WritingLayer)}
        inexact = [p for p in self.model.parameters() if _inexact(p) and p not in set_later]
        if inexact:
            self.pending.append(weight * sum(p.abs().square().sum().double() for p in inexact))

    def do_look(self, how: str) -> None:
        with torch.inference_mode() if how == "inference" else torch.no_grad():
            self.next_loss()

    def do_backward(self, how: str, accumulates: bool) -> None:
        losses = [loss for loss in self.pending if loss.requires_grad]
        self.pending = []
        with self.no_sync() if accumulates else nullcontext():
            if how == "sum" and losses:
                torch.stack(losses).sum().backward()
            elif how != "sum":
                for loss in losses if how == "each" else reversed(losses):
                    loss.backward()

    def settled(self) -> None:
        """A weight must not change between forward and backward, plain or sharded."""
        self.do_backward("sum", False)

    def do_step(self) -> None:
        self.settled()
        self.optimizer.step()

    def do_zero_grad(self, how: str) -> None:
        if how == "module":
            self.model.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=how == "none")

    def do_clip_norm(self, limit: float, order: float) -> None:
        # Torch has no infinity norm of nothing.
        parameters = [p for p in self.model.parameters() if p.numel() or order != float("inf")]
        total = nn.utils.clip_grad_norm_(parameters, limit, norm_type=order)
        self.story.seen.append(("clip_norm", total.item()))

    def do_clip_value(self, limit: float) -> None:
        parameters = [p for p in self.model.parameters() if not p.is_complex() and p.grad is not None]
        if parameters:
            nn.utils.clip_grad_value_(parameters, limit)

    def choose(self, index: int) -> nn.Parameter | None:
        return self.parameters[index % len(self.parameters)] if self.parameters else None

    def do_grad(self, index: int, how: str) -> None:
        parameter = self.choose(index)
        if parameter is None or not _inexact(parameter):
            return
        if how == "none":
            parameter.grad = None
        elif how == "new":
            parameter.grad = _ramp(parameter, 0.5)
        elif parameter.grad is not None and how == "halved":
            parameter.grad = parameter.grad * 0.5
        elif parameter.grad is not None:
            parameter.grad.data.mul_(2)

    def do_train(self, index: int, flag: bool) -> None:
        self.settled()
        parameter = self.choose(index)
        if parameter is None or not (parameter.is_floating_point() or parameter.is_complex()):
            return
        if parameter is not self.model.anchor:
            parameter.requires_grad = flag

    def do_write(self, index: int, how: str, value: float) -> None:
        self.settled()
        parameter = self.choose(index)
        if parameter is not None and WRITES[how].fits(parameter):
            with torch.no_grad():
                WRITES[how].act(parameter, value)

    def do_copy(self, index: int, other: int) -> None:
        self.settled()
        parameter = self.choose(index)
        same = [p for p in self.parameters if parameter is not None and p.shape == parameter.shape]
        if parameter is not None and parameter.is_floating_point():
            with torch.no_grad():
                source = same[other % len(same)]
                parameter.copy_(source.real if source.is_complex() else source)

    def do_scale_all(self, factor: float) -> None:
        self.settled()
        floating = [p for p in self.parameters if p.is_floating_point()]
        with torch.no_grad():
            if floating:
                torch._foreach_mul_(floating, factor)

    def do_read(self, index: int, how: str, grad: str) -> None:
        parameter = self.choose(index)
        value = parameter.grad if parameter is not None and grad == "grad" else parameter
        if value is None or not READS[how].fits(value):
            self.story.seen.append((how, None if value is None else "skipped"))
            return
        with torch.no_grad() if grad == "no grad" else nullcontext():
            self.story.seen.append((how, plain(READS[how].act(value))))

    def do_gathered(self, index: int, factor: float | None) -> None:
        self.settled()
        modules = list(self.model.modules())
        module = modules[index % len(modules)]
        with self.gathered(module, factor is not None), torch.no_grad():
            for parameter in module.parameters():
                self.story.seen.append(("gathered", parameter.detach().clone()))
                if factor is not None and self.writes and parameter.dtype != torch.int64:
                    parameter.mul_(factor)

    def do_state_dict(self, how: str) -> None:
        self.settled()
        if how == "optimizer":
            self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        elif how == "model":
            before = {name: value.clone() for name, value in self.model.state_dict().items()}
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.zero_()
            self.model.load_state_dict(before)
        else:
            with self.gathered(self.model, False):
                values = {name: value.detach().clone() for name, value in self.model.named_parameters()}
            changed = {n: value if value.dtype == torch.int64 else value * 0.875 for n, value in values.items()}
            self.model.load_state_dict(changed, strict=False)


def plain(value: Tensor) -> Tensor:
    """An ordinary tensor of the value."""
    return (value.whole() if hasattr(value, "whole") else value).detach().clone()


@dataclass(frozen=True)
class _Act:
    fits: Callable[[Tensor], bool]
    act: Callable[..., Any]


def _any(tensor: Tensor) -> bool:
    return True


def _real(tensor: Tensor) -> bool:
    return tensor.is_floating_point()


def _inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _row(tensor: Tensor) -> bool:
    return tensor.ndim > 0 and tensor.numel() > 0


def _flat(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and tensor.is_contiguous()


def _matrix(tensor: Tensor) -> bool:
    return tensor.ndim == 2 and _inexact(tensor)


def _ramp(parameter: Tensor, value: float) -> Tensor:
    ramp = torch.arange(parameter.numel(), dtype=torch.float64).mul(value).cos().reshape(parameter.shape)
    return ramp.to(parameter.dtype)


def _set_data(parameter: Tensor, value: float) -> None:
    parameter.data = _ramp(parameter, value)


def _set_item(parameter: Tensor, value: float) -> None:
    parameter.data[-1] = value


def _set_flat(parameter: Tensor, value: float) -> None:
    parameter.view(-1)[parameter.numel() // 2] = value


def _set_tail(parameter: Tensor, value: float) -> None:
    parameter.data.view(-1)[parameter.numel() // 2 :].fill_(value)


def _set_mask(parameter: Tensor, value: float) -> None:
    parameter[_ramp(parameter, 1.0) > 0] = value


WRITES: dict[str, _Act] = {
    "mul_": _Act(_inexact, lambda p, v: p.mul_(v)),
    "clamp_": _Act(_real, lambda p, v: p.clamp_(-abs(v), abs(v))),
    "fill_": _Act(_any, lambda p, v: p.fill_(v)),
    "copy_": _Act(_any, lambda p, v: p.copy_(_ramp(p, v))),
    "data.copy_": _Act(_any, lambda p, v: p.data.copy_(_ramp(p, v))),
    "data =": _Act(_any, _set_data),
    "data[-1] =": _Act(_row, _set_item),
    "view(-1)[k] =": _Act(_flat, _set_flat),
    "data.view(-1)[k:].fill_": _Act(_flat, _set_tail),
    "[mask] =": _Act(lambda p: _row(p) and _real(p), _set_mask),
    "t().mul_": _Act(_matrix, lambda p, v: p.t().mul_(v)),
    "add_(whole)": _Act(_inexact, lambda p, v: p.add_(_ramp(p, v), alpha=0.5)),
    "data.sub_(self mean)": _Act(lambda p: _real(p) and p.numel() > 0, lambda p, v: p.data.sub_(p.data.mean() * v)),
    "lerp_": _Act(_inexact, lambda p, v: p.lerp_(_ramp(p, v), 0.25)),
}

READS: dict[str, _Act] = {
    "norm": _Act(_inexact, lambda p: p.norm()),
    "sum": _Act(_any, lambda p: p.sum()),
    "abs().max()": _Act(lambda p: _inexact(p) and p.numel() > 0, lambda p: p.abs().max()),
    "mean": _Act(_inexact, lambda p: p.mean() if p.numel() else p.sum()),
    "[0]": _Act(_row, lambda p: p[0]),
    "data[-1]": _Act(_row, lambda p: p.data[-1]),
    "sum(-1)": _Act(lambda p: p.ndim > 0, lambda p: p.sum(-1)),
    "square().sum()": _Act(_inexact, lambda p: p.square().sum()),
    "clone": _Act(_any, lambda p: p.clone()),
    "detach().t() @": _Act(_matrix, lambda p: p.detach().t() @ p.detach()),
    "view(-1)[k]": _Act(_flat, lambda p: p.view(-1)[p.numel() // 2]),
}


class _Rank(_Session):
    """One rank of several, with a sharded model and its own data."""

    def __init__(self, example: Example, model: Model, parameters: list[nn.Parameter], rank: int) -> None:
        super().__init__(example, model, parameters)
        self.rank = rank
        self.writes = rank == 0

    def compute(self, number: int, accumulates: bool) -> Tensor:
        return self.model(*self.batch(number, self.rank), self.rank)

    def no_sync(self) -> Any:
        return lightning_zero.no_sync(self.model)

    def gathered(self, module: nn.Module, writeback: bool) -> Any:
        return lightning_zero.gathered(module, writeback)


class _Twin(_Session):
    """One plain process with the data of all ranks, and their buffers: rank 0's are everyone's before a forward that
    follows one whose gradients were shared."""

    def __init__(self, example: Example, model: Model) -> None:
        super().__init__(example, model, list(model.parameters()))
        self.buffers = [self._buffers() for _ in range(example.world_size)]
        self._shares = False

    def _buffers(self) -> list[Tensor]:
        return [buffer.clone() for buffer in self.model.buffers()]

    @contextmanager
    def _buffers_of(self, rank: int) -> Iterator[None]:
        with torch.no_grad():
            for buffer, value in zip(self.model.buffers(), self.buffers[rank], strict=True):
                buffer.copy_(value)
        yield
        self.buffers[rank] = self._buffers()

    def compute(self, number: int, accumulates: bool) -> Tensor:
        ranks = range(self.example.world_size)
        if torch.is_grad_enabled():
            if self._shares:
                self.buffers = [[value.clone() for value in self.buffers[0]] for _ in ranks]
            self._shares = not accumulates
        losses = []
        for rank in ranks:
            with self._buffers_of(rank):
                losses.append(self.model(*self.batch(number, rank), rank))
        return torch.stack(losses).mean()

    def no_sync(self) -> Any:
        return nullcontext()

    def gathered(self, module: nn.Module, writeback: bool) -> Any:
        return nullcontext()


def in_one_process(example: Example) -> Story:
    """The twin's story."""
    model = build(example)
    for odd in (True, False):
        hook(example, list(model.parameters()), odd)
    session = _Twin(example, model)
    dtypes = {parameter.dtype for parameter in model.parameters()}
    features = {name for name, has in (("tied", tied(model)), ("frozen", partly_frozen(model))) if has}
    story = session.run()
    story.grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    story.live = {name: parameter.detach() for name, parameter in model.named_parameters()}
    story.after = {name: value.detach() for name, value in model.state_dict(keep_vars=True).items()}
    names = [name for name, _ in model.named_buffers()]
    story.buffers = [dict(zip(names, values, strict=True)) for values in session.buffers]
    story.dtypes = dtypes
    features |= {"differs at stage 3"} if example.stage == 3 and differs(example, model) else set()
    story.features = features
    if reused(model, session.batches * example.world_size):
        story.features.add("reused")
    return story


def _stranger(example: Example, rank: int) -> Model:
    """A rank's own model, whose values do not count unless it is rank 0's."""
    if rank and example.meta:
        with torch.device("meta"):
            return build(example)
    model = build(example)
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()) if rank else ():
            value.fill_(rank)
    return model


def on_rank(rank: int, example: Example) -> Story:
    """One rank's story."""
    model = _stranger(example, rank)
    # Kept from before: a parameter remains itself.
    parameters = list(model.parameters())
    hook(example, parameters, odd=True)
    asks = example.asks or differs(example, model)
    lightning_zero.shard(model, stage=example.stage, units=units_of(example, model), ranks_may_differ=asks)
    hook(example, parameters, odd=False)
    engine = engine_of(model)
    assert engine is not None
    engine.pool.poison = True
    story = _Rank(example, model, parameters, rank).run()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    story.grads = {name: None if grad is None else plain(grad) for name, grad in grads.items()}
    with lightning_zero.gathered(model):
        story.live = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    lightning_zero.unshard(model)
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    story.after = {name: value.detach().clone() for name, value in model.state_dict(keep_vars=True).items()}
    story.buffers = [dict(model.named_buffers())]
    return story
