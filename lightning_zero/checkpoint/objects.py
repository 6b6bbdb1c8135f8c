"""Whatever a checkpoint holds, whole: sharded tensors, and those in objects, as in a module among hyperparameters.

every rank    walks through the checkpoint, as pickling does, and finds the same sharded tensors in the same order
together      they are made whole, one after another, on rank 0
rank 0        copies what holds them, with whole tensors in the place of sharded ones and all others shared
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_zero.checkpoint.first_rank import on_first_rank
from lightning_zero.collectives import Collectives
from lightning_zero.param_group import ParamGroup
from lightning_zero.progress import progress
from lightning_zero.sharded_parameter import ShardedParameter, ShardedTensor, ShardedView
from lightning_zero.whole_parameter import WholeParameter

__all__ = ["copied", "place_of_tensor", "whole_values"]

_Sharded = ShardedTensor | ShardedView


def whole_values(
    checkpoint: Mapping[str, Any],
    collectives: Collectives,
    at_hand: Mapping[Any, Tensor] | None = None,
    keeps_entries: bool = False,
) -> dict[str, Any]:
    """``checkpoint`` with whole values, on the host, in the place of sharded tensors: a collective.

    Callbacks and hooks of modules put them there: averages of weights, parameters, modules. Rank 0 alone has the
    result; on the others ``checkpoint`` is as it was.

    Args:
        checkpoint: the same entries on all ranks.
        collectives: of the ranks that save it together.
        at_hand: whole tensors that rank 0 has already, by `place_of_tensor`: they are not gathered again.
        keeps_entries: leave tensors that are entries of dictionaries and lists sharded; those in objects are not.

    Raises:
        RuntimeError: on every rank, where ranks differ in the sharded tensors that they bring, or rank 0 cannot copy.
    """
    leaves, shape = tree_flatten(dict(checkpoint))
    skipped = _Sharded if keeps_entries else ()
    numbers = [i for i, leaf in enumerate(leaves) if _may_hold_sharded(leaf) and not isinstance(leaf, skipped)]
    walk, pickled = _walk_all([leaves[i] for i in numbers])
    sharded = [tensor for tensor in walk.tensors if isinstance(tensor, _Sharded)]
    if not collectives.on_any_rank(bool(sharded)):
        return dict(checkpoint)
    whole = dict(at_hand or {}) if collectives.rank == 0 else {}
    known = _agree([_name(tensor) for tensor in sharded], [place_of_tensor(t) in whole for t in sharded], collectives)
    _gather([t for t, is_known in zip(sharded, known, strict=True) if not is_known], whole, collectives.rank == 0)

    def copy() -> None:
        plain = [_plain(tensor, whole) for tensor in walk.tensors]
        for i, value in zip(walk.taken, _Copies(pickled, plain).load(), strict=True):
            leaves[numbers[i]] = value

    on_first_rank(collectives, copy)
    return tree_unflatten(leaves, shape)  # type: ignore[no-any-return]


def copied(objects: Sequence[Any], change: Callable[[Any], Any]) -> list[Any]:
    """Copies of ``objects``, which share what these share; what cannot be copied is there itself.

    Args:
        change: gives what stands for a tensor, or a storage, in the copies.
    """
    walk, pickled = _walk_all(objects)
    changed = [change(tensor) for tensor in walk.tensors]
    of = {id(tensor): value for tensor, value in zip(walk.tensors, changed, strict=True)}
    found = [of.get(id(value), value) for value in objects]
    with suppress(Exception):  # an object that cannot be made anew
        for i, value in zip(walk.taken, _Copies(pickled, changed).load(), strict=True):
            found[i] = value
    return found


def place_of_tensor(tensor: Any) -> Any:
    """What is the same for two tensors that are one parameter's value."""
    owner = tensor.owner if isinstance(tensor, ShardedTensor) else None
    return id(tensor) if owner is None else (owner, tensor._index)


