"""The user's hooks on one parameter: they outlive its sharding, and their handles go on to remove them.

before   register_hook               the parameter's own dictionary of hooks
sharded  the same dictionary         the leaf, and the resting parameter, call what is in it at each backward
after    the same dictionary         the parameter's own again
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

__all__ = ["ParamHooks"]


class ParamHooks:
    """Hooks on a parameter that is about to be sharded.

    Args:
        parameter: plain. An exchange with its sharded form would leave earlier hooks behind; so they are kept here.
        dtype: in which hooks expect a gradient.
    """

    def __init__(self, parameter: Tensor, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._local = _dictionary(parameter._backward_hooks)
        self.on_accumulated = _dictionary(parameter._post_accumulate_grad_hooks)
        """Called with the resting parameter after its mean gradient has changed."""
        self._called = False

    @property
    def has_local(self) -> bool:
        """Whether some hook waits for local gradients."""
        return bool(self._local)

    def register(self, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        """Call ``hook`` with each local gradient, as ``Tensor.register_hook`` does."""
        handle = RemovableHandle(self._local)
        self._local[handle.id] = hook
        return handle

    def register_accumulated(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """Call ``hook`` with the resting parameter after its mean gradient has changed."""
        handle = RemovableHandle(self.on_accumulated)
        self.on_accumulated[handle.id] = hook
        return handle

    def listen(self, leaf: Tensor, parameter: Tensor) -> None:
        """Have the leaf and the resting parameter, which gradients reach, call the hooks of the time of backward."""
        if self._called:
            return
        hooks, dtype = self._local, self._dtype

        def call(grad: Tensor) -> Tensor:
            seen = grad.to(dtype)
            for hook in list(hooks.values()):
                changed = hook(seen)
                seen = seen if changed is None else changed
            return seen.to(grad.dtype)

        torch.Tensor.register_hook(leaf, call)
        parameter._backward_hooks = hooks
        self._called = True

    def accumulated(self, parameter: Tensor) -> None:
        """The mean gradient of ``parameter`` has changed."""
        for hook in list(self.on_accumulated.values()):
            hook(parameter)

    def give_back(self, parameter: Tensor) -> None:
        """Put the hooks on ``parameter``, which is plain again."""
        if self._local:
            parameter._backward_hooks = self._local
        if self.on_accumulated:
            parameter._post_accumulate_grad_hooks = self.on_accumulated


def _dictionary(hooks: Any) -> OrderedDict[int, Callable[[Tensor], Any]]:
    return OrderedDict() if hooks is None else hooks
