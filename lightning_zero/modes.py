"""Work of ours inside user code: what watches or records that code does not see it.

Selective checkpointing is a dispatch mode: it wants the second forward to run the operations of the first, and a
gather, a buffer that is new, or a copy from the host come at one time and not at the other. What is made inside a
transform of `torch.func` is one of its wrappers, without memory of its own. A backward that builds a graph records what
runs in its hooks. A compiler traces whatever it meets.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["Unobserved", "making_ordinary_tensors", "unobserved", "unrecorded"]

P = ParamSpec("P")
T = TypeVar("T")


def unobserved(function: Callable[P, T]) -> Callable[P, T]:
    """``function`` outside of the dispatch modes and transforms of `torch.func` that are active when it is called."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        observed, transformed = torch._C._len_torch_dispatch_stack(), peek_interpreter_stack() is not None
        if not observed and not transformed:
            return function(*args, **kwargs)
        with ExitStack() as outside:
            if transformed:
                outside.enter_context(temporarily_clear_interpreter_stack())
            if observed:
                outside.enter_context(_disable_current_modes())
            return function(*args, **kwargs)

    return run


class Unobserved(AbstractContextManager[T]):
    """``context``, entered and left unobserved and uncompiled; what runs in it is observed and compiled as around it.

    A compiler that is active there would take our own lines for the model's, and end a graph that has to be whole at
    the first that it cannot trace.
    """

    def __init__(self, context: AbstractContextManager[T]) -> None:
        self._context = context

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @unobserved
    def __enter__(self) -> T:
        return self._context.__enter__()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @unobserved
    def __exit__(self, *exc: Any) -> bool | None:
        return self._context.__exit__(*exc)


def unrecorded(function: Callable[P, T]) -> Callable[P, T]:
    """``function`` without a graph. To ask whether one is recorded is cheaper than to switch it off again."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return run


_NOTHING = nullcontext()


def making_ordinary_tensors() -> AbstractContextManager[Any]:
    """Context in which no tensor is one of inference mode, which could never be saved for a backward again."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING
