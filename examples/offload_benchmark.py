"""What offload costs and saves: step time, memory and bytes moved, interleaved on one machine.

    none          nothing is offloaded
    host          main weights, gradients and optimizer state in host memory
    parameters    the shard that is gathered from, too; at stage 3
    auto          as host, but for what `--device-budget` bytes hold
    disk          as host, in a mapped file
    waiting       as host, but each step waits for the update of all weights: offload that hides nothing
    fsdp          torch's `fully_shard` with `CPUOffloadPolicy`, which offloads parameters too

    python examples/benchmark.py --offload                               two processes of one thread; 29M parameters
    python examples/benchmark.py --offload --devices 1 --micro-batches 4
    python examples/benchmark.py --offload --accelerator gpu --size 7B   one GPU; bf16 with fp32 main weights

All run the same plain loop on the same random tokens: gradients are clipped to a norm of 1, AdamW is torch's fused one.
A run is a process of its own; one that fails, as for want of memory, is a line of the report.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from llamas import HEAD_DIM, build_llama, llama, random_tokens
from measuring import MIN_WARMUP, Clock, environment, format_columns, format_spread, peak_bytes, positive, spread
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW

import lightning_zero
from lightning_zero import HostMemory, MappedFile, OffloadTarget, PrecisionRecipe
from lightning_zero.engine import engine_of

CONTENDERS = ("none", "host", "parameters", "auto", "disk", "waiting", "fsdp")
LEARNING_RATE = 1e-4
MAX_NORM = 1.0

SIZES = {
    "29M": {"layers": 8, "hidden": 512, "vocab": 4096, "seq_len": 128, "batch_size": 1},
    "1B": {"layers": 18, "hidden": 2048, "vocab": 32000, "seq_len": 2048, "batch_size": 8},
    "4B": {"layers": 34, "hidden": 3072, "vocab": 32000, "seq_len": 2048, "batch_size": 8},
    "7B": {"layers": 32, "hidden": 4096, "vocab": 32000, "seq_len": 2048, "batch_size": 8},
    "12B": {"layers": 37, "hidden": 5120, "vocab": 32000, "seq_len": 2048, "batch_size": 8},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


# One run: a plain loop of one contender on one rank.


def build_model(args: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A Llama with random weights of ``dtype``, equal for every contender, on the host."""
    with device:  # billions of random numbers take minutes on a CPU
        model = build_llama(llama(args.layers, args.hidden, args.vocab), args.seq_len)
    for parameter in model.parameters():  # buffers, which hold angles, keep theirs
        parameter.data = parameter.data.to("cpu", dtype)
    if args.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return model.train()


def shard_with_zero(args: argparse.Namespace, contender: str, device: torch.device) -> nn.Module:
    """The model, sharded by this package; in bf16 it computes in bf16 throughout, and its main weights are fp32."""
    model = build_model(args, DTYPES[args.precision], device)
    recipe = PrecisionRecipe(main=torch.float32, main_grad=DTYPES[args.main_grad])
    return lightning_zero.shard(
        model, args.stage, precision=recipe, device=device, offload=target(args, contender, model)
    )


def target(args: argparse.Namespace, contender: str, model: nn.Module) -> OffloadTarget | None:
    if contender == "none":
        return None
    if contender == "auto":
        # Main weights, gradients and the two moments of Adam are 16 bytes a parameter in fp32.
        state = 16 * sum(parameter.numel() for parameter in model.parameters()) // args.devices
        budget = state // 2 if args.device_budget is None else args.device_budget
        return HostMemory(ratio="auto", device_budget=budget)
    if contender == "disk":
        return MappedFile(args.directory)
    return HostMemory(parameters=contender == "parameters")


def shard_with_fsdp(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """The model under `fully_shard`, block by block, with the dtypes of `shard_with_zero`."""
    model: Any = build_model(args, torch.float32, device)
    policies: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (args.devices,)),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu"),
        "mp_policy": MixedPrecisionPolicy(param_dtype=DTYPES[args.precision], reduce_dtype=torch.float32),
    }
    for part in (*model.model.layers, model):
        fully_shard(part, **policies)
    return model


