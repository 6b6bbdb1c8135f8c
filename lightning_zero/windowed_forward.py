"""A module's forward inside a window: on the instance, so names, classes and ``state_dict`` keys stay as they are."""

from __future__ import annotations

import copy
import inspect
import types
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from lightning_zero.activation import ActivationPolicy
from lightning_zero.modes import Unobserved
from lightning_zero.substitutes import the_same_again

__all__ = ["WindowedForward"]

_PATCHED = "_forward_before_sharding"
"""Attribute of a module that keeps a forward that someone had put on the instance."""


class WindowedForward:
    """A module's ``forward`` inside a window. It stands on the instance: names and classes stay as they are.

    Args:
        module: whose forward is wrapped.
        window: makes the context of each call.
        compiled: what `torch.compile` made of the forward on the instance, or else of the class's.
        policy: decides what the forward keeps for its backward; default: everything.
    """

    def __init__(
        self,
        module: nn.Module,
        window: Callable[[], AbstractContextManager[Any]],
        compiled: Callable[..., Any] | None = None,
        policy: ActivationPolicy | None = None,
    ) -> None:
        # Neither the module nor anything bound to it is held here: the module must be free to go.
        self._module = weakref.ref(module)
        self._window = window
        self._compiled = compiled
        self._policy = policy
        self.__wrapped__ = type(module).forward
        self.put_on()

    def put_on(self) -> None:
        """Let the module's calls come here."""
        module = self._module()
        assert module is not None
        if "forward" in module.__dict__:
            module.__dict__[_PATCHED] = module.__dict__["forward"]
        module.__dict__["forward"] = self

    def take_off(self) -> None:
        """Give the module its own forward back, if it has this one."""
        module = self._module()
        if module is not None and module.__dict__.get("forward") is self:
            del module.__dict__["forward"]
            if _PATCHED in module.__dict__:
                module.__dict__["forward"] = module.__dict__.pop(_PATCHED)

    def _own(self) -> Callable[..., Any]:
        """The forward that someone put on the instance, else the class's."""
        module = self._module()
        assert module is not None
        patched: Callable[..., Any] | None = module.__dict__.get(_PATCHED)
        if patched is not None:
            return self._compiled or patched
        return types.MethodType(self._compiled or self.__wrapped__, module)

    @property
    def __signature__(self) -> inspect.Signature:
        """The module's own, which libraries read to see what a model accepts."""
        return inspect.signature(self._own())

    # A compiler ends its graph here, says so where it may not, and begins another one inside.
    @torch.compiler.disable(  # type: ignore[untyped-decorator]
        recursive=False, reason="the weights of a block are gathered here; `fullgraph=True` is for single blocks"
    )
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        if self._policy is None or module is None:
            return self._in_window(*args, **kwargs)
        return self._policy.run(module, the_same_again(module, self._in_window), args, kwargs)

    def _in_window(self, *args: Any, **kwargs: Any) -> Any:
        with Unobserved(self._window()):
            return self._own()(*args, **kwargs)

    def remove(self) -> None:
        """`take_off` for good; who kept this one calls the module's own forward through it."""
        self._window, self._policy = nullcontext, None
        self.take_off()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A file must open where this package is not installed: there the forward is the module's own.
        module = self._module()
        if module is None:
            raise TypeError("A forward inside a window cannot be pickled without its module. Keep the module.")
        return getattr, (module, "forward")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copied module shares no window: its forward is its own."""
        original = self._module()
        module = memo.get(id(original))
        if original is None or module is None:
            raise RuntimeError("A forward inside a window cannot be copied without its module. Copy the module.")
        patched = original.__dict__.get(_PATCHED)
        return types.MethodType(self.__wrapped__, module) if patched is None else copy.deepcopy(patched, memo)
