"""Forwards of units, compiled: one graph for blocks that are equal, in place of one for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_zero.activation import ActivationPolicy, Selective

__all__ = ["CompiledForwards", "compile_options"]


def compile_options(compile: bool | dict[str, Any] | None) -> dict[str, Any] | None:
    """Arguments of `torch.compile`; ``None`` compiles nothing.

    Raises:
        TypeError: ``compile`` is neither a truth value nor a dictionary.
    """
    if compile is None or compile is False:
        return None
    if compile is True:
        return {}
    if isinstance(compile, dict):
        return dict(compile)
    raise TypeError(
        f"compile={compile!r} says nothing. Write `compile=True`, or arguments of `torch.compile`, as"
        " `compile={'mode': 'max-autotune-no-cudagraphs'}`."
    )


class CompiledForwards:
    """`torch.compile` of forwards, once for each class: blocks that are equal share a graph.

    Args:
        options: of `torch.compile`; ``None`` compiles nothing.
        root: whose units are compiled.
        units: the modules of all units.
        policies: what stands around the forward of which module.

    Raises:
        ValueError: there are no units, or `Selective` would see nothing of what it is to keep.
    """

    def __init__(
        self,
        options: dict[str, Any] | None,
        root: nn.Module,
        units: Sequence[nn.Module],
        policies: Mapping[nn.Module, ActivationPolicy],
    ) -> None:
        if options is not None and not units:
            raise ValueError(
                f"`{type(root).__name__}` has no units, so `compile` has nothing to compile. Name them:"
                " `ZeROStrategy(units=[MyBlock], compile=True)`."
            )
        for module, policy in policies.items():
            # Compiled code shows no operations: all of it would be computed again.
            if options is not None and isinstance(policy, Selective) and not set(units).isdisjoint(module.modules()):
                raise ValueError(
                    f"Selective keeps results of operations, and a compiled `{type(module).__name__}` shows none: the"
                    " compiler itself decides what is kept, and computes again what is cheap. Leave"
                    " `activation_checkpointing` out, write 'full', or leave `compile` out."
                )
        self._options = options
        self._forwards: dict[type, Callable[..., Any]] = {}

    def of(self, module: nn.Module) -> Callable[..., Any] | None:
        """The compiled ``forward`` of the class of ``module``, or the one that someone put on the instance."""
        if self._options is None:
            return None
        if "forward" in module.__dict__:
            return torch.compile(module.__dict__["forward"], **self._options)
        kind = type(module)
        if kind not in self._forwards:
            self._forwards[kind] = torch.compile(kind.forward, **self._options)
        return self._forwards[kind]
