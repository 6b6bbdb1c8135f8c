"""The main weights of one group, and the shard of model weights that a gather takes from them.

on the device    main_weight --cast--> this rank's shard of the whole buffer
off the device   main_weight --cast, move, once a step--> a shard on the device          (a whole buffer that rests,
                                                                                       or one of its own)
                 main_weight --cast--> a shard beside it --move, each gather--> the whole buffer
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_zero.lane import Lane, Mark

__all__ = ["MainWeights", "OffloadedWeights"]

OwnShard = Callable[[Tensor], Tensor]
"""This rank's shard of a whole buffer, a view."""


class MainWeights:
    """Main weights on the device.

    Args:
        value: shape (shard_numel,), what the optimizer steps.
        own_shard: of the group.
        model_dtype: of whole weights.
    """

    lane: Lane | None = None
    moves_each_gather = False
    """Whether no shard rests on the device, and each gather brings one."""

    def __init__(self, value: Tensor, own_shard: OwnShard, model_dtype: torch.dtype) -> None:
        self.handle = value
        self._own_shard = own_shard
        self._model_dtype = model_dtype

    @property
    def value(self) -> Tensor:
        """Shape (shard_numel,)."""
        return self.handle

    def write(self, value: Tensor) -> None:
        """Make ``value``, on the device, the main weights."""
        self.value.copy_(value)

    @contextmanager
    def source(self, whole: Tensor) -> Iterator[Tensor]:
        """Context of a gather into ``whole``, from what it yields: shape (shard_numel,), in the model dtype."""
        source = self.handle
        if source.dtype != self._model_dtype:
            source = self._own_shard(whole)
            source.copy_(self.handle)
        yield source

    def before_write(self) -> None:
        """The value is about to be written."""

    def changed(self) -> None:
        """The value was written, or is about to be by what was queued."""

    def begin_update(self) -> None:
        """Do in the background what is queued, up to the next gather."""

    @property
    def updating(self) -> bool:
        """Whether the value has changed since the last gather, in the background: the next gather waits for that."""
        return False

    def shards(self) -> Iterator[tuple[Tensor, bool]]:
        """What holds these weights beside whole buffers, and whether off the device."""
        yield self.handle, False


class OffloadedWeights(MainWeights):
    """Main weights in a lane, off the device.

    Args:
        value: on the device; it is copied to where it rests.
        own_shard: of the group.
        model_dtype: of whole weights.
        lane: of the group.
        whole: the whole buffer that rests on the device, where one does: its own shard is what gathers take.
        moves_each_gather: keep no shard on the device, but bring one for each gather.
    """

    lane: Lane

    def __init__(
        self,
        value: Tensor,
        own_shard: OwnShard,
        model_dtype: torch.dtype,
        lane: Lane,
        whole: Tensor | None,
        moves_each_gather: bool,
    ) -> None:
        resting = lane.allocate(value.numel(), value.dtype, moves=True)
        lane.background.target.to_rest(resting, value)
        lane.background.copies.settle()
        super().__init__(resting, own_shard, model_dtype)
        self.lane = lane
        self._same_dtype = value.dtype == model_dtype
        self._ready: Tensor
        """In the model dtype: what gathers take, or bring."""
        self.moves_each_gather = moves_each_gather
        if whole is not None:
            self._ready = own_shard(whole)
        elif not moves_each_gather:
            self._ready = value.new_empty(value.numel(), dtype=model_dtype)
        else:
            self._ready = resting if self._same_dtype else lane.allocate(value.numel(), model_dtype, moves=True)
        self._behind = self._updating = True
        self._read: Mark = None
        lane.relax()

    @property
    def value(self) -> Tensor:
        """Shape (shard_numel,), after everything that was queued."""
        self.lane.wait()
        return self.handle

    def write(self, value: Tensor) -> None:
        self.lane.background.target.to_rest(self.value, value)
        self.lane.background.copies.settle()

    def before_write(self) -> None:
        if self._read is not None:
            # The device, behind the host, may still have to read what rests.
            self.lane.add(self._read.synchronize)
            self._read = None

    def changed(self) -> None:
        self._behind = self._updating = True

    @property
    def updating(self) -> bool:
        return self._updating

    def begin_update(self) -> None:
        if self._behind:
            self._prepare()
            self.lane.begin()

    def _prepare(self) -> None:
        """Queue what makes the shard that gathers take, or bring, current."""
        self._behind = False
        mark = self.lane.background.copies.mark()
        self.lane.add(lambda: self._cast() if self.moves_each_gather else self._move(mark))

    def _cast(self) -> None:
        if self._ready is not self.handle:
            self._ready.copy_(self.handle)

    def _move(self, mark: object) -> None:
        shared = self.lane.background
        source = self.handle
        if not self._same_dtype:
            source = self.lane.take(source.numel(), self._model_dtype).copy_(source)
        # What computed with the old values was queued before the mark.
        with shared.copies.after(mark):
            shared.target.to_device(self._ready, source)
        shared.count_moved("to device", self._ready.nbytes)

    @contextmanager
    def source(self, whole: Tensor) -> Iterator[Tensor]:
        # Not at each gather: mean gradients of micro-batches wait in the lane to be complete.
        if self._updating:
            if self._behind:
                self._prepare()
            self.lane.wait()
            self._updating = False
        if not self.moves_each_gather:
            yield self._ready
            return
        shared = self.lane.background
        own = self._own_shard(whole)
        # The gather follows the copy on a stream beside the computation, which waits for the gather alone.
        with shared.gathers.beside():
            shared.target.to_device(own, self._ready)
            shared.count_moved("to device", own.nbytes)
            self._read = shared.gathers.mark()
            yield own
        shared.target.relax(self._ready)

    def shards(self) -> Iterator[tuple[Tensor, bool]]:
        yield self.handle, True
        yield self._ready, self.moves_each_gather
