"""Windows: the time in which a unit's parameters are whole.

    forward    enter 0 | enter 1 | ... | enter n      gather k + 1 while k computes, free k when k + 1 opens
    backward   open n | ... | open 1 | open 0         the same in reverse, opened by autograd itself

In a unit's window the module's attributes are plain leaves; outside they are resting parameters. Autograd never
holds a whole buffer that does not rest: a saved weight is packed as a place in a buffer, and unpacking opens the window
again.
"""

from __future__ import annotations

import copy
import inspect
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_zero.flat_buffer import storage_id
from lightning_zero.lockstep import Lockstep
from lightning_zero.param_group import ParamGroup
from lightning_zero.whole_parameter import ConcealedParameter, NarrowParameter, WholeParameter

__all__ = ["ReplacedParameterError", "Unit", "Windows", "in_backward"]


class ReplacedParameterError(RuntimeError):
    """A module's parameter is no longer the one that was sharded."""


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread. Asked of autograd: a flag of ours would survive an exception."""
    return torch._C._current_graph_task_id() != -1


@dataclass(frozen=True)
class _Slot:
    """One attribute of one module that holds a parameter; tied parameters have several."""

    module: weakref.ref[nn.Module]
    attribute: str
    name: str
    group: ParamGroup
    index: int

    def exchange(self, old: Tensor, new: Tensor) -> bool:
        """Put ``new`` where ``old`` is; false if something else is there."""
        module = self.module()
        if module is None or module._parameters.get(self.attribute) is not old:
            return False
        module._parameters[self.attribute] = cast(nn.Parameter, new)
        return True


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
    def numel_whole(self) -> int:
        """Elements of whole buffers held now."""
        return sum(group.layout.total for group in self.groups if group.whole is not None)

    def unshard(self) -> None:
        """Begin to gather; `wait` ends it."""
        for group in self.groups:
            group.unshard()

    def serve(self, wanted: bool) -> None:
        """Take part in a gather of all groups, and keep what comes if it is ``wanted`` here and not held already."""
        for group in self.groups:
            if wanted and not group.is_gathered:
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

    def check(self) -> None:
        """See that every attribute still holds the parameter that was sharded.

        Raises:
            ReplacedParameterError: one holds another parameter, or none.
        """
        for slot in self._slots:
            module = slot.module()
            if module is None:
                continue
            current: Tensor | None = module._parameters.get(slot.attribute)
            known = current._resting if isinstance(current, WholeParameter) else current
            replaced = isinstance(current, nn.Parameter) and known is not slot.group.parameters[slot.index]
            if current is None or replaced:
                raise ReplacedParameterError(
                    f"`{slot.name}` was {'removed' if current is None else 'replaced'} after the model was sharded, so"
                    " it would not be trained. Change the model in `configure_model`, or assign values in place:"
                    f" `module.{slot.name}.data = value`."
                )

    def replace(self, group: ParamGroup, old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        """Let attributes that hold a parameter of ``group`` hold ``new`` where they hold ``old``."""
        for slot in self._slots:
            if slot.group is group:
                slot.exchange(old[slot.index], new[slot.index])

    def swap_in(self) -> None:
        """Let module attributes be leaves. A foreign tensor, as `functional_call` sets it, stays."""
        if self.swapped:
            return
        self.swapped = True
        for group in self.groups:
            group.in_window = True
        for slot in self._slots:
            leaf = slot.group.leaves[slot.index]
            if slot.exchange(slot.group.parameters[slot.index], leaf):
                leaf.follow_requires_grad()
                slot.group.hook_gradients(slot.index)

    def swap_out(self) -> None:
        """Let module attributes be resting parameters again."""
        if not self.swapped:
            return
        self.swapped = False
        for group in self.groups:
            group.in_window = False
        for slot in self._slots:
            slot.exchange(slot.group.leaves[slot.index], slot.group.parameters[slot.index])


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


_PATCHED = "_forward_before_sharding"
"""Attribute of a module that keeps a forward that someone had put on the instance."""

_PACKABLE = {Tensor, nn.Parameter, WholeParameter, NarrowParameter, ConcealedParameter}


class _Order:
    """Which unit was opened after which one, the last time."""

    def __init__(self) -> None:
        self.previous: Unit | None = None
        self.predecessor: dict[Unit, Unit] = {}
        self._successor: dict[Unit, Unit] = {}

    def follow(self, unit: Unit) -> Unit | None:
        """Note that ``unit`` opens; which one came next the last time."""
        if self.previous is None:
            self.predecessor.pop(unit, None)
        elif self.previous is not unit:
            self._successor[self.previous] = unit
            self.predecessor[unit] = self.previous
        self.previous = unit
        following = self._successor.get(unit)
        return None if following is unit else following

    def end(self) -> None:
        """Note that nothing opens after the unit that was opened last."""
        if self.previous is not None:
            self._successor.pop(self.previous, None)
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
        self._training = 0
        self._graph_flows = False
        self._number = {unit: number for number, unit in enumerate((root, *units), start=1)}
        self.path = 0
        """The numbers of the units whose gathers began unasked, in order, as one number below 2 ** 32."""
        self._packs = not all(group.placements.keeps_whole_parameters for group in self._unit_of)
        self._steps = 0
        # What one rank does alone must not change what it gathers unasked in training.
        self._order = {flows: _Order() for flows in (True, False)}
        self._prefetched: Unit | None = None
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
            for unit in (self.root, *self.units):
                unit.check()
            if self._flows or not self._packs:
                self.refresh()
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
    def _flows(self) -> bool:
        """Whether gathers may begin unasked, and ahead: in forwards of a training step and their backward."""
        if in_backward():
            return self._graph_flows
        return self._training > 0 and torch.is_grad_enabled()

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
        self._let_go()
        # A graph may still need the root, which is whole from forward to backward.
        if not torch.is_grad_enabled():
            self.root.reshard()

    def saving(self) -> AbstractContextManager[Any]:
        """Context in which autograd saves weights as places in buffers, not as the buffers."""
        if not self._packs or not torch.is_grad_enabled():
            return nullcontext()
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            # Hooks of ours above theirs would hide what they came to see, as checkpointing does; what they hold
            # keeps its buffer.
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

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
            self._graph_flows = self._flows
        following = self._order[self._flows].follow(unit)
        if following is not None:
            self._unshard(following)
            self._prefetched = following

    def _exit(self, unit: Unit) -> None:
        unit.depth -= 1
        if unit.depth == 0:
            unit.swap_out()
            if in_backward():
                return
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
        if unit.is_whole:
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
        self._unshard(unit)
        self._opened_in_backward[unit] = None
        if preceding is not None and preceding is not unit and self._flows:
            preceding.unshard()
            self._opened_in_backward[preceding] = None
        unit.wait()

    def end_backward(self) -> None:
        """Close everything that backward opened; parameters are at rest afterwards."""
        for unit in self._opened_in_backward:
            self._close(unit)
        self._opened_in_backward.clear()
        self._let_go()
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

    def touched(self, group: ParamGroup) -> None:
        """As `needed`, to the end of the operation; within a step the root opens too."""
        self._operands[self._unit_of[group]] = None
        self.needed(group)
        if self._steps and not in_backward():
            self._open_root()

    def went_stale(self, group: ParamGroup) -> None:
        """A resting parameter was written: nobody may go on with the old whole value."""
        unit = self._unit_of[group]
        if unit.depth:
            self._unshard(unit)
            unit.wait()
        else:
            unit.swap_out()

    def refresh(self) -> None:
        """Begin to make stale whole values that rest, and the root's, current: in one order on every rank."""
        self.root.unshard()
        for unit in self.units if not self._packs else ():
            unit.unshard()

    def _unshard(self, unit: Unit) -> None:
        """Begin to make ``unit`` whole."""
        if self._packs:
            if self._flows:
                self._flow()
                if not unit.is_gathered:
                    self.path = (31 * self.path + self._number[unit]) % 2**32
                unit.unshard()
            elif not unit.is_gathered:
                self._lockstep.ask(unit)
        elif not unit.is_whole:
            # Ranks may differ in which unit they need next; where all of them rest, all are gathered together.
            self.refresh()

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
        """Let go of what may be whole on this rank alone, before all ranks go on together."""
        self._let_go()

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

    def _pack(self, tensor: Tensor) -> Any:
        if type(tensor) not in _PACKABLE:
            return tensor
        group = self._held.get(storage_id(tensor))
        # A place has no room for the bits of a lazy conjugate or negation.
        if group is not None and group.model_dtype is tensor.dtype and not (tensor.is_conj() or tensor.is_neg()):
            return _packed(self._unit_of[group], group, tensor)
        # Hooks hide in-place changes from autograd's own check.
        return tensor, 0 if tensor.is_inference() else tensor._version

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _PackedWeight):
            return self._unpack_weight(packed)
        if isinstance(packed, Tensor):
            return packed
        tensor, version = packed
        if not tensor.is_inference() and tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation:"
                f" a tensor of shape {tuple(tensor.shape)} is at version {tensor._version}, expected {version}."
            )
        return tensor  # type: ignore[no-any-return]

    def _unpack_weight(self, packed: _PackedWeight) -> Tensor:
        group = packed.group
        if group.version(packed.index) != packed.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation:"
                f" `{group.names[packed.index]}` was written after this forward. Run forward again before backward."
            )
        if in_backward():
            self.open_in_backward(packed.unit)
        else:
            self.needed(group)
        assert group.whole is not None
        return group.whole.as_strided(packed.size, packed.stride, packed.offset)


