"""Work on state that rests off the device: it queues, and is done before anyone reads its result.

    optimizer.step()    mul_ | lerp_ | addcdiv_ | upload        operations queue, `step()` returns
    in the background   one lane after another, in forward order
    a reader            waits for its own lane, and does itself what nobody has begun

One lane holds the state of one group. What an operation takes it takes as it was when it was queued, so that results
are those of doing it at once.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_zero.flat_buffer import BufferPool
from lightning_zero.offload import OffloadError, OffloadTarget

__all__ = ["Background", "CopyStream", "Deferred", "Lane", "Mark", "value_of"]

T = TypeVar("T")

Mark = Any
"""A position of a CUDA stream, or ``None`` on the CPU, where everything is done at once."""


IN_FLIGHT = 2
"""Groups whose mean gradients leave the device at a time."""


class CopyStream:
    """Copies between the device and the host beside the computation.

    Args:
        device: on the CPU there is one stream of work, and a copy is a copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._device = device

    def mark(self) -> Mark:
        """The position of the current stream, as a rule the one that computes: what is queued on it so far."""
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    @contextmanager
    def after(self, mark: Mark) -> Iterator[None]:
        """Context of copies that begin after ``mark``. At its end they are done, for the host too."""
        if self._stream is None:
            yield
            return
        # Each thread has a current device of its own.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield
        self._stream.synchronize()

    def settle(self) -> None:
        """Wait, on the host, for what the compute stream does."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).synchronize()

    def finish(self) -> None:
        """Wait, on the host, for the copies."""
        if self._stream is not None:
            self._stream.synchronize()

    def enter_thread(self) -> None:
        """Have this thread begin at the device: what it page-locks would make it a context on the first one."""
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Context of work that begins after what the compute stream does now, and goes on beside it."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield


class Background:
    """What all lanes of a model share: the target, the thread, the counters, and a failure, which ends all.

    Args:
        target: where state rests.
        device: where it computes.
    """

    def __init__(self, target: OffloadTarget, device: torch.device) -> None:
        target.open(device)
        self.target = target
        self.copies = CopyStream(device)
        self.gathers = CopyStream(device)
        self.pool = BufferPool(torch.device("cpu"), allocate=lambda n, dtype: target.allocate(n, dtype, True))
        self.moved: Counter[str] = Counter()
        """Bytes "to device" and "to rest" that this rank moved."""
        self.seconds = {"worked": 0.0, "waited": 0.0}
        """Seconds of operations, in whatever thread, and seconds that readers waited for them, or did them."""
        self.failure: BaseException | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._leaving: deque[Lane] = deque()
        # Several threads count, and a sum in place is more than one step.
        self._counting = threading.Lock()

    def count_moved(self, to: str, nbytes: int) -> None:
        """Note a transfer."""
        with self._counting:
            self.moved[to] += nbytes

    @contextmanager
    def timing(self, what: str) -> Iterator[None]:
        """Context whose seconds count as ``what``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            with self._counting:
                self.seconds[what] += time.perf_counter() - started

    def leaves(self, lane: Lane, more_follow: bool) -> None:
        """Note that mean gradients of ``lane`` leave the device, and wait for those `IN_FLIGHT` before.

        A backward that is faster than the transfers, or a host that runs ahead of its device, would else fill the
        device with what is about to leave it.

        Args:
            more_follow: not yet: further ones add to them on the device first.
        """
        if more_follow:
            # What left for the step before is over, and a wait for its lane would not let more follow.
            self._leaving.clear()
            return
        lane.begin()
        self._leaving.append(lane)
        if len(self._leaving) > IN_FLIGHT:
            self._leaving.popleft().wait()

    def submit(self, work: Callable[[], None]) -> None:
        """Do ``work`` in the background, after what was submitted before."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "lightning_zero.offload", self.copies.enter_thread)
        self._thread.submit(work)

    def close(self, waits: bool) -> None:
        """Give the target back after what was submitted, and end the thread.

        Args:
            waits: for that. The background thread itself must not, nor a thread that holds a lane.
        """
        self._leaving.clear()
        if self._thread is None:
            self._close_target()
            return
        self.submit(self._close_target)
        self._thread.shutdown(waits)
        self._thread = None

    def _close_target(self) -> None:
        # A gather that nobody waited for on the host may still read.
        self.gathers.finish()
        self.target.close()


class Deferred:
    """A fragment that a queued operation will make.

    Args:
        dtype: of its elements.
        device: where it will be.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.value: Tensor | None = None


