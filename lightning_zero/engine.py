"""A plan applied to a model: its parameters become sharded in place, its forwards open windows.

shard(model, stage=3)       parameters at rest; `model(x)`, `loss.backward()`, `optimizer.step()` as ever
unshard(model)              an ordinary model again
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_zero.autocast import is_multiplied
from lightning_zero.collectives import Collectives
from lightning_zero.flat_buffer import BufferPool
from lightning_zero.lane import Background, Lane
from lightning_zero.lockstep import FLOWING, Lockstep
from lightning_zero.offload import OffloadError, OffloadTarget, offload_target
from lightning_zero.offload_plan import ask_for_fused, moments_of, offloaded_units, require_room
from lightning_zero.param_group import GroupObserver, ParamGroup
from lightning_zero.placements import STAGES, Placements, StateBytes, stage_placements
from lightning_zero.precision import Dtypes, PrecisionRecipe
from lightning_zero.reducer import Reducer
from lightning_zero.sharded_parameter import ShardedParameter
from lightning_zero.unit import Unit
from lightning_zero.units import NamedModules, UnitSpec, find_units
from lightning_zero.watch import CollectiveFailedError
from lightning_zero.whole_parameter import WholeParameter
from lightning_zero.window import Windows, in_backward
from lightning_zero.windowed_forward import WindowedForward

__all__ = [
    "AlreadyShardedError",
    "Engine",
    "MovedBytes",
    "Where",
    "checked_offload",
    "engine_of",
    "moved_bytes",
    "no_sync",
    "planned_bytes",
    "shard",
    "unshard",
]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

Where = Literal["everywhere", "device", "offloaded"]

_PLACE = {False: "device", True: "offloaded"}

OWN_GROUP_SHARE = 1 / 4
"""A root parameter that holds this part of the root, as an embedding or a head does, is a group of its own: its
gradient leaves as soon as it is there."""


class AlreadyShardedError(RuntimeError):
    """A module, or a part of it, is sharded already."""


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

    Raises:
        OffloadError: there is no room for what is offloaded.
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
    ) -> None:
        self._module = weakref.ref(module)
        self.collectives = collectives
        self.stage_placements = placements
        self.placements = placements if collectives.world_size > 1 else _alone(placements, offload)
        self.offload = offload
        self.pool = BufferPool(collectives.device)
        self._held: dict[int, ParamGroup] = {}
        self._recipe = recipe
        self._buffers_differ = False
        self.has_steps = False
        """Whether someone marks training steps, as a Trainer does; else each training forward is one."""
        self.abandoned = False
        self._may_write = False
        plan = find_units(module, units)
        _drop_references(module)
        holders = _holders_of_parameters(module)
        homes = _homes(holders, plan)
        self._local_ranks = local_ranks
        self._offloaded: set[int | None] = set()
        self.background: Background | None = None
        """What works on offloaded state, and counts what moves."""
        self._known_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        if offload is not None:
            self._offloaded = self._choose_offloaded(offload, holders, homes, len(plan), local_ranks)
            self.background = Background(offload, collectives.device)
        with torch.inference_mode(False), torch.no_grad():
            self._adopt_buffers(module)
            self.root, self.units = self._build_units(holders, homes, plan)
        self.groups = [group for unit in (self.root, *self.units) for group in unit.groups]
        self.reducer = Reducer(
            self.groups, collectives, self._forward_order, lambda: self.windows.path, self._end_backward
        )
        self.lockstep = Lockstep([self.root, *self.units], collectives)
        self.windows = Windows(self.root, self.units, self._held, self.reducer.begin, self.lockstep)
        collectives.meet = _meeting(self)
        for group in self.groups:
            group.observer = self
        self._forwards = [WindowedForward(module, self._forward)]
        for unit, members in zip(self.units, plan, strict=True):
            for _, member in members:
                self._forwards.append(WindowedForward(member, _window_of(self.windows, unit)))
        self.pool.trim()
        # Groups, windows and reductions refer to each other; without the module nobody needs them, and their memory
        # should not wait for a garbage collection.
        self._dissolution = weakref.finalize(module, self._dissolve)
        self._dissolution.atexit = False

    # Set-up

    def _adopt_buffers(self, module: nn.Module) -> None:
        """Put rank 0's buffers on the device; shared ones stay shared."""
        adopted: dict[Tensor, Tensor] = {}
        for submodule in module.modules():
            for name, buffer in submodule._buffers.items():
                if buffer is None:
                    continue
                if buffer not in adopted:
                    device = self.collectives.device
                    dtype = self._recipe.buffers if buffer.is_floating_point() else None
                    like = buffer.to(dtype or buffer.dtype)
                    value = torch.empty_like(like, device=device) if buffer.is_meta else like.to(device)
                    value.copy_(self.collectives.broadcast(value.contiguous()))
                    adopted[buffer] = value
                submodule._buffers[name] = adopted[buffer]

    def _choose_offloaded(
        self,
        target: OffloadTarget,
        holders: _Holders,
        homes: dict[Tensor, int | None],
        num_units: int,
        local_ranks: int,
    ) -> set[int | None]:
        """The units whose state is offloaded, ``None`` being the root; there is room for it, as far as it is known."""
        numels: dict[int | None, int] = dict.fromkeys((None, *range(num_units)), 0)
        nbytes: dict[int | None, float] = dict.fromkeys(numels, 0.0)
        stepped = 0.0
        shards = self.collectives.world_size if self.placements.shards_optimizer else 1
        for parameter, home in homes.items():
            trained = parameter.requires_grad
            if not (target.optimizer if trained else target.parameters):
                continue
            dtypes = self._dtypes(parameter, holders[parameter], offloaded=True)
            size = parameter.numel() / shards
            numels[home] += parameter.numel()
            nbytes[home] += size * dtypes.main.itemsize
            if trained:
                nbytes[home] += size * dtypes.main_grad.itemsize
                stepped += size * 2 * dtypes.main.itemsize  # Adam's two moments
        total = sum(numels.values())
        if not total:
            return set()
        per_element = (sum(nbytes.values()) + stepped) / total
        chosen = offloaded_units(target, list(numels.values()), per_element, self.collectives.device)
        offloaded = {home for home, off in zip(numels, chosen, strict=True) if off}
        need = sum(nbytes[home] for home in offloaded)
        require_room(target, need, "main weights and gradients", local_ranks, self.collectives)
        return offloaded

    def _build_units(
        self, holders: _Holders, homes: dict[Tensor, int | None], plan: Sequence[NamedModules]
    ) -> tuple[Unit, list[Unit]]:
        if self.collectives.rank == 0:
            _require_values(holders)
        units = []
        for number, members in enumerate(plan):
            parameters = [p for p in holders if homes[p] == number]
            units.append(self._build_unit(members[0][0], parameters, holders, number in self._offloaded))
        parameters = [p for p in holders if homes[p] is None]
        return self._build_unit("", parameters, holders, None in self._offloaded, is_root=True), units

    def _build_unit(
        self, name: str, parameters: Sequence[Tensor], holders: _Holders, offloaded: bool, is_root: bool = False
    ) -> Unit:
        groups: dict[Any, list[Tensor]] = {}
        total = sum(parameter.numel() for parameter in parameters)
        for parameter in parameters:
            large = is_root and parameter.numel() >= total * OWN_GROUP_SHARE
            dtypes = self._dtypes(parameter, holders[parameter], offloaded)
            key = (dtypes, parameter.requires_grad, id(parameter) if large else None)
            groups.setdefault(key, []).append(parameter)
        built = [
            self._build_group(members, dtypes, holders, offloaded and self._may_offload(trained))
            for (dtypes, trained, _), members in groups.items()
        ]
        unit = Unit(name, built, is_root)
        for group in built:
            for index, sharded in enumerate(group.parameters):
                for holder in holders[sharded]:
                    unit.add_slot(holder.module, holder.attribute, holder.name, group, index)
        return unit

    def _may_offload(self, trained: bool) -> bool:
        return self.offload is not None and (self.offload.optimizer if trained else self.offload.parameters)

    def _dtypes(self, parameter: Tensor, holders: Sequence[_Holder], offloaded: bool) -> Dtypes:
        trained, placements = parameter.requires_grad, self.placements
        copied = placements.shards_optimizer or (offloaded and self._may_offload(trained))
        return self._recipe.dtypes(
            parameter.dtype,
            trained=trained,
            gathered=copied if trained else not placements.keeps_whole_parameters,
            # An embedding that is the head as well is looked up too.
            multiplied=all(is_multiplied(holder.module, holder.attribute, parameter) for holder in holders),
        )

    def _build_group(
        self, parameters: Sequence[Tensor], dtypes: Dtypes, holders: _Holders, offloaded: bool
    ) -> ParamGroup:
        names = [holders[parameter][0].name for parameter in parameters]
        lane = Lane(names[0], self.background) if offloaded and self.background is not None else None
        return ParamGroup(names, parameters, self.placements, dtypes, self.collectives, self.pool, self._held, lane)

    def planned_bytes(self, moments: int, where: Where) -> StateBytes:
        """See the function of this name."""
        kinds = [offloaded for offloaded in (False, True) if where in ("everywhere", _PLACE[offloaded])]
        planned = [group.planned_bytes(moments, offloaded) for group in self.groups for offloaded in kinds]
        return StateBytes(*(sum(getattr(one, f.name) for one in planned) for f in fields(StateBytes)))

    # Steps

    def before_collective(self, purpose: str) -> None:
        """`meet`, unless training flows."""
        if purpose not in FLOWING:
            self.meet(purpose)
        elif self.lockstep.asked:
            self.meet("training step")

    def meet(self, place: str) -> None:
        """Wait for all ranks before they go on together, and give those that are behind what they need.

        Raises:
            RanksDifferError: another rank is elsewhere.
        """
        if not self.abandoned:
            self.windows.pause()
            self.windows.agree_on_root(self.lockstep.meet(place, self.root.is_gathered))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of one step of user code: a call of the module, or a step method of a LightningModule."""
        self.reducer.recover()
        with self.windows.step():
            yield

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """A `step` that a backward follows, on all ranks: rank 0's buffers come first."""
        if not self.windows.all_gathered:
            self.meet("training step")
        with self.windows.training(), self.step():
            self.share_buffers()
            yield
        self._may_write = False
        # Data parallelism sends no buffers after a forward whose gradients wait.
        self._buffers_differ = not self.reducer.accumulating

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

    def gradient_arrived(self, group: ParamGroup, index: int) -> None:
        """Backward gave parameter ``index`` of ``group`` a local gradient."""
        self.reducer.arrived(group, index)

    def gradient_read(self, group: ParamGroup) -> None:
        """Someone reads a gradient of ``group``, part of which may be unreduced."""
        self.reducer.flush()

    # Optimizer steps, from torch's hooks

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Parameters are at rest while an optimizer steps."""
        self.reducer.recover()
        self.root.swap_out()
        self.adopt(optimizer)

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare ``optimizer``, which steps offloaded parameters of this module: a collective, once for each.

        Raises:
            OffloadError: there is no room for its state.
        """
        if self.background is None:
            return
        # After a checkpoint was loaded its groups are those of the file.
        ask_for_fused(optimizer)
        if optimizer in self._known_optimizers:
            return
        self._known_optimizers.add(optimizer)
        stepped = (p for group in optimizer.param_groups for p in group["params"] if p not in optimizer.state)
        numel = sum(
            p.slicing.own.numel * p.element_size() for p in stepped if isinstance(p, ShardedParameter) and p.lane
        )
        require_room(
            self.background.target,
            moments_of(optimizer) * numel,
            f"the state of {type(optimizer).__name__}",
            self._local_ranks,
            self.collectives,
        )

    def after_optimizer_step(self) -> None:
        """Begin to gather what the step made stale: the next forward needs it soon."""
        self._may_write = False
        if self.lockstep.asked:
            self.meet("optimizer step")
        if self.background is None:
            self.windows.refresh()
        else:
            self.windows.begin_updates()

    # The way back

    def rest(self) -> None:
        """Leave every parameter at rest and nothing in flight; the next step opens windows again."""
        self.reducer.recover()
        self.windows.close()

    def finish_transfers(self) -> None:
        """Wait for what the last optimizer step left under way: other ranks may still receive this rank's part."""
        if not self.abandoned:
            for group in self.groups:
                group.finish_gather()
            self.finish_updates()

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

    def _dissolve(self) -> None:
        self.collectives.watch.stop()
        # Nobody is left to receive this rank's part, or an update failed and was told then.
        with suppress(CollectiveFailedError, OffloadError):
            self.finish_transfers()
        for group in self.groups:
            group.observer = GroupObserver()
        if self.background is not None:
            self.background.close()
        for collection in (self.groups, self.units, self._forwards, self._held):
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
        self._dissolution()