def _packed(unit: Unit, group: ParamGroup, tensor: Tensor) -> _PackedWeight:
    offset = int(tensor.storage_offset())
    index = group.layout.tensor_at(offset)
    return _PackedWeight(unit, group, index, group.version(index), offset, tensor.shape, tensor.stride())


class WindowedForward:
    """A module's ``forward`` inside a window. It stands on the instance: names and classes stay as they are.

    Args:
        module: whose forward is wrapped.
        window: makes the context of each call.
    """

    def __init__(self, module: nn.Module, window: Callable[[], AbstractContextManager[Any]]) -> None:
        # Neither the module nor anything bound to it is held here: the module must be free to go.
        self._module = weakref.ref(module)
        self._window = window
        self.__wrapped__ = type(module).forward
        if "forward" in module.__dict__:
            module.__dict__[_PATCHED] = module.__dict__["forward"]
        module.__dict__["forward"] = self

    def _own(self) -> Callable[..., Any]:
        """The forward that someone put on the instance, else the class's."""
        module = self._module()
        assert module is not None
        patched: Callable[..., Any] | None = module.__dict__.get(_PATCHED)
        return types.MethodType(self.__wrapped__, module) if patched is None else patched

    @property
    def __signature__(self) -> inspect.Signature:
        """The module's own, which libraries read to see what a model accepts."""
        return inspect.signature(self._own())

    # A compiler ends its graph here, says so where it may not, and begins another one inside.
    @torch.compiler.disable(  # type: ignore[untyped-decorator]
        recursive=False, reason="the weights of a block are gathered here; `fullgraph=True` is for single blocks"
    )
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._window():
            return self._own()(*args, **kwargs)

    def remove(self) -> None:
        """Give the module its own forward back; who kept this one calls that through it."""
        self._window = nullcontext
        module = self._module()
        if module is not None and module.__dict__.get("forward") is self:
            del module.__dict__["forward"]
            if _PATCHED in module.__dict__:
                module.__dict__["forward"] = module.__dict__.pop(_PATCHED)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copied module shares no window: its forward is its own."""
        original = self._module()
        module = memo.get(id(original))
        if original is None or module is None:
            raise RuntimeError("A forward inside a window cannot be copied without its module. Copy the module.")
        patched = original.__dict__.get(_PATCHED)
        return types.MethodType(self.__wrapped__, module) if patched is None else copy.deepcopy(patched, memo)
