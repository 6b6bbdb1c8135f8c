"""What a unit's forward keeps for its backward: less than everything, by one policy or several.

    Recompute              its inputs; the rest is computed again                      one more forward
    Selective              its inputs and the results of costly operations             the cheap rest again
    OffloadActivations     everything, in host memory                                  no computation, host traffic

A policy stands around forwards, outside the window of a unit: to recompute is to enter it again like any forward.
Names, classes and ``state_dict`` keys stay as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from lightning_zero.kept_results import Version, keeping
from lightning_zero.modes import unobserved
from lightning_zero.saved_hooks import in_transform
from lightning_zero.stash import HostStash, Ticket

__all__ = [
    "COSTLY",
    "ActivationPolicy",
    "OffloadActivations",
    "Recompute",
    "Selective",
    "activation_policies",
    "chosen_policies",
]

Forward = Callable[..., Any]

_aten = torch.ops.aten

COSTLY: tuple[Any, ...] = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten._scaled_mm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_attention_math.default,
)
"""Matrix products, convolutions and attention: where a transformer's time goes."""


@dataclass(kw_only=True)
class ActivationPolicy(ABC):
    """What the forwards of some modules keep.

    Args:
        classes: the modules, by type or class name; default: whole units.
        every: only each ``every``-th of them, the first one included.

    Raises:
        ValueError: ``every`` is below 1, or ``classes`` are none.
    """

    classes: Iterable[type | str] | None = None
    every: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"every={self.every!r} must be a whole number of 1 or more. Write `every=2`.")
        if self.classes is None:
            return
        given = (self.classes,) if isinstance(self.classes, type | str) else tuple(self.classes)
        if not given or not all(isinstance(kind, type | str) for kind in given):
            raise ValueError(
                f"classes={self.classes!r} must be module classes or their names. Write `classes={{MyBlock}}`, or leave"
                " it out for whole units."
            )
        self.classes = given

    @abstractmethod
    def run(self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``forward(*args, **kwargs)`` of ``module`` gives, with less kept for backward.

        ``forward`` may be called again in backward.
        """

    def saves(self, unit: nn.Module) -> bool:
        """Whether less is kept of a ``unit`` under this policy."""
        return True

    def choose(self, root: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
        """The modules below ``root`` that this is applied to: none where nobody names any and there are no units.

        Args:
            units: the modules of all units, in the order of their definition.

        Raises:
            ValueError: a class occurs nowhere.
        """
        if self.classes is None:
            return [unit for unit in units if self.saves(unit)][:: self.every]
        chosen = [module for module in root.modules() if any(_is(module, kind) for kind in self.classes)]
        for kind in self.classes:
            if not any(_is(module, kind) for module in chosen):
                name = kind if isinstance(kind, str) else kind.__name__
                raise ValueError(
                    f"no module of `{type(root).__name__}` is a {name!r}. It has"
                    f" {sorted({type(module).__name__ for module in root.modules()})}."
                )
        return chosen[:: self.every]


def _is(module: nn.Module, kind: type | str) -> bool:
    return type(module).__name__ == kind if isinstance(kind, str) else isinstance(module, kind)


_KEEPS_ITS_INPUT = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)


@dataclass(kw_only=True)
class Recompute(ActivationPolicy):
    """Keep the inputs alone, and compute the forward again in backward (Chen 2016, arXiv:1604.06174).

    Random numbers are those of the first time. The cost is one more forward of what is recomputed.

    Args:
        inputs: where inputs wait; default: on the device.
    """

    inputs: OffloadActivations | None = None

    def run(self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled() or in_transform() or _checkpoints_itself(module):
            return forward(*args, **kwargs)
        inputs = _Inputs(args, _without_cache(module, kwargs), None if self.inputs is None else self.inputs.stash)
        # Torch keeps the random state of the devices of positional tensors alone.
        out = checkpoint(lambda _: inputs.call(forward), inputs.anchors, use_reentrant=False, **self._context())
        inputs.leave()
        return out

    def saves(self, unit: nn.Module) -> bool:
        """A single product or lookup keeps its input alone; an unembedding is the most costly of them."""
        return not isinstance(unit, _KEEPS_ITS_INPUT)

    def _context(self) -> dict[str, Any]:
        return {}


@dataclass(kw_only=True)
class Selective(Recompute):
    """Keep the inputs and what costly operations gave, and compute the rest again (Korthikanti 2022, section 5).

    Args:
        save: operations (overloads of ``torch.ops``) whose results are kept. Random ones are not: the random numbers
            of what follows depend on them.

    Raises:
        ValueError: ``save`` is empty.
        TypeError: something in it is no overload.
    """

    save: Iterable[Any] = COSTLY

    def __post_init__(self) -> None:
        super().__post_init__()
        self.save = frozenset(self.save)
        if not self.save:
            raise ValueError("Selective(save=()) keeps nothing but inputs. Write `Recompute()`.")
        for operation in self.save:
            if not isinstance(operation, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
                raise TypeError(
                    f"save={operation!r} is no overload of an operation. Write `Selective(save=[*COSTLY,"
                    " torch.ops.aten.mul.Tensor])`."
                )

    def _context(self) -> dict[str, Any]:
        return {"context_fn": partial(keeping, frozenset(self.save))}

    # Torch's operations do not pickle, and a process that is spawned gets its strategy so.

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "save": frozenset(_pickled(operation) for operation in self.save)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, save=frozenset(_unpickled(operation) for operation in state["save"]))


def _pickled(operation: Any) -> Any:
    return str(operation) if isinstance(operation, torch._ops.OpOverload) else operation


def _unpickled(operation: Any) -> Any:
    return reduce(getattr, operation.split("."), torch.ops) if isinstance(operation, str) else operation


@dataclass(kw_only=True)
class OffloadActivations(ActivationPolicy):
    """Keep everything, in host memory: it leaves as it is saved and comes back ahead of backward.

    Args:
        min_bytes: smaller tensors stay on the device.
        pin_memory: page-lock the host's copies, so that they move beside the computation.
    """

    min_bytes: int = 1 << 16
    pin_memory: bool = True
    stash: HostStash = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stash = HostStash(self.min_bytes, self.pin_memory)

    def run(self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled() or in_transform():
            return forward(*args, **kwargs)
        visit = self.stash.visit()
        with torch.autograd.graph.saved_tensors_hooks(visit.pack, visit.unpack):
            return forward(*args, **kwargs)


class _Inputs:
    """The arguments of one forward, which is called twice: at once, and in backward.

    Args:
        args, kwargs: of the forward.
        stash: where its tensors wait for the second call; ``None`` is where they are.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], stash: HostStash | None) -> None:
        self._arguments: Any = tree_map_only(Tensor, Version, (args, kwargs))
        self._stash = stash
        self.anchors = [t.new_empty(0) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        """Empty tensors on the devices of the arguments."""

    def call(self, forward: Forward) -> Any:
        """``forward`` with the arguments.

        Raises:
            RuntimeError: one was written since the first call began.
        """
        args, kwargs = tree_map_only((Version, Ticket), _returned, self._arguments)
        return forward(*args, **kwargs)

    def leave(self) -> None:
        """The first call is over: let go of tensors that wait elsewhere."""
        if self._stash is None:
            return
        visit, stash = self._stash.visit(), self._stash

        def left(kept: Version) -> Version | Ticket:
            return stash.put(kept.tensor, visit) if kept.is_current and stash.accepts(kept.tensor) else kept

        self._arguments = tree_map_only(Version, left, self._arguments)


@unobserved
def _returned(waiting: Version | Ticket) -> Tensor:
    if isinstance(waiting, Ticket):
        # A leaf where the graph had something before it: what the forward saves is the same.
        return waiting.get().detach().requires_grad_(waiting.requires_grad)
    if not waiting.is_current:
        raise RuntimeError(
            f"an argument of shape {tuple(waiting.tensor.shape)} of a forward that is to be recomputed was written in"
            " place, in this forward or after it, so the same cannot be computed again. Write `x = x + y` for"
            " `x += y`, or leave this module out: `Recompute(classes={...})`."
        )
    return waiting.tensor


def _checkpoints_itself(module: nn.Module) -> bool:
    """Whether a Hugging Face block, by `gradient_checkpointing_enable`, recomputes this very call."""
    return bool(getattr(module, "gradient_checkpointing", False)) and module.training


_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache")
"""Arguments of Hugging Face blocks that a forward appends to."""


def _without_cache(module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """``kwargs`` without a cache of keys and values: a second forward would append to it again.

    Hugging Face's own checkpointing does the same: training has no use for one that is empty.

    Raises:
        ValueError: it is not empty.
    """
    if not hasattr(module, "gradient_checkpointing") or getattr(module, "_can_checkpoint_with_cache", False):
        return kwargs
    for key in _CACHES:
        if _is_filled(kwargs.get(key), module):
            raise ValueError(
                f"`{key}` of a `{type(module).__name__}` that is to be recomputed holds keys and values, as a prefix"
                " does, and a second forward would append to it again. Use `activation_checkpointing='offload'`."
            )
    return {key: None if key in _CACHES else value for key, value in kwargs.items()}


def _is_filled(cache: Any, block: nn.Module) -> bool:
    if not hasattr(cache, "get_seq_length"):
        return bool(cache)
    # Blocks before this one may have appended theirs.
    layer = next((part.layer_idx for part in block.modules() if hasattr(part, "layer_idx")), 0)
    # A layer without attention has no length, and says so; a prefix shows in the others.
    with suppress(ValueError):
        return bool(cache.get_seq_length(layer))
    return False


NAMED: dict[str, Callable[[], ActivationPolicy]] = {
    "full": Recompute,
    "selective": Selective,
    "offload": OffloadActivations,
}
"""By the name that ``activation_checkpointing=`` takes."""


def activation_policies(spec: Any) -> list[ActivationPolicy]:
    """What ``activation_checkpointing=`` means: ``None``, a name, classes to recompute, a policy, or several of these.

    Raises:
        ValueError: a name is unknown, or there are no classes.
        TypeError: something else is given.
    """
    if spec is None:
        return []
    return [_policy(item) for item in (spec if isinstance(spec, list | tuple) else [spec])]


def _policy(item: Any) -> ActivationPolicy:
    if isinstance(item, ActivationPolicy):
        return item
    if isinstance(item, set | frozenset):
        return Recompute(classes=item)
    if isinstance(item, str):
        if item not in NAMED:
            raise ValueError(
                f"activation_checkpointing={item!r} is unknown: expected None, {', '.join(map(repr, NAMED))}, a set of"
                " module classes, or an `ActivationPolicy`."
            )
        return NAMED[item]()
    raise TypeError(
        f"activation_checkpointing={item!r} is no policy. Write `activation_checkpointing='full'`, a set of module"
        " classes, or `Recompute(every=2)`."
    )


def chosen_policies(
    root: nn.Module, units: Sequence[nn.Module], policies: Sequence[ActivationPolicy]
) -> dict[nn.Module, ActivationPolicy]:
    """Which policy stands around the forward of which module; of what is recomputed the inputs alone are offloaded.

    Raises:
        ValueError: a class occurs nowhere, two policies do not go together, or a forward cannot be wrapped.
    """
    found: dict[nn.Module, ActivationPolicy] = {}
    for policy in policies:
        for module in policy.choose(root, units):
            if isinstance(module, torch.jit.ScriptModule):
                raise ValueError(
                    f"{type(policy).__name__} cannot stand around the forward of a `{type(module).__name__}`, which is"
                    " compiled by `torch.jit`. Give it the plain module."
                )
            found[module] = _both(found[module], policy, module) if module in found else policy
    return found


def _both(first: ActivationPolicy, second: ActivationPolicy, module: nn.Module) -> ActivationPolicy:
    for recompute, store in ((first, second), (second, first)):
        if isinstance(recompute, Recompute) and isinstance(store, OffloadActivations) and recompute.inputs is None:
            return replace(recompute, inputs=store)
    raise ValueError(
        f"{type(first).__name__} and {type(second).__name__} both apply to a `{type(module).__name__}`. Give each its"
        " `classes`, or write `('full', 'offload')`."
    )