class _Holder:
    """One attribute that holds a parameter."""

    def __init__(self, module: nn.Module, attribute: str, name: str) -> None:
        self.module = module
        self.attribute = attribute
        self.name = name


_Holders = dict[Tensor, list[_Holder]]


def _holders_of_parameters(module: nn.Module) -> _Holders:
    """Every attribute below ``module`` that holds a parameter, by parameter, in definition order.

    Raises:
        AlreadyShardedError: a parameter is sharded.
        ValueError: a parameter is uninitialized.
        TypeError: a parameter is of a class of its own.
    """
    holders: _Holders = {}
    for path, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is None:
                continue
            name = f"{path}.{attribute}" if path else attribute
            if isinstance(parameter, ShardedParameter | WholeParameter):
                raise AlreadyShardedError(
                    f"`{name}` is sharded already. Call `lightning_zero.unshard(module)` before it is sharded again."
                )
            if isinstance(parameter, UninitializedParameter):
                raise ValueError(
                    f"`{name}` is uninitialized: its shape is unknown. Run one forward of the lazy module before it is"
                    " sharded."
                )
            if type(parameter) is not nn.Parameter:
                # Quantized weights are such: fragments would have neither their methods nor their layout.
                raise TypeError(
                    f"`{name}` is a {type(parameter).__name__}, and only the plain `nn.Parameter` can be sharded. Keep"
                    " the data in one, which may hold integers and attributes of its own, before the module is sharded:"
                    f" `nn.Parameter(data, requires_grad={parameter.requires_grad})`."
                )
            holders.setdefault(parameter, []).append(_Holder(owner, attribute, name))
    return holders


