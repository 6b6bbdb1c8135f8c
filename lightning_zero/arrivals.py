"""How backward brings gradients to the parameters of one group, and which of them it will bring.

    begin       what autograd is about to run       the gradients that are awaited
    backward    each gradient goes to the group     the last awaited one completes it

A gradient arrives at the leaf, or at the resting parameter itself where a custom autograd function took it: such a call
goes past everything that could have put the leaf in its place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_zero.gradients import GroupGradients
from lightning_zero.sharded_parameter import ShardedParameter
from lightning_zero.whole_parameter import WholeParameter

__all__ = ["Arrivals"]

# Past the properties of our classes.
_raw_grad = cast(Any, torch.Tensor.grad)
_raw_requires_grad = cast(Any, torch.Tensor.requires_grad)


class Arrivals:
    """The hooks on the leaves and resting parameters of one group.

    Python runs here at every gradient of every backward: each function called in `_arrive` is felt.

    Args:
        parameters: at rest.
        leaves: of the same.
        gradients: take what arrives.
        on_first: called when a gradient arrives and nobody has said what is awaited: a backward runs.
        on_last: called when all awaited gradients are there.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        leaves: Sequence[WholeParameter],
        gradients: GroupGradients,
        on_first: Callable[[], None],
        on_last: Callable[[], None],
    ) -> None:
        self._parameters = parameters
        self._leaves = leaves
        self._gradients = gradients
        self._on_first = on_first
        self._on_last = on_last
        self._handles: list[RemovableHandle] = []
        self._nodes: dict[int, list[Any]] = {}
        self._awaited: dict[int, int] | None = None

    @property
    def trained(self) -> list[int]:
        """Parameters that are trained now."""
        with torch._C.DisableTorchFunctionSubclass():
            return [i for i, trained in enumerate(map(_raw_requires_grad.__get__, self._parameters)) if trained]

    def hook(self, index: int) -> None:
        """Have backward bring gradients of a parameter; torch forbids the hook while it is frozen."""
        parameter, leaf = self._parameters[index], self._leaves[index]
        if index in self._nodes or not parameter.requires_grad:
            return
        leaf.follow_requires_grad()
        self._handles += [self.hook_into(holder, index) for holder in (leaf, parameter)]
        with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
            self._nodes[index] = [torch.autograd.graph.get_gradient_edge(holder).node for holder in (leaf, parameter)]

    def holds(self, index: int) -> bool:
        """Whether the leaf's node, which refers to the leaf, is kept here."""
        return index in self._nodes

    def reach_resting(self, index: int, tensor: Tensor) -> bool:
        """Whether a gradient of ``tensor`` arrives at the resting parameter itself."""
        with torch._C.DisableTorchFunctionSubclass():
            return index in self._nodes and torch.autograd.graph.get_gradient_edge(tensor).node is self._nodes[index][1]

    def hook_into(self, holder: Tensor, index: int) -> RemovableHandle:
        """Have backward bring what reaches ``holder`` as a gradient of a parameter."""
        me = weakref.ref(self)

        def arrive(holder: Tensor) -> None:
            arrivals = me()
            if arrivals is not None:
                arrivals._arrive(index, holder)

        return cast(RemovableHandle, torch.Tensor.register_post_accumulate_grad_hook(holder, arrive))

    def _arrive(self, index: int, holder: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            grad = _raw_grad.__get__(holder)
            _raw_grad.__set__(holder, None)
        if grad is None:  # it was frozen between forward and backward
            return
        if self._awaited is None:
            self._on_first()
        self._gradients.arrive(index, grad)
        awaited = self._awaited
        # One that was not announced joins at the end of backward.
        if awaited and index in awaited:
            awaited[index] -= 1
            if not awaited[index]:
                del awaited[index]
                if not awaited:
                    self._on_last()

    # What the running backward will bring

    def expect(self) -> None:
        """Ask autograd which gradients the running backward will bring."""
        trained = self.trained
        counts = map(sum, map(_will_run, [self._nodes.get(i, ()) for i in trained]))
        self._awaited = {i: count for i, count in zip(trained, counts, strict=True) if count}

    def expect_nothing(self) -> None:
        """The running backward brings no more."""
        self._awaited = {}

    def forget(self) -> None:
        """No backward is known to run."""
        self._awaited = None

    @property
    def awaited(self) -> dict[int, int]:
        """How many gradients of which parameters are still to come, as far as autograd knew at the beginning."""
        return self._awaited or {}

    def remove(self) -> None:
        """Take the hooks away. Nodes refer to parameters, and torch exchanges no tensor that something in C++ holds."""
        self._nodes.clear()
        for handle in self._handles:
            handle.remove()


def _will_run(nodes: Sequence[Any]) -> list[bool]:
    """Which of a parameter's nodes the running backward will run."""
    try:
        return [*map(torch._C._will_engine_execute_node, nodes)]
    except RuntimeError:
        # `torch.autograd.grad` with respect to a leaf: it takes the gradient, and nothing accumulates there.
        return [_runs(node) for node in nodes]


def _runs(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False
