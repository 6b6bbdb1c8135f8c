"""Full values from shards and shards from full values: the layout of one ordinary checkpoint file.

    state_dict            {name: whole tensor}                    as `module.state_dict()` of the plain module
    optimizer_states      {"state": {i: {...whole tensors}}}      as `optimizer.state_dict()` of the plain optimizer

Names, shapes and dtypes are the plain module's: the file knows nothing of stages or ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from lightning_zero.checkpoint.objects import place_of_tensor
from lightning_zero.checkpoint.stored import StoredTensor
from lightning_zero.param_group import ParamGroup
from lightning_zero.progress import progress
from lightning_zero.sharded_parameter import ShardedTensor

__all__ = ["full_optimizer_state", "full_state_dict", "load_state_dict", "shard_optimizer_state"]

PER_PARAMETER_SCALARS = {"step", "mu_product", "eta", "mu"}
"""Optimizer state that is one number for each parameter, whatever the parameter's shape."""


def full_state_dict(
    state_dict: Mapping[str, Any], gathered: MutableMapping[Any, Tensor] | None = None
) -> dict[str, Any]:
    """``state_dict`` of a sharded module with whole tensors on the host; a collective on all ranks.

    Rank 0 alone receives values, one tensor at a time. On the others tensors of the same geometry on ``meta`` stand in,
    so that code which edits a checkpoint finds the same keys on every rank. Names that share a parameter share the
    tensor.

    Args:
        state_dict: what ``module.state_dict()`` gives at rest.
        gathered: filled with the whole values by `place_of_tensor`.
    """
    for group in {v.owner for v in state_dict.values() if isinstance(v, ShardedTensor)}:
        if isinstance(group, ParamGroup):
            group.keep_writes()
    found: dict[Any, Any] = {}
    full = dict(state_dict)
    for name, value in progress(list(state_dict.items()), "Gathering weights", _receives(state_dict)):
        place = place_of_tensor(value)
        if place not in found:
            found[place] = _full_value(value)
        full[name] = found[place]
        if gathered is not None and isinstance(value, ShardedTensor):
            gathered[place] = full[name]
    return full


def load_state_dict(module: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> None:
    """Load whole tensors into ``module``, plain or at rest.

    Raises:
        RuntimeError: names or shapes do not match, with all of them and what to do.
    """
    # These are copied into; modules may keep the rest, as metrics and extra states do.
    copied = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    copied |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    if not state_dict.keys() <= copied:
        state_dict = {n: v if n in copied else tree_map(_detached, v) for n, v in state_dict.items()}
    try:
        module.load_state_dict(state_dict, strict=strict)
    except RuntimeError as error:
        raise RuntimeError(
            f"{error}\nThe checkpoint is of another model than `{type(module).__name__}` is now. Build the model as it"
            " was when the checkpoint was written; names alone may differ with `self.strict_loading = False`."
        ) from error


def full_optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """``optimizer.state_dict()`` with whole tensors on the host; a collective on all ranks.

    Args:
        optimizer: over sharded parameters, or once over them.
    """
    packed = optimizer.state_dict()
    if "param_groups" not in packed:  # Lightning's stand-in where there is no optimizer
        return dict(packed)
    state = {
        key: {name: _full_value(value) for name, value in values.items()} if isinstance(values, dict) else values
        for key, values in progress(list(packed["state"].items()), "Gathering optimizer state", _receives(packed))
    }
    return {**packed, "state": state}


def _receives(tree: Any) -> bool:
    """Whether this rank is the one that receives whole values of what is sharded in ``tree``."""
    return any(isinstance(v, ShardedTensor) and v.slicing.collectives.rank == 0 for v in tree_leaves(tree))


def _full_value(value: Any) -> Any:
    if isinstance(value, ShardedTensor):
        whole, slicing = value.whole_on_first(), value.slicing
        if whole is not None:
            return whole.to("cpu")
        return torch.empty_strided(slicing.shape, slicing.stride, dtype=value.dtype, device="meta")
    return value


def shard_optimizer_state(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `full_optimizer_state`: ``state_dict`` as ``optimizer`` can load it, this rank's part of it.

    Raises:
        ValueError: the groups of ``state_dict`` are not the optimizer's.
    """
    if "param_groups" not in state_dict:
        return dict(state_dict)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    if sizes != saved_sizes:
        raise ValueError(
            f"the checkpoint's {type(optimizer).__name__} has parameter groups of {saved_sizes} parameters, this one"
            f" has {sizes}. Build the optimizer in `configure_optimizers` as it was when the checkpoint was written."
        )
    by_key = dict(zip(keys, parameters, strict=True))
    state = {
        key: {name: _sharded_value(name, value, by_key.get(key)) for name, value in values.items()}
        if isinstance(values, dict)
        else values
        for key, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _detached(value: Any) -> Any:
    """``value`` without the file that it was read from, or is to be."""
    if isinstance(value, StoredTensor):
        return value.read()
    return value.clone() if isinstance(value, Tensor) and not isinstance(value, ShardedTensor) else value


def _sharded_value(name: str, value: Any, parameter: Any) -> Any:
    is_part = (
        isinstance(value, Tensor) and isinstance(parameter, ShardedTensor) and not isinstance(value, ShardedTensor)
    )
    if not is_part or name in PER_PARAMETER_SCALARS or value.shape != parameter.shape:
        return _detached(value)
    if isinstance(value, StoredTensor):
        sharded: ShardedTensor = parameter.empty_kept(value.dtype)
        value.read_into(sharded)
        return sharded
    return parameter.kept(parameter.slicing.cut(value))
