"""A checkpoint as a directory: every rank writes its part, whoever reads it finds whole tensors under plain names.

    NAME.ckpt/.metadata     which piece of which tensor is where            torch.distributed.checkpoint
    NAME.ckpt/__R_0.distcp  what rank R wrote: "model", "optimizer_0", ...
    NAME.ckpt/meta.pt       everything else, as in one file                 rank 0

So `lightning.pytorch.strategies.FSDPStrategy` lays it out, and Lightning's own tool makes one file of it:
``python -m lightning.pytorch.utilities.consolidate_checkpoint NAME.ckpt``.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_zero.checkpoint.first_rank import on_first_rank
from lightning_zero.checkpoint.places import META, place_of
from lightning_zero.checkpoint.stored import CheckpointError, StoredDirectory
from lightning_zero.collectives import Collectives
from lightning_zero.sharded_parameter import ShardedTensor, ShardedView

__all__ = ["is_directory", "load_directory", "named_optimizer_state", "save_directory", "whole_views"]

_ELSEWHERE = "lightning_zero.tensor"
"""In ``meta.pt`` a dictionary with this key alone stands for a sharded tensor, which the ranks wrote."""
_OTHERS, _STATES = "lightning_zero.state_dict", "lightning_zero.optimizer_states"
"""What is no tensor of these two, in ``meta.pt``."""


def is_directory(path: Any) -> bool:
    """Whether ``path`` is a checkpoint that is a directory."""
    return place_of(path).is_complete()


def named_optimizer_state(optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """``optimizer.state_dict()`` by the names of parameters, in place of their numbers; tensors stay as they are.

    A plain optimizer loads it too: it goes by the order of parameters in groups. Numbers would come back from the files
    as text, which fits none.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    packed = optimizer.state_dict()
    if "param_groups" not in packed:  # Lightning's stand-in where there is no optimizer
        return dict(packed)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    keys = [key for group in packed["param_groups"] for key in group["params"]]
    name_of = {
        key: names.get(id(parameter), f"parameter {key}") for key, parameter in zip(keys, parameters, strict=True)
    }
    return {
        "state": {name_of.get(key, key): values for key, values in packed["state"].items()},
        "param_groups": [
            {**group, "params": [name_of[key] for key in group["params"]]} for group in packed["param_groups"]
        ],
    }


def save_directory(checkpoint: Mapping[str, Any], path: str | Path, collectives: Collectives) -> None:
    """Write ``checkpoint``, whose tensors may be sharded, as the directory ``path``: a collective.

    Args:
        checkpoint: as a Trainer dumps it, alike on all ranks, with optimizer states by name.
        path: local, or a URL. Takes this name when it is complete on all ranks; what had it stays whole until then.

    Raises:
        CheckpointError: on every rank, if it cannot be written on one.
    """
    is_first = collectives.rank == 0
    rest = dict(checkpoint)
    state_dict, states = rest.pop("state_dict"), rest.pop("optimizer_states", None)
    elsewhere: dict[str, Tensor] = {}

    def moved(value: Any) -> Any:
        if not isinstance(value, ShardedTensor):
            return value
        key = f"elsewhere.{len(elsewhere)}"
        elsewhere[key] = value
        return {_ELSEWHERE: key}

    # The files know names of tensors, and flatten what is nested: what is no tensor stays as it is in ``meta.pt``.
    rest[_OTHERS] = {name: value for name, value in state_dict.items() if not isinstance(value, Tensor)}
    rest[_STATES] = None if states is None else [_split(state, False) for state in states]
    meta = tree_map(moved, rest)
    tensors: dict[str, Any] = {"model": {name: v for name, v in state_dict.items() if isinstance(v, Tensor)}}
    tensors |= {f"optimizer_{i}": _split(state, True) for i, state in enumerate(states or [])}
    tensors = _own(tensors | elsewhere, is_first)
    place = place_of(path)

    def complete() -> None:
        with place.writing(META) as file:
            torch.save(meta, file)
        place.complete()

    try:
        on_first_rank(collectives, place.prepare)
        save(tensors, storage_writer=place.writer(), planner=_OneAtATime(), process_group=collectives.group)
        on_first_rank(collectives, complete)
    except (CheckpointException, Exception) as error:
        if is_first:
            with suppress(Exception):  # what led here is told below
                place.discard_part()
        raise CheckpointError(
            f"the checkpoint `{path}` was not written: {error}. One that was there before is as it was."
        ) from error


