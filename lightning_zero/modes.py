"""Work of ours inside user code: what watches or records that code does not see it.

Selective checkpointing is a dispatch mode: it wants the second forward to run the operations of the first, and a
gather, a buffer that is new, or a copy from the host come at one time and not at the other. A backward that builds a
graph records what runs in its hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["making_ordinary_tensors", "unobserved", "unrecorded"]

P = ParamSpec("P")
T = TypeVar("T")


def unobserved(function: Callable[P, T]) -> Callable[P, T]:
    """``function`` outside of the dispatch modes that are active when it is called."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch._C._len_torch_dispatch_stack():
            return function(*args, **kwargs)
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run


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
