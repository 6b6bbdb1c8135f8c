"""Windows: the time in which a unit's parameters are whole.

    forward    enter 0 | enter 1 | ... | enter n      gather k + 1 while k computes, free k when k + 1 opens
    backward   open n | ... | open 1 | open 0         the same in reverse, opened by autograd itself

In a unit's window the module's attributes are plain leaves; outside they are resting parameters. Autograd never
holds a whole buffer that does not rest: a saved weight is packed as a place in a buffer, and unpacking opens the window
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.flat_buffer import storage_id
from lightning_zero.lockstep import Lockstep
from lightning_zero.modes import unobserved
from lightning_zero.param_group import ParamGroup
from lightning_zero.saved_hooks import hooks_are_refused, steps_aside, top_hooks
from lightning_zero.sharded_parameter import ShardedParameter
from lightning_zero.stash import Ticket, Visit, without_graph
from lightning_zero.unit import Unit
from lightning_zero.whole_parameter import ConcealedParameter, NarrowParameter, WholeParameter, stored_dtype

__all__ = ["Windows", "in_backward"]


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread. Asked of autograd: a flag of ours would survive an exception."""
    return torch._C._current_graph_task_id() != -1


@dataclass(frozen=True)
class _PackedWeight:
    """A saved tensor that is a view of a whole buffer."""

    unit: Unit
    group: ParamGroup
    index: int
    version: int
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True)
class _PackedParameter:
    """A resting parameter that a custom function saved: such a call goes past what would have put the leaf there."""

    group: ParamGroup
    parameter: ShardedParameter
    index: int
    version: int


_PACKABLE = {Tensor, nn.Parameter, WholeParameter, NarrowParameter, ConcealedParameter}


class _Order:
    """Which unit was opened after which one, the last time."""

    def __init__(self) -> None:
        self.previous: Unit | None = None
        self.predecessor: dict[Unit, Unit] = {}
        self.successor: dict[Unit, Unit] = {}

    def follow(self, unit: Unit) -> Unit | None:
        """Note that ``unit`` opens; which one came next the last time."""
        if self.previous is None:
            self.predecessor.pop(unit, None)
        elif self.previous is not unit:
            self.successor[self.previous] = unit
            self.predecessor[unit] = self.previous
        self.previous = unit
        following = self.successor.get(unit)
        return None if following is unit else following

    def end(self) -> None:
        """Note that nothing opens after the unit that was opened last."""
        if self.previous is not None:
            self.successor.pop(self.previous, None)
            self.previous = None