def _split(state: Mapping[str, Any], tensors: bool) -> dict[str, Any]:
    """Of an optimizer's state what the files hold, or what ``meta.pt`` does."""
    if "param_groups" not in state:
        return {} if tensors else dict(state)
    kept = {
        name: {key: value for key, value in values.items() if isinstance(value, Tensor) == tensors}
        for name, values in state["state"].items()
        if isinstance(values, dict)
    }
    others = {} if tensors else {name: v for name, v in state["state"].items() if not isinstance(v, dict)}
    # Groups are in both: other tools look for them in the files.
    return {"state": kept | others, "param_groups": state["param_groups"]}


def _own(tensors: dict[str, Any], is_first: bool) -> dict[str, Any]:
    """What this rank writes: its parts, and on rank 0 what is whole on each, as buffers are, which may differ."""
    found: dict[str, Any] = {}
    for key, value in tensors.items():
        if isinstance(value, dict):
            found[key] = _own(value, is_first)
        elif isinstance(value, ShardedTensor) and value.numel():
            found[key] = value
        elif is_first:
            # Of nothing nobody has a part.
            found[key] = torch.empty(value.shape, dtype=value.dtype) if isinstance(value, ShardedTensor) else value
    return found


def whole_views(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """``checkpoint`` with views of sharded tensors, which have no part of their own, whole: a collective."""
    return tree_map(  # type: ignore[no-any-return]
        lambda value: value.whole().detach().to("cpu", copy=True) if isinstance(value, ShardedView) else value,
        dict(checkpoint),
    )


def load_directory(path: str | Path, weights_only: bool | None) -> dict[str, Any]:
    """The checkpoint that `save_directory` wrote, or Lightning's FSDP and model-parallel strategies.

    Tensors of the model and of optimizers are `StoredTensor`: they are read where they are loaded.

    Raises:
        CheckpointError: it is incomplete, damaged, or holds no model.
    """
    place = place_of(path)
    stored = StoredDirectory(place, weights_only is not False)
    if place.size(META) < 0:
        raise CheckpointError(
            f"`{path}` has tensors, but no {META!r}: a Trainer did not write it, or did not finish. Take another"
            " checkpoint, or load tensors alone with `torch.distributed.checkpoint.load`."
        )
    try:
        with place.open(META) as file:
            meta = torch.load(file, map_location="cpu", weights_only=weights_only is not False)
    except Exception as error:
        raise CheckpointError(f"`{path}/{META}` cannot be read: {error}") from error
    tree = stored.tree()
    state_dict = tree.get("model", tree.get("state_dict"))
    if state_dict is None:
        raise CheckpointError(f"`{path}` holds no model, but {sorted(tree)}.")
    checkpoint: dict[str, Any] = tree_map(
        lambda value: tree[value[_ELSEWHERE]] if _is_elsewhere(value) else value, meta, is_leaf=_is_elsewhere
    )
    checkpoint["state_dict"] = {**state_dict, **checkpoint.pop(_OTHERS, {})}
    stored_states = sorted((key for key in tree if re.fullmatch(r"optimizer_\d+", key)), key=lambda key: int(key[10:]))
    states = checkpoint.pop(_STATES, [tree[key] for key in stored_states] or None)
    if states is not None:
        checkpoint["optimizer_states"] = [
            _merged(state, tree.get(f"optimizer_{number}", {})) for number, state in enumerate(states)
        ]
    return checkpoint


def _merged(state: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `_split`."""
    if "param_groups" not in state:
        return dict(state)
    # An optimizer that has not stepped has no state, and left no trace of that.
    found = dict(state.get("state", {}))
    for name, values in stored.get("state", {}).items():
        found[name] = {**values, **found.get(name, {})}
    return {**state, "state": found}


def _is_elsewhere(value: Any) -> bool:
    return isinstance(value, dict) and list(value) == [_ELSEWHERE]


class _OneAtATime(DefaultSavePlanner):
    """Hands out copies of pieces, one at a time: the memory of each goes when the next one is asked for.

    `torch.save` leaves what it wrote in a reference cycle, so without this all pieces would wait for the garbage
    collector.
    """

    _copied: Tensor | None = None

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if self._copied is not None:
            self._copied.untyped_storage().resize_(0)
            self._copied = None
        found = super().resolve_data(write_item)
        if isinstance(found, Tensor) and (not found.is_cpu or found.untyped_storage().nbytes() != found.nbytes):
            found = self._copied = found.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        return found
