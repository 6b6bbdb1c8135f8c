"""What benchmarks measure with: clocks, memory, bytes on the wire, spreads, and what a number depends on."""

import argparse
import gc
import os
import platform
import resource
import shlex
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.sharded_parameter import ShardedParameter

MIN_WARMUP = 3
"""Steps until buffers, moments and the allocator have settled."""

_PLAIN = (Tensor, nn.Parameter)

# Time.


class Clock:
    """Times of marks; on a GPU they are events in the stream, since waiting there would end overlap between steps."""

    def __init__(self, device: torch.device) -> None:
        self.is_gpu = device.type == "cuda"
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.is_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def intervals(self) -> list[float]:
        """Seconds between consecutive marks."""
        pairs = zip(self.marks, self.marks[1:])
        if not self.is_gpu:
            return [end - start for start, end in pairs]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in pairs]


def spread(values: list[float]) -> dict[str, float] | None:
    return {"median": median(values), "min": min(values), "max": max(values)} if values else None


def format_spread(values: dict[str, float] | None, digits: int) -> tuple[str, str]:
    """Median, and minimum - maximum."""
    if values is None:
        return "-", "-"
    return f"{values['median']:.{digits}f}", f"{values['min']:.{digits}f} - {values['max']:.{digits}f}"


# Memory.


class Peak(threading.Thread):
    """Most private memory of this process in a block, bytes above that at its beginning.

    It looks every 10 ms, and each look takes time, so what it watches is not timed.
    """

    def __enter__(self) -> "Peak":
        self.ended = threading.Event()
        self.begun, self.nbytes = private_bytes(), 0
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.ended.set()
        self.join()

    def run(self) -> None:
        while not self.ended.wait(0.01):
            self.nbytes = max(self.nbytes, private_bytes() - self.begun)


def private_bytes() -> int:
    """Memory that this process has written and shares with no other; 0 where there is no /proc."""
    try:
        with open("/proc/self/smaps_rollup") as file:
            return sum(int(line.split()[1]) * 1024 for line in file if line.startswith(("Private_Dirty", "Swap:")))
    except FileNotFoundError:
        return 0


def peak_bytes(device: torch.device) -> int:
    """Most memory this process has held so far, bytes: allocated on its GPU, else resident on the host."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


def resting_bytes(model: nn.Module) -> int:
    """Bytes of all tensors that Python code of this process can reach, gradients included, each storage once.

    Between two steps that is the training state, and the buffers that a library keeps for the next step. What C++ alone
    holds is missing: DDP's buckets, 4 bytes a parameter in fp32.

    Args:
        model: its parameters' gradients may not have been looked at by Python yet.
    """
    # Sharded tensors of any library have no memory of their own, and asking for it may gather: what they stand for is
    # among the plain ones.
    found = [tensor for tensor in gc.get_objects() if type(tensor) in _PLAIN]
    gradients = [p.grad for p in model.parameters() if not isinstance(p, ShardedParameter)]
    tensors = [*found, *(gradient for gradient in gradients if type(gradient) in _PLAIN)]
    storages = [tensor.untyped_storage() for tensor in tensors if not tensor.is_meta]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


# Traffic.


def loopback_bytes() -> int | None:
    """Bytes that processes of this machine have sent each other over TCP, headers included; ``None`` without /proc."""
    path = Path("/sys/class/net/lo/statistics/tx_bytes")
    return int(path.read_text()) if path.exists() else None


# What a number depends on.


def environment(*packages: str) -> dict[str, Any]:
    """The command, versions and the machine; a package that is not installed is left out."""
    versions = {}
    for name in ("torch", "lightning", "transformers", *packages):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "command": shlex.join(["python", *sys.argv]),
        "python": platform.python_version(),
        **versions,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }


def print_environment(about: dict[str, Any]) -> None:
    print("\n".join(f"{name:<13}{value}" for name, value in about.items()), flush=True)


def format_columns(lines: list[tuple[str, ...]]) -> str:
    """Lines of equal length for a terminal, the first column to the left."""
    widths = [max(len(line[column]) for line in lines) + 2 for column in range(len(lines[0]))]
    return "\n".join(line[0].ljust(widths[0]) + "".join(map(str.rjust, line[1:], widths[1:])) for line in lines)


def positive(text: str) -> int:
    """A type of `argparse`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)
