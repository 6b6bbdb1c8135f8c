"""Step time, memory and traffic of ZeRO stages 1 to 3 against DDP, FSDP1, FSDP2 and DeepSpeed, in interleaved rounds.

    round 1    [none]  [ddp]   [zero1] ...     [ ] a run, all ranks of one contender in processes of their own:
    round 2    [ddp]   [zero1] ...  [none]         warm-up steps | timed steps | one step in which memory is watched
      ...
    tables     medians over rounds; a ratio pairs two runs of one round

    python examples/benchmark.py                                     two processes of one thread; 29M-parameter Llama
    python examples/benchmark.py --model smollm2 --rounds 3 --only ddp zero3 zero3-loop fsdp2
    python examples/benchmark.py --rounds 1 --steps 3 --json step.json
    python examples/benchmark.py --device cuda --devices 8 --model llama-1b --precision bf16-mixed --tokens 1024
    python examples/benchmark.py --device cuda                       what one GPU can tell: `gpu_check.py` without tests
    python examples/benchmark.py --offload                           offload, which has its own arguments

`contenders.py` says who they are; model, tokens, AdamW, seed and number of ranks are the same for all, and so is the
loss after the last step, or the table says which one differs. A step lasts from one batch's start to the next one's, so
neither the optimizer nor what it leaves in flight is hidden. `overhead.py` measures the host's part alone.
"""

import argparse
import gc
import json
import os
import shlex
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.multiprocessing as mp
from contenders import ALONE, CONTENDERS, LOOPS, OF_ALL, PRECISIONS, TRAINERS, missing, stage_of, train
from llamas import MODELS
from measuring import MIN_WARMUP, environment, format_columns, format_spread, positive, print_environment, spread

TOLERANCE = {"32-true": 1e-4}
"""Most that losses may differ relative to the loss: fp32 sums of another order. Libraries place the casts of other
precisions differently: 1e-2."""


# One run: all ranks of one contender.


def run_rank(rank: int, args: argparse.Namespace, contender: str, world_size: int, port: int, folder: Path) -> None:
    """Train as ``rank`` and write what it measured into ``folder``; output goes to a file there."""
    gc.freeze()  # what the parent holds is not this rank's, and a collection would copy its pages
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    status = 1
    try:
        result = train(args, contender, rank)
        (folder / f"{rank}.json").write_text(json.dumps(result))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not an ordinary end: gloo aborts when references to its tensors outlive the group.
        os._exit(status)


def measure_one(args: argparse.Namespace, contender: str) -> dict[str, Any]:
    """Run one contender in new processes: what a run leaves in a process cannot reach the next one."""
    world_size = 1 if contender in ALONE else args.devices
    # This process has only imported so far, so a fork is safe and spares each rank the imports; CUDA wants new ones.
    method = "fork" if args.device == "cpu" else "spawn"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = (args, contender, world_size, free_port(), folder)
        processes = mp.start_processes(run_rank, arguments, world_size, join=False, start_method=method)
        assert processes is not None
        deadline = time.monotonic() + args.limit
        try:
            while not processes.join(timeout=0.1):
                if time.monotonic() > deadline:
                    return {"failure": f"no end after {args.limit} s", "output": output_of(folder)}
        except mp.ProcessExitedException:
            return {"failure": failure_in(output_of(folder)), "output": output_of(folder)}
        finally:
            for process in processes.processes:
                process.kill()
                process.join()
        ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]
    return {
        "failure": None,
        "seconds": max(median(rank["step_seconds"]) for rank in ranks),
        "loss": sum(rank["loss"] for rank in ranks) / len(ranks),
        "resting_bytes": max(rank["resting_bytes"] for rank in ranks),
        "peak_bytes": max(rank["peak_bytes"] for rank in ranks),
        "sent_bytes": ranks[0]["sent_bytes"],
        "counted_bytes": ranks[0]["counted_bytes"],
        "ranks": ranks,
    }


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def output_of(folder: Path) -> str:
    return "\n".join(f"{path.stem}: {path.read_text()}" for path in sorted(folder.glob("*.log")))


def failure_in(output: str) -> str:
    """The error that ended a run, in one line."""
    lines = [line.strip() for line in output.splitlines() if "Error" in line]
    return lines[-1][:300] if lines else "a rank was killed"


# All runs.


