"""Seconds until a model of a billion parameters is built and sharded, beside building it once.

    build once       one process, nothing sharded
    build            each of two processes, side by side, nothing sharded: what they share of the machine
    shard            each builds it, then `lightning_zero.shard`
    shard from one   rank 0 builds it, the others on `meta`: rank 0's values are the truth anyhow

    python examples/setup_benchmark.py                  6 GB of memory a process
    python examples/setup_benchmark.py --width 1024 --rounds 1

Each run has processes of its own, forked after all imports; a time is that of the slowest rank, from the first
parameter to the last wait.
"""

import argparse
import os
import time
from multiprocessing import get_context
from multiprocessing.queues import Queue
from statistics import median

import torch
import torch.distributed as dist
from benchmark import free_port
from measuring import environment, format_columns, format_spread, positive, print_environment, spread
from torch import nn

import lightning_zero

RANKS = 2
BLOCKS = 30
TIMEOUT = 600
"""Seconds until a run counts as failed."""
WAYS = {"build once": 1, "build": RANKS, "shard": RANKS, "shard from one": RANKS}
"""Processes of each."""


class Block(nn.Module):
    """Two layers, 2 width^2 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)


def build(width: int) -> nn.Module:
    return nn.Sequential(*(Block(width) for _ in range(BLOCKS)))


def run(rank: int, way: str, stage: int, width: int, port: int, seconds: Queue) -> None:  # type: ignore[type-arg]
    """One rank of one run."""
    torch.set_num_threads(1)
    if WAYS[way] > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=RANKS)
        dist.barrier()
    started = time.perf_counter()
    with torch.device("meta" if way == "shard from one" and rank else "cpu"):
        model = build(width)
    if way.startswith("shard"):
        lightning_zero.shard(model, stage, units=[Block], device=torch.device("cpu"))
    if WAYS[way] > 1:
        dist.barrier()
    seconds.put(time.perf_counter() - started)
    seconds.close()
    seconds.join_thread()
    os._exit(0)  # gloo aborts when references to its tensors outlive the group


def measure(way: str, stage: int, width: int) -> float:
    context = get_context("fork")
    seconds: Queue[float] = context.Queue()
    port = free_port()
    processes = [
        # They end with this one: one that failed would leave the other at a barrier.
        context.Process(target=run, args=(rank, way, stage, width, port, seconds), daemon=True)
        for rank in range(WAYS[way])
    ]
    for process in processes:
        process.start()
    slowest = max(seconds.get(timeout=TIMEOUT) for _ in processes)
    for process in processes:
        process.join()
    return slowest


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds to build and to shard.")
    parser.add_argument("--width", type=positive, default=4096, help="of the blocks: 60 width^2 parameters in all")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3, help="of sharding")
    parser.add_argument("--rounds", type=positive, default=3, help="runs of each way, in turn")
    args = parser.parse_args()
    print_environment(environment())
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        for way in WAYS:
            found[way].append(measure(way, args.stage, args.width))
    lines: list[tuple[str, ...]] = [("way", "seconds", "min - max", "of building once")]
    for way, values in found.items():
        ratios = [value / once for value, once in zip(values, found["build once"], strict=True)]
        lines.append((way, *format_spread(spread(values), 2), f"{median(ratios):.2f}"))
    print(f"\n{2 * BLOCKS * args.width**2:,} parameters, stage {args.stage}, {RANKS} processes of one thread")
    print(format_columns(lines))


if __name__ == "__main__":
    main()
