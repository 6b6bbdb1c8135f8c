"""What torch operations do to sharded tensors, once autograd is out of the way.

    elementwise        on the fragments, if every operand is cut alike
    reduction          on the fragment, then one all-reduce
    view               a `ShardedView`: parent and chain
    anything else      on whole values; what it mutates is folded back

Operations on fragments that rest off the device queue in their lane; what needs a value waits for it.

Reached under ``no_grad`` (optimizers, clipping, initializers, checkpoints). Nothing is ever lost: an in-place
operation that would change a tensor's geometry raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from itertools import cycle
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.optimizer import _foreach_supported_types as _optimizer_types
from torch.utils._foreach_utils import _foreach_supported_types as _utility_types
from torch.utils._pytree import tree_leaves, tree_map

from lightning_zero.lane import Deferred, Lane
from lightning_zero.sharded_parameter import ShardedParameter, ShardedTensor, ShardedView, install, writing

__all__ = ["UnplaceableWriteError", "dispatch"]

aten = torch.ops.aten

Plan = Callable[[Any, Sequence[Any], dict[str, Any]], Any]
Sharded = ShardedTensor | ShardedView


class UnplaceableWriteError(RuntimeError):
    """An in-place operation changes a tensor in a way that fragments cannot follow."""


class _NotAlike(Exception):
    """Operands are cut differently, so the operation needs whole values."""


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
    name = func._schema.name.split("::")[1]
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
    if func in _REDUCTIONS:
        return _REDUCTIONS[func]
    if name in _LIST_REDUCTIONS:
        return _LIST_REDUCTIONS[name]
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
    if any(isinstance(value, ShardedView) for value in _tensors(args, kwargs)) or _writes_plain(func, args, kwargs):
        return _on_whole(func, args, kwargs)
    try:
        local_args = [_local(value, lead) for value in args]
        local_kwargs = {key: _local(value, lead) for key, value in kwargs.items()}
    except _NotAlike:
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


def _local(value: Any, lead: ShardedTensor) -> Any:
    """``value`` as it takes part in an operation on ``lead``'s fragment.

    Raises:
        _NotAlike: ``value`` is broadcast against ``lead``.
    """
    if not isinstance(value, Tensor):
        return value
    if value.shape != lead.shape:
        if value.ndim == 0 and not isinstance(value, ShardedTensor):
            return _snapshot(value, lead)
        raise _NotAlike
    if isinstance(value, ShardedTensor):
        if not _alike(value, lead):
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


def _alike(a: ShardedTensor, b: ShardedTensor) -> bool:
    return a.slicing is b.slicing or (
        a.slicing.fragments == b.slicing.fragments and a.slicing.stride == b.slicing.stride
    )


def _are_alike(row: Sequence[Any], lead: ShardedTensor) -> bool:
    return all(_alike(item, lead) for item in row if isinstance(item, ShardedTensor))


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
        lane.add(lambda: func(*_mapped(args, _made), **_mapped(kwargs, _made)))
        return None
    # Of nothing, it has at once the dtypes that it will have.
    like = func(*_mapped(args, _nothing), **_mapped(kwargs, _nothing))
    promised = _mapped(like, lambda tensor: Deferred(tensor.dtype, tensor.device))

    def operation() -> None:
        out = func(*_mapped(args, _made), **_mapped(kwargs, _made))
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


def _made(fragment: Tensor | Deferred) -> Tensor:
    if isinstance(fragment, Tensor):
        return fragment
    assert fragment.value is not None
    return fragment.value


def _nothing(fragment: Tensor | Deferred) -> Tensor:
    if isinstance(fragment, Tensor) and fragment.ndim == 0:
        return fragment
    return torch.empty(0, dtype=fragment.dtype, device=fragment.device)


# Lists: the foreach and fused optimizers


def _on_lists(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    lists = [value for value in (*args, *kwargs.values()) if _is_tensor_list(value)]
    rows = list(zip(*lists, strict=True))
    leads: list[Any] = [
        next((item for item in row if isinstance(item, ShardedTensor)), None) for row in zip(*lists, strict=True)
    ]
    written = _written(func, args, kwargs)
    if any(lead is None for lead in leads) or _writes_plain(func, args, kwargs) or _writes_elsewhere(written, leads):
        return _one_by_one(func, args, kwargs, lists)
    keep = list(range(len(leads)))
    if written and all(_are_alike(row, lead) for row, lead in zip(rows, leads)):
        # Kernels need no launch for tensors that lie on other ranks. Operands that are cut differently are made whole,
        # which takes all ranks.
        keep = [i for i in keep if leads[i].slicing.own.numel]
    by_lane: dict[Lane | None, list[int]] = {}
    for i in keep:
        by_lane.setdefault(leads[i].lane, []).append(i)
    try:
        local = {
            lane: (
                [_local_list(value, leads, rows_here) for value in args],
                {key: _local_list(value, leads, rows_here) for key, value in kwargs.items()},
            )
            for lane, rows_here in by_lane.items()
        }
    except _NotAlike:
        return _one_by_one(func, args, kwargs, lists)
    results: list[Any] = [None] * len(leads)
    # Announced also where nothing of it lies: whole values become stale on all ranks or on none.
    with writing(written):
        for lane, (local_args, local_kwargs) in local.items():
            out = _run(lane, func, local_args, local_kwargs)
            for i, item in zip(by_lane[lane], () if written else out):
                results[i] = leads[i].like(item)
    return None if written else results


def _writes_elsewhere(written: Sequence[Any], leads: Sequence[Any]) -> bool:
    """Whether ``written``, a list for each row or several, rests elsewhere than its row: a copy would be written."""
    rows = zip(written, cycle(leads), strict=False)
    return any(isinstance(tensor, ShardedTensor) and tensor.lane is not lead.lane for tensor, lead in rows)


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Tensor)


def _local_list(value: Any, leads: Sequence[Any], keep: Sequence[int]) -> Any:
    if _is_tensor_list(value):
        return [_local(value[i], leads[i]) for i in keep]
    if isinstance(value, Tensor) and keep:  # one for all: a rate, the scale of a loss
        return _snapshot(value, leads[keep[0]])
    if isinstance(value, list | tuple) and len(value) == len(leads):  # one scalar for each tensor
        return [value[i] for i in keep]
    return value


def _one_by_one(func: Any, args: Sequence[Any], kwargs: dict[str, Any], lists: Sequence[Any]) -> Any:
    """The operation on each row of the lists by itself, where sharded and plain tensors mix."""
    results: list[Any] = []
    for i in range(len(lists[0])):

        def row(value: Any, i: int = i) -> Any:
            return [value[i]] if isinstance(value, list | tuple) and len(value) == len(lists[0]) else value

        row_args, row_kwargs = [row(value) for value in args], {key: row(value) for key, value in kwargs.items()}
        if any(isinstance(item, Sharded) for item in _tensors(row_args, row_kwargs)):
            out = _on_whole(func, row_args, row_kwargs)
        else:
            out = func(*row_args, **row_kwargs)
        results.extend(out or ())
    return results or None


# Reductions


def _sum(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return _reduced(func, args, kwargs, "sum")


def _mean(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], ShardedTensor):
        return _on_whole(func, args, kwargs)
    dtype = kwargs.get("dtype") or args[0].dtype
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    return (_sum(aten.sum.default, args, {"dtype": wide}) / args[0].slicing.numel).to(dtype)


def _max(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return _reduced(func, args, kwargs, "max")


def _min(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return _reduced(func, args, kwargs, "min")


def _reduced(func: Any, args: Sequence[Any], kwargs: dict[str, Any], op: str) -> Any:
    tensor = args[0]
    if not isinstance(tensor, ShardedTensor) or len(args) > 1 or tensor.local_whole() is not None:
        return _on_whole(func, args, kwargs)
    local = tensor.fragment
    if local.numel() or op == "sum":
        out = func(local, **kwargs)
    else:
        out = _identity(local.dtype, op, local.device)
    all_reduce = tensor.slicing.collectives.all_reduce
    return all_reduce(out, op) if op == "sum" else _extreme(out, op, all_reduce)


def _extreme(local: Tensor, op: str, all_reduce: Callable[..., Tensor]) -> Tensor:
    """Maximum or minimum over ranks, NaN where any rank has one: collectives may drop it."""
    if not local.dtype.is_floating_point:
        return all_reduce(local, op)
    is_nan = all_reduce(local.isnan().to(torch.uint8), "max").bool()
    finite = torch.where(local.isnan(), _identity(local.dtype, op, local.device), local)
    return all_reduce(finite, op).masked_fill_(is_nan, math.nan)


def _identity(dtype: torch.dtype, op: str, device: torch.device) -> Tensor:
    """What an empty fragment contributes to a maximum or minimum."""
    info = torch.finfo(dtype) if dtype.is_floating_point else None
    low, high = (-math.inf, math.inf) if info else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return torch.tensor(low if op == "max" else high, dtype=dtype, device=device)


def _any(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return _boolean(func, args, kwargs, "max")


def _all(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return _boolean(func, args, kwargs, "min")


def _boolean(func: Any, args: Sequence[Any], kwargs: dict[str, Any], op: str) -> Any:
    tensor = args[0]
    if not isinstance(tensor, ShardedTensor) or len(args) > 1 or tensor.local_whole() is not None:
        return _on_whole(func, args, kwargs)
    out = func(tensor.fragment).to(torch.uint8)
    return tensor.slicing.collectives.all_reduce(out, op).to(torch.bool)


def _equal(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    a, b = args
    if a.shape != b.shape:
        return False
    if not (isinstance(a, ShardedTensor) and isinstance(b, ShardedTensor) and _alike(a, b)) or a.slicing.replicated:
        return _on_whole(func, args, kwargs)
    same = torch.tensor(func(a.fragment, b.fragment), dtype=torch.uint8, device=a.device)
    return bool(a.slicing.collectives.all_reduce(same, "min").item())


def _vector_norm(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    shaped = (len(args) > 2 and (args[2] is not None or (len(args) > 3 and args[3]))) or kwargs.get("keepdim", False)
    if not isinstance(tensor, ShardedTensor) or shaped or kwargs.get("dim") or tensor.local_whole() is not None:
        return _on_whole(func, args, kwargs)
    return _norms([tensor], order, kwargs.get("dtype"))[0]


def _foreach_norm(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    tensors = [item if isinstance(item, ShardedTensor) else None for item in args[0]]
    norms = iter(_norms([tensor for tensor in tensors if tensor is not None], order, kwargs.get("dtype")))
    return [
        torch.linalg.vector_norm(_whole_of(plain), order, dtype=kwargs.get("dtype")) if tensor is None else next(norms)
        for plain, tensor in zip(args[0], tensors, strict=True)
    ]


def _norms(tensors: Sequence[ShardedTensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """The ``order``-norm of each whole tensor, shape (): one all-reduce for all that are sharded."""
    # Between ranks p-th powers are added, for which 2-byte types have neither range nor digits.
    wide = torch.float32 if tensors and tensors[0].dtype.itemsize == 2 else dtype
    narrow = dtype or (tensors[0].dtype if tensors else None)
    norms = _local_norms(tensors, order, wide)
    sharded = [i for i, tensor in enumerate(tensors) if not tensor.slicing.replicated]
    if sharded:
        collectives = tensors[sharded[0]].slicing.collectives
        for same in _by_dtype_and_device(norms, sharded):
            stacked = torch.stack([norms[i] for i in same])
            for i, norm in zip(same, _combined(stacked, order, collectives.all_reduce).unbind(), strict=True):
                norms[i] = norm
    return norms if wide is dtype else [norm.to(narrow) for norm in norms]


def _local_norms(tensors: Sequence[ShardedTensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """The norm of each fragment, shape (): those that rest off the device lane by lane."""
    by_lane: dict[Lane | None, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_lane.setdefault(tensor.lane, []).append(i)
    norms: dict[int, Tensor] = {}
    for lane, rows in by_lane.items():

        def norms_here(rows: Sequence[int] = rows) -> list[Tensor]:
            fragments = [_made(tensors[i].handle) for i in rows]
            if math.isinf(order):
                fragments = [f if f.numel() else f.new_full((1,), 0 if order > 0 else math.inf) for f in fragments]
            return list(torch._foreach_norm(fragments, order, dtype=dtype))

        norms.update(zip(rows, norms_here() if lane is None else lane.compute(norms_here), strict=True))
    return [norms[i] for i in range(len(tensors))]


def _by_dtype_and_device(tensors: Sequence[Tensor], indices: Sequence[int]) -> list[list[int]]:
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i in indices:
        groups.setdefault((tensors[i].dtype, tensors[i].device), []).append(i)
    return list(groups.values())


def _combined(norms: Tensor, order: float, all_reduce: Callable[..., Tensor]) -> Tensor:
    """Norms of whole tensors from the norms of this rank's fragments."""
    if math.isinf(order):
        return _extreme(norms, "max" if order > 0 else "min", all_reduce)
    if order == 0:
        return all_reduce(norms, "sum")
    return all_reduce(norms.pow(order), "sum").pow(1.0 / order)


