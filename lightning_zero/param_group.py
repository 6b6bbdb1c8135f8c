"""The state of some parameters of one unit in flat buffers: main weights, whole weights, and their gradients.

    main_weight --cast, all-gather--> model_weight --forward, backward--> gradient
         ^                                                                   |
         +---------- optimizer <---------- main_grad <----reduce-scatter-----+

Which of these rest, and whole or sharded, is the group's `Placements`. The group holds parameters whose
state has the same dtypes, and that are all trained, or all frozen. Offload is where `MainWeights` and mean gradients
rest.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

import lightning_zero.sharded_ops  # noqa: F401  (gives sharded tensors their operations)
from lightning_zero.arrivals import Arrivals
from lightning_zero.collectives import Collectives, Pending
from lightning_zero.flat_buffer import BufferPool, storage_id
from lightning_zero.gradients import GroupGradients
from lightning_zero.group_plan import GroupPlan
from lightning_zero.lane import Lane
from lightning_zero.main_weights import MainWeights, OffloadedWeights
from lightning_zero.modes import making_ordinary_tensors
from lightning_zero.param_hooks import ParamHooks
from lightning_zero.partition import Partition
from lightning_zero.sharded_parameter import ShardedParameter, ShardedTensor
from lightning_zero.slicing import Slicing
from lightning_zero.stepping import is_stepping
from lightning_zero.whole_parameter import ConcealedParameter, NarrowParameter, WholeParameter

__all__ = ["GroupObserver", "ParamGroup"]


class GroupObserver:
    """What a group tells those above it; the default does nothing but keep values current."""

    def needed(self, group: ParamGroup) -> None:
        """Whole values of ``group`` are read at rest."""
        group.unshard()
        group.wait()

    def touched(self, group: ParamGroup) -> None:
        """A parameter of ``group`` takes part in a differentiable operation at rest."""
        self.needed(group)

    def operating(self) -> AbstractContextManager[Any]:
        """Context of one operation on resting parameters."""
        return nullcontext()

    def before_write(self, group: ParamGroup) -> None:
        """A fragment is about to change."""

    def went_stale(self, group: ParamGroup) -> None:
        """A fragment changed, so whole values are out of date."""

    def backward_began(self) -> None:
        """Backward gave a group a local gradient, and nobody has asked yet what it will bring."""

    def gradients_arrived(self, group: ParamGroup) -> None:
        """All local gradients of ``group`` that were awaited are there."""

    def gradient_read(self, group: ParamGroup) -> None:
        """Someone reads a gradient of ``group``, part of which may be unreduced."""


class ParamGroup:
    """Main weights, whole weights and gradients of ``parameters``, which become `ShardedParameter` in place.

    Rank 0's values are the truth. Setting up is a collective; the other ranks' parameters may be on ``meta``.

    Args:
        names: full name of each parameter.
        parameters: distinct, all trained or all frozen.
        plan: what rests where, in which dtypes.
        collectives: of the ranks that share the state.
        pool: whole and gradient buffers.
        held: filled with this group under the storage of each whole buffer that does not rest.
        lane: of the state that rests off the device, where it does.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        plan: GroupPlan,
        collectives: Collectives,
        pool: BufferPool,
        held: dict[int, ParamGroup],
        lane: Lane | None = None,
    ) -> None:
        self.names = list(names)
        self._plan = plan
        self.placements = placements = plan.placements
        self.observer = GroupObserver()
        self.collectives = collectives
        self._tag = collectives.new_tag()
        self._pool = pool
        self._held = held
        self.dtypes = dtypes = plan.dtypes
        self.model_dtype = dtypes.model
        self.main_dtype = dtypes.main
        self.lane = lane
        self.layout = plan.layout
        self.slicings = [self._slicing(i, parameter) for i, parameter in enumerate(parameters)]
        shard = collectives.rank if placements.shards_optimizer else 0
        self.partition = Partition(self.layout, self.slicings, shard)

        self._whole: Tensor | None = None
        self._gathering: Pending | None = None
        self._fresh = False
        self.main = self._first_weights(parameters)
        self._hooks = [ParamHooks(parameter, dtypes.own) for parameter in parameters]
        self.parameters = [self._rest(i, parameter) for i, parameter in enumerate(parameters)]
        self.leaves = [self._leaf(i, self.model_dtype) for i in range(len(self.parameters))]
        self._pointed = False
        self._in_window = False
        self.leaves_may_be_saved = False
        """Whether graphs may hold leaves themselves, where hooks that save them as places are not allowed."""
        self._exposed_versions: list[int] = []
        nothing = torch.full((), float("nan"), dtype=torch.float64, device=pool.device).to(self.model_dtype)
        self._placeholders = [nothing.expand(slicing.shape) for slicing in self.slicings]
        self._writes = [0] * len(self.leaves)
        self._conceal()

        self.gradients = GroupGradients(self.partition, placements, dtypes, collectives, pool, lane)
        if placements.keeps_whole_parameters:
            self._begin_resting_whole()
        me = weakref.ref(self)
        self.arrivals = Arrivals(
            self.parameters, self.leaves, self.gradients, lambda: _began(me()), lambda: _complete(me())
        )
        # Now that leaves have their shape, which autograd notes.
        for i in range(len(self.leaves)):
            self.arrivals.hook(i)
            if self._hooks[i].has_local:
                self._hooks[i].listen(self.leaves[i], self.parameters[i])

    # Set-up

    def _slicing(self, index: int, parameter: Tensor) -> Slicing:
        stride = _dense_stride(parameter)
        return Slicing(self.names[index], parameter.shape, stride, self.layout, index, self.collectives)

    def _first_weights(self, parameters: Sequence[Tensor]) -> MainWeights:
        """Rank 0's values, of which this rank keeps its shard."""
        if self._main_is_whole:
            whole = torch.empty(self.layout.total, dtype=self.main_dtype, device=self._pool.device)
            self._fill(whole, parameters)
            self.collectives.broadcast(whole)
            self._whole = whole
            return MainWeights(self.partition.own_shard(whole), self.partition.own_shard, self.model_dtype)
        own = self._first_shard(parameters)
        if self.placements.keeps_whole_parameters:
            self._whole = torch.empty(self.layout.total, dtype=self.model_dtype, device=self._pool.device)
        if self.lane is None:
            return MainWeights(own, self.partition.own_shard, self.model_dtype)
        moves = not self.placements.keeps_whole_parameters and self.lane.background.target.parameters
        return OffloadedWeights(own, self.partition.own_shard, self.model_dtype, self.lane, self._whole, moves)

    def _first_shard(self, parameters: Sequence[Tensor]) -> Tensor:
        """This rank's shard of rank 0's values, shape (shard_numel,)."""
        whole = None
        if self.collectives.rank == 0:
            whole = self._pool.take(self.layout.total, self.main_dtype)
            self._fill(whole, parameters)
        own = torch.empty(self.layout.shard_numel, dtype=self.main_dtype, device=self._pool.device)
        if self.layout.num_shards > 1:
            self.collectives.scatter_from_first(own, whole)
        else:
            if whole is not None:
                own.copy_(whole)
            self.collectives.broadcast(own)
        return own

    def _fill(self, whole: Tensor, parameters: Sequence[Tensor]) -> None:
        """Lay out ``parameters``, which have values on rank 0."""
        if self.layout.padding:
            whole.zero_()
        for i, parameter in enumerate(parameters if self.collectives.rank == 0 else ()):
            self.partition.view(whole, i).copy_(parameter.detach())

    @property
    def main_weight(self) -> Tensor:
        """What the optimizer steps, shape (shard_numel,)."""
        return self.main.value

    def _rest(self, index: int, parameter: Tensor) -> ShardedParameter:
        """``parameter``, the same object, as a `ShardedParameter`."""
        fragment = self.partition.fragment(self.main.handle, index)
        sharded = ShardedParameter(
            fragment, self.slicings[index], parameter.requires_grad, weakref.ref(self), index, self.lane
        )
        sharded.__dict__.update(
            {key: value for key, value in parameter.__dict__.items() if key not in sharded.__dict__}
        )
        _exchange(self.names[index], parameter, sharded)
        return cast(ShardedParameter, parameter)

    def _leaf(self, index: int, dtype: torch.dtype) -> WholeParameter:
        expected = self.dtypes.own if self.dtypes.narrow else dtype
        return WholeParameter.of(self.parameters[index], index, dtype, not self._main_is_whole, expected)

    def _begin_resting_whole(self) -> None:
        if self._main_is_whole:
            self._fresh = True
        else:
            self.unshard()
        self.wait()

    @property
    def _main_is_whole(self) -> bool:
        """Whether the main weights are a slice of whole weights that rest."""
        return self.placements.keeps_whole_parameters and self.main_dtype == self.model_dtype and self.lane is None

    @property
    def plan(self) -> GroupPlan:
        """What it holds and sends, by formula, as its parameters are trained or frozen now."""
        return replace(self._plan, trained=self.parameters[0].requires_grad)

    # Whole weights

    @property
    def whole(self) -> Tensor | None:
        """The whole buffer, shape (layout.total,), where one is held."""
        return self._whole

    @property
    def is_whole(self) -> bool:
        """Whether whole values are held and current."""
        return self._fresh

    @property
    def is_gathered(self) -> bool:
        """As `is_whole`, or about to be."""
        return self._fresh or self._gathering is not None

    def unshard(self) -> None:
        """Begin to make whole values current; `wait` ends it."""
        if self._fresh or self._gathering is not None:
            return
        if self._whole is None:
            self._whole = self._pool.take(self.layout.total, self.model_dtype)
            self._held[storage_id(self._whole)] = self
        self._gathering = self._gather(self._whole)

    def serve(self) -> None:
        """Take part in a gather that other ranks need and this one does not."""
        self.keep_writes()
        self._gather(self._pool.take(self.layout.total, self.model_dtype)).wait()

    def _gather(self, whole: Tensor) -> Pending:
        """Begin to fill ``whole``, shape (layout.total,), from the main weights of all ranks."""
        with making_ordinary_tensors(), self.main.source(whole) as source:
            if self.layout.num_shards > 1:
                return self.collectives.all_gather(whole, source, tag=self._tag)
            if source.data_ptr() != whole.data_ptr():
                whole.copy_(source)
            return Pending.on_stream(whole)

    def wait(self) -> None:
        """Make whole values current and the leaves views of them."""
        self.finish_gather()
        if self._fresh and not self._exposed_versions:
            self._expose()
            self._show_leaves()

    @property
    def in_window(self) -> bool:
        """Whether modules compute with the leaves; outside a window they open it themselves when used."""
        return self._in_window

    @in_window.setter
    def in_window(self, value: bool) -> None:
        self._in_window = value
        if not value:
            # The root stays whole after its window, and resting parameters are read from fragments.
            self.keep_writes()
        if not self.placements.keeps_whole_parameters:
            self._show_leaves()

    def _show_leaves(self) -> None:
        whole = self._fresh and (self._in_window or self.placements.keeps_whole_parameters)
        kind = (NarrowParameter if self.dtypes.narrow else WholeParameter) if whole else ConcealedParameter
        if type(self.leaves[0]) is not kind:  # all are of one
            for leaf in self.leaves:
                object.__setattr__(leaf, "__class__", kind)

    def reshard(self) -> None:
        """Let go of whole values, if they do not rest; what was written into them is kept."""
        self.finish_gather()
        self.keep_writes()
        if self.placements.keeps_whole_parameters or self._whole is None or self._leaves_are_saved:
            return
        self._conceal()
        del self._held[storage_id(self._whole)]
        self._whole = None

    @property
    def _leaves_are_saved(self) -> bool:
        """Whether a graph holds a leaf itself: it would compute with what the leaf becomes when it is concealed."""
        if not self.leaves_may_be_saved:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            # Python's object is one user, the node that takes its gradient another.
            return any(leaf._use_count() > 1 + self.arrivals.holds(i) for i, leaf in enumerate(self.leaves))

    def finish_gather(self) -> None:
        """Wait for a gather under way, without use for its result yet."""
        if self._gathering is not None:
            what = f"the weights of `{self.names[0]}` and its unit"
            with self.collectives.watch.waiting_for(what, self._gathering.operation):
                self._gathering.wait()
            self._gathering = None
            self._fresh = True

    def _expose(self) -> None:
        assert self._whole is not None
        moves = not self.placements.keeps_whole_parameters or not self._pointed
        # A concealed leaf would take each of these for a use of its value.
        with making_ordinary_tensors(), torch._C.DisableTorchFunctionSubclass():
            if moves:
                WholeParameter.point_all(self.leaves, self.partition.views(self._whole))
            self._exposed_versions = [leaf._version for leaf in self.leaves]
        self._pointed = True

    def _conceal(self) -> None:
        if not self.placements.keeps_whole_parameters:
            with making_ordinary_tensors(), torch._C.DisableTorchFunctionSubclass():
                WholeParameter.point_all(self.leaves, self._placeholders)
        self._exposed_versions = []
        self._fresh = False
        self._show_leaves()

    def _written_leaves(self) -> list[int]:
        """Parameters whose whole values user code may have written since they were exposed."""
        with torch._C.DisableTorchFunctionSubclass():
            versions = [leaf._version for leaf in self.leaves] if self._exposed_versions else []
        if versions == self._exposed_versions:
            return []
        return [i for i, (now, then) in enumerate(zip(versions, self._exposed_versions, strict=True)) if now != then]

    def version(self, index: int) -> int:
        """Counts the writes to a parameter, at rest and through its leaf."""
        unfolded = 0
        if self._exposed_versions:
            with torch._C.DisableTorchFunctionSubclass():
                unfolded = self.leaves[index]._version - self._exposed_versions[index]
        return self._writes[index] + unfolded

    def keep_writes(self) -> None:
        """Fold what user code wrote, alike on every rank, into whole weights into the main weights."""
        if self._main_is_whole or not self._fresh:
            return
        for i in self._written_leaves():
            self._fold(i)

    def _fold(self, index: int) -> None:
        assert self._whole is not None
        leaf = self.leaves[index]
        self._writes[index] = self.version(index)
        self._exposed_versions[index] = leaf._version
        main = self.partition.fragment(self.main_weight, index)
        whole = self.partition.fragment(self.partition.own_shard(self._whole), index).to(main.device)
        # An element that was not written keeps its main precision.
        main.copy_(torch.where(main.to(whole.dtype) == whole, main, whole.to(main.dtype)))
        self.main.changed()

    def snapshot(self) -> Tensor | None:
        """Begin to watch for writes into whole values, which are held; what `restore` needs to undo them."""
        self.keep_writes()
        with torch._C.DisableTorchFunctionSubclass():
            self._exposed_versions = [leaf._version for leaf in self.leaves]
        return self.main_weight.clone() if self._main_is_whole else None

    def written_names(self) -> list[str]:
        """Parameters whose whole values this rank wrote since `snapshot`."""
        return [self.names[i] for i in self._written_leaves()]

    def restore(self, snapshot: Tensor | None) -> None:
        """Undo writes into whole values: alike on every rank."""
        self._exposed_versions = []
        self._fresh = False
        self.main.changed()
        self._show_leaves()
        if snapshot is not None:
            self.main_weight.copy_(snapshot)
            self._fresh = self.layout.num_shards == 1

    def write_back(self) -> None:
        """Make rank 0's whole values everyone's: a collective."""
        assert self._whole is not None
        with torch.no_grad():
            self.collectives.broadcast(self._whole, "writeback")
            for i in range(len(self.leaves)) if not self._main_is_whole else ():
                self._fold(i)

    def leaves_over(self, whole: Tensor) -> list[WholeParameter]:
        """Further leaves, views of ``whole``, main weights of shape (layout.total,); their gradients count too."""
        leaves = [
            WholeParameter.of(parameter, i, self.main_dtype, counts_data_writes=True)
            for i, parameter in enumerate(self.parameters)
        ]
        WholeParameter.point_all(leaves, self.partition.views(whole))
        for i, leaf in enumerate(leaves):
            if leaf.requires_grad:
                self.arrivals.hook_into(leaf, i)  # its hook goes with it
        return leaves

    def store(self, whole: Tensor) -> None:
        """Make ``whole``, shape (layout.total,), the main weights."""
        self.before_write()
        with torch.no_grad():
            self.main.write(self.partition.own_shard(whole))
        self.after_write(range(len(self.parameters)))

    # Owner: what a resting parameter asks

    def read_local(self, index: int) -> Tensor | None:
        """The whole value in the main dtype, if it rests here."""
        if not self.placements.keeps_whole_parameters or self.main_dtype != self.model_dtype:
            return None
        self.observer.needed(self)
        assert self._whole is not None
        return self.partition.view(self._whole, index).detach()

    def read_resting(self, index: int) -> Tensor | None:
        """As `read_local`, without a word to those above: what is stale stays so, and is not told."""
        if not self.placements.keeps_whole_parameters or self.main_dtype != self.model_dtype or not self.is_gathered:
            return None
        self.finish_gather()
        assert self._whole is not None
        return self.partition.view(self._whole, index).detach()

    def read(self, index: int) -> Tensor:
        """The whole value in the main dtype, detached."""
        if self.main_dtype == self.model_dtype:
            self.observer.needed(self)
            assert self._whole is not None
            return self.partition.view(self._whole, index).detach()
        return self.partition.view(self.whole_main_weight(), index)

    def whole_main_weight(self, purpose: str = "fragment") -> Tensor:
        """All main weights, shape (layout.total,): a collective where they are sharded."""
        self.finish_gather()
        self.keep_writes()
        main = self.main_weight.to(self._pool.device)
        if self.layout.num_shards == 1:
            return main
        with torch.inference_mode(False), torch.no_grad():
            # Not pooled: it is needed rarely, and in mixed precision its size occurs nowhere else.
            whole = torch.empty(self.layout.total, dtype=self.main_dtype, device=self._pool.device)
            self.collectives.all_gather(whole, main, purpose).wait()
        return whole

    def touch(self, index: int, func: Any) -> Tensor:
        """The leaf of parameter ``index``, whole, as ``func`` sees it."""
        self.observer.touched(self)
        self.leaves[index].follow_requires_grad()
        self.arrivals.hook(index)
        return self.leaves[index].seen_by(func)

    def gave_back(self, index: int, tensor: Tensor) -> bool:
        """Whether autograd made ``tensor``, which requires a gradient, of a saved parameter: it stands for that one."""
        return self.arrivals.reach_resting(index, tensor)

    @property
    def computes_apart(self) -> bool:
        """Whether code computes in the model dtype now, where another one rests."""
        # A narrow leaf tells the dtype that rests, and autocast's functions round what rests to what it holds.
        return self.main_dtype != self.model_dtype and not (self.dtypes.narrow or is_stepping())

    def operating(self) -> AbstractContextManager[Any]:
        """Context of one operation: what is touched inside stays whole to its end, and is saved as a place."""
        return self.observer.operating()

    def before_write(self) -> None:
        """A gather under way still reads the main weights; earlier writes into whole weights come first."""
        self.observer.before_write(self)
        self.finish_gather()
        self.keep_writes()
        self.main.before_write()

    def after_write(self, indices: Sequence[int]) -> None:
        """Whole values are stale."""
        self.main.changed()
        # A graph that saved the old value must fail in backward, as autograd does for in-place changes.
        torch.autograd.graph.increment_version([self.leaves[index] for index in indices])
        stays = self.layout.num_shards == 1 and self._main_is_whole
        for index in indices:
            self._writes[index] += 1
            if stays:
                self._exposed_versions[index] = self.leaves[index]._version
        if stays:
            return
        self._fresh = False
        if self._exposed_versions:
            self._conceal()
        self.observer.went_stale(self)

    # Gradients

    def publish(self, used: Sequence[int]) -> None:
        """Give the parameters ``used`` on any rank their gradients; the others keep what they had."""
        self.gradients.publish(used)
        for i in used:
            if self._hooks[i].on_accumulated:
                self._hooks[i].accumulated(self.parameters[i])

    def get_grad(self, index: int) -> Tensor | None:
        """The mean gradient of parameter ``index``, or ``None``."""
        if self.gradients.arrived:
            self.observer.gradient_read(self)
        return self.gradients.get(index)

    def set_grad(self, index: int, grad: Tensor | None) -> None:
        """Replace the mean gradient; ``None`` also drops local gradients that wait for a reduction."""
        assert grad is None or isinstance(grad, ShardedTensor)
        self.gradients.set(index, grad)

    def trained_changed(self, index: int) -> None:
        """``requires_grad`` was set on the resting parameter."""
        self.leaves[index].follow_requires_grad()
        self.arrivals.hook(index)

    def hook_grad(self, index: int, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Call ``hook`` with each local gradient, as ``Tensor.register_hook`` does."""
        self.leaves[index].follow_requires_grad()
        self._hooks[index].listen(self.leaves[index], self.parameters[index])
        return self._hooks[index].register(hook)

    def hook_accumulated(self, index: int, hook: Callable[[Tensor], None]) -> Any:
        """Call ``hook`` with the resting parameter after its mean gradient has changed."""
        return self._hooks[index].register_accumulated(hook)

    # The way back

    def release(self, whole: Tensor) -> None:
        """Make the parameters plain, in the dtype they were built in, with the values of ``whole``, (layout.total,)."""
        self.arrivals.remove()
        for i, parameter in enumerate(self.parameters):
            value = self.partition.view(whole, i).detach().to(self.dtypes.own, copy=True)
            plain = parameter.plain(value)
            self._hooks[i].give_back(plain)
            _exchange(self.names[i], parameter, plain)
        for i in range(len(self.leaves)):
            self.gradients.set(i, None)


def _began(group: ParamGroup | None) -> None:
    if group is not None:
        group.observer.backward_began()


def _complete(group: ParamGroup | None) -> None:
    if group is not None:
        group.observer.gradients_arrived(group)


def _dense_stride(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's stride where it fills its memory without gaps or overlap, else the contiguous one."""
    order = sorted(range(parameter.ndim), key=lambda d: (parameter.stride(d), parameter.shape[d]))
    expected = 1
    for d in order:
        if parameter.shape[d] != 1 and parameter.stride(d) != expected:
            return torch.empty(parameter.shape, device="meta").stride()
        expected *= parameter.shape[d]
    return parameter.stride()


def _exchange(name: str, parameter: Tensor, other: Tensor) -> None:
    """Let ``parameter``, whoever refers to it, become ``other``."""
    try:
        torch.utils.swap_tensors(parameter, other)
    except RuntimeError as error:
        raise RuntimeError(
            f"`{name}` cannot be sharded in place: {error}. Drop graphs, weak references and views of it before"
            " the module is sharded."
        ) from error
