"""Which modules are units: the parts of a model that are gathered, computed and freed together.

    LightningModule            root: everything that is in no unit
      model.embed_tokens         root
      model.layers.0             unit 0
      model.layers.1             unit 1
      lm_head                    root

Pure: modules are only looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import nn

from lightning_zero.cut import NamedModules, automatic_units

__all__ = ["NamedModules", "UnitSpec", "UnknownUnitError", "find_units"]

UnitSpec = Callable[[nn.Module], bool] | Iterable[type[nn.Module] | str]
"""A predicate on modules, or classes given as types or as names."""


class UnknownUnitError(ValueError):
    """The user's ``units`` match no module."""


def find_units(root: nn.Module, spec: UnitSpec | None = None) -> list[NamedModules]:
    """Units of ``root`` in definition order, each a list of ``(full name, module)`` that are never nested.

    Those of the user's ``spec``, each match one; else see `automatic_units`.

    Args:
        root: the module to cut. It is never a unit itself.
        spec: classes (types or class names), or a predicate on modules.

    Raises:
        UnknownUnitError: no module matches a class named in ``spec``, or the predicate is false everywhere.
    """
    return automatic_units(root) if spec is None else [[named] for named in _matching(root, spec)]


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


def _outermost(root: nn.Module, matches: Callable[[nn.Module], bool]) -> NamedModules:
    """Matching descendants of ``root`` that hold parameters, not looking inside a match."""
    return list(_descend("", root, {root}, matches))


def _descend(
    prefix: str, parent: nn.Module, seen: set[nn.Module], matches: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in parent.named_children():
        if child in seen:
            continue
        seen.add(child)
        path = f"{prefix}{name}"
        if matches(child) and any(True for _ in child.parameters()):
            yield path, child
        else:
            yield from _descend(f"{path}.", child, seen, matches)
