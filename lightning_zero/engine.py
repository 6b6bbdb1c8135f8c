"""A plan applied to a model: its parameters become sharded in place, its forwards open windows.

forward             units open and close           optimizer step      parameters are at rest
backward            they open again, reduce        and after it        updates begin, or gathers
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_zero import stepping
from lightning_zero.activation import ActivationPolicy, chosen_policies
from lightning_zero.assembly import Assembly, adopt_buffers
from lightning_zero.blueprint import Blueprint, placements_of
from lightning_zero.collectives import Collectives
from lightning_zero.compiled import CompiledForwards
from lightning_zero.flat_buffer import BufferPool
from lightning_zero.group_plan import GroupPlan
from lightning_zero.holders import drop_references, flatten_again, keep_layout
from lightning_zero.in_flight import InFlight
from lightning_zero.lane import Background
from lightning_zero.lockstep import FLOWING, Lockstep
from lightning_zero.offload import OffloadError, OffloadTarget
from lightning_zero.param_group import GroupObserver, ParamGroup
from lightning_zero.placements import Placements, StateBytes, Where
from lightning_zero.precision import PrecisionRecipe
from lightning_zero.reducer import Reducer
from lightning_zero.sharded_parameter import ShardedParameter
from lightning_zero.unfit_optimizers import refuse_unfit_optimizer
from lightning_zero.unit import Unit
from lightning_zero.units import UnitSpec, find_units
from lightning_zero.watch import CollectiveFailedError, RanksDifferError
from lightning_zero.window import Windows, in_backward
from lightning_zero.windowed_forward import WindowedForward

__all__ = ["Engine", "engine_of"]


class Engine(GroupObserver):
    """Groups, units, windows and reductions of one sharded module.

    Setting up is a collective: rank 0's parameters and buffers are the truth, the other ranks' parameters may be on
    ``meta``. The module refers to the engine, never the other way round.

    Args:
        module: becomes sharded in place.
        placements: what rests where.
        recipe: dtypes.
        units: which submodules are units; see `find_units`.
        collectives: of the ranks that share the state.
        offload: where state rests off the device, if it does.
        local_ranks: ranks on this host.
        policies: what forwards keep for their backward.
        compile: arguments of `torch.compile` for the forwards of units; ``None`` compiles nothing.
        ranks_may_differ: whether ranks may use different units in training, where these are sharded.

    Raises:
        OffloadError: there is no room for what is offloaded.
        ValueError: a policy or ``compile`` has nothing to apply to.
    """

    def __init__(
        self,
        module: nn.Module,
        placements: Placements,
        recipe: PrecisionRecipe,
        units: UnitSpec | None,
        collectives: Collectives,
        offload: OffloadTarget | None = None,
        local_ranks: int = 1,
        policies: Sequence[ActivationPolicy] = (),
        compile: dict[str, Any] | None = None,
        ranks_may_differ: bool = False,
    ) -> None:
        self._module = weakref.ref(module)
        self.collectives = collectives
        self.stage_placements = placements
        self.placements = placements_of(placements, collectives.world_size, offload)
        self.pool = BufferPool(collectives.device)
        self.in_flight: InFlight[ParamGroup] = InFlight()
        """Whole buffers that do not rest."""
        self._buffers_differ = False
        self.has_steps = False
        """Whether someone marks training steps, as a Trainer does; else each training forward is one."""
        self.abandoned = False
        self._may_write = False
        plan = find_units(module, units)
        members_of_units = [member for unit in plan for _, member in unit]
        policy_of = chosen_policies(module, members_of_units, policies)
        self.num_checkpointed = len(policy_of)
        """Modules whose forwards keep less for their backward."""
        compiled = CompiledForwards(compile, module, members_of_units, policy_of)
        drop_references(module)
        keep_layout(module)
        with torch.inference_mode(False), torch.no_grad():
            adopt_buffers(module, recipe.buffers, collectives)
            blueprint = Blueprint(module, plan, self.placements, recipe, collectives.world_size, offload)
            self.sizes = blueprint.sizes
            """Of units and root, as the module was plain."""
            assembly = Assembly(blueprint, collectives, self.pool, self.in_flight, offload, local_ranks)
        self.root, self.units = assembly.root, assembly.units
        self._offloading = assembly.offloading
        self.groups = [group for unit in (self.root, *self.units) for group in unit.groups]
        self.reducer = Reducer(
            self.groups, collectives, self._forward_order, lambda: self.windows.path, self._end_backward
        )
        asks = ranks_may_differ and collectives.world_size > 1 and not self.placements.keeps_whole_parameters
        self.lockstep = Lockstep([self.root, *self.units], collectives, asks)
        self.windows = Windows(self.root, self.units, self.in_flight, self.reducer.begin, self.lockstep)
        collectives.meet = _meeting(self)
        for group in self.groups:
            group.observer = self
        self._forwards = [WindowedForward(module, self._forward, policy=policy_of.pop(module, None))]
        for unit, members in zip(self.units, plan, strict=True):
            window = _window_of(self.windows, unit)
            for _, member in members:
                policy = policy_of.pop(member, None)
                self._forwards.append(WindowedForward(member, window, compiled.of(member), policy))
                # What recomputes a part of a unit enters the unit's window again.
                inner = [part for part in member.modules() if part in policy_of]
                self._forwards += [WindowedForward(part, window, policy=policy_of.pop(part)) for part in inner]
        saving = self.windows.saving
        self._forwards += [WindowedForward(part, saving, policy=policy) for part, policy in policy_of.items()]
        self.pool.trim()
        # Groups, windows and reductions refer to each other; without the module nobody needs them, and their memory
        # should not wait for a garbage collection.
        self._dissolution = weakref.finalize(module, self._dissolve)
        self._dissolution.atexit = False
        _engines[module] = self

    def planned_bytes(self, moments: int = 2, where: Where = "everywhere") -> StateBytes:
        """See the function of this name."""
        kinds = {"everywhere": (False, True), "device": (False,), "offloaded": (True,)}[where]
        rank = self.collectives.rank
        planned = [group.plan.state_bytes(rank, moments, off) for group in self.groups for off in kinds]
        return StateBytes(*(sum(getattr(one, f.name) for one in planned) for f in fields(StateBytes)))

    @property
    def plans(self) -> list[list[GroupPlan]]:
        """What the groups of each unit hold and send by formula, the root's last."""
        return [[group.plan for group in unit.groups] for unit in (*self.units, self.root)]

    @property
    def background(self) -> Background | None:
        """What works on offloaded state, and counts what moves."""
        return None if self._offloading is None else self._offloading.background

    # Steps

    def before_collective(self, purpose: str) -> None:
        """`meet`, unless training flows."""
        if purpose not in FLOWING:
            self.meet(purpose)
        elif self.lockstep.trains:
            # Nothing is whole that all ranks must hold, so nothing is let go of.
            self.lockstep.meet(FLOWING[purpose], agrees=False)
        else:
            self.windows.complete()
            if self.lockstep.asked:
                self.meet("training step")

    def meet(self, place: str) -> None:
        """Wait for all ranks before they go on together, and give those that are behind what they need.

        Raises:
            RanksDifferError: another rank is elsewhere.
        """
        if not self.abandoned:
            self.windows.complete()
            self.windows.pause()
            self.lockstep.meet(place)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of one step of user code: a call of the module, or a step method of a LightningModule."""
        self.reducer.recover()
        stepping.user_code()
        with self.windows.step():
            yield

    @contextmanager
    def training_step(self, is_manual: bool = False) -> Iterator[None]:
        """A `step` that a backward follows, on all ranks: rank 0's buffers come first.

        Args:
            is_manual: user code runs backward in it.
        """
        if self.lockstep.trains or not self.windows.all_gathered:
            self.meet("training step")
        with self.windows.training(), self.step():
            self.share_buffers()
            yield
        self._may_write = False
        # Data parallelism sends no buffers after a forward whose gradients wait; under Lightning's manual optimization
        # it takes each forward for one.
        self._buffers_differ = not (self.reducer.accumulating or is_manual)

    def _forward(self) -> AbstractContextManager[None]:
        """Context of the module's own forward, which in a plain loop is the step."""
        module = self._module()
        training = module is not None and module.training and torch.is_grad_enabled()
        return self.training_step() if training and not (self.has_steps or self.windows.in_step) else self.step()

    def share_buffers(self) -> None:
        """Make rank 0's buffers everyone's, as data parallelism does before a forward: a collective, if they differ."""
        module = self._module()
        if module is None or not self._buffers_differ or self.collectives.world_size == 1:
            return
        self._buffers_differ = False
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in module.buffers():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        with torch.no_grad():
            for buffers in by_dtype.values():
                flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
                self.collectives.broadcast(flat, purpose="buffers")
                pieces = flat.split([buffer.numel() for buffer in buffers])
                for buffer, piece in zip(buffers if self.collectives.rank else (), pieces):
                    buffer.copy_(piece.view(buffer.shape))

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Context of the backwards before the last one of an optimizer step: gradients wait where they may."""
        before, self.reducer.accumulating = self.reducer.accumulating, True
        try:
            yield
        finally:
            self.reducer.accumulating = before

    def _forward_order(self) -> Iterable[ParamGroup]:
        return (group for unit in self.windows.forward_order for group in unit.groups)

    def _end_backward(self) -> None:
        self.windows.end_backward()
        self.windows.path = 0

    # GroupObserver

    def before_write(self, group: ParamGroup) -> None:
        """A resting parameter of ``group`` is about to be written, on all ranks: none may still need the old values."""
        self.windows.complete()
        if not (self._may_write or self.placements.keeps_whole_parameters or in_backward()):
            self._may_write = True
            self.meet("write")

    def needed(self, group: ParamGroup) -> None:
        """Whole values of ``group`` are read at rest."""
        self.windows.needed(group)

    def touched(self, group: ParamGroup) -> None:
        """A parameter of ``group`` takes part in a differentiable operation at rest."""
        self.windows.touched(group)

    def operating(self) -> AbstractContextManager[Any]:
        """Context of one operation on resting parameters."""
        return self.windows.operating()

    def went_stale(self, group: ParamGroup) -> None:
        """A fragment of ``group`` changed."""
        self.windows.went_stale(group)

    def backward_began(self) -> None:
        """Backward gave a group a local gradient, and nobody has asked yet what it will bring."""
        self.reducer.begin()

    def gradients_arrived(self, group: ParamGroup) -> None:
        """All local gradients of ``group`` that were awaited are there."""
        self.reducer.completed(group)

    def gradient_read(self, group: ParamGroup) -> None:
        """Someone reads a gradient of ``group``, part of which may be unreduced."""
        self.reducer.flush()

    # Optimizer steps, from torch's hooks

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Parameters are at rest while an optimizer steps."""
        self.reducer.recover()
        self.root.swap_out()
        self.adopt(optimizer)
        if self._offloading is not None:
            self._offloading.before_step(optimizer)

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare ``optimizer``, which steps parameters of this module: a collective where they are offloaded.

        Raises:
            ValueError: it cannot step sharded parameters.
            OffloadError: there is no room for its state.
        """
        refuse_unfit_optimizer(optimizer)
        if self._offloading is not None:
            self._offloading.adopt(optimizer)

    def after_optimizer_step(self) -> None:
        """Begin to gather what the step made stale: the next forward needs it soon."""
        self._may_write = False
        if self._offloading is not None:
            self._offloading.after_step()
        if self.lockstep.asked:
            self.meet("optimizer step")
        if self.background is None:
            self.windows.refresh()
        else:
            self.windows.begin_updates()

    @contextmanager
    def without_windows(self) -> Iterator[None]:
        """Context in which modules have their own methods, as a pickle of them should."""
        module = self._module()
        assert module is not None
        for forward in reversed(self._forwards):
            forward.take_off()
        flatten_again(module)
        try:
            yield
        finally:
            keep_layout(module)
            for forward in self._forwards:
                forward.put_on()

    # The way back

    def rest(self) -> None:
        """Leave every parameter at rest and nothing in flight; the next step opens windows again."""
        self.reducer.recover()
        self.windows.close()

    def finish_transfers(self) -> None:
        """Wait for what the last optimizer step left under way: other ranks may still receive this rank's part."""
        if not self.abandoned:
            self._finish_gathers()
            self.finish_updates()

    def _finish_gathers(self) -> None:
        for group in self.groups:
            group.finish_gather()

    def finish_updates(self) -> None:
        """Wait for what works on offloaded state in the background.

        Raises:
            OffloadError: it failed.
        """
        for group in self.groups:
            if group.lane is not None:
                group.lane.wait()

    @property
    def failed(self) -> bool:
        """Whether offloaded state could not be updated: its weights may be of different steps."""
        return self.background is not None and self.background.failure is not None

    def abandon(self) -> None:
        """Take the windows off the module after an exception, when other ranks may be gone: wait for nothing."""
        self.abandoned = True
        for unit in (self.root, *self.units):
            unit.swap_out()
        self._remove_windows()

    def _dissolve(self, waits: bool = False) -> None:
        self.collectives.close()
        # Not for updates: a garbage collection may run this in the background thread itself, or where a lane is held.
        # Who reads their results later, as an average of the weights, waits for them.
        if not self.abandoned:
            with suppress(CollectiveFailedError, RanksDifferError):  # nobody is left to receive this rank's part
                self._finish_gathers()
        for group in self.groups:
            group.observer = GroupObserver()
        if self.background is not None:
            self.background.close(waits)
        for collection in (self.groups, self.units, self._forwards, self.in_flight):
            collection.clear()
        del self.reducer, self.windows, self.root

    def _remove_windows(self) -> None:
        for forward in self._forwards:
            forward.remove()

    def release(self, device: torch.device | None = None) -> None:
        """Make the parameters plain, on ``device`` or where they are: a collective."""
        self.meet("end")
        self.rest()
        self._remove_windows()
        # Tensors made in inference mode could never be trained again.
        with torch.inference_mode(False), torch.no_grad():
            for group in self.groups:
                whole = group.whole_main_weight("checkpoint")
                group.release(whole if device is None else whole.to(device))
        module = self._module()
        assert module is not None
        flatten_again(module)
        del _engines[module]
        self._dissolution.detach()
        self._dissolve(waits=True)


