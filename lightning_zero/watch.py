"""What this rank waits for: told to the others, and to the user, when it takes too long.

    rank 0 has waited 60 s for the weights of `blocks.3`. Other ranks: rank 1 computes, last waited for ... 58 s ago

A wait that fails raises with the same words, so a time limit of the process group names what did not come. Ranks that
wait for each other cannot go on: each waits for a collective that another one has not begun, and none of them will.
That is certain, however slow links and ranks are, so it is not left to the time limit:

    rank 0    waits for the weights of `blocks.5`     has not begun to gather `blocks.4`
    rank 1    waits for the weights of `blocks.4`     has not begun to gather `blocks.5`
    all       `RanksDifferError`
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

__all__ = ["CollectiveFailedError", "Operation", "RanksDifferError", "Watch"]

PATIENCE = 60.0
"""Seconds after which a wait is reported, once."""

SUSPICION = 2.0
"""Seconds after which a wait is held against those of the other ranks."""

MOST_RANKS = 8
"""How many other ranks a report describes."""

Operation = tuple[int | str, int]
"""One collective: the sequence it belongs to, the same on all ranks, and its number there."""

_log = logging.getLogger("lightning_zero")


class CollectiveFailedError(RuntimeError):
    """Other ranks did not bring what this one waited for."""


class RanksDifferError(RuntimeError):
    """Ranks have come to places from which they cannot go on together."""


class Watch:
    """Waits of one rank. A context: ``with watch.waiting_for("the weights of `net.0`"): work.wait()``.

    Args:
        rank: this rank.
        world_size: of the ranks that share the state.
        store: where ranks leave a line about themselves, of the process group's own; ``None`` reports this rank alone.
        interrupt: has every wait of this rank for the others fail at once.
        patience: seconds.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store | None = None,
        interrupt: Callable[[], object] | None = None,
        patience: float | None = None,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._interrupt = interrupt
        self._patience = PATIENCE if patience is None else patience
        self._stack: list[tuple[str, float, Operation | None]] = []
        self._last = ("nothing yet", time.monotonic())
        self._launched: Counter[int | str] = Counter()
        self.waited = 0.0
        """Seconds that this rank has waited in all. On a GPU the stream waits, mostly, and not the host."""
        self.on_wait: Callable[[str, float, float], None] | None = None
        """Called with what a wait was for, and when it began and ended, in seconds of `time.monotonic`."""
        self._uses = 0
        self._stopped = threading.Event()

    def begin(self) -> None:
        """One more who may wait: a thread looks at the waits until `end` was called as often."""
        self._uses += 1
        if self._uses == 1 and self._world_size > 1:
            self._stopped = threading.Event()
            run = _Looks(self, self._stopped).run
            threading.Thread(target=run, name="lightning_zero watch", daemon=True).start()

    def end(self) -> None:
        """One less."""
        self._uses -= 1
        if not self._uses:
            self._stopped.set()

    def launch(self, sequence: int | str) -> Operation:
        """Note that this rank begins its part of the next collective of ``sequence``; which one that is."""
        self._launched[sequence] += 1
        return sequence, self._launched[sequence]

    def waiting_for(self, what: str, operation: Operation | None = None) -> _Waiting:
        """Context of one wait, for a collective of the others if it is for one."""
        return _Waiting(self, what, operation)

    @property
    def line(self) -> str:
        """What this rank does now."""
        if self._stack:
            what, since, _ = self._stack[-1]
            return f"waits for {what}, for {time.monotonic() - since:.0f} s"
        what, since = self._last
        return f"computes; it last waited for {what}, {time.monotonic() - since:.0f} s ago"

    # What ranks leave in the store

    def key(self, name: int | str) -> str:
        """Of what rank ``name`` says of itself, or of the ``"verdict"``."""
        return f"lightning_zero/watch/{name}"

    def read(self, name: int | str) -> Any:
        """What is there, if anything."""
        key = self.key(name)
        if self._store is None or not self._store.check([key]):
            return None
        return json.loads(self._store.get(key))

    def write(self, name: int | str, value: Any) -> None:
        """Leave ``value`` for the other ranks."""
        if self._store is not None:
            self._store.set(self.key(name), json.dumps(value))

    def others(self) -> str:
        """What the other ranks said of themselves, at most a quarter of ``patience`` ago."""
        if self._store is None:
            return ""
        ranks = [rank for rank in range(self._world_size) if rank != self._rank][:MOST_RANKS]
        said = [(rank, self.read(rank)) for rank in ranks]
        lines = [f"rank {rank} {'said nothing' if state is None else state['line']}" for rank, state in said]
        return "Other ranks: " + "; ".join(lines) + "."

    def failed(self, what: str, error: BaseException) -> Exception:
        """The error of a wait that ended with ``error``."""
        try:
            verdict = self.read("verdict")
        except RuntimeError:  # the store is gone with the rank that keeps it
            verdict = None
        if verdict is not None:
            return RanksDifferError(verdict)
        return CollectiveFailedError(
            f"rank {self._rank} waited for {what}, which did not come: {error}. Another rank may have failed, or takes"
            " another path: at stage 3 all ranks must compute with the same blocks in training."
        )


