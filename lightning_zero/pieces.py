"""A rank's fragment of a tensor as torch.distributed.checkpoint sees it: boxes of the whole tensor.

A fragment is a run of elements in storage order, so it is a handful of boxes. Files hold boxes under the tensor's name
and whole shape: whoever reads them, on however many ranks, finds the whole tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lightning_zero.boxes import Box, boxes
from lightning_zero.slicing import Slicing

__all__ = ["chunk_of", "own_boxes", "piece_at", "write_items"]


def _storage_order(slicing: Slicing) -> list[int]:
    """Dimensions from the slowest to the fastest in memory."""
    return sorted(range(len(slicing.shape)), key=lambda d: (-slicing.stride[d], -slicing.shape[d]))


def own_boxes(slicing: Slicing) -> list[Box]:
    """This rank's fragment as boxes of the whole tensor; ``start`` counts in storage order."""
    order = _storage_order(slicing)
    found = boxes([slicing.shape[d] for d in order], slicing.own.start, slicing.own.stop)
    return [box.permuted(order) for box in found]


def chunk_of(box: Box) -> ChunkStorageMetadata:
    """``box`` in the words of torch.distributed.checkpoint."""
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def write_items(name: str, slicing: Slicing, dtype: torch.dtype) -> list[WriteItem]:
    """What this rank writes of the tensor ``name``."""
    properties = TensorProperties(dtype=dtype)
    return [
        WriteItem(
            index=MetadataIndex(name, torch.Size(box.offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk_of(box), properties=properties, size=slicing.shape),
        )
        for box in own_boxes(slicing)
    ]


def piece_at(index: MetadataIndex, slicing: Slicing, fragment: Tensor) -> Tensor:
    """The box at ``index.offset`` as a view of ``fragment``, shape (own.numel,).

    Raises:
        ValueError: this rank has no such box.
    """
    for box in own_boxes(slicing):
        if index.offset is None or torch.Size(box.offsets) == index.offset:
            order = _storage_order(slicing)
            start = box.start - slicing.own.start
            run = fragment[start : start + box.numel].view([box.sizes[d] for d in order])
            return run.permute([order.index(d) for d in range(len(order))])
    raise ValueError(f"`{index.fqn}` has no piece at {tuple(index.offset or ())} on this rank.")
