"""What this rank waits for: told to the others, and to the user, when it takes too long.

    rank 0 has waited 60 s for the weights of `blocks.3`. Other ranks: rank 1 computes, last waited for ... 58 s ago

A wait that fails raises with the same words, so a time limit of the process group names what did not come.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

__all__ = ["CollectiveFailedError", "Watch"]

PATIENCE = 60.0
"""Seconds after which a wait is reported, once."""

MOST_RANKS = 8
"""How many other ranks a report describes."""

_numbers = itertools.count()

_log = logging.getLogger("lightning_zero")


class CollectiveFailedError(RuntimeError):
    """Other ranks did not bring what this one waited for."""


class Watch:
    """Waits of one rank. A context: ``with watch.waiting_for("the weights of `net.0`"): work.wait()``.

    Args:
        rank: this rank.
        world_size: of the ranks that share the state.
        store: where ranks leave a line about themselves; ``None`` reports this rank alone.
        patience: seconds.
    """

    def __init__(self, rank: int, world_size: int, store: Store | None = None, patience: float | None = None) -> None:
        self._rank = rank
        self._world_size = world_size
        self._store = store
        # Modules are sharded in one order on all ranks: each has lines of its own.
        self._key = f"lightning_zero/{next(_numbers)}"
        self._patience = PATIENCE if patience is None else patience
        self._stack: list[tuple[str, float]] = []
        self._last = ("nothing yet", time.monotonic())
        self.waited = 0.0
        """Seconds that this rank has waited in all. On a GPU the stream waits, mostly, and not the host."""
        self.on_wait: Callable[[str, float, float], None] | None = None
        """Called with what a wait was for, and when it began and ended, in seconds of `time.monotonic`."""
        self._stopped = threading.Event()
        if world_size > 1:
            threading.Thread(target=self._run, name="lightning_zero watch", daemon=True).start()

    def waiting_for(self, what: str) -> _Waiting:
        """Context of one wait."""
        return _Waiting(self, what)

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()

    @property
    def line(self) -> str:
        """What this rank does now."""
        if self._stack:
            what, since = self._stack[-1]
            return f"waits for {what}, for {time.monotonic() - since:.0f} s"
        what, since = self._last
        return f"computes; it last waited for {what}, {time.monotonic() - since:.0f} s ago"

    def _run(self) -> None:
        reported = 0.0
        while not self._stopped.wait(self._patience / 4):
            try:
                if self._store is not None:
                    self._store.set(f"{self._key}/{self._rank}", self.line)
                since = self._stack[-1][1] if self._stack else time.monotonic()
                if since != reported and time.monotonic() - since > self._patience:
                    reported = since
                    _log.warning("rank %d %s. %s", self._rank, self.line, self.others())
            except RuntimeError:
                # The process group, and its store, are gone: there is nobody to tell.
                return

    def others(self) -> str:
        """What the other ranks said of themselves, at most a quarter of ``patience`` ago."""
        if self._store is None:
            return ""
        lines = []
        for rank in [rank for rank in range(self._world_size) if rank != self._rank][:MOST_RANKS]:
            key = f"{self._key}/{rank}"
            lines.append(f"rank {rank} {self._store.get(key).decode() if self._store.check([key]) else 'said nothing'}")
        return "Other ranks: " + "; ".join(lines) + "."


class _Waiting:
    """One wait."""

    def __init__(self, watch: Watch, what: str) -> None:
        self._watch = watch
        self._what = what

    def __enter__(self) -> None:
        self._watch._stack.append((self._what, time.monotonic()))

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        watch = self._watch
        watch._last = what, since = watch._stack.pop()
        now = time.monotonic()
        if not watch._stack:  # a wait inside a wait counts once
            watch.waited += now - since
        if watch.on_wait is not None:
            watch.on_wait(what, since, now)
        if kind is RuntimeError or kind is dist.DistBackendError:
            raise CollectiveFailedError(
                f"rank {self._watch._rank} waited for {self._what}, which did not come: {error}. Another rank may have"
                " failed, or takes another path: at stage 3 all ranks must compute with the same blocks in training."
            ) from error
