"""Bytes that torch's allocator hands out, from its profiler: what the process does with them changes no count."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch.profiler import profile

__all__ = ["allocations", "peak"]


def allocations(found: profile) -> list[int]:
    """Bytes allocated (above 0) and freed (below), in order."""
    events: list[tuple[int, int]] = []
    waiting = list(found.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            events.append((event.start_time_ns, event.extra_fields.alloc_size))
    return [nbytes for _, nbytes in sorted(events)]


def peak(found: profile) -> int:
    """Most bytes that were held at once, above those at the beginning."""
    return max(accumulate(allocations(found), initial=0))
