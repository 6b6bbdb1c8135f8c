"""Work of ours inside user code that a dispatch mode watches: the mode does not see it.

Selective checkpointing is such a mode: it wants the second forward to run the operations of the first, and a gather, a
buffer that is new, or a copy from the host come at one time and not at the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["unobserved"]

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