def tokens_of(args: argparse.Namespace, rank: int, device: torch.device) -> Tensor:
    """Frequent and rare tokens, of shape (steps, micro-batches, batch, sequence)."""
    shape = (num_steps(args), args.micro_batches, args.batch_size, args.seq_len)
    return random_tokens(shape, args.vocab, rank).to(device)


def num_steps(args: argparse.Namespace) -> int:
    """Optimizer steps of one run: the start of the last one ends the last timed step."""
    return int(args.warmup + args.steps + 1)


class Offloaded:
    """What this package tells about the offload of a model; of another one it is silent.

    Args:
        model: sharded by this package, or not.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.engine = engine_of(model)
        self.worked: list[float] = []
        """Seconds of work on offloaded state from each optimizer step to the end of the next forward."""
        self.waited: list[float] = []
        """Those of them for which the loop waited, or in which it helped."""
        self._before = (0.0, 0.0)

    def begin_update(self) -> None:
        """The optimizer is about to step."""
        self._before = self._seconds()

    def end_update(self) -> None:
        """A forward has used all weights, so the update is done."""
        (worked, waited), before = self._seconds(), self._before
        self.worked.append(worked - before[0])
        self.waited.append(waited - before[1])

    def _seconds(self) -> tuple[float, float]:
        background = None if self.engine is None else self.engine.background
        return (0.0, 0.0) if background is None else (background.seconds["worked"], background.seconds["waited"])

    def moved(self) -> dict[str, int]:
        """Bytes moved so far, all of which have arrived."""
        if self.engine is None:
            return {}
        moved = lightning_zero.moved_bytes(self.model)
        return {"to_device": moved.to_device, "to_rest": moved.to_rest}

    def held(self, optimizer: AdamW) -> dict[str, float]:
        """Bytes of model state on the device and offloaded."""
        if self.engine is None:
            return {}
        places: Any = ("device", "offloaded")
        return {place: lightning_zero.held_bytes(self.model, [optimizer], place).total for place in places}


def train(args: argparse.Namespace, contender: str, rank: int, device: torch.device) -> dict[str, Any]:
    """Train for `num_steps` and return what this rank measured."""
    if contender == "fsdp":
        model = shard_with_fsdp(args, device)
    else:
        model = shard_with_zero(args, contender, device)
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    offloaded, clock = Offloaded(model), Clock(device)
    moved_before: dict[str, int] = {}
    loss = torch.zeros(())
    for step, batches in enumerate(tokens_of(args, rank, device)):
        if step == args.warmup and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        clock.mark()
        optimizer.zero_grad()
        for number, batch in enumerate(batches):
            is_last = number == args.micro_batches - 1
            with nullcontext() if is_last or offloaded.engine is None else lightning_zero.no_sync(model):
                loss = model(input_ids=batch, labels=batch).loss
                if number == 0:
                    offloaded.end_update()
                (loss / args.micro_batches).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        offloaded.begin_update()
        optimizer.step()
        if contender == "waiting" and offloaded.engine is not None:
            offloaded.engine.finish_updates()
        if step == 0:
            moved_before = offloaded.moved()
    moved = offloaded.moved()
    return {
        "step_seconds": clock.intervals()[args.warmup :],
        "loss": loss.item(),
        "moved_per_step": {way: (moved[way] - moved_before[way]) / (num_steps(args) - 1) for way in moved},
        "worked": median(offloaded.worked[args.warmup :]),
        "waited": median(offloaded.waited[args.warmup :]),
        "held": offloaded.held(optimizer),
        "device_peak_bytes": peak_bytes(device) if device.type == "cuda" else None,
        "host_peak_bytes": peak_bytes(torch.device("cpu")),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "numel": sum(parameter.numel() for parameter in model.parameters()),
        "num_threads": torch.get_num_threads(),
    }


def run_rank(rank: int, args: argparse.Namespace) -> None:
    """Train the one contender of ``args`` as ``rank``; rank 0 writes what all ranks measured, a JSON list."""
    [contender], path = args.contenders, args.write_ranks
    is_gpu = args.accelerator == "gpu"
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.devices) if is_gpu else 1)
    if is_gpu:
        torch.cuda.set_device(device)
    if args.devices > 1 or contender == "fsdp":
        # The norm of gradients on the host is a collective there.
        mixed = "cpu:gloo,cuda:nccl" if contender == "fsdp" else "nccl"
        store = dist.FileStore(f"{path}.store", args.devices)
        dist.init_process_group(mixed if is_gpu else "gloo", store=store, rank=rank, world_size=args.devices)
    local = train(args, contender, rank, device)
    ranks: list[Any] = [local] * args.devices
    if args.devices > 1:
        dist.all_gather_object(ranks, local)
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank == 0:
        path.write_text(json.dumps(ranks))


def run_ranks(args: argparse.Namespace) -> None:
    if args.devices == 1:
        run_rank(0, args)
        return
    # This process has only imported so far, so a fork is safe and spares each rank the imports; CUDA wants new ones.
    method = "fork" if args.accelerator == "cpu" else "spawn"
    mp.start_processes(run_rank, (args,), args.devices, start_method=method)


# All runs.


def measure_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every contender once a round; each round starts with another contender."""
    runs = []
    for index in range(args.rounds):
        first = index % len(args.contenders)
        for contender in args.contenders[first:] + args.contenders[:first]:
            started = time.perf_counter()
            run = {"round": index + 1, "contender": contender} | measure_one(contender)
            outcome = run["failure"] or f"{run['seconds']:.4f} s per step"
            took = time.perf_counter() - started
            print(f"round {index + 1}/{args.rounds}  {contender:<11}{outcome}  ({took:.0f} s)", flush=True)
            runs.append(run)
    return runs


