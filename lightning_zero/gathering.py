"""Whole parameters by hand: `gathered` opens the windows of a module and keeps them open.

with gathered(model):                    plain parameters of main precision, on every rank
with gathered(model, writeback=True):    and what rank 0 writes into them stays
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from lightning_zero.engine import Engine
from lightning_zero.param_group import ParamGroup
from lightning_zero.sharded_parameter import ShardedParameter
from lightning_zero.unit import Unit
from lightning_zero.whole_parameter import WholeParameter

__all__ = ["gathered"]


@contextmanager
def gathered(module: nn.Module, writeback: bool = False) -> Iterator[None]:
    """Context in which the parameters of ``module`` are whole and plain, on every rank: a collective.

    ``module`` is a sharded module or any part of one. Memory: one whole copy of its units, in main precision.

    Args:
        writeback: keep what rank 0 wrote into the parameters.

    Raises:
        RuntimeError: a rank wrote a parameter and ``writeback`` is false; at the end, on all ranks, with nothing kept.
    """
    units = _units_of(module)
    with ExitStack() as stack:
        for engine in dict.fromkeys(engine for engine, _ in units):
            engine.meet("gathered")
        for engine, unit in units:
            stack.enter_context(engine.windows.held_open(unit))
        opened = [_open(unit, group) for _, unit in units for group in unit.groups]
        for one in opened:
            stack.callback(one.close)
        try:
            yield
            if writeback:
                for one in opened:
                    one.write_back()
            else:
                _refuse_writes(opened)
        except BaseException:
            for one in opened:
                one.restore()
            raise


class _Leaves:
    """A group whose leaves have main precision: they are what user code meets."""

    def __init__(self, unit: Unit, group: ParamGroup) -> None:
        self.group = group
        self._snapshot = group.snapshot()

    def written_names(self) -> list[str]:
        return self.group.written_names()

    def write_back(self) -> None:
        self.group.write_back()

    def restore(self) -> None:
        self.group.restore(self._snapshot)

    def close(self) -> None:
        """Nothing was put in the place of the leaves."""


class _MainCopies:
    """A group whose leaves have another dtype: whole parameters in main precision take their place."""

    def __init__(self, unit: Unit, group: ParamGroup) -> None:
        self.group = group
        self._unit = unit
        _open_copies[group] = self
        main = group.whole_main_weight()
        self._whole = main.clone() if main is group.main_weight else main
        self._leaves = group.leaves_over(self._whole)
        self._versions = self.versions()
        unit.replace(group, group.leaves, self._leaves)

    def versions(self) -> list[int]:
        return [leaf._version for leaf in self._leaves]

    def written_names(self) -> list[str]:
        return self.written_since(self._versions)

    def written_since(self, versions: Sequence[int]) -> list[str]:
        changed = zip(self.group.names, self.versions(), versions, strict=True)
        return [name for name, now, before in changed if now != before]

    def write_back(self) -> None:
        self.group.store(self.group.collectives.broadcast(self._whole, "writeback"))
        self._versions = self.versions()

    def restore(self) -> None:
        """The copy goes, and with it what was written."""

    def close(self) -> None:
        del _open_copies[self.group]
        self._unit.replace(self.group, self._leaves, self.group.leaves)


class _OpenAlready(_Leaves):
    """A group whose copies a `gathered` around this one has put there: they are what user code meets here too."""

    def __init__(self, copies: _MainCopies) -> None:
        self.group = copies.group
        self._copies = copies
        self._before = copies._whole.clone()
        self._versions = copies.versions()

    def written_names(self) -> list[str]:
        # What the outer one may keep was written before this one opened.
        return self._copies.written_since(self._versions)

    def write_back(self) -> None:
        self._copies.write_back()

    def restore(self) -> None:
        self._copies._whole.copy_(self._before)


_open_copies: weakref.WeakKeyDictionary[ParamGroup, _MainCopies] = weakref.WeakKeyDictionary()


def _open(unit: Unit, group: ParamGroup) -> _Leaves | _MainCopies:
    if group in _open_copies:
        return _OpenAlready(_open_copies[group])
    return (_Leaves if group.model_dtype == group.main_dtype else _MainCopies)(unit, group)


def _refuse_writes(opened: Sequence[_Leaves | _MainCopies]) -> None:
    written = [name for one in opened for name in one.written_names()]
    flag = torch.tensor([bool(written)], dtype=torch.uint8)
    if opened:
        opened[0].group.collectives.max_flags(flag).wait()
    if flag.item():
        raise RuntimeError(
            f"`{written[0] if written else 'a parameter'}` was written inside `gathered(module)`"
            f"{'' if written else ' on another rank'}; nothing was kept. To keep what rank 0 wrote, use"
            " `with lightning_zero.gathered(module, writeback=True):`."
        )


def _units_of(module: nn.Module) -> list[tuple[Engine, Unit]]:
    found: dict[Unit, Engine] = {}
    for parameter in module.parameters():
        # A window may be open already, and then attributes are leaves.
        resting = parameter._resting if isinstance(parameter, WholeParameter) else parameter
        owner = resting.owner if isinstance(resting, ShardedParameter) else None
        if isinstance(owner, ParamGroup) and isinstance(owner.observer, Engine):
            found[owner.observer.windows.unit_of(owner)] = owner.observer
    return [(engine, unit) for unit, engine in found.items()]