def _require_values(holders: _Holders) -> None:
    for parameter, places in holders.items():
        if parameter.is_meta:
            raise ValueError(
                f"`{places[0].name}` is on the meta device of rank 0, whose values are everyone's. Give it values"
                " first: `module.to_empty(device='cpu')` and an initializer, or a checkpoint."
            )


def _homes(holders: _Holders, plan: Sequence[NamedModules]) -> dict[Tensor, int | None]:
    """The unit of each parameter; ``None`` is the root, where parameters of several units go too."""
    number: dict[nn.Module, int] = {}
    for i, members in enumerate(plan):
        for _, member in members:
            for module in member.modules():
                number.setdefault(module, i)
    homes: dict[Tensor, int | None] = {}
    for parameter, places in holders.items():
        found = {number.get(holder.module) for holder in places}
        homes[parameter] = found.pop() if len(found) == 1 else None
    return homes


def _alone(placements: Placements, offload: OffloadTarget | None) -> Placements:
    """Where state rests without other ranks."""
    if offload is None:
        # There is nothing to share: every state rests whole, and no stage differs.
        return STAGES[0]
    # Gradients leave unit by unit where they need not rest whole; weights stay, unless they are offloaded too.
    return placements if offload.parameters else replace(placements, parameter=STAGES[0].parameter)