def measure_one(contender: str) -> dict[str, Any]:
    """Run this script again for one contender: what one run leaves in a process cannot reach the next one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ranks.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--contenders", contender, "--write-ranks", str(path)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode or not path.exists():
            return {"failure": failure_of(done), "output": done.stdout}
        ranks = json.loads(path.read_text())
    return {
        "failure": None,
        "seconds": max(median(rank["step_seconds"]) for rank in ranks),
        "loss": sum(rank["loss"] for rank in ranks) / len(ranks),
        "ranks": ranks,
    }


def failure_of(done: subprocess.CompletedProcess[str]) -> str:
    """The error that ended a run, in one line."""
    lines = [line.strip() for line in done.stdout.splitlines() if "Error" in line]
    return (
        lines[-1][:300] if lines else f"exit status {done.returncode}, of a process that was killed if it is negative"
    )


# The report.


def summarize(runs: list[dict[str, Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a contender that ended: medians and ranges over the rounds; a ratio pairs two runs of one round."""
    of_contender = {
        name: [run for run in runs if run["contender"] == name and not run["failure"]] for name in args.contenders
    }
    baseline = {run["round"]: run["seconds"] for run in of_contender.get("none", [])}
    tokens = args.micro_batches * args.batch_size * args.seq_len * args.devices
    rows = []
    for name, mine in of_contender.items():
        if not mine:
            continue
        seconds = spread([run["seconds"] for run in mine])
        assert seconds is not None
        first = mine[0]["ranks"][0]
        ranks = [rank for run in mine for rank in run["ranks"]]
        worked, waited = (median(rank[what] for rank in ranks) for what in ("worked", "waited"))
        rows.append(
            {
                "contender": name,
                "seconds": seconds,
                "ratio": spread([run["seconds"] / baseline[run["round"]] for run in mine if run["round"] in baseline]),
                "tokens_per_second": tokens / seconds["median"],
                "worked": worked or None,
                "waited": waited if worked else None,
                "hidden": max(0.0, 1 - waited / worked) if worked else None,
                "moved_per_step": first["moved_per_step"],
                "held": first["held"],
                "device_peak_bytes": max(rank["device_peak_bytes"] or 0 for rank in ranks) or None,
                "host_peak_bytes": max(rank["host_peak_bytes"] for rank in ranks),
                "loss": median(run["loss"] for run in mine),
            }
        )
    return rows


