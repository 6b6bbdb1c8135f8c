"""Hooks of saved tensors that step aside for the transforms of `torch.func`, which refuse any.

step            pack, unpack: weights are saved as places
torch.func      without hooks: graphs hold weights themselves
step            pack, unpack
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch._C._functorch import peek_interpreter_stack

__all__ = ["hooks_are_refused", "in_transform", "steps_aside", "top_hooks"]

_autograd: Any = torch._C._autograd
_refusing = torch.autograd.graph.disable_saved_tensors_hooks

_packs: set[Callable[..., Any]] = set()

Pack = TypeVar("Pack", bound=Callable[..., Any])


def steps_aside(pack: Pack) -> Pack:
    """Let ``pack``, a method, be left out where hooks are refused, for the time of that."""
    _packs.add(pack)
    return pack


def hooks_are_refused() -> bool:
    """Whether a transform of `torch.func` runs that takes no hooks of saved tensors."""
    return not _autograd._saved_tensors_hooks_is_enabled()


def in_transform() -> bool:
    """Whether a transform of `torch.func` runs: what is computed again later would be so without it."""
    return peek_interpreter_stack() is not None


def top_hooks() -> Any:
    """The innermost pair of hooks, or ``None``."""
    return _autograd._top_saved_tensors_default_hooks(False)


def _is_ours(hooks: Any) -> bool:
    pack = hooks[0].func if isinstance(hooks[0], partial) else hooks[0]
    return getattr(pack, "__func__", None) in _packs


@contextmanager
def _refusing_others(error_message: str) -> Iterator[None]:
    aside = []
    try:
        while (top := top_hooks()) is not None and _is_ours(top):
            _autograd._pop_saved_tensors_default_hooks()
            aside.append(top)
        with _refusing(error_message):
            yield
    finally:
        for pack, unpack in reversed(aside):
            _autograd._push_saved_tensors_default_hooks(pack, unpack)


def _disable_saved_tensors_hooks(error_message: str) -> Any:
    """Torch's own, but for hooks that step aside."""
    top = None if torch.compiler.is_compiling() else top_hooks()
    return _refusing(error_message) if top is None or not _is_ours(top) else _refusing_others(error_message)


# The transforms look it up at each call, and offer no other place.
torch.autograd.graph.disable_saved_tensors_hooks = _disable_saved_tensors_hooks
