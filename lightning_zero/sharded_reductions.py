"""Sums, extremes, norms and flags of whole sharded tensors: on the fragment, then one all-reduce.

norm of each of many    the fragments' norms in one call    one all-reduce for all of them
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_zero.lane import Lane, value_of
from lightning_zero.sharded_parameter import ShardedTensor, ShardedView

__all__ = ["LIST_REDUCTIONS", "REDUCTIONS", "NotInParts", "Plan"]

aten = torch.ops.aten

Plan = Callable[[Any, Sequence[Any], dict[str, Any]], Any]
"""How an operation is done, given it and its arguments."""


class NotInParts(Exception):
    """The operation needs whole values, and has not begun."""


def _sum(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return _reduced(func, args, kwargs, "sum")


def _mean(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], ShardedTensor):
        raise NotInParts
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
        raise NotInParts
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
        raise NotInParts
    out = func(tensor.fragment).to(torch.uint8)
    return tensor.slicing.collectives.all_reduce(out, op).to(torch.bool)


def _equal(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    a, b = args
    if a.shape != b.shape:
        return False
    if (
        not (isinstance(a, ShardedTensor) and isinstance(b, ShardedTensor) and a.slicing.is_cut_as(b.slicing))
        or a.slicing.replicated
    ):
        raise NotInParts
    same = torch.tensor(func(a.fragment, b.fragment), dtype=torch.uint8, device=a.device)
    return bool(a.slicing.collectives.all_reduce(same, "min").item())


def _vector_norm(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    shaped = (len(args) > 2 and (args[2] is not None or (len(args) > 3 and args[3]))) or kwargs.get("keepdim", False)
    if not isinstance(tensor, ShardedTensor) or shaped or kwargs.get("dim") or tensor.local_whole() is not None:
        raise NotInParts
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
            fragments = [value_of(tensors[i].handle) for i in rows]
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


def _whole_of(tensor: Tensor) -> Tensor:
    return tensor.whole() if isinstance(tensor, ShardedTensor | ShardedView) else tensor


REDUCTIONS: dict[Any, Plan] = {
    aten.sum.default: _sum,
    aten.mean.default: _mean,
    aten.max.default: _max,
    aten.min.default: _min,
    aten.any.default: _any,
    aten.all.default: _all,
    aten.equal.default: _equal,
    aten.linalg_vector_norm.default: _vector_norm,
}

LIST_REDUCTIONS: dict[str, Plan] = {
    "_foreach_norm": _foreach_norm,
    "_foreach_max": _foreach_max,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
}