def _meeting(engine: Engine) -> Callable[[str], None]:
    reference = weakref.ref(engine)

    def meet(place: str) -> None:
        found = reference()
        if found is not None:
            found.before_collective(place)

    return meet


def _window_of(windows: Windows, unit: Unit) -> Callable[[], Any]:
    return lambda: windows.forward(unit)


def _drop_references(module: nn.Module) -> None:
    """Drop what modules keep of their parameters beside the parameters: torch exchanges no tensor under a reference."""
    for submodule in module.modules():
        if isinstance(submodule, nn.RNNBase):
            # Weak ones, only to notice a replacement.
            submodule._flat_weight_refs = [None for _ in submodule._flat_weight_refs]
            # User code calls it before a forward: it would lay raw memory out anew, which is the groups' own.
            submodule.flatten_parameters = _stay_as_laid_out  # type: ignore[method-assign]
        for name, value in vars(submodule).items():
            # A weight that `nn.utils.weight_norm` computed; it does so before each forward.
            if isinstance(value, Tensor) and value.grad_fn is not None:
                vars(submodule)[name] = value.detach()


def _stay_as_laid_out() -> None:
    """What ``flatten_parameters`` of a recurrent module does while its parameters are sharded."""


def _flatten_again(module: nn.Module) -> None:
    for submodule in module.modules():
        if isinstance(submodule, nn.RNNBase):
            vars(submodule).pop("flatten_parameters", None)


