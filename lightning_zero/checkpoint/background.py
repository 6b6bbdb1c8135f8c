"""Checkpoints that are written while training goes on.

    training    stage | steps ...                    | wait, stage | steps ...
    thread            | write, take its name, remove |             | write ...

What is staged is a copy in host memory, into the same buffers each time, so at most one is on its way.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_zero.checkpoint.objects import copied
from lightning_zero.collectives import Collectives
from lightning_zero.sharded_parameter import ShardedTensor

__all__ = ["BackgroundSaver"]


class BackgroundSaver:
    """Writes one checkpoint at a time, beside training.

    To make it is a collective: the thread communicates over a group of its own, in an order of its own.

    Args:
        collectives: of the ranks that save together, which are all of the default group.
        timeout: of a collective in the thread.
    """

    def __init__(self, collectives: Collectives, timeout: timedelta | None) -> None:
        self._group: dist.ProcessGroup | None = None
        if collectives.group is not None:
            ranks = dist.get_process_group_ranks(collectives.group)
            # Named by a count: a name made of its ranks would be that of the one before, which may have gone.
            self._group = dist.new_group(ranks, timeout, backend="gloo")
        self.collectives = Collectives(self._group, torch.device("cpu"))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lightning_zero checkpoint")
        self._buffers: list[Tensor] = []
        self._pending: list[Future[None]] = []
        _savers.add(self)

    def stage(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """A copy of ``checkpoint`` that training does not change; sharded tensors stay sharded. What was staged before
        is overwritten: `wait` first."""
        copies: dict[int, Any] = {}
        leaves, shape = tree_flatten(checkpoint)
        staged = tree_unflatten(copied(leaves, lambda value: self._staged(value, copies)), shape)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        return staged  # type: ignore[no-any-return]

    def _staged(self, value: Any, copies: dict[int, Any]) -> Any:
        """A copy of a tensor or storage; what is there under several names is so afterwards."""
        if id(value) not in copies:
            copies[id(value)] = self._copy(value, len(copies))
        return copies[id(value)]

    def _copy(self, value: Any, place: int) -> Any:
        if isinstance(value, ShardedTensor):
            return ShardedTensor(self._copied(value.fragment, place), value.slicing)
        if not isinstance(value, Tensor):
            return value.clone()
        if value.is_meta:
            return value
        made = self._copied(value.detach(), place)
        if not isinstance(value, nn.Parameter):
            return made
        parameter = nn.Parameter(made, requires_grad=value.requires_grad)
        parameter.__dict__.update(value.__dict__)
        return parameter

    def _copied(self, value: Tensor, place: int) -> Tensor:
        if value.layout is not torch.strided or not torch._prims_common.is_non_overlapping_and_dense_or_false(value):
            return value.cpu().clone()
        self._buffers.extend([torch.empty(0)] * (place + 1 - len(self._buffers)))
        buffer = self._buffers[place]
        if buffer.shape != value.shape or buffer.dtype != value.dtype or buffer.stride() != value.stride():
            pinned = value.device.type == "cuda"
            buffer = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, pin_memory=pinned)
            self._buffers[place] = buffer
        return buffer.copy_(value, non_blocking=True)

    def begin(self, save: Callable[[], None]) -> None:
        """Have the thread do ``save``, which may communicate over `collectives`. `wait` comes before the next one."""
        self._pending.append(self._thread.submit(save))

    def then(self, work: Callable[[], None]) -> bool:
        """Have the thread do ``work`` after the save that is under way, if that succeeds; false if there is none."""
        if not self._pending:
            return False
        save = self._pending[0]

        def after() -> None:
            if save.exception() is None:
                work()

        self._pending.append(self._thread.submit(after))
        return True

    def wait(self) -> None:
        """Until nothing is under way.

        Raises:
            CheckpointError: it was not written, on any rank.
        """
        pending, self._pending = self._pending, []
        errors = [error for error in [future.exception() for future in pending] if error is not None]
        if errors:
            raise errors[0]

    def wait_at_most(self, seconds: float) -> None:
        """Until nothing is under way, or so long; where other ranks may have gone it may never end."""
        wait(self._pending, timeout=seconds)

    def close(self) -> None:
        """`wait`, and end the thread and its group: a collective."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._buffers.clear()
            if self._group is not None:
                dist.destroy_process_group(self._group)


_savers: weakref.WeakSet[BackgroundSaver] = weakref.WeakSet()


@atexit.register
def _wait_for_all() -> None:
    """A script that ends after its last save has it on the disk, or says that it has not."""
    for saver in list(_savers):
        saver.wait()
