"""Which modules are units: the parts of a model that are gathered, computed and freed together.

    LightningModule            root: everything that is in no unit
      model.embed_tokens         root
      model.layers.0             unit 0
      model.layers.1             unit 1
      lm_head                    root

Pure: modules are only looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

__all__ = ["NamedModules", "UnitSpec", "UnknownUnitError", "find_units"]

UnitSpec = Callable[[nn.Module], bool] | Iterable[type[nn.Module] | str]
"""A predicate on modules, or classes given as types or as names."""

NamedModules = list[tuple[str, nn.Module]]
"""Modules with their full names; one unit, where it stands in a list."""

LARGEST_SHARE = 1 / 8
"""An element of a ``ModuleList`` or ``Sequential`` is a unit if it holds at most this part of all parameters."""

MERGED_NUMEL = 2**18
"""Elements. Siblings merge into one unit up to this size: below it a collective costs its latency, not its bytes."""


class UnknownUnitError(ValueError):
    """The user's ``units`` match no module."""


def find_units(root: nn.Module, spec: UnitSpec | None = None) -> list[NamedModules]:
    """Units of ``root`` in definition order, each a list of ``(full name, module)`` that are never nested.

    In order of preference: the user's ``spec``; the classes that Hugging Face models list in ``_no_split_modules``;
    elements of ``ModuleList`` and ``Sequential``. But for the user's, small siblings in a row are one unit.

    Args:
        root: the module to cut. It is never a unit itself.
        spec: classes (types or class names), or a predicate on modules.

    Raises:
        UnknownUnitError: no module matches a class named in ``spec``, or the predicate is false everywhere.
    """
    if spec is not None:
        return [[named] for named in _matching(root, spec)]
    names = _no_split_classes(root)
    largest = _numel(root) * LARGEST_SHARE
    blocks = _outermost(root, lambda module: type(module).__name__ in names) or _list_elements(root, largest)
    # Siblings share the path up to their own name.
    siblings = groupby(blocks, key=lambda named: named[0].rpartition(".")[0])
    return [unit for _, members in siblings for unit in _merged(members, min(MERGED_NUMEL, int(largest)))]


def _matching(root: nn.Module, spec: UnitSpec) -> NamedModules:
    if callable(spec) and not isinstance(spec, type):
        found = _outermost(root, spec)
        if not found:
            raise UnknownUnitError(
                "units: the predicate is true for no submodule of"
                f" `{type(root).__name__}`. Name a class instead: `units=[{_example_class(root)}]`."
            )
        return found
    classes = [spec] if isinstance(spec, (str, type)) else list(spec)
    for wanted in classes:
        if not isinstance(wanted, (str, type)):
            raise UnknownUnitError(
                f"units: {wanted!r} is neither a module class nor the name of one."
                f" Write `units=[{_example_class(root)}]`."
            )
        if not any(_is_a(module, wanted) for module in root.modules() if module is not root):
            raise UnknownUnitError(
                f"units: no submodule of `{type(root).__name__}` is a {wanted!r}. It has"
                f" {sorted({type(module).__name__ for module in root.children()})} and their children."
                f" Write `units=[{_example_class(root)}]`."
            )
    return _outermost(root, lambda module: any(_is_a(module, wanted) for wanted in classes))


def _is_a(module: nn.Module, wanted: type[nn.Module] | str) -> bool:
    return type(module).__name__ == wanted if isinstance(wanted, str) else isinstance(module, wanted)


def _example_class(root: nn.Module) -> str:
    return next((type(module).__name__ for module in root.modules() if module is not root), "nn.Linear")


def _no_split_classes(root: nn.Module) -> set[str]:
    """Class names that Hugging Face models below ``root`` declare as blocks."""
    names: set[str] = set()
    for module in root.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    return names


def _outermost(root: nn.Module, matches: Callable[[nn.Module], bool]) -> NamedModules:
    """Matching descendants of ``root`` that hold parameters, not looking inside a match."""
    return list(_descend("", root, {root}, lambda parent, child: matches(child)))


def _descend(
    prefix: str, parent: nn.Module, seen: set[nn.Module], matches: Callable[[nn.Module, nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in parent.named_children():
        if child in seen:
            continue
        seen.add(child)
        path = f"{prefix}{name}"
        if matches(parent, child) and _numel(child):
            yield path, child
        else:
            yield from _descend(f"{path}.", child, seen, matches)


def _list_elements(root: nn.Module, largest: float) -> NamedModules:
    """Elements of lists below ``root`` that hold at most ``largest`` parameters."""
    return list(_descend("", root, {root}, lambda parent, child: _is_list(parent) and _numel(child) <= largest))


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential) and not isinstance(module, ParametrizationList)


def _merged(siblings: Iterable[tuple[str, nn.Module]], limit: int) -> Sequence[NamedModules]:
    """Consecutive siblings, joined while together they hold at most ``limit`` elements."""
    merged: list[NamedModules] = []
    held = limit + 1
    for named in siblings:
        numel = _numel(named[1])
        if held + numel <= limit:
            merged[-1].append(named)
            held += numel
        else:
            merged.append([named])
            held = numel
    return merged


def _numel(module: nn.Module) -> int:
    # What is lazy has no size yet; who lays it out says so.
    return sum(parameter.numel() for parameter in module.parameters() if not is_lazy(parameter))
