"""Gloo ranks that stay: forked once, given one piece of work after another.

    parent    start(work) | something else meanwhile | collect()
    rank r    function(rank, work) -> result, over the same process group each time

Ranks that fail or hang leave the group in an unknown state: they are killed, and the next piece of work finds new ones.
"""

from __future__ import annotations

import datetime
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

PATIENCE = 15.0
"""Seconds in which a rank waits for the others; work that fits the pool takes a fraction of one."""

GRACE = 2.0
"""Seconds for the other ranks to tell what they know, after the first has failed."""


def _serve(
    rank: int, world_size: int, store: str, function: Callable[[int, Any], Any], pipe: Any, others: list[Any]
) -> None:
    for other in others:  # else a dead parent would not be noticed
        other.close()
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout)
    while True:
        try:
            work = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        sent = journal.begin()
        try:
            answer = (True, (function(rank, work), sent))
        except BaseException:
            answer = (False, traceback.format_exc())
        # Not `send`: it would pass tensors as shared memory.
        pipe.send_bytes(pickle.dumps(answer))


class RankPool:
    """``world_size`` ranks that call ``function(rank, work)`` on each piece of work.

    Args:
        world_size: number of ranks.
        function: called on each rank; work and result must be picklable.
    """

    def __init__(self, world_size: int, function: Callable[[int, Any], Any]) -> None:
        self._world_size = world_size
        self._function = function
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._pipes: list[Any] = []
        self._processes: list[Any] = []

    def start(self, work: Any) -> None:
        """Give ``work`` to every rank."""
        if not self._processes:
            self._fork()
        message = pickle.dumps(work)
        for pipe in self._pipes:
            pipe.send_bytes(message)

    def collect(self) -> list[Any]:
        """What the ranks return, by rank.

        Raises:
            AssertionError: a rank raised, with its traceback, died, or hangs.
        """
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + 2 * PATIENCE
        while len(results) + len(failures) < self._world_size and time.monotonic() < deadline:
            for rank in range(self._world_size):
                if rank in results or rank in failures or not self._pipes[rank].poll(0.002):
                    continue
                try:
                    done, answer = pickle.loads(self._pipes[rank].recv_bytes())
                except (EOFError, ConnectionResetError):
                    done, answer = False, "it died"
                (results if done else failures)[rank] = answer
                if not done:
                    deadline = min(deadline, time.monotonic() + GRACE)
        if len(results) == self._world_size:
            journal.compare([results[rank][1] for rank in range(self._world_size)])
            return [results[rank][0] for rank in range(self._world_size)]
        self.close()
        raise AssertionError(self._story(results, failures))

    def _story(self, results: dict[int, Any], failures: dict[int, str]) -> str:
        silent = [rank for rank in range(self._world_size) if rank not in results and rank not in failures]
        hang = not failures or any("timed out" in text.lower() for text in failures.values())
        # Two ranks that fail alike are told once.
        ranks_of: dict[str, list[int]] = {}
        for rank, text in failures.items():
            ranks_of.setdefault(text, []).append(rank)
        parts = [f"ranks {ranks} raised:\n{text}" for text, ranks in ranks_of.items()]
        if hang:
            parts.insert(0, f"a hang; done: ranks {sorted(results)}, silent: ranks {silent}")
        return "\n".join(parts)

    def _fork(self) -> None:
        context = get_context("fork")
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        for rank in range(self._world_size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self._world_size, store, self._function, there, [*self._pipes, here])
            )
            process.daemon = True
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def close(self) -> None:
        """Kill the ranks."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._pipes, self._processes, self._folder = [], [], None