class _Looks:
    """What the thread of a watch does.

    Args:
        watch: whose waits.
        stopped: set when nobody waits any more.
    """

    def __init__(self, watch: Watch, stopped: threading.Event) -> None:
        self._watch = watch
        self._stopped = stopped
        self._reported = 0.0
        self._told = 0.0
        self._number = 0
        self._before: list[tuple[Any, int]] = []

    def run(self) -> None:
        """Look until it is stopped."""
        # So often that no wait is judged later than this after it became suspicious.
        while not self._stopped.wait(min(SUSPICION / 2, self._watch._patience / 4)):
            try:
                self._look()
            except RuntimeError:
                # The process group, and its store, are gone: there is nobody to tell.
                return

    def _look(self) -> None:
        watch, now = self._watch, time.monotonic()
        stack = [*watch._stack]
        what, since, operation = stack[-1] if stack else ("", now, None)
        suspicious = now - since > SUSPICION
        if suspicious or now - self._told > watch._patience / 4:
            self._told = now
            self._number += 1
            waits = {"what": what, "since": since, "operation": operation} if suspicious else None
            # Copied at once: the main thread goes on counting.
            counts = dict(watch._launched) if suspicious else {}
            launched = {str(sequence): number for sequence, number in counts.items()}
            watch.write(watch._rank, {"line": watch.line, "number": self._number, "waits": waits, "launched": launched})
        if since != self._reported and now - since > watch._patience:
            self._reported = since
            _log.warning("rank %d %s. %s", watch._rank, watch.line, watch.others())
        if not suspicious:
            return
        if watch._rank == 0 and watch.read("verdict") is None:
            verdict = self._judge()
            if verdict is not None:
                watch.write("verdict", verdict)
        if watch._interrupt is not None and watch.read("verdict") is not None:
            watch._interrupt()
            self._stopped.set()

    def _judge(self) -> str | None:
        """What keeps all ranks from going on, if it is certain that something does."""
        states = []
        for rank in range(self._watch._world_size):
            state = self._watch.read(rank)
            if state is None or state["waits"] is None or state["waits"]["operation"] is None:
                self._before = []
                return None
            states.append(state)
        before, self._before = self._before, [(state["waits"], state["number"]) for state in states]
        # Ranks wrote at different times. Who said twice that it waits has waited all the time between, with nothing
        # begun: so at the first of these looks all of them waited at once.
        still = before and all(
            waits == earlier and number > told
            for (waits, number), (earlier, told) in zip(self._before, before, strict=True)
        )
        if not still or not all(self._is_stuck(state, states) for state in states):
            return None
        lines = [f"rank {rank} waits for {state['waits']['what']}" for rank, state in enumerate(states[:MOST_RANKS])]
        return (
            f"ranks wait for each other and none can go on: {'; '.join(lines)}. All ranks must run as many backwards,"
            " and call what communicates on all of them or on none; at stage 3 they must also compute with the same"
            " blocks in training. Draw what is left out from a generator that is seeded alike on every rank, or let"
            " them differ: `ZeROStrategy(ranks_may_differ=True)`, `shard(module, ranks_may_differ=True)`."
        )

    @staticmethod
    def _is_stuck(state: Any, states: list[Any]) -> bool:
        """Whether some rank has not begun what ``state`` waits for."""
        sequence, number = state["waits"]["operation"]
        return any(other["launched"].get(str(sequence), 0) < number for other in states)


class _Waiting:
    """One wait."""

    def __init__(self, watch: Watch, what: str, operation: Operation | None) -> None:
        self._watch = watch
        self._what = what
        self._operation = operation

    def __enter__(self) -> None:
        self._watch._stack.append((self._what, time.monotonic(), self._operation))

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        watch = self._watch
        what, since, _ = watch._stack.pop()
        watch._last = what, since
        now = time.monotonic()
        if not watch._stack:  # a wait inside a wait counts once
            watch.waited += now - since
        if watch.on_wait is not None:
            watch.on_wait(what, since, now)
        if error is not None and (kind is RuntimeError or kind is dist.DistBackendError):
            raise watch.failed(self._what, error) from error