def measure_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every contender once a round; each round starts with another contender."""
    runs = []
    for index in range(args.rounds):
        first = index % len(args.only)
        for contender in args.only[first:] + args.only[:first]:
            run = {"round": index + 1, "contender": contender} | measure_one(args, contender)
            outcome = f"failed: {run['failure']}" if run["failure"] else f"{run['seconds']:9.4f} s per step"
            print(f"round {run['round']}/{args.rounds}  {contender:<12}{outcome}", flush=True)
            runs.append(run)
    return runs


# The report.


def summarize(runs: list[dict[str, Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a contender that ended, medians and ranges over the rounds."""
    rounds_of = seconds_by_round(runs)
    reference = reference_loss(runs, args)
    rows = []
    for name, rounds in rounds_of.items():
        mine = [run for run in runs if run["contender"] == name and not run["failure"]]
        sent = [run["sent_bytes"] for run in mine if run["sent_bytes"] is not None]
        peers = (peer for peer in rounds_of if peer not in (*TRAINERS, *LOOPS) and stage_of(name) == stage_of(peer))
        is_ours = name.startswith("zero")
        loss = median(run["loss"] for run in mine)
        rows.append(
            {
                "contender": name,
                "seconds": spread(list(rounds.values())),
                "ratio": ratio(rounds, rounds_of.get(baseline_of(args), {})),
                "of_peers": {peer: ratio(rounds, rounds_of[peer]) for peer in peers} if is_ours else {},
                "loss": loss,
                "agrees": agrees(name, loss, reference, args),
                "resting_bytes": max(run["resting_bytes"] for run in mine),
                "peak_bytes": max(run["peak_bytes"] for run in mine),
                # Other processes of the machine may have sent, too.
                "sent_bytes": min(sent, default=None),
                "counted_bytes": mine[0]["counted_bytes"],
            }
        )
    return rows


