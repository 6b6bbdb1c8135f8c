"""What one GPU can tell about this package, in one run of less than 12 minutes on an H200.

    tests      python -m pytest tests/gpu
    table      step time and peak memory of a random Llama of a billion parameters: no strategy, zero1, zero2, zero3
    recipes    the same of 0.3 billion in each precision: no strategy, zero1, zero3
    profile    of a step of that one, with its sharded path forced: device-to-device copies, beside the GPU's time

    python examples/gpu_check.py
    python examples/benchmark.py --device cuda               the same without tests
    python examples/gpu_check.py --device cpu --small        the same at toy size, without tests that need a GPU

One rank alone shards nothing, so the tables show what the engine costs; those of several GPUs are `benchmark.py
--device cuda --devices 8`. The profile counts one rank as several, over a real process group of one.
"""

import argparse
import datetime
import platform
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

import benchmark  # noqa: E402
from contenders import PRECISIONS, RandomLlama, build_trainer, num_batches  # noqa: E402
from one_gpu import OneOfMany  # noqa: E402

from lightning_zero.collectives import Collectives  # noqa: E402

CONTENDERS = ("none", "zero1", "zero2", "zero3")
BILLION = ["--model", "llama-1b", "--tokens", "1024", "--batch-size", "4"]
SMALLER = ["--model", "llama-0.3b", "--tokens", "1024", "--batch-size", "4"]
TOY = ["--model", "toy", "--tokens", "16"]
PROFILED_STEP = 4


class StepProfiler(Callback):
    """Traces one step, from the start of a batch to the start of the next one."""

    def __init__(self) -> None:
        self.profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == PROFILED_STEP:
            self.profile.start()
        if batch_idx == PROFILED_STEP + 1:
            if pl_module.device.type == "cuda":
                torch.cuda.synchronize()
            self.profile.stop()


def arguments(device: str, small: bool, size: list[str], only: tuple[str, ...], precision: str) -> list[str]:
    """Of `benchmark.py`, for one rank."""
    return [
        *("--device", device, "--devices", "1", "--precision", precision, "--rounds", "1"),
        *("--steps", "2" if small else "8", "--only", *only),
        *(TOY if small else size),
    ]


def profile_step(device: str, small: bool, contender: str) -> None:
    """Print the device-to-device copies of one step, and the kernels that took the GPU's time."""
    args = benchmark.build_parser().parse_args(arguments(device, small, SMALLER, (contender,), "bf16-mixed"))
    args.steps = PROFILED_STEP + 2 - num_batches(args) + args.steps  # batches enough
    traced = StepProfiler()
    build_trainer(args, contender, traced).fit(RandomLlama(args))  # in this process, which holds the group
    events = traced.profile.events() or []
    copies = Counter(event.name for event in events if "Memcpy" in event.name)
    kernels = traced.profile.key_averages()
    busy = sum(kernel.self_device_time_total for kernel in kernels if kernel.device_type.name == "CUDA")
    print(f"\n{contender}: {busy / 1000:.2f} ms on the GPU; copies: {dict(copies) or 'none seen'}", flush=True)
    if device == "cuda":
        print(kernels.table(sort_by="self_device_time_total", row_limit=12, max_name_column_width=60))


def profile_all(device: str, small: bool) -> None:
    """`profile_step` of every contender, with one rank that counts as several."""
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    flags = dist.new_group([0], backend="gloo")

    def of(group: Any, device: torch.device) -> Collectives:
        collectives = OneOfMany(dist.group.WORLD, device, flags)
        collectives._is_native = True  # gloo's own exchange wants a peer
        return collectives

    Collectives.of = of  # type: ignore[method-assign, assignment]
    for contender in CONTENDERS:
        profile_step(device, small, contender)
    dist.destroy_process_group()


def check(device: str, small: bool) -> None:
    """Print both tables and the profiles."""
    print("\n== table", flush=True)
    benchmark.main(arguments(device, small, BILLION, CONTENDERS, "bf16-mixed"))
    for precision in PRECISIONS:
        if device == "cuda" or precision in ("32-true", "bf16-mixed", "bf16-true", "bf16-true-main32"):
            print(f"\n== recipe {precision}", flush=True)
            benchmark.main(arguments(device, small, SMALLER, ("none", "zero1", "zero3"), precision))
    print("\n== profile", flush=True)
    profile_all(device, small)


def main() -> None:
    parser = argparse.ArgumentParser(description="Check this package on one GPU.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="toy sizes")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU. Write --device cpu --small.")
    started = time.perf_counter()
    name = torch.cuda.get_device_name() if args.device == "cuda" else platform.machine()
    cuda = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}" if args.device == "cuda" else "no CUDA"
    print(f"{datetime.date.today()}, {name}, {cuda}")
    print("\n== tests", flush=True)
    tests = subprocess.run([sys.executable, "-m", "pytest", "-q", "-rs", "--durations=5", "tests/gpu"], cwd=ROOT)
    check(args.device, args.small)
    print(f"\n{time.perf_counter() - started:.0f} s in all; tests {'failed' if tests.returncode else 'passed'}")
    raise SystemExit(tests.returncode)


if __name__ == "__main__":
    main()
