"""Where a model is cut into units when nobody says where.

    model                      1.00    more than 1/4: look inside
      embed_tokens             0.30    a single module, more than twice any other part: stays in the root
      layers                   0.65    has no forward: look inside
        0                      0.16    a part
        1                      0.16    a part
      norm                     0.00    small: stays in the root

Every rank comes to the same cut: names, classes and sizes count, values do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

__all__ = ["MERGED_NUMEL", "NamedModules", "automatic_units"]

NamedModules = list[tuple[str, nn.Module]]
"""Modules with their full names; one unit, where it stands in a list."""

LARGEST_SHARE = 1 / 4
"""A larger part of all parameters is cut further, while it can be."""

LARGEST_SHARE_OF_BLOCKS = 1 / 8
"""The same for what is made of blocks or layers itself: it is cut further at a lower price."""

MERGED_NUMEL = 2**18
"""Elements. Neighbors merge into one unit up to this size: below it a collective costs its latency, not its bytes."""

ROOT_SHARE = 1 / 32
"""What is in the root is whole from forward to backward, and gathered once in place of twice: small parts stay there up
to this part of all parameters."""

SMALL = 1 / 16
"""Of the largest part: a single layer below it, as a norm is, does not pay for a collective."""


def automatic_units(root: nn.Module) -> list[NamedModules]:
    """Units of ``root``, which is none itself, in definition order; they are never nested.

    Their forwards are called, as far as the structure tells: weights that a parent reads past the forward that they
    belong to would be gathered by each use.
    """
    cut = _Cut(root)
    parts = cut.without_root(list(cut.parts("", root)))
    # Siblings share the path up to their own name.
    siblings = groupby(parts, key=lambda named: named[0].rpartition(".")[0])
    return [unit for _, members in siblings for unit in cut.merged(members)]


class _Cut:
    """One walk through ``root``, which remembers what it has seen."""

    def __init__(self, root: nn.Module) -> None:
        self._total = sum(_numel(parameter) for parameter in root.parameters())
        self._merged = min(MERGED_NUMEL, int(self._total * LARGEST_SHARE_OF_BLOCKS))
        self._named_blocks: set[str] = set()
        self._parents: dict[nn.Module, set[nn.Module]] = defaultdict(set)
        self._owners: dict[Tensor, set[nn.Module]] = defaultdict(set)
        for module in root.modules():
            self._named_blocks.update(getattr(module, "_no_split_modules", None) or ())
            for child in module.children():
                self._parents[child].add(module)
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._owners[parameter].add(module)
        self._seen = {root}
        self._sizes: dict[nn.Module, int] = {}

    def parts(self, prefix: str, parent: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Modules below ``parent`` that may be units, outermost first come."""
        for name, child in parent.named_children():
            if child in self._seen or not self._size(child) or isinstance(child, _NEVER_UNITS):
                continue
            self._seen.add(child)
            if self._is_part(parent, child):
                yield f"{prefix}{name}", child
            elif not _is_indivisible(child):
                yield from self.parts(f"{prefix}{name}.", child)

    def _is_part(self, parent: nn.Module, child: nn.Module) -> bool:
        inside = set(child.modules())
        # What another module calls as well has a window of its own.
        shared = any(not self._parents[module] <= inside for module in inside if module is not child)
        if shared or not _has_forward(child):
            return False
        return _is_indivisible(child) or self._size(child) <= self._largest(parent, child)

    def _largest(self, parent: nn.Module, child: nn.Module) -> float:
        """Elements that ``child`` may hold as a part."""
        if type(child).__name__ in self._named_blocks:
            return self._total * LARGEST_SHARE
        holds_blocks = any(self._is_block(module, inner) for module in child.modules() for inner in module.children())
        if holds_blocks and not _is_list(parent):
            return self._merged
        return self._total * (LARGEST_SHARE_OF_BLOCKS if holds_blocks or _is_list(child) else LARGEST_SHARE)

    def _is_block(self, parent: nn.Module, child: nn.Module) -> bool:
        """Whether ``child`` is one of the blocks that a model is made of, as far as its place tells."""
        if not self._size(child):
            return False
        return type(child).__name__ in self._named_blocks or (_is_list(parent) and not _is_layer(child))

    def _size(self, module: nn.Module) -> int:
        """Elements that a unit of ``module`` would hold: parameters that others hold too are in the root."""
        if module not in self._sizes:
            inside = set(module.modules())
            own = (parameter for parameter in module.parameters() if self._owners[parameter] <= inside)
            self._sizes[module] = sum(_numel(parameter) for parameter in own)
        return self._sizes[module]

    def without_root(self, parts: NamedModules) -> NamedModules:
        """``parts`` but for those that are better off in the root."""
        largest = max((self._size(module) for _, module in parts), default=0)
        equal: dict[tuple[int, str, bool], list[nn.Module]] = defaultdict(list)
        for _, module in parts:
            # A parametrized module has a class of its own.
            in_list = any(_is_list(parent) for parent in self._parents[module])
            equal[self._size(module), type(module).__name__, in_list].append(module)
        room = max(self._total * ROOT_SHARE, min(MERGED_NUMEL, self._total * LARGEST_SHARE))
        kept: set[nn.Module] = set()
        for (size, _, in_list), modules in sorted(equal.items(), key=lambda item: item[0][0]):
            # Of equal blocks none is treated differently; layers by name, as heads are, are no blocks.
            if len(modules) == 1 or (_is_layer(modules[0]) and (size <= largest * SMALL or not in_list)):
                room -= size * len(modules)
                kept.update(modules if room >= 0 else ())
        rest = [named for named in parts if named[1] not in kept]
        ascending = sorted((module for _, module in rest), key=self._size)
        # The unit that comes next is whole beside it: to free it would save as much as that, and cost a gather of it.
        # The last one is gathered once, like the root.
        if ascending and ascending[-1] is not rest[-1][1]:
            second, giant = ascending[-2:]
            if self._size(giant) > 2 * self._size(second):
                return [named for named in rest if named[1] is not giant]
        return rest

    def merged(self, siblings: Iterator[tuple[str, nn.Module]]) -> Sequence[NamedModules]:
        """Consecutive siblings, joined while together they are small."""
        merged: list[NamedModules] = []
        held = self._merged + 1
        for named in siblings:
            numel = self._size(named[1])
            if held + numel <= self._merged:
                merged[-1].append(named)
                held += numel
            else:
                merged.append([named])
                held = numel
        return merged


_NEVER_UNITS = (torch.jit.ScriptModule, nn.RNNCellBase)
"""What calls no forward of Python's; and cells, called once for each step in time, as what is beside them is."""


def _is_layer(module: nn.Module) -> bool:
    """Whether no module inside holds parameters."""
    return not any(True for child in module.children() for _ in child.parameters())


def _is_indivisible(module: nn.Module) -> bool:
    """Whether the forward of ``module`` needs all it holds at a time, past the forwards of what is inside."""
    if _is_layer(module) or isinstance(module, nn.MultiheadAttention) or parametrize.is_parametrized(module):
        return True
    if any(isinstance(child, nn.RNNCellBase) for child in module.children()):
        return _has_forward(module)
    own = sum(_numel(parameter) for parameter in module.parameters(recurse=False))
    return 2 * own > sum(_numel(parameter) for parameter in module.parameters())


def _has_forward(module: nn.Module) -> bool:
    """Whether ``module`` can be called: a ``ModuleList`` cannot."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential) and not isinstance(module, parametrize.ParametrizationList)


def _numel(parameter: Tensor) -> int:
    # What is lazy has no size yet; who lays it out says so.
    return 0 if is_lazy(parameter) else parameter.numel()