_engines: weakref.WeakKeyDictionary[nn.Module, Engine] = weakref.WeakKeyDictionary()


def engine_of(module: nn.Module) -> Engine | None:
    """The engine of ``module``, if `shard` was called on it."""
    return _engines.get(module)


def _engines_of(optimizer: torch.optim.Optimizer) -> dict[Engine, None]:
    """The engines whose parameters ``optimizer`` steps: others must not send anything on its account."""
    owners = {p.owner for group in optimizer.param_groups for p in group["params"] if isinstance(p, ShardedParameter)}
    observers = (owner.observer for owner in owners if isinstance(owner, ParamGroup))
    return dict.fromkeys(observer for observer in observers if isinstance(observer, Engine))


def _before_any_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for engine in _engines_of(optimizer):
        engine.before_optimizer_step(optimizer)


def _after_any_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for engine in _engines_of(optimizer):
        engine.after_optimizer_step()


register_optimizer_step_pre_hook(_before_any_step)
register_optimizer_step_post_hook(_after_any_step)


@atexit.register
def _finish_transfers() -> None:
    """Wait for what is under way: a rank that leaves first would take from the others what they still receive."""
    for engine in list(_engines.values()):
        engine.finish_transfers()


def shard(
    module: ModuleT,
    stage: int = 3,
    units: UnitSpec | None = None,
    *,
    precision: PrecisionRecipe | None = None,
    process_group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    offload: OffloadTarget | str | None = None,
    local_ranks: int | None = None,
) -> ModuleT:
    """Shard ``module`` in place over the ranks of a process group, and return it.

    Every rank calls this at the same place, before the optimizer is made::

        model = lightning_zero.shard(Model(), stage=3)
        optimizer = torch.optim.AdamW(model.parameters())
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

    Args:
        module: the model. Rank 0's values are the truth; on other ranks parameters may be on ``meta``.
        stage: 0 (plain data parallelism) to 3 (Rajbhandari 2020).
        units: module classes (types or names) or a predicate; default: Hugging Face's ``_no_split_modules``, else
            elements of ``ModuleList`` and ``Sequential``.
        precision: dtypes; default: each parameter's own throughout.
        process_group: default: the default group, or one process alone.
        device: where state lives; default: the parameters' device.
        offload: where main weights, gradients and optimizer state rest instead: "cpu", "disk" or an `OffloadTarget`.
        local_ranks: ranks on this host, which share its room for offloaded state; default: what ``torchrun`` says, else
            all.

    Raises:
        ValueError: ``stage``, ``units``, ``offload`` or ``device`` is bad, or parameters lie on several devices.
        OffloadError: there is no room for what is offloaded.
        AlreadyShardedError: a part of ``module`` is sharded.
        TypeError: a parameter is of a class of its own, as some quantized ones are.
    """
    placements = stage_placements(stage)
    target = checked_offload(offload, placements)
    where = torch.device(device) if device is not None else _common_device(module)
    if where.type == "mps":
        raise ValueError("device='mps' has no collectives that sharding could use. Use `accelerator='cpu'`.")
    collectives = Collectives.of(process_group, where)
    if local_ranks is None:
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", collectives.world_size))
    recipe = precision or PrecisionRecipe()
    _engines[module] = Engine(module, placements, recipe, units, collectives, target, local_ranks)
    return module


