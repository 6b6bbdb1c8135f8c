"""A unit: parameters that are whole together, and the module attributes that hold them.

at rest      module.weight is the resting parameter, a fragment
in a window  module.weight is the leaf, a view of the whole buffer
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from lightning_zero.param_group import ParamGroup
from lightning_zero.whole_parameter import WholeParameter

__all__ = ["ReplacedParameterError", "Unit"]


class ReplacedParameterError(RuntimeError):
    """A module's parameter is no longer the one that was sharded."""


@dataclass(frozen=True)
class _Slot:
    """One attribute of one module that holds a parameter; tied parameters have several."""

    module: weakref.ref[nn.Module]
    attribute: str
    name: str
    group: ParamGroup
    index: int

    def check(self) -> None:
        """See that the attribute, if its module is there yet, does not hold another parameter.

        Raises:
            ReplacedParameterError: it does, or it holds none.
        """
        module = self.module()
        if module is None:
            return
        current: Tensor | None = module._parameters.get(self.attribute)
        if current is self.group.parameters[self.index]:
            return
        known = current._resting if isinstance(current, WholeParameter) else current
        replaced = isinstance(current, nn.Parameter) and known is not self.group.parameters[self.index]
        if current is None or replaced:
            raise ReplacedParameterError(
                f"`{self.name}` was {'removed' if current is None else 'replaced'} after the model was sharded, so"
                " it would not be trained. Change the model in `configure_model`, or assign values in place:"
                f" `module.{self.name}.data = value`."
            )


class Unit:
    """The parameters that are whole together, and the attributes that hold them.

    Args:
        name: full name of the unit's (first) module.
        groups: their state, by dtype and by trained or frozen.
        is_root: whether this is the rest of the model, which stays whole from forward to backward.
    """

    def __init__(self, name: str, groups: Sequence[ParamGroup], is_root: bool = False) -> None:
        self.name = name
        self.groups = list(groups)
        self.is_root = is_root
        self.depth = 0
        """How many of its forwards are running."""
        self.swapped = False
        """Whether module attributes are leaves."""
        self._slots: list[_Slot] = []

    def add_slot(self, module: nn.Module, attribute: str, name: str, group: ParamGroup, index: int) -> None:
        """Let the window swap ``module.attribute``, whose full name is ``name``."""
        self._slots.append(_Slot(weakref.ref(module), attribute, name, group, index))

    @property
    def is_whole(self) -> bool:
        """Whether all whole values are held and current."""
        return all(group.is_whole for group in self.groups)

    @property
    def is_gathered(self) -> bool:
        """As `is_whole`, or about to be."""
        return all(group.is_gathered for group in self.groups)

    @property
    def updating(self) -> bool:
        """Whether its next gather waits for an update in the background: the same on every rank."""
        return any(group.main.updating for group in self.groups)

    def begin_update(self) -> None:
        """Do in the background what an optimizer queued for it."""
        for group in self.groups:
            group.main.begin_update()

    @property
    def numel_whole(self) -> int:
        """Elements of whole buffers held now."""
        return sum(group.layout.total for group in self.groups if group.whole is not None)

    def unshard(self) -> None:
        """Begin to gather; `wait` ends it."""
        for group in self.groups:
            group.unshard()

    def serve(self, wanted: bool) -> None:
        """Take part in a gather of all groups; keep what comes if it is ``wanted`` here, or rests here, and is due."""
        for group in self.groups:
            if (wanted or group.placements.keeps_whole_parameters) and not group.is_gathered:
                group.unshard()
            else:
                group.serve()

    def wait(self) -> None:
        """Make whole values current."""
        for group in self.groups:
            group.wait()

    def reshard(self) -> None:
        """Let go of whole values that do not rest."""
        for group in self.groups:
            group.reshard()

    def replace(self, group: ParamGroup, old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        """Let attributes that hold a parameter of ``group`` hold ``new`` where they hold ``old``."""
        self._exchange([(s, old[s.index], new[s.index]) for s in self._slots if s.group is group])

    def check(self) -> None:
        """See that every attribute still holds the parameter that was sharded.

        Raises:
            ReplacedParameterError: one holds another parameter, or none.
        """
        for slot in self._slots:
            slot.check()

    def swap_in(self) -> None:
        """Let module attributes be leaves. A foreign tensor, as `functional_call` sets it, stays."""
        if self.swapped:
            return
        self.swapped = True
        for group in self.groups:
            group.in_window = True
        self._exchange(
            [(slot, slot.group.parameters[slot.index], slot.group.leaves[slot.index]) for slot in self._slots]
        )

    def swap_out(self) -> None:
        """Let module attributes be resting parameters again."""
        if not self.swapped:
            return
        self.swapped = False
        for group in self.groups:
            group.in_window = False
        self._exchange(
            [(slot, slot.group.leaves[slot.index], slot.group.parameters[slot.index]) for slot in self._slots]
        )

    @staticmethod
    def _exchange(places: Iterable[tuple[_Slot, Tensor, Tensor]]) -> None:
        """Put the third where the second is; what else is there stays."""
        for slot, old, new in places:
            module = slot.module()
            if module is not None and module._parameters.get(slot.attribute) is old:
                module._parameters[slot.attribute] = cast(nn.Parameter, new)