def value_of(fragment: Tensor | Deferred) -> Tensor:
    """What a fragment is, once the operation that makes it is done."""
    if isinstance(fragment, Tensor):
        return fragment
    assert fragment.value is not None
    return fragment.value


class Lane:
    """Operations on the state of one group, in order.

    Args:
        name: of the state, for errors.
        background: shared with the other lanes of a model.
    """

    def __init__(self, name: str, background: Background) -> None:
        self.name = name
        self.background = background
        self._queue: deque[Callable[[], object]] = deque()
        self._added = self._done = 0
        self._lock = threading.RLock()
        self._resting: list[weakref.ref[Tensor]] = []

    def allocate(self, numel: int, dtype: torch.dtype, moves: bool = False) -> Tensor:
        """See `OffloadTarget.allocate`; the lane tells the target when it is not needed for a while."""
        return self.keep(self.background.target.allocate(numel, dtype, moves))

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer of shape (numel,) that moves, from the pool."""
        buffer, memory = self.background.pool.lend(numel, dtype)
        # Not the buffer: operations may be queued that refer to parts of it alone.
        self.keep(memory)
        return buffer

    def keep(self, resting: Tensor) -> Tensor:
        """Have `relax` know of ``resting``."""
        others = [reference for reference in self._resting if reference() is not None and reference() is not resting]
        self._resting = [*others, weakref.ref(resting)]
        return resting

    def add(self, operation: Callable[[], object]) -> None:
        """Queue ``operation``. It must not read through anything that waits for this lane."""
        self._queue.append(operation)
        self._added += 1

    def ends_with(self, operation: Callable[[], object]) -> bool:
        """Whether ``operation`` is queued, and nothing after it."""
        return bool(self._queue) and self._queue[-1] == operation

    def begin(self) -> None:
        """Have what is queued done in the background."""
        # No more than that: a reader may do it first, and what is queued then may be there to be added to.
        self.background.submit(partial(self._work, self._added))

    def _work(self, last: int) -> None:
        # Whoever waits next, on the main thread, raises it.
        with suppress(BaseException):
            self._drain(last)

    def wait(self) -> None:
        """See that everything that was queued is done.

        Raises:
            OffloadError: some operation of this model failed.
        """
        if self._queue and self.background.failure is None:
            # Not an interrupt: it is the user's, who waits for nothing then.
            with suppress(Exception), self.background.timing("waited"):
                self._drain()
        failure = self.background.failure
        if failure is not None:
            self._queue.clear()
            reason = str(failure) or type(failure).__name__
            raise OffloadError(
                f"offloaded state could not be updated, at `{self.name}` or before: {reason}. Weights may be of"
                " different steps now: resume from the last checkpoint."
            ) from failure

    def compute(self, function: Callable[[], T]) -> T:
        """What ``function`` makes of the state, after everything that was queued before."""
        result: list[T] = []
        self.add(lambda: result.append(function()))
        self.wait()
        return result[0]

    def _drain(self, last: int | None = None) -> None:
        """Do what is queued, up to the operation that was added as number ``last``."""
        with self._lock, self.background.timing("worked"), torch.inference_mode(False), torch.no_grad():
            try:
                while self._queue and (last is None or self._done < last) and self.background.failure is None:
                    self._queue[0]()
                    # Only now: who sees an empty queue goes on to read.
                    self._queue.popleft()
                    self._done += 1
                self.relax()
            except BaseException as error:
                # What was interrupted may be half done.
                self.background.failure = self.background.failure or error
                raise

    def relax(self) -> None:
        """Note that nothing of this lane is needed for a while."""
        for reference in self._resting:
            tensor = reference()
            if tensor is not None:
                self.background.target.relax(tensor)

    @contextmanager
    def still(self) -> Iterator[None]:
        """Context in which no operation of this lane runs."""
        with self._lock:
            yield
