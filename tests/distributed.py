"""Runs a function on several gloo ranks, forked from the test process, and reports what the ranks raise."""

from __future__ import annotations

import datetime
import gc
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import journal
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from lightning_zero.sharded_parameter import ShardedTensor

TIMEOUT = 150.0
"""Seconds after which ranks count as hanging."""


def _rank_main(
    rank: int, world_size: int, store: str, function: Callable[..., Any], args: tuple[Any, ...], pipe: Any
) -> None:
    gc.freeze()  # a collection would touch, and so copy, every page of the parent
    torch.set_num_threads(1)
    try:
        timeout = datetime.timedelta(seconds=20)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout
        )
        sent = journal.begin()
        result = function(rank, *args)
        # Not `send`: it would pass tensors as shared memory, which goes with this process.
        pipe.send_bytes(pickle.dumps((True, (result, sent))))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        pipe.close()
        # Gloo aborts when references to its tensors outlive the group; nothing is left to do here but to leave.
        os._exit(0)


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, journals_differ: bool = False) -> list[Any]:
    """``function(rank, *args)`` on ``world_size`` gloo ranks; its results, which must be picklable, by rank.

    Args:
        world_size: number of ranks.
        function: called on each.
        args: of it.
        journals_differ: what ranks send may differ, since one of them fails.

    Raises:
        AssertionError: a rank raised, with its traceback, or hangs; or ranks sent different things.
    """
    context = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(rank, world_size, store, function, args, sender))
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            results = _collect(pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()
    if not journals_differ:
        journal.compare([sent for _, sent in results])
    return [result for result, _ in results]


def _collect(pipes: list[Any]) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    deadline = time.monotonic() + TIMEOUT
    waiting = set(range(len(pipes)))
    while waiting:
        assert time.monotonic() < deadline, f"ranks {sorted(waiting)} hang"
        for rank in sorted(waiting):
            if not pipes[rank].poll(0.02):
                continue
            try:
                done, result = pickle.loads(pipes[rank].recv_bytes())
            except EOFError:
                raise AssertionError(f"rank {rank} died") from None
            assert done, f"rank {rank} raised:\n{result}"
            results[rank] = result
            waiting.discard(rank)
    return results


def whole_values(tree: Any) -> Any:
    """``tree`` with the whole value of each sharded tensor, on every rank: a collective."""
    return tree_map(lambda value: value.whole().clone() if isinstance(value, ShardedTensor) else value, tree)
