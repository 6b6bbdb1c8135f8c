"""Memory of this rank: what the allocator of a GPU gave, or what a process on the CPU has of its own."""

from __future__ import annotations

import sys

import torch

__all__ = ["memory_now", "memory_peak"]


def memory_now(device: torch.device) -> float:
    """Bytes in use."""
    if device.type == "cuda":
        return float(torch.cuda.memory_allocated(device))
    return _status("VmRSS:")


def memory_peak(device: torch.device) -> float:
    """Bytes in use at most, since the process began, or since somebody reset torch's count of it."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return _status("VmHWM:")


def _status(field: str) -> float:
    """A field of what the kernel tells about this process, bytes; 0 where it tells nothing."""
    if not sys.platform.startswith("linux"):
        return 0.0
    with open("/proc/self/status") as file:
        return next((float(line.split()[1]) * 1024 for line in file if line.startswith(field)), 0.0)