class Windows:
    """All windows of one model: which unit is whole now, and which one is next.

    Args:
        root: what is in no unit.
        units: the others, in definition order.
        held: the group of each whole buffer that does not rest, by storage.
        on_backward: called when a saved weight shows that a backward runs.
        lockstep: gathers units where ranks may differ in what they need.
    """

    def __init__(
        self,
        root: Unit,
        units: Sequence[Unit],
        held: Mapping[int, ParamGroup],
        on_backward: Callable[[], None],
        lockstep: Lockstep,
    ) -> None:
        self.root = root
        self.units = list(units)
        self._unit_of = {group: unit for unit in (root, *units) for group in unit.groups}
        self._held = held
        self._on_backward = on_backward
        self._lockstep = lockstep
        self._asks = lockstep.trains
        lockstep.join(self)
        self._training = 0
        self._graph_trains = False
        self._number = {unit: number for number, unit in enumerate((root, *units), start=1)}
        self.path = 0
        """The numbers of the units whose gathers began unasked, in order, as one number below 2 ** 32."""
        self._resting_buffers = {
            storage_id(group.whole)
            for group in self._unit_of
            if group.placements.keeps_whole_parameters and group.whole is not None
        }
        self._packs = not all(group.placements.keeps_whole_parameters for group in self._unit_of)
        self._saves_leaves = False
        self._shares = any(group.layout.num_shards > 1 for group in self._unit_of)
        self._left_gathers = False
        self._steps = 0
        # What one rank does alone must not change what it gathers unasked in training.
        self._order = {flows: _Order() for flows in (True, False)}
        self._prefetched: Unit | None = None
        self._expected: dict[Unit, Unit] = {}
        self._lingering: Unit | None = None
        self._opened_in_backward: dict[Unit, None] = {}
        self._operands: dict[Unit, None] = {}
        self.forward_order: dict[Unit, None] = {}
        """Units in the order of their first forward."""

    # A step: one call of the root, or of a LightningModule's step method

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context in which the root opens at the first touch or unit call, and weights are saved as places."""
        if self._steps == 0:
            for order in self._order.values():
                order.previous = None
            self._let_go()
            self._close_saved()
            for unit in (self.root, *self.units):
                unit.check()
            if self._flows:
                self._flow()
                self.refresh(self.root)
        self._steps += 1
        try:
            with self.saving():
                yield
        finally:
            self._steps -= 1
            if self._steps == 0:
                self._end_step()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Context of a training step, in which all ranks need the same units in the same order."""
        self._training += 1
        try:
            yield
        finally:
            self._training -= 1

    @property
    def _trains(self) -> bool:
        """Whether this is a forward of a training step, or its backward."""
        if in_backward():
            return self._graph_trains
        return self._training > 0 and torch.is_grad_enabled()

    @property
    def _flows(self) -> bool:
        """Whether gathers may begin unasked: all ranks need the same units in the same order."""
        return not self._asks and self._trains

    @property
    def all_gathered(self) -> bool:
        """Whether everything is whole, or about to be, or comes from this rank alone."""
        return not self._shares or all(unit.is_gathered for unit in (self.root, *self.units))

    @property
    def in_step(self) -> bool:
        """Whether a step runs."""
        return self._steps > 0

    def _end_step(self) -> None:
        if self.root.depth:
            return
        self.root.swap_out()
        if in_backward():
            return
        # Backward begins with the unit that was used last: to free it now would be to wait for it then.
        last = self._lingering if self._trains and self._packs else None
        self._let_go(keep=last)
        self._lingering = last
        if self._flows and not self._packs:
            self.refresh()
        # A graph may still need the root, which is whole from forward to backward.
        if not torch.is_grad_enabled():
            self.root.reshard()

    def saving(self) -> AbstractContextManager[Any]:
        """Context in which autograd saves weights as places in buffers, not as the buffers."""
        if not torch.is_grad_enabled():
            return nullcontext()
        if hooks_are_refused():
            return self._saving_leaves()
        above = top_hooks()
        if above is not None:
            holder = getattr(getattr(above[0], "func", above[0]), "__self__", None)
            if holder is self:
                return nullcontext()
            if isinstance(holder, Visit):
                return torch.autograd.graph.saved_tensors_hooks(partial(self._pack, visit=holder), self._unpack)
            # Hooks of ours above theirs would hide what they came to see, as checkpointing does.
            return self._saving_leaves()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack) if self._packs else nullcontext()

    def _saving_leaves(self) -> AbstractContextManager[Any]:
        """Context in which graphs may hold leaves themselves: no window closes from now on while one does.

        A view that a graph holds keeps its buffer by itself.
        """
        if self._packs and not self._saves_leaves:
            self._saves_leaves = True
            for group in self._unit_of:
                group.leaves_may_be_saved = True
        return nullcontext()

    def _close_saved(self) -> None:
        """Close what stayed open because a graph held leaves, and need not any more."""
        for unit in self.units if self._saves_leaves else ():
            self._close(unit)

    # Forward

    @contextmanager
    def forward(self, unit: Unit) -> Iterator[None]:
        """A forward of ``unit``: its parameters are whole inside."""
        self._enter(unit)
        try:
            with self.saving():
                yield
        finally:
            self._exit(unit)

    @unobserved
    def _enter(self, unit: Unit) -> None:
        if unit.depth == 0:
            if in_backward():
                self.open_in_backward(unit)
            else:
                self._open_in_forward(unit)
            unit.swap_in()
        unit.depth += 1

    def _open_in_forward(self, unit: Unit) -> None:
        if self._steps:
            self._open_root()
        # Several modules of one unit in a row: what was gathered ahead still comes after them.
        if unit is not self._lingering:
            self._let_go(keep=unit)
        self._unshard(unit)
        self._follow(unit)
        unit.wait()

    def _open_root(self) -> None:
        if not self.root.swapped:
            self._unshard(self.root)
            self.root.wait()
            self.root.swap_in()

    def _follow(self, unit: Unit) -> None:
        """Record the order, and gather the unit that came next the last time."""
        if torch.is_grad_enabled():
            self.forward_order.setdefault(unit)
            self._graph_trains = self._trains
        following = self._order[self._trains].follow(unit)
        if following is None:
            return
        if following.updating and self._trains:
            # To wait for it now would hold this unit's computation up.
            self._expected[unit] = following
        else:
            self._prefetch(following)

    def _prefetch(self, unit: Unit) -> None:
        after = self._order[True].successor.get(unit) if self._asks and self._trains else None
        self._unshard(unit, None if after is None or after.is_gathered else after)
        self._prefetched = unit

    @unobserved
    def _exit(self, unit: Unit) -> None:
        unit.depth -= 1
        if unit.depth == 0:
            unit.swap_out()
            if in_backward():
                return
            expected = self._expected.pop(unit, None)
            if expected is not None and self._trains:
                self._prefetch(expected)
            # It is freed when the next unit opens: a unit may consist of several modules in a row.
            if self._lingering is not None and self._lingering is not unit:
                self._close(self._lingering)
            self._lingering = unit
            if not self._steps:
                self._let_go()

    def _let_go(self, keep: Unit | None = None) -> None:
        """Free the unit that was used last and the one that was gathered ahead, but for ``keep``."""
        for unit in (self._lingering, self._prefetched):
            if unit is not None and unit is not keep:
                self._close(unit)
        self._lingering = self._prefetched = None

    def _close(self, unit: Unit) -> bool:
        """Free ``unit`` unless a forward of it runs or an operation under way uses it; whether it was freed."""
        if unit.depth or unit in self._operands:
            return False
        unit.reshard()
        return True

    # Backward

    def open_in_backward(self, unit: Unit) -> None:
        """Make ``unit`` whole during backward, and gather the one that backward reaches next."""
        if unit.is_whole and (self._steps or unit is not self._lingering):
            unit.wait()
            return
        self._on_backward()
        if unit.is_root:
            self._unshard(unit)
            unit.wait()
            return
        self._order[True].end()
        preceding = self._order[True].predecessor.get(unit)
        for other in [*self._opened_in_backward]:
            if other is not unit and other is not preceding and self._close(other):
                del self._opened_in_backward[other]
        if unit is self._lingering:
            self._lingering = None
        self._unshard(unit)
        self._opened_in_backward[unit] = None
        if preceding is not None and preceding is not unit and self._trains:
            if self._asks:
                self._unshard(preceding)
            else:
                preceding.unshard()
            self._opened_in_backward[preceding] = None
        unit.wait()

    def end_backward(self) -> None:
        """Close everything that backward opened; parameters are at rest afterwards."""
        for unit in self._opened_in_backward:
            self._close(unit)
        self._opened_in_backward.clear()
        self._let_go()
        self._close_saved()
        if self.root.depth == 0:
            self.root.swap_out()
            self.root.reshard()

    # At rest

    @contextmanager
    def operating(self) -> Iterator[None]:
        """Context of one operation: the units it needs stay whole to its end, and are saved as places."""
        before, self._operands = self._operands, {**self._operands}
        try:
            with self.saving():
                yield
        finally:
            used, self._operands = self._operands, before
            for unit in used:
                if not unit.is_root and unit is not self._lingering and unit not in self._opened_in_backward:
                    self._close(unit)

    @unobserved
    def needed(self, group: ParamGroup) -> None:
        """Make ``group`` whole; a unit stays so until another one opens, or the step ends."""
        unit = self._unit_of[group]
        if in_backward():
            self.open_in_backward(unit)
        elif not unit.is_root and unit.depth == 0:
            self._let_go(keep=unit)
            self._lingering = unit
        self._unshard(unit)
        unit.wait()

    @unobserved
    def touched(self, group: ParamGroup) -> None:
        """As `needed`, to the end of the operation; within a step the root opens too."""
        self._operands[self._unit_of[group]] = None
        self.needed(group)
        if self._steps and not in_backward():
            self._open_root()

    @unobserved
    def went_stale(self, group: ParamGroup) -> None:
        """A resting parameter was written: nobody may go on with the old whole value."""
        unit = self._unit_of[group]
        if unit.depth:
            self._unshard(unit)
            unit.wait()
        else:
            unit.swap_out()

    def begin_updates(self) -> None:
        """Do in the background what an optimizer queued, in the order in which the next forward needs it."""
        for unit in dict.fromkeys((self.root, *self.forward_order, *self.units)):
            unit.begin_update()

    def refresh(self, needed: Unit | None = None) -> None:
        """Begin to make stale whole values that rest, and the root's, current: in one order on every rank.

        Where ranks ask, nothing rests whole, and the root is asked for too.

        Args:
            needed: gather no further than to this unit where that would wait for updates in the background.
        """
        if self._asks:
            return
        units = (self.root, *self.units) if not self._packs else (self.root,)
        last = units.index(needed) if needed in units and any(unit.updating for unit in units) else len(units)
        for unit in units[: last + 1]:
            unit.unshard()
        self._left_gathers = last + 1 < len(units)

    def complete(self) -> None:
        """Begin the gathers that `refresh` left for later: other ranks may have gone on to them, or go another way."""
        if self._left_gathers:
            self.refresh()

    def _unshard(self, unit: Unit, following: Unit | None = None) -> None:
        """Begin to make ``unit`` whole; where ranks ask, ask for ``following`` ahead."""
        if self._packs:
            if self._flows:
                self._flow()
                if not unit.is_gathered:
                    self.path = (31 * self.path + self._number[unit]) % 2**32
                unit.unshard()
            elif not unit.is_gathered:
                self._lockstep.ask(unit, following)
        elif not self._shares:  # no other rank is needed
            unit.unshard()
        elif not unit.is_whole:
            # Ranks may differ in which unit they need next; where all of them rest, all are gathered in one order.
            if self._flows:
                self._flow()
                if not unit.is_gathered:
                    self.refresh(unit)
            else:
                self.complete()
            for each in (self.root, *self.units) if not unit.is_gathered else ():
                if not each.is_gathered:
                    self._lockstep.ask(each)

    def unit_of(self, group: ParamGroup) -> Unit:
        """The unit that ``group`` belongs to."""
        return self._unit_of[group]

    @contextmanager
    def held_open(self, unit: Unit) -> Iterator[None]:
        """Context in which ``unit`` is whole and its attributes are leaves, whatever else opens."""
        unit.unshard()
        unit.wait()
        unit.swap_in()
        unit.depth += 1
        try:
            yield
        finally:
            unit.depth -= 1
            if unit.depth == 0:
                unit.swap_out()
                unit.reshard()

    def _flow(self) -> None:
        """Before gathers begin unasked, all ranks hold the same units."""
        if self._lockstep.asked:
            self._let_go()
            self._lockstep.meet("training step")

    def pause(self) -> None:
        """Let go of what may be whole on this rank alone, and of what it alone expects, before all go on together."""
        self._let_go()
        self._order[False] = _Order()

    @property
    def holds_root(self) -> bool:
        """Whether the root is whole, or about to be."""
        return self.root.is_gathered

    def agree_on_root(self, all_hold: bool) -> None:
        """Let go of the root where some rank does not hold it, unless it is in use."""
        if self._packs and not all_hold and not self.root.swapped and self.root.depth == 0:
            self.root.reshard()

    def close(self) -> None:
        """Leave everything at rest; nothing is in flight afterwards."""
        self.end_backward()
        for unit in (self.root, *self.units):
            unit.swap_out()
            unit.reshard()

    # Saved tensors

    @steps_aside
    def _pack(self, tensor: Tensor, visit: Visit | None = None) -> Any:
        """A place for a weight; anything else as it is, or in the stash of a ``visit``."""
        if type(tensor) not in _PACKABLE:
            return self._pack_parameter(tensor) if isinstance(tensor, ShardedParameter) else tensor
        group = self._held.get(storage_id(tensor))
        # A place has no room for the bits of a lazy conjugate or negation.
        if (
            group is not None
            and group.model_dtype is stored_dtype(tensor)
            and not (tensor.is_conj() or tensor.is_neg())
        ):
            return _packed(self._unit_of[group], group, tensor)
        if visit is not None and group is None and storage_id(tensor) not in self._resting_buffers:
            packed = visit.pack(tensor)
            if isinstance(packed, Ticket):
                return packed
        # Hooks hide in-place changes from autograd's own check.
        return without_graph(tensor), 0 if tensor.is_inference() else tensor._version

    def _pack_parameter(self, parameter: ShardedParameter) -> Any:
        group = parameter.owner
        if not isinstance(group, ParamGroup) or group not in self._unit_of:
            return parameter
        return _PackedParameter(group, parameter, parameter._index, group.version(parameter._index))

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _PackedWeight):
            return self._unpack_weight(packed)
        if isinstance(packed, _PackedParameter):
            _check_version(packed)
            return packed.parameter
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed, Ticket):
            return packed.get()
        tensor, version = packed
        if not tensor.is_inference() and tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation:"
                f" a tensor of shape {tuple(tensor.shape)} is at version {tensor._version}, expected {version}."
            )
        return tensor  # type: ignore[no-any-return]

    @unobserved
    def _unpack_weight(self, packed: _PackedWeight) -> Tensor:
        _check_version(packed)
        group = packed.group
        if in_backward():
            self.open_in_backward(packed.unit)
        else:
            self.needed(group)
        assert group.whole is not None
        return group.whole.as_strided(packed.size, packed.stride, packed.offset)


def _check_version(packed: _PackedWeight | _PackedParameter) -> None:
    """Hooks hide in-place changes from autograd's own check."""
    group, index = packed.group, packed.index
    if group.version(index) != packed.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation:"
            f" `{group.names[index]}` was written after this forward. Run forward again before backward."
        )


def _packed(unit: Unit, group: ParamGroup, tensor: Tensor) -> _PackedWeight:
    offset = int(tensor.storage_offset())
    index = group.layout.tensor_at(offset)
    return _PackedWeight(unit, group, index, group.version(index), offset, tensor.shape, tensor.stride())
