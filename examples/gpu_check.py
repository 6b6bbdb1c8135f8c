"""What one GPU can tell about this package, in one run of less than 8 minutes on an H200.

    tests      python -m pytest tests/gpu
    table      step time and peak memory of a random Llama of a billion parameters: no strategy, zero1, zero2, zero3
    profile    of a step of a smaller one, with its sharded path forced: device-to-device copies, beside the GPU's time

    python examples/gpu_check.py
    python examples/gpu_check.py --device cpu --small        the same at toy size, without tests that need a GPU

One rank alone shards nothing, so the table shows what the engine costs; that of several GPUs is `benchmark.py --devices
8`. The profile counts one rank as several, over a real process group of one.
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
from one_gpu import OneOfMany  # noqa: E402

from lightning_zero.collectives import Collectives  # noqa: E402

CONTENDERS = ("none", "zero1", "zero2", "zero3")
BILLION = ["--layers", "18", "--hidden", "2048", "--vocab", "32000", "--seq-len", "1024", "--batch-size", "4"]
PROFILED = ["--layers", "4", "--hidden", "2048", "--vocab", "32000", "--seq-len", "1024", "--batch-size", "4"]
TOY = ["--layers", "2", "--hidden", "64", "--vocab", "64", "--seq-len", "16"]
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


def benchmark_arguments(args: argparse.Namespace, size: list[str], contenders: str) -> list[str]:
    return [
        *("--devices", "1", "--accelerator", "gpu" if args.device == "cuda" else "cpu", "--precision", "bf16-mixed"),
        *("--rounds", "1", "--steps", "2" if args.small else "8", "--strategies", contenders),
        *(TOY if args.small else size),
    ]


def profile_step(args: argparse.Namespace, contender: str) -> None:
    """Print the device-to-device copies of one step, and the kernels that took the GPU's time."""
    run = benchmark.build_parser().parse_args(benchmark_arguments(args, PROFILED, contender))
    traced = StepProfiler()
    trainer = Trainer(
        strategy=benchmark.build_strategy(contender, "gpu"),  # in this process, which holds the group
        accelerator=run.accelerator,
        devices=1,
        precision=run.precision,
        max_steps=PROFILED_STEP + 2,
        callbacks=[traced],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    run.steps = PROFILED_STEP  # batches enough
    trainer.fit(benchmark.RandomLlama(run))
    events = traced.profile.events() or []
    copies = Counter(event.name for event in events if "Memcpy" in event.name)
    kernels = traced.profile.key_averages()
    busy = sum(kernel.self_device_time_total for kernel in kernels if kernel.device_type.name == "CUDA")
    print(f"\n{contender}: {busy / 1000:.2f} ms on the GPU; copies: {dict(copies) or 'none seen'}", flush=True)
    if args.device == "cuda":
        print(kernels.table(sort_by="self_device_time_total", row_limit=12, max_name_column_width=60))


def profile_all(args: argparse.Namespace) -> None:
    """`profile_step` of every contender, with one rank that counts as several."""
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    flags = dist.new_group([0], backend="gloo")

    def of(group: Any, device: torch.device) -> Collectives:
        collectives = OneOfMany(dist.group.WORLD, device, flags)
        collectives._is_native = True  # gloo's own exchange wants a peer
        return collectives

    Collectives.of = of  # type: ignore[method-assign, assignment]
    for contender in CONTENDERS:
        profile_step(args, contender)
    dist.destroy_process_group()


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

    print("\n== table", flush=True)
    sys.argv = ["examples/benchmark.py", *benchmark_arguments(args, BILLION, ",".join(CONTENDERS))]
    benchmark.main()

    print("\n== profile", flush=True)
    profile_all(args)
    print(f"\n{time.perf_counter() - started:.0f} s in all; tests {'failed' if tests.returncode else 'passed'}")
    raise SystemExit(tests.returncode)


if __name__ == "__main__":
    main()
