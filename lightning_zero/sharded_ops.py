"""What torch operations do to sharded tensors, once autograd is out of the way.

    elementwise        on the fragments, if every operand is known to be alike on all ranks
    reduction          on the fragment, then one all-reduce
    view               a `ShardedView`: parent and chain
    collective         on whole values; what all ranks receive alike is folded back, anything else is refused
    anything else      on whole values, with a plain result; what it mutates is folded back

A fragment of a result is worth something only where the ranks' fragments are of one value. What an operand may be, of
an elementwise operation on fragments:

    sharded, of the same shape         always; what is cut otherwise is gathered and cut again
    a number                           always
    plain, of that shape or 0-dim      where a sharded tensor is written, and in an optimizer's own arithmetic: there
                                       data parallelism itself asks for values alike on all ranks
    anything else                      never

Everywhere else a plain operand may be data of this rank, so its operation gives this rank's whole result.

Operations on fragments that rest off the device queue in their lane; what needs a value waits for it.

Reached under ``no_grad`` (optimizers, clipping, initializers, checkpoints). Nothing is ever lost: an in-place
operation that would change a tensor's geometry raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from itertools import cycle
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.optim.optimizer import _foreach_supported_types as _optimizer_types
from torch.utils._foreach_utils import _foreach_supported_types as _utility_types
from torch.utils._pytree import tree_leaves, tree_map

from lightning_zero.lane import Deferred, Lane, value_of
from lightning_zero.sharded_parameter import ShardedParameter, ShardedTensor, ShardedView, install, writing
from lightning_zero.sharded_reductions import LIST_REDUCTIONS, REDUCTIONS, NotInParts, Plan
from lightning_zero.stepping import is_stepping

__all__ = ["UnplaceableWriteError", "dispatch"]

aten = torch.ops.aten

Sharded = ShardedTensor | ShardedView

_CUT = {ShardedTensor, ShardedParameter}
_PLAIN = {Tensor, nn.Parameter}


class UnplaceableWriteError(RuntimeError):
    """An operation changes a tensor in a way that fragments cannot follow."""


# Elementwise in effect, though torch does not tag them so.
_ELEMENTWISE = {
    aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default, aten.full_like.default,
    aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default, aten._to_copy.default,
    aten.lerp_.Scalar, aten.lerp_.Tensor,
}  # fmt: skip

_ALIASES = {aten.detach.default, aten.alias.default, aten.detach_.default}

# Their result depends on geometry, dtype and device alone.
_VALUE_FREE = {
    aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_full.default,
    aten.new_empty_strided.default, aten.rand_like.default, aten.randn_like.default,
}  # fmt: skip

_REFUSED = {"set_", "resize_", "resize_as_", "_resize_output_", "swap_", "unsqueeze_", "squeeze_", "t_", "transpose_"}


def dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run aten operation ``func`` on arguments of which at least one is sharded.

    Raises:
        UnplaceableWriteError: ``func`` resizes or re-strides a sharded tensor.
    """
    return _plan(func)(func, args, kwargs)


@cache
def _plan(func: Any) -> Plan:
    library, name = func._schema.name.split("::")
    if library == "c10d":
        return _collective
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return _in_parts
    if name in _REFUSED:
        return _refuse
    if func in _ALIASES:
        return _alias
    if func in _VALUE_FREE:
        return _value_free
    if func is aten.index_put_.default:
        return _by_mask
    reduction = REDUCTIONS.get(func) or LIST_REDUCTIONS.get(name)
    if reduction is not None:
        return partial(_reduction, reduction)
    if name.startswith(("_foreach_", "_fused_")):
        return _on_lists
    random = torch.Tag.nondeterministic_seeded in func.tags
    if func in _ELEMENTWISE or (torch.Tag.pointwise in func.tags and not random):
        return _elementwise
    if any(ret.alias_info is not None and not ret.alias_info.is_write for ret in func._schema.returns):
        return _view
    return _on_whole