def format_table(rows: list[dict[str, Any]]) -> str:
    """The rows of `summarize` for a terminal; "-" is what a contender does not have, or does not tell."""
    titles = (
        *("contender", "s/step", "min - max", "of none", "tokens/s", "update s", "waited s", "hidden"),
        *("MB to device", "MB to rest", "MB on device", "MB offloaded", "peak GPU MB", "peak RSS MB", "last loss"),
    )
    lines = [titles]
    for row in rows:
        times, (ratio, _) = format_spread(row["seconds"], 4), format_spread(row["ratio"], 3)
        update = [cell(row["worked"], "{:.3f}"), cell(row["waited"], "{:.3f}"), cell(row["hidden"], "{:.0%}")]
        moved, held = row["moved_per_step"], row["held"]
        nbytes = (moved.get("to_device"), moved.get("to_rest"), held.get("device"), held.get("offloaded"))
        peaks = (row["device_peak_bytes"], row["host_peak_bytes"])
        megabytes = [cell(None if value is None else value / 1e6, "{:.1f}") for value in (*nbytes, *peaks)]
        tokens, loss = f"{row['tokens_per_second']:.0f}", f"{row['loss']:.5f}"
        lines.append((row["contender"], *times, ratio, tokens, *update, *megabytes, loss))
    return format_columns(lines)


def cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def report(args: argparse.Namespace, runs: list[dict[str, Any]], about: dict[str, Any], seconds: float) -> None:
    rows = summarize(runs, args)
    failures = [f"{run['contender']}: {run['failure']}" for run in runs if run["failure"]]
    ended = [run["ranks"][0] for run in runs if not run["failure"]]
    if ended:
        tokens = args.micro_batches * args.batch_size * args.seq_len
        print(f"""
{ended[0]["numel"]:,} parameters, stage {args.stage}, {args.devices} ranks of {ended[0]["num_threads"]} threads, \
{ended[0]["device"]}
{args.precision}, main_grad {args.main_grad}, {tokens} tokens per rank and step in {args.micro_batches} micro-batches, \
activation checkpointing {"on" if args.checkpointing else "off"}
{args.rounds} rounds of {args.warmup} warm-up and {args.steps} timed steps; a run is the median of its steps on the \
slowest rank; {seconds:.0f} s in all
per rank and step: "update s" is the work on offloaded state from an optimizer step to the next forward's end; of it \
the loop waited "waited s", or did it itself, beside the background

{format_table(rows)}
""")
    print("\n".join(f"failed: {failure}" for failure in failures))
    if args.json:
        settings = {name: str(value) for name, value in vars(args).items() if name not in ("json", "write_ranks")}
        result = {"environment": about, "settings": settings, "summary": rows, "runs": runs}
        args.json.write_text(json.dumps(result, indent=1))
        print(f"Wrote {args.json}.")


# The command line.