def _meeting(engine: Engine) -> Callable[[str], None]:
    reference = weakref.ref(engine)

    def meet(place: str) -> None:
        found = reference()
        if found is not None:
            found.before_collective(place)

    return meet


def _window_of(windows: Windows, unit: Unit) -> Callable[[], Any]:
    return lambda: windows.forward(unit)


_engines: weakref.WeakKeyDictionary[nn.Module, Engine] = weakref.WeakKeyDictionary()


def engine_of(module: nn.Module) -> Engine | None:
    """The engine of ``module``, if `shard` was called on it."""
    return _engines.get(module)


def _engines_of(optimizer: torch.optim.Optimizer) -> dict[Engine, None]:
    """The engines whose parameters ``optimizer`` steps: others must not send anything on its account.

    In the order of its parameters: they communicate one after another, and a set's order differs between ranks.
    """
    parameters = (p for group in optimizer.param_groups for p in group["params"] if isinstance(p, ShardedParameter))
    owners = dict.fromkeys(p.owner for p in parameters)
    observers = (owner.observer for owner in owners if isinstance(owner, ParamGroup))
    return dict.fromkeys(observer for observer in observers if isinstance(observer, Engine))


def _before_any_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
    engines = _engines_of(optimizer)
    for engine in engines:
        engine.before_optimizer_step(optimizer)
    return stepping.begin(optimizer, args, kwargs) if engines else None


def _after_any_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    stepping.end(optimizer)
    for engine in _engines_of(optimizer):
        engine.after_optimizer_step()


register_optimizer_step_pre_hook(_before_any_step)
register_optimizer_step_post_hook(_after_any_step)


@atexit.register
def _finish_transfers() -> None:
    """Wait for what is under way: a rank that leaves first would take from the others what they still receive."""
    with ExitStack() as all_of_them:  # one that fails keeps none of the others from it
        for engine in list(_engines.values()):
            all_of_them.callback(engine.finish_transfers)


def _finish_updates() -> None:
    """Wait for updates in the background: a child would have no thread for them, and mapped files are its parent's."""
    for engine in list(_engines.values()):
        with suppress(OffloadError):  # told to who reads
            engine.finish_updates()


os.register_at_fork(before=_finish_updates)