def _refuse(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name = _name_of(args[0])
    raise UnplaceableWriteError(
        f"`{name}` is sharded and `{func}` would change its geometry, which other ranks cannot follow."
        " Change the module before it is sharded."
    )


def _in_parts(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What inference mode hands over undivided: some, as `to` and `reshape`, only may return a view."""
    return func.decompose(*args, **kwargs)


def _reduction(plan: Plan, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    try:
        return plan(func, args, kwargs)
    except NotInParts:
        return _on_whole(func, args, kwargs)


def _name_of(tensor: Any) -> str:
    return (tensor.base if isinstance(tensor, ShardedView) else tensor).slicing.name


def _alias(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if func is aten.detach_.default:
        return tensor
    if isinstance(tensor, ShardedView):
        return _view(func, args, kwargs)
    with _mode_of(tensor):
        return tensor.alias()


def _mode_of(viewed: Tensor) -> AbstractContextManager[Any]:
    """Context in which a view of ``viewed`` is made: autograd takes none of an ordinary tensor from inference mode."""
    mode = viewed.is_inference()
    return nullcontext() if torch.is_inference_mode_enabled() is mode else torch.inference_mode(mode)


def _value_free(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    like = args[0]
    plain = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return func(plain, *args[1:], **kwargs)


# Elementwise


def _elementwise(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    written = _written(func, args, kwargs)
    lead: Any = written[0] if written else next(value for value in _tensors(args, kwargs) if isinstance(value, Sharded))
    if len(written) > 1 or _writes_plain(func, args, kwargs):
        return _on_whole(func, args, kwargs)
    plain_too = bool(written) or is_stepping()
    try:
        local_args = [_local(value, lead, plain_too) for value in args]
        local_kwargs = {key: _local(value, lead, plain_too) for key, value in kwargs.items()}
    except NotInParts:
        return _on_whole(func, args, kwargs)
    with writing(written):
        out = _run(lead.lane, func, local_args, local_kwargs)
    if lead.lane is not None and func is aten.copy_.default and not isinstance(args[1], Sharded):
        # As from a file: if all of that queued, the host would hold what is offloaded from it.
        lead.lane.wait()
    return lead if written else _wrapped(out, lead)


def _wrapped(out: Any, lead: ShardedTensor) -> Any:
    if isinstance(out, Tensor | Deferred):
        return lead.like(out)
    return type(out)(_wrapped(item, lead) for item in out) if isinstance(out, list | tuple) else out


def _takes_part(value: Tensor, lead: Any, plain_too: bool) -> bool:
    """Whether this rank's elements of ``value`` may meet its fragment of ``lead``: the same answer on every rank.

    Args:
        plain_too: whether plain operands are alike on all ranks.
    """
    if isinstance(value, ShardedTensor):
        return bool(value.shape == lead.shape)
    return plain_too and not isinstance(value, ShardedView) and bool(value.ndim == 0 or value.shape == lead.shape)


def _local(value: Any, lead: Any, plain_too: bool) -> Any:
    """``value`` as it takes part in an operation on ``lead``'s fragment.

    Raises:
        NotInParts: it does not.
    """
    if not isinstance(value, Tensor):
        return value
    if not _takes_part(value, lead, plain_too):
        raise NotInParts
    if isinstance(value, ShardedTensor):
        if not value.slicing.is_cut_as(lead.slicing):
            return _moved(lead.slicing.cut(value.whole()), lead)
        return value.handle if value.lane is lead.lane else _moved(value.fragment, lead)
    # A 0-dim plain operand of a 0-dim tensor broadcasts against the fragment, which may be empty here.
    return _snapshot(value if value.ndim == 0 else lead.slicing.cut(value), lead)


def _snapshot(value: Tensor, lead: ShardedTensor) -> Tensor:
    """A plain operand: as it is now, where the operation comes later."""
    return value if lead.lane is None else _moved(value, lead)


def _moved(value: Tensor, lead: ShardedTensor) -> Tensor:
    """Values that rest elsewhere, where ``lead`` rests: as they are now, where the operation comes later."""
    return value.to(lead.device, copy=lead.lane is not None)


def _are_alike(row: Sequence[Any], lead: ShardedTensor) -> bool:
    return all(item.slicing.is_cut_as(lead.slicing) for item in row if isinstance(item, ShardedTensor))


# Operations that come later


# What they make may be kept as long as their operand: an optimizer's moments, a copy of the weights.
_MAKES_STATE = {
    aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default, aten.full_like.default,
    aten.clone.default, aten._to_copy.default,
}  # fmt: skip


def _run(lane: Lane | None, func: Any, args: Any, kwargs: Any) -> Any:
    """``func`` on fragments, or what it will make, where it queues."""
    if lane is None:
        return func(*args, **kwargs)
    if _written_positions(func):
        lane.add(lambda: func(*_mapped(args, value_of), **_mapped(kwargs, value_of)))
        return None
    # Of nothing, it has at once the dtypes that it will have.
    like = func(*_mapped(args, _nothing), **_mapped(kwargs, _nothing))
    promised = _mapped(like, lambda tensor: Deferred(tensor.dtype, tensor.device))

    def operation() -> None:
        out = func(*_mapped(args, value_of), **_mapped(kwargs, value_of))
        for deferred, value in zip(tree_leaves(promised), tree_leaves(out), strict=True):
            kept = func in _MAKES_STATE and value.device.type == "cpu"
            deferred.value = lane.allocate(value.numel(), value.dtype).copy_(value) if kept else value

    lane.add(operation)
    return promised


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with each fragment in it changed."""
    if isinstance(value, Tensor | Deferred):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    return type(value)([_mapped(item, change) for item in value]) if isinstance(value, list | tuple) else value


def _nothing(fragment: Tensor | Deferred) -> Tensor:
    if isinstance(fragment, Tensor) and fragment.ndim == 0:
        return fragment
    return torch.empty(0, dtype=fragment.dtype, device=fragment.device)


# Lists: the foreach and fused optimizers


def _on_lists(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    lists = [value for value in (*args, *kwargs.values()) if _is_tensor_list(value)]
    written: list[Any] = _mutated(func, args, kwargs)
    plain_too = bool(written) or is_stepping()
    leads: Sequence[Any] = _alike(lists, plain_too) if {*map(type, written)} <= _CUT else ()
    alike = bool(leads)
    if not plain_too and any(isinstance(value, Tensor) for value in args):  # one for all
        return _one_by_one(func, args, kwargs, lists)
    if not alike:
        rows = list(zip(*lists, strict=True))
        leads = [next((item for item in row if isinstance(item, ShardedTensor)), None) for row in rows]
        if not _are_in_parts(rows, leads, written, plain_too):
            return _one_by_one(func, args, kwargs, lists)
    # Nothing is decided from here on: ranks hold fragments of different rows.
    keep = list(range(len(leads)))
    if written and (alike or all(map(_are_alike, rows, leads))):
        # Kernels need no launch for tensors that lie on other ranks. Operands that are cut differently are made whole,
        # which takes all ranks.
        keep = [i for i in keep if leads[i].slicing.lies_here]
    by_lane: dict[Lane | None, list[int]] = {}
    for i in keep:
        by_lane.setdefault(leads[i].lane, []).append(i)
    local = {
        lane: (
            [_local_list(value, leads, rows_here, alike) for value in args],
            {key: _local_list(value, leads, rows_here, alike) for key, value in kwargs.items()},
        )
        for lane, rows_here in by_lane.items()
    }
    results: list[Any] = [None] * len(leads)
    # Announced also where nothing of it lies: whole values become stale on all ranks or on none.
    with writing(written):
        for lane, (local_args, local_kwargs) in local.items():
            out = _run(lane, func, local_args, local_kwargs)
            for i, item in zip(by_lane[lane], () if written else out):
                results[i] = leads[i].like(item)
    return None if written else results


def _alike(lists: Sequence[Sequence[Any]], plain_too: bool) -> Sequence[ShardedTensor]:
    """The tensors of one list, if those of the others are cut and rest as these are, row by row, or plain scalars.

    So the lists of an optimizer are, and it has many: what can be asked of whole lists is not asked of each tensor.
    """
    leads: Sequence[ShardedTensor] = next((tensors for tensors in lists if type(tensors[0]) in _CUT), ())
    for tensors in lists:
        kinds = {*map(type, tensors)}
        if kinds <= _CUT:
            # Slicings and lanes are equal to themselves alone.
            if [t._slicing for t in tensors] != [t._slicing for t in leads]:
                return ()
            if [t._lane for t in tensors] != [t._lane for t in leads]:
                return ()
        elif not (plain_too and kinds <= _PLAIN) or any(map(Tensor.dim, tensors)) or len(tensors) != len(leads):
            return ()
    return leads


def _are_in_parts(rows: Sequence[Sequence[Any]], leads: Sequence[Any], written: Sequence[Any], plain_too: bool) -> bool:
    """Whether each row is an elementwise operation on fragments, and writes what is cut, and rests, as its lead."""
    if not all(lead is not None for lead in leads):
        return False
    if not all(_takes_part(item, lead, plain_too) for row, lead in zip(rows, leads, strict=True) for item in row):
        return False
    # One list of what is written for each row, or several. Of anything else a copy would be written.
    return all(
        isinstance(tensor, ShardedTensor) and tensor.lane is lead.lane and tensor.slicing.is_cut_as(lead.slicing)
        for tensor, lead in zip(written, cycle(leads), strict=False)
    )


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Tensor)


def _local_list(value: Any, leads: Sequence[Any], keep: Sequence[int], alike: bool) -> Any:
    if _is_tensor_list(value):
        if alike and type(value[0]) in _CUT:
            return [value[i].handle for i in keep]
        return [_local(value[i], leads[i], True) for i in keep]
    if isinstance(value, Tensor) and keep:  # one for all: a rate, the scale of a loss
        return _snapshot(value, leads[keep[0]])
    if isinstance(value, list | tuple) and len(value) == len(leads):  # one scalar for each tensor
        return [value[i] for i in keep]
    return value


def _one_by_one(func: Any, args: Sequence[Any], kwargs: dict[str, Any], lists: Sequence[Any]) -> Any:
    """The operation on each row of the lists by itself, where sharded and plain tensors mix."""
    length = len(lists[0])
    results: list[Any] = []
    for i in range(length):

        def row(value: Any, i: int = i) -> Any:
            return [value[i]] if isinstance(value, list | tuple) and len(value) == length else value

        row_args, row_kwargs = [row(value) for value in args], {key: row(value) for key, value in kwargs.items()}
        if not any(isinstance(item, Sharded) for item in _tensors(row_args, row_kwargs)):
            out = func(*row_args, **row_kwargs)
        else:
            out = (_on_lists if length > 1 else _on_whole)(func, row_args, row_kwargs)
        results.extend(out or ())
    _count_writes(func, args, kwargs)
    return results or None


def _count_writes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Advance the versions of plain tensors that ``func`` wrote beneath autograd, which counts for it elsewhere.

    Whole values in a window are folded back by it.
    """
    written = [tensor for tensor in _mutated(func, args, kwargs) if not isinstance(tensor, Sharded)]
    torch.autograd.graph.increment_version([tensor for tensor in written if not tensor.is_inference()])


# Views


def _view(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    viewed = args[0]
    if not isinstance(viewed, Sharded) or any(isinstance(value, Sharded) for value in _tensors(args[1:], kwargs)):
        return _on_whole(func, args, kwargs)
    base = viewed.base if isinstance(viewed, ShardedView) else viewed
    rest = tuple(args[1:])

    def replay(whole: Tensor, pick: int | None = None) -> Tensor:
        start = viewed.view_of(whole) if isinstance(viewed, ShardedView) else whole
        out: Any = func(start, *rest, **kwargs)
        return cast(Tensor, out if pick is None else out[pick])

    slicing = base.slicing
    like = torch.empty_strided(slicing.shape, slicing.stride, dtype=base.dtype, device="meta")
    several = func(viewed.view_of(like) if isinstance(viewed, ShardedView) else like, *rest, **kwargs)
    with _mode_of(viewed):
        if isinstance(several, Tensor):
            return ShardedView(base, replay)
        return [ShardedView(base, partial(replay, pick=i)) for i in range(len(several))]


def _by_mask(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`x[mask] = number`, as of optimizers that go by signs, is a choice for each element."""
    tensor, indices, value = args[:3]
    mask = indices[0] if len(indices) == 1 else None
    adds = kwargs.get("accumulate", False) or any(args[3:])
    is_choice = isinstance(mask, ShardedTensor) and mask.dtype is torch.bool and mask.shape == tensor.shape
    if (
        is_choice
        and isinstance(tensor, ShardedTensor)
        and value.ndim == 0
        and not isinstance(value, Sharded)
        and not adds
    ):
        return _elementwise(aten.masked_fill_.Tensor, (tensor, mask, value), {})
    return _on_whole(func, args, kwargs)


# Whole values


def _on_whole(func: Any, args: Sequence[Any], kwargs: dict[str, Any], written: list[Any] | None = None) -> Any:
    """Run on whole values; fold back what was mutated: by its schema, or ``written``."""
    written = _written(func, args, kwargs) if written is None else written
    bases = {id(base): base for base in (_base_of(tensor) for tensor in written)}
    # A resting whole buffer must not be written past its owner, so what is mutated is copied first.
    copies = {key: base.whole().clone() for key, base in bases.items()}

    def materialize(value: Any) -> Any:
        if not isinstance(value, Sharded):
            return value
        base = _base_of(value)
        whole = copies[id(base)] if id(base) in copies else base.whole()
        return value.view_of(whole) if isinstance(value, ShardedView) else whole

    out = func(*tree_map(materialize, list(args)), **tree_map(materialize, kwargs))
    for key, base in bases.items():
        base.store(copies[key])
    return written[0] if len(written) == 1 and isinstance(out, Tensor) else out


# Collectives of user code, whose schemas do not tell what they write. What they receive comes first.


_RECEIVED_ALIKE = {
    "broadcast_", "allreduce_", "allreduce_coalesced_", "allgather_", "_allgather_base_", "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
}  # fmt: skip

_POINT_TO_POINT = {"send", "recv_", "recv_any_source_"}


def _collective(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """On whole values, as under data parallelism.

    Raises:
        UnplaceableWriteError: ranks would receive different values, or not all of them take part.
    """
    name = func._schema.name.split("::")[1]
    received = [tensor for tensor in tree_leaves(args[0]) if isinstance(tensor, Sharded)]
    received = [] if name in ("send", "barrier") else received
    if received and name not in _RECEIVED_ALIKE:
        _refuse_collective(name, received[0], "gives each rank a value of its own")
    group = next(ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject) and _is_group(arg))
    for tensor in (tensor for tensor in tree_leaves(list(args)) if isinstance(tensor, Sharded)):
        base = _base_of(tensor)
        takes_all = name not in _POINT_TO_POINT and group.size() == base.slicing.collectives.world_size
        if not takes_all and (any(tensor is other for other in received) or base.local_whole() is None):
            _refuse_collective(name, tensor, "does not take all ranks that hold a part of it")

    def run(*args: Any, **kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        # Only what has arrived can be folded back.
        Work.unbox(out[-1] if isinstance(out, tuple | list) else out).wait()
        return out

    out = _on_whole(run, args, kwargs, received)
    return (args[0], out[-1]) if isinstance(out, tuple | list) else out


def _is_group(argument: torch.ScriptObject) -> bool:
    return str(argument._type()).endswith(".ProcessGroup")


def _refuse_collective(name: str, tensor: Sharded, why: str) -> NoReturn:
    raise UnplaceableWriteError(
        f"`{_name_of(tensor)}` is sharded, and the collective `{name}` on it {why}. Give it a plain tensor:"
        " `whole = torch.empty(p.shape, dtype=p.dtype, device=p.device).copy_(p)`, on every rank."
    )


def _base_of(tensor: Sharded) -> ShardedTensor:
    return tensor.base if isinstance(tensor, ShardedView) else tensor


def _whole_of(tensor: Tensor) -> Tensor:
    return tensor.whole() if isinstance(tensor, Sharded) else tensor


# Arguments


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The sharded tensors that ``func`` changes in place."""
    return [tensor for tensor in _mutated(func, args, kwargs) if isinstance(tensor, Sharded)]


def _writes_plain(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether ``func`` changes a plain tensor: a slice of it must not be mistaken for it."""
    return any(not isinstance(tensor, Sharded) for tensor in _mutated(func, args, kwargs))


def _mutated(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    found: list[Any] = []
    for position in _written_positions(func):
        name = func._schema.arguments[position].name
        value = args[position] if position < len(args) else kwargs.get(name)
        # The step counters of fused optimizers are plain scalars beside the sharded lists.
        if name != "state_steps":
            found += value if isinstance(value, list | tuple) else [value]
    return [value for value in found if isinstance(value, Tensor)]


@cache
def _written_positions(func: Any) -> tuple[int, ...]:
    return tuple(
        i for i, arg in enumerate(func._schema.arguments) if arg.alias_info is not None and arg.alias_info.is_write
    )


def _tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, Tensor):
                yield item


install(dispatch)

# Without these two lists torch's optimizers and clipping would loop over parameters in Python.
for _types in cast(tuple[list[type], ...], (_optimizer_types, _utility_types)):
    _types.extend(kind for kind in (ShardedTensor, ShardedParameter) if kind not in _types)