def _foreach_max(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return [torch.max(item) for item in args[0]]


def _unscale(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Gradient unscaling: an infinity on one rank is an infinity on all, so that all skip the step together."""
    grads, found_inf, inv_scale = args
    sharded = [grad for grad in grads if isinstance(grad, ShardedTensor)]
    local = [grad.fragment if isinstance(grad, ShardedTensor) else grad for grad in grads]
    func([grad for grad in local if grad.numel()], found_inf, inv_scale)
    sharded[0].slicing.collectives.all_reduce(found_inf, "max", purpose="flags")


_REDUCTIONS: dict[Any, Plan] = {
    aten.sum.default: _sum,
    aten.mean.default: _mean,
    aten.max.default: _max,
    aten.min.default: _min,
    aten.any.default: _any,
    aten.all.default: _all,
    aten.equal.default: _equal,
    aten.linalg_vector_norm.default: _vector_norm,
}

_LIST_REDUCTIONS: dict[str, Plan] = {
    "_foreach_norm": _foreach_norm,
    "_foreach_max": _foreach_max,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
}


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


def _on_whole(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run on whole values; fold back what was mutated."""
    written = _written(func, args, kwargs)
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
    found: list[Tensor] = []
    for position in _written_positions(func):
        name = func._schema.arguments[position].name
        value = args[position] if position < len(args) else kwargs.get(name)
        # The step counters of fused optimizers are plain scalars beside the sharded lists.
        found.extend(_tensors((value,), {}) if name != "state_steps" else ())
    return found


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