def contenders(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in CONTENDERS:
            raise argparse.ArgumentTypeError(f"{name!r} is unknown; write some of {','.join(CONTENDERS)}")
    return list(dict.fromkeys(names))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmark.py --offload",
        description="Compare offload with training on the device alone, and with torch's.",
    )
    parser.add_argument("--contenders", type=contenders, help="default: all that the stage has")
    parser.add_argument("--size", choices=SIZES, default="29M", help="of the model and its batches; default: 29M")
    for name, what in (
        ("layers", "decoder layers"),
        ("hidden", "width, a multiple of 64"),
        ("vocab", "tokens of the vocabulary"),
        ("seq-len", "tokens of a sequence, 2 or more"),
        ("batch-size", "sequences per process and micro-batch"),
    ):
        parser.add_argument(f"--{name}", type=positive, help=f"{what}; default: of --size")
    parser.add_argument("--micro-batches", type=positive, default=1, help="per optimizer step; default: 1")
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True, help="of activations")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3, help="ZeRO stage; default: 3")
    parser.add_argument("--devices", type=positive, help="processes; default: 2, on GPUs 1")
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu", help="default: cpu")
    parser.add_argument("--precision", choices=DTYPES, help="of computation; default: fp32, on GPUs bf16")
    parser.add_argument("--main-grad", choices=DTYPES, help="dtype in which gradients move; default: --precision")
    parser.add_argument("--device-budget", type=int, help="bytes for `auto`; default: half of 16 per parameter")
    parser.add_argument("--directory", type=Path, default=Path("."), help="of `disk`, on a local disk; default: .")
    parser.add_argument("--rounds", type=positive, help="runs of each contender; default: 3, on GPUs 1")
    parser.add_argument("--steps", type=positive, help="timed steps of a run; default: 8, on GPUs 4")
    parser.add_argument("--warmup", type=positive, default=MIN_WARMUP, help=f"untimed steps; default: {MIN_WARMUP}")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    # How the script calls itself for one run.
    parser.add_argument("--write-ranks", type=Path, help=argparse.SUPPRESS)
    return parser


def fill_in(args: argparse.Namespace) -> None:
    """Give arguments that were left out their defaults, which depend on the others."""
    is_gpu = args.accelerator == "gpu"
    defaults: dict[str, Any] = {
        **SIZES[args.size],
        "contenders": [name for name in CONTENDERS if name != "parameters" or args.stage == 3],
        "devices": 1 if is_gpu else 2,
        "precision": "bf16" if is_gpu else "fp32",
        "rounds": 1 if is_gpu else 3,
        "steps": 4 if is_gpu else 8,
    }
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.main_grad = args.main_grad or args.precision


def complaint(args: argparse.Namespace) -> str | None:
    """What is wrong with arguments that are right one by one, and what to type instead."""
    if "parameters" in args.contenders and args.stage != 3:
        return f"--contenders parameters needs stage 3, not {args.stage}. Write --stage 3."
    if args.warmup < MIN_WARMUP:
        return f"--warmup {args.warmup} times steps that still allocate. Write --warmup {MIN_WARMUP}."
    if args.hidden % HEAD_DIM:
        nearest = max(1, round(args.hidden / HEAD_DIM)) * HEAD_DIM
        return f"--hidden {args.hidden} is no multiple of {HEAD_DIM}, the width of a head. Write --hidden {nearest}."
    if args.json and (args.json.is_dir() or not args.json.parent.is_dir()):
        return f"--json {str(args.json)!r} is not a file in an existing folder. Write --json offload.json."
    num_gpus = torch.cuda.device_count() if args.accelerator == "gpu" else args.devices
    if num_gpus < args.devices:
        instead = f"--devices {num_gpus}" if num_gpus else "--accelerator cpu"
        return f"--devices {args.devices} needs as many GPUs; torch sees {num_gpus}. Write {instead}."
    return None


def main() -> None:
    parser = build_parser()
    args = parser.parse_args()
    fill_in(args)
    if message := complaint(args):
        parser.error(message)
    if args.write_ranks:
        run_ranks(args)
        return
    about = environment()
    about["command"] = shlex.join(["python", "examples/benchmark.py", "--offload", *sys.argv[1:]])
    print("\n".join(f"{name:<13}{value}" for name, value in about.items()), flush=True)
    started = time.perf_counter()
    runs = measure_all(args)
    report(args, runs, about, time.perf_counter() - started)


if __name__ == "__main__":
    main()
