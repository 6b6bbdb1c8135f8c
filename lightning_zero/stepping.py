"""Whether an optimizer does its own arithmetic now: between torch's hooks of its step, but for the closure.

    step() | closure: forward, backward, hooks | exp_avg.mul_() ... |
             user code                           the optimizer's

User code may bring values of its own rank to any operation. What an optimizer computes with is alike on all ranks, or
plain data parallelism would not train one model either.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

__all__ = ["begin", "end", "is_stepping", "user_code"]

_outermost: int | None = None
"""Of optimizers that step others: the one that was called."""


def begin(optimizer: object, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Note that ``optimizer`` steps, on sharded tensors; its arguments, in which closures count as user code."""
    global _outermost
    if _outermost is None:
        _outermost = id(optimizer)
    closures = {key: _as_user_code(value) if callable(value) else value for key, value in kwargs.items()}
    return (args[0], *(_as_user_code(value) if callable(value) else value for value in args[1:])), closures


def end(optimizer: object) -> None:
    """Note that the step of ``optimizer`` is over."""
    global _outermost
    if _outermost == id(optimizer):
        _outermost = None


def user_code() -> None:
    """Note that user code runs. A step that an exception ended told nobody."""
    global _outermost
    _outermost = None


def is_stepping() -> bool:
    """Whether an optimizer's own arithmetic runs; the backward that one runs is the model's."""
    return _outermost is not None and not torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


def _as_user_code(closure: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(closure)
    def run(*args: Any, **kwargs: Any) -> Any:
        global _outermost
        before, _outermost = _outermost, None
        result = closure(*args, **kwargs)
        # Not where it raised: that ends the step, as a rule.
        _outermost = before
        return result

    return run
