"""Results of costly operations, kept from the first run of a forward for the second one.

    first run     mm -> a | gelu -> b | mm -> c      a and c are kept
    second run    mm: a   | gelu -> b | mm: c        b is computed, the matrix products are not

What the second run does not find it computes: the rest, random results, whose numbers would be missing to those
that follow, and results that someone wrote into. What it found it does not find again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["Version", "keeping"]

_Key: TypeAlias = tuple[Any, int]
"""An operation, and how often it ran before."""


class Version:
    """A tensor, and whether someone has written into it since.

    Args:
        tensor: held.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        # Tensors of inference mode count nothing; autograd takes none that it would have to save.
        self._number = None if tensor.is_inference() else tensor._version

    @property
    def is_current(self) -> bool:
        """Whether it has the values of then."""
        return self._number is None or self.tensor._version == self._number


def keeping(operations: Collection[Any]) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Contexts of the first run and of each further one; the results of ``operations`` are kept."""
    kept: dict[_Key, Any] = {}
    return _First(operations, kept), _Further(operations, kept)


class _Run(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, operations: Collection[Any], kept: dict[_Key, Any]) -> None:
        super().__init__()
        self._operations = operations
        self._kept = kept
        self._ran: Counter[Any] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Compiled code runs as such.
        return True

    def __enter__(self) -> Any:
        self._ran.clear()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self._operations:
            return func(*args, **kwargs)
        key = func, self._ran[func]
        self._ran[func] += 1
        return self._costly(key, args, kwargs)

    def _costly(self, key: _Key, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class _First(_Run):
    def _costly(self, key: _Key, args: Any, kwargs: Any) -> Any:
        func, _ = key
        out = func(*args, **kwargs)
        if not _is_random(func, args, kwargs):
            self._kept[key] = tree_map_only(Tensor, lambda tensor: Version(_alias(tensor)), out)
        return out


class _Further(_Run):
    def _costly(self, key: _Key, args: Any, kwargs: Any) -> Any:
        func, _ = key
        kept = self._kept.pop(key, None)
        if kept is None or not all(one.is_current for one in tree_leaves(kept) if isinstance(one, Version)):
            return func(*args, **kwargs)
        return tree_map_only(Version, lambda one: one.tensor, kept)


def _alias(tensor: Tensor) -> Tensor:
    """``tensor`` without the graph that it will get; they share their count of writes."""
    guard: Any = torch._C._SetExcludeDispatchKeyGuard
    # Below autograd a view has a count of its own, but for this.
    with guard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _is_random(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether this call draws random numbers: attention does where it has dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given)
    return True