def seconds_by_round(runs: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for run in runs:
        if not run["failure"]:
            found.setdefault(run["contender"], {})[run["round"]] = run["seconds"]
    return found


def ratio(mine: dict[int, float], other: dict[int, float]) -> dict[str, float] | None:
    """Of two runs of one round, over the rounds that both have ended."""
    return spread([mine[index] / other[index] for index in mine if index in other])


def baseline_of(args: argparse.Namespace) -> str:
    """Whose time is 1: a rank alone is compared with no strategy where there is no DDP."""
    return "none" if args.devices == 1 and "ddp" not in args.only else "ddp"


def reference_loss(runs: list[dict[str, Any]], args: argparse.Namespace) -> float | None:
    """The loss of `baseline_of`, or of the first contender that sees all tokens."""
    losses = {run["contender"]: run["loss"] for run in runs if not run["failure"] and sees_all(run["contender"], args)}
    return losses.get(baseline_of(args), next(iter(losses.values()), None))


def sees_all(contender: str, args: argparse.Namespace) -> bool:
    return args.devices == 1 or contender not in ALONE


def agrees(contender: str, loss: float, reference: float | None, args: argparse.Namespace) -> bool | None:
    """Whether the loss is what it should be; ``None`` where tokens are others."""
    if reference is None or not sees_all(contender, args):
        return None
    return abs(loss - reference) <= TOLERANCE.get(args.precision, 1e-2) * abs(reference)


def format_table(rows: list[dict[str, Any]], baseline: str) -> str:
    """The rows of `summarize` for a terminal; "-" is what a contender does not have, or does not tell."""
    titles = ("contender", "s/step", "min - max", f"of {baseline}", "min - max")
    lines = [(*titles, "MB at rest", "peak MB", "MB sent", "counted", "last loss", "")]
    for row in rows:
        times, ratios = format_spread(row["seconds"], 4), format_spread(row["ratio"], 3)
        nbytes = (row["resting_bytes"], row["peak_bytes"], row["sent_bytes"], row["counted_bytes"])
        megabytes = ("-" if value is None else f"{value / 1e6:.1f}" for value in nbytes)
        note = {None: "other tokens", False: "DIFFERS", True: ""}[row["agrees"]]
        lines.append((row["contender"], *times, *ratios, *megabytes, f"{row['loss']:.6f}", note))
    return format_columns(lines)


def format_peers(rows: list[dict[str, Any]]) -> str | None:
    """Seconds per step of this package as a fraction of each peer's of the same stage."""
    mine = [row for row in rows if row["of_peers"]]
    peers = [name for name in CONTENDERS if any(name in row["of_peers"] for row in mine)]
    if not peers:
        return None
    lines = [("ratio to", *peers)]
    for row in mine:
        ratios = [format_spread(row["of_peers"].get(peer), 3) for peer in peers]
        lines.append((row["contender"], *(value if value == "-" else f"{value} ({ends})" for value, ends in ratios)))
    return format_columns(lines)


def report(args: argparse.Namespace, runs: list[dict[str, Any]], about: dict[str, Any], seconds: float) -> None:
    rows = summarize(runs, args)
    ended = [run["ranks"][0] for run in runs if not run["failure"]]
    if ended:
        tokens = args.batch_size * args.tokens
        print(f"""
{args.model}, {args.devices} ranks of {ended[0]["num_threads"]} threads, {ended[0]["device"]}, {tokens} tokens per \
rank and step, {args.precision}, fused AdamW
{args.rounds} rounds of {args.warmup} warm-up and {args.steps} timed steps; a run is the median of its steps on the \
slowest rank; {seconds:.0f} s in all
per rank: "MB at rest" is tensors between two steps, gradients included; "peak MB" is {peak_title(args)}
in one step; "MB sent" is what the loopback device carried in a step, "counted" what this package counts

{format_table(rows, baseline_of(args))}""")
        if peers := format_peers(rows):
            print(f"\n{peers}")
        print_agreement(rows)
    for run in runs:
        if run["failure"]:
            print(f"{run['contender']} failed in round {run['round']}: {run['failure']}")
    if args.json:
        settings = {name: str(value) if name == "json" else value for name, value in vars(args).items()}
        result = {"environment": about, "settings": settings, "summary": rows, "runs": runs}
        args.json.write_text(json.dumps(result, indent=1))
        print(f"Wrote {args.json}.")


def peak_title(args: argparse.Namespace) -> str:
    return "allocated on the GPU" if args.device == "cuda" else "private memory of the process"


def print_agreement(rows: list[dict[str, Any]]) -> None:
    losses = [row["loss"] for row in rows if row["agrees"] is not None]
    different = [row["contender"] for row in rows if row["agrees"] is False]
    if losses:
        verdict = f", too much: {', '.join(different)}" if different else ""
        print(f"\nLosses after the last step differ by at most {max(losses) - min(losses):.1e}{verdict}.")


# The command line.


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Compare ZeRO stages 1 to 3 with DDP, FSDP1, FSDP2 and DeepSpeed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--offload", action="store_true", help="compare offload instead; see `--offload --help`")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, metavar="NAME", help=f"some of {' '.join(CONTENDERS)}")
    parser.add_argument("--model", choices=MODELS, default="llama-29m", help="what is trained")
    parser.add_argument("--tokens", type=positive, default=128, help="of a sequence, 2 or more")
    parser.add_argument("--batch-size", type=positive, default=1, help="sequences per process and step")
    parser.add_argument("--rounds", type=positive, default=6, help="runs of each contender")
    parser.add_argument("--steps", type=positive, default=12, help="timed steps of a run")
    parser.add_argument("--warmup", type=positive, default=MIN_WARMUP, help=f"untimed steps, {MIN_WARMUP} or more")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of a process")
    parser.add_argument("--devices", type=positive, help="processes; default: 2, on cuda what one GPU can tell")
    parser.add_argument("--threads", type=positive, help="of a process; default: 1, on cuda its part of the cores")
    parser.add_argument("--precision", choices=PRECISIONS, default="32-true", help="of the Trainer")
    parser.add_argument("--limit", type=positive, default=600, help="seconds after which a run counts as failed")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    return parser


def fill_in(args: argparse.Namespace) -> None:
    """Give arguments that were left out their defaults, which depend on the others, and leave out who cannot run."""
    args.devices = args.devices or 2
    args.threads = args.threads or (1 if args.device == "cpu" else max(1, (os.cpu_count() or 1) // args.devices))
    if args.only is None:
        args.only = list(CONTENDERS if args.precision in OF_ALL else TRAINERS)
    args.only = list(dict.fromkeys(args.only))
    for name in list(args.only):
        if reason := missing(name):
            args.only.remove(name)
            print(f"{name} is skipped: {reason}")


def complaint(args: argparse.Namespace) -> str | None:
    """What is wrong with arguments that are right one by one, and what to type instead."""
    if args.warmup < MIN_WARMUP:
        return f"--warmup {args.warmup} times steps that still allocate. Write --warmup {MIN_WARMUP}."
    if args.tokens < 2:
        return "--tokens 1 leaves no next token to predict. Write --tokens 128."
    if args.precision not in OF_ALL and not set(args.only) <= set(TRAINERS):
        return f"--precision {args.precision} is the Trainer's alone. Write --only {' '.join(TRAINERS)}."
    if args.precision == "16-mixed" and args.device == "cpu":
        return "--precision 16-mixed needs --device cuda. Write --precision bf16-mixed."
    num_gpus = torch.cuda.device_count() if args.device == "cuda" else args.devices
    if num_gpus < args.devices:
        instead = f"--devices {num_gpus}" if num_gpus else "--device cpu"
        return f"--devices {args.devices} needs as many GPUs; torch sees {num_gpus}. Write {instead}."
    if args.json and (args.json.is_dir() or not args.json.parent.is_dir()):
        return f"--json {str(args.json)!r} is not a file in an existing folder. Write --json step.json."
    return None


def main(argv: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    if "--offload" in arguments:
        import offload_benchmark

        sys.argv.remove("--offload")
        offload_benchmark.main()
        return
    parser = build_parser()
    args = parser.parse_args(arguments)
    if args.device == "cuda" and args.devices is None:
        if not torch.cuda.is_available():
            parser.error("--device cuda needs a GPU; torch sees none. Write --device cpu.")
        import gpu_check

        gpu_check.check("cuda", small=False)
        return
    fill_in(args)
    if message := complaint(args):
        parser.error(message)
    about = environment("deepspeed")
    about["command"] = shlex.join(["python", "examples/benchmark.py", *arguments])
    print_environment(about)
    started = time.perf_counter()
    runs = measure_all(args)
    report(args, runs, about, time.perf_counter() - started)
    for output in {run["contender"]: run["output"] for run in runs if run["failure"]}.values():
        print(output, file=sys.stderr)


if __name__ == "__main__":
    main()