def _may_hold_sharded(leaf: Any) -> bool:
    return isinstance(leaf, _Sharded) or not isinstance(leaf, str | bytes | int | float | Tensor | None)


def _name(tensor: ShardedTensor | ShardedView) -> str:
    if isinstance(tensor, ShardedView):
        return f"{_name(tensor.base)}, a view of shape {tuple(tensor.shape)}"
    return tensor.slicing.name


def _agree(names: list[str], known: list[bool], collectives: Collectives) -> list[bool]:
    """Which tensors rank 0 has at hand, of those that all ranks found."""
    first_names, known = collectives.broadcast_object((names, known))
    if collectives.on_any_rank(names != first_names):
        differing = [
            name for name in dict.fromkeys((*names, *first_names)) if names.count(name) != first_names.count(name)
        ]
        raise RuntimeError(
            f"the checkpoint has {len(first_names)} sharded tensors on rank 0 and {len(names)} on this one"
            f" {differing[:4]}, or others on another rank, so they cannot be made whole together. Fill it alike on"
            " every rank, in `on_save_checkpoint` or `state_dict`: only rank 0 writes the file."
        )
    return known


def _gather(sharded: Sequence[ShardedTensor | ShardedView], whole: dict[Any, Tensor], is_first: bool) -> None:
    """Put whole values of ``sharded`` into ``whole``, by their places, on rank 0: a collective."""
    for group in dict.fromkeys(tensor.owner for tensor in sharded if isinstance(tensor, ShardedTensor)):
        if isinstance(group, ParamGroup):
            group.keep_writes()
    by_place = {place_of_tensor(tensor): tensor for tensor in sharded}
    for place, tensor in progress(list(by_place.items()), "Gathering what is in a checkpoint", is_first):
        # A view would drag its whole buffer into the file.
        found = tensor.whole_on_first() if isinstance(tensor, ShardedTensor) else tensor.whole().detach().clone()
        if is_first and found is not None:
            whole[place] = found.to("cpu")


def _plain(tensor: Any, whole: Mapping[Any, Tensor]) -> Any:
    """What stands for ``tensor`` in a file."""
    if not isinstance(tensor, _Sharded):
        return tensor
    value = whole[place_of_tensor(tensor)]
    return tensor.plain(value) if isinstance(tensor, ShardedParameter) else value


class _Walk(pickle.Pickler):
    """Pickles objects without their tensors, which it collects: in the pickle there is the number of each."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Any] = []
        self.taken: Sequence[int] = ()
        """Which of the objects are in the pickle."""
        self._number: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor | torch.UntypedStorage | torch.TypedStorage):
            return None
        if isinstance(value, WholeParameter):  # a window is open
            value = value._resting
        number = self._number.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
        return number


class _Copies(pickle.Unpickler):
    """The objects of a pickle, with ``tensors`` by their numbers."""

    def __init__(self, pickled: bytes, tensors: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors

    def persistent_load(self, number: int) -> Any:
        return self._tensors[number]


def _walk_all(objects: Sequence[Any]) -> tuple[_Walk, bytes]:
    """Walk through ``objects``, together: what they share is shared in the pickle.

    What cannot be pickled is left out. Whoever writes the checkpoint may know a way, or says which it is.
    """
    taken: Sequence[int] = range(len(objects))
    try:
        return _walked(objects, taken)
    except Exception:
        taken = [i for i in taken if _can_be_pickled(objects[i])]
        return _walked(objects, taken)


def _walked(objects: Sequence[Any], taken: Sequence[int]) -> tuple[_Walk, bytes]:
    file = io.BytesIO()
    walk = _Walk(file)
    walk.taken = taken
    walk.dump([objects[i] for i in taken])
    return walk, file.getvalue()


def _can_be_pickled(value: Any) -> bool:
    try:
        _walked([value], [0])
    except Exception:
        return False
    return True