def checked_offload(offload: OffloadTarget | str | None, placements: Placements) -> OffloadTarget | None:
    """The target that ``offload`` means.

    Raises:
        ValueError: it is unknown, or does not go with ``placements``.
        TypeError: it is no target.
    """
    target = offload_target(offload)
    if target is not None and target.parameters and placements.keeps_whole_parameters:
        raise ValueError(
            f"`{type(target).__name__}(parameters=True)` needs stage 3: at other stages whole parameters rest on the"
            " device. Write `stage=3`, or leave `parameters` out."
        )
    return target


def _common_device(module: nn.Module) -> torch.device:
    first: tuple[str, torch.device] | None = None
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            continue
        if first is not None and parameter.device != first[1]:
            raise ValueError(
                f"`{name}` is on {parameter.device}, but `{first[0]}` is on {first[1]}."
                " Move the module first, `module.to(device)`, or pass `device=`."
            )
        first = first or (name, parameter.device)
    if first is not None:
        return first[1]
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@dataclass(frozen=True)
class MovedBytes:
    """What offload moved, bytes a rank."""

    to_device: int
    to_rest: int


def planned_bytes(module: nn.Module, moments: int = 2, where: Where = "everywhere") -> StateBytes:
    """Bytes of model state that this rank holds of a sharded ``module`` at rest by formula, padding included.

    Args:
        moments: optimizer state in multiples of the main weights: 2 for Adam.
        where: what rests on the device alone, or what is offloaded alone.

    Raises:
        ValueError: ``module`` was not sharded.
    """
    return _required_engine(module).planned_bytes(moments, where)


def moved_bytes(module: nn.Module) -> MovedBytes:
    """Bytes that this rank moved between the device and where offloaded state rests, since ``module`` was sharded.

    Raises:
        ValueError: ``module`` was not sharded.
    """
    engine = _required_engine(module)
    engine.finish_updates()
    moved = Counter[str]() if engine.background is None else engine.background.moved
    return MovedBytes(to_device=moved["to device"], to_rest=moved["to rest"])


def unshard(module: ModuleT, device: torch.device | None = None) -> ModuleT:
    """Make ``module`` an ordinary module with whole parameters again: a collective on all ranks. Returns it.

    Args:
        device: where the whole parameters go, one group at a time; default: where the shards are.
    """
    _required_engine(module).release(device)
    _flatten_again(module)
    del _engines[module]
    return module


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Context of the micro-batches before the last one of an optimizer step.

    At stages 0 and 1 their gradients wait, whole, and are reduced once; at stages 2 and 3 there is no place to wait,
    and each backward reduces into the shard.
    """
    with _required_engine(module).accumulate():
        yield


def _required_engine(module: nn.Module) -> Engine:
    engine = engine_of(module)
    if engine is None:
        raise ValueError(
            f"this `{type(module).__name__}` was not sharded. Call `lightning_zero.shard(module, stage=3)` first, and"
            " pass the same module."
        )
    return engine
