"""Tensors in a directory of torch.distributed.checkpoint, read when someone needs their values.

checkpoint["state_dict"]["head.weight"]      a `StoredTensor`: shape and dtype, no memory
weight.copy_(it)                             read into the weight
anything else that computes with it          read whole, then done
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.utils._pytree import tree_map_only

from lightning_zero.checkpoint.places import Place
from lightning_zero.sharded_parameter import ShardedTensor

__all__ = ["CheckpointError", "StoredDirectory", "StoredTensor"]

_aten = torch.ops.aten


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names it."""


class StoredDirectory:
    """The files of torch.distributed.checkpoint in one directory.

    Nothing is communicated: each rank reads what it needs.

    Args:
        place: of the directory.
        weights_only: whether objects beside tensors are read without running what they ask for; see `torch.load`.

    Raises:
        CheckpointError: files are missing, or shorter than they should be.
    """

    def __init__(self, place: Place, weights_only: bool = True) -> None:
        self._place = place
        self._weights_only = weights_only
        self._reader = place.reader()
        try:
            self._metadata = self._reader.read_metadata()
        except Exception as error:
            raise CheckpointError(f"`{place}` is no complete checkpoint: {error}") from error
        self._require_files()

    def _require_files(self) -> None:
        """See that every piece is there, before the first one is read into a model."""
        sizes: dict[str, int] = {}
        for index, piece in self._metadata.storage_data.items():
            name = piece.relative_path
            if name not in sizes:
                sizes[name] = self._place.size(name)
            if sizes[name] < piece.offset + piece.length:
                what = "is missing" if sizes[name] < 0 else f"ends after {sizes[name]:,} bytes"
                raise CheckpointError(
                    f"`{self._place}` is damaged: its file {name!r}, which holds `{index.fqn}`, {what}. Take another"
                    " checkpoint."
                )

    def tree(self) -> dict[str, Any]:
        """What was saved: tensors as `StoredTensor`, the rest read."""
        entries = self._metadata.state_dict_metadata
        objects = {key: None for key, entry in entries.items() if not isinstance(entry, TensorStorageMetadata)}
        self.read(objects)
        places = self._metadata.planner_data or {}
        found: dict[str, Any] = {}
        for key, entry in entries.items():
            value = StoredTensor(self, key, entry) if isinstance(entry, TensorStorageMetadata) else objects[key]
            _put(found, places.get(key, (key,)), value)
        return found

    def read(self, destinations: dict[str, Any]) -> None:
        """Read each key into its tensor, whole or sharded, or read the object that it is.

        Raises:
            CheckpointError: a file is damaged.
        """
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # so it is, for this read
                load(destinations, storage_reader=self._reader, planner=_Planner(self._weights_only), no_dist=True)
        except (CheckpointException, Exception) as error:
            raise CheckpointError(f"`{self._place}` cannot be read at {sorted(destinations)[:3]}: {error}") from error


class StoredTensor(Tensor):
    """A tensor that lies in a directory.

    Args:
        directory: where.
        key: by which it is found there.
        entry: its shape and dtype.
    """

    directory: StoredDirectory
    key: str
    value: Tensor | None
    """What it is since someone wrote into it."""

    @staticmethod
    def __new__(cls, directory: StoredDirectory, key: str, entry: TensorStorageMetadata) -> StoredTensor:
        made: StoredTensor = Tensor._make_wrapper_subclass(cls, entry.size, dtype=entry.properties.dtype)
        made.directory, made.key, made.value = directory, key, None
        return made

    def __init__(self, directory: StoredDirectory, key: str, entry: TensorStorageMetadata) -> None:
        pass

    def read(self) -> Tensor:
        """The whole tensor, on the host."""
        if self.value is not None:
            return self.value
        whole = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(whole)
        return whole

    def read_into(self, out: Tensor) -> None:
        """Read what ``out`` has room for: all, or a rank's fragment; it has the same shape."""
        if self.value is None:
            self.directory.read({self.key: out})
        elif isinstance(out, ShardedTensor):
            out.store(self.value)
        else:
            out.copy_(self.value)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _aten.copy_.default and isinstance(args[1], cls) and type(args[0]) in (Tensor, torch.nn.Parameter):
            out, stored = args[:2]
            if out.shape == stored.shape:
                if not out.is_meta:
                    stored.read_into(out)
                return out
        if func is _aten.detach.default:
            return args[0]
        if func._schema.is_mutable or any(result.alias_info is not None for result in func._schema.returns):
            # It is written, or a view of it may be: from now on that is its value.
            tree_map_only(cls, cls._keep, (args, kwargs or {}))
        args, kwargs = tree_map_only(cls, cls.read, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _keep(self) -> None:
        self.value = self.read()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StoredTensor({self.key!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.read()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)


def _put(tree: dict[str, Any], place: Sequence[str | int], value: Any) -> None:
    """``value`` at ``place`` in nested dictionaries and lists: a number is a place in a list."""
    at: Any = tree
    for step, following in zip(place, (*place[1:], None), strict=True):
        if isinstance(step, int):
            at.extend([None] * (step + 1 - len(at)))
        if following is None:
            at[step] = value
        else:
            inner = at[step] if isinstance(step, int) else at.get(step)
            if inner is None:
                inner = at[step] = [] if isinstance(following, int) else {}
            at = inner


class _Planner(DefaultLoadPlanner):
    """Reads objects as ``weights_only`` says; torch's own runs what they ask for."""

    def __init__(self, weights_only: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=self._weights_only)
