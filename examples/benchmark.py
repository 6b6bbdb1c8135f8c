"""Step time of ZeRO stages 1 to 3 against plain DDP, through the Lightning Trainer, interleaved on one machine.

    round 1    [ddp]   [zero1] [zero2] [zero3]      [ ] a process of its own, which starts the ranks and fits:
    round 2    [zero1] [zero2] [zero3] [ddp]            warm-up steps | timed steps | one step that ends the last
      ...                                               interval
    table      median over rounds, and its ratio to the DDP of the same round

    python examples/benchmark.py                                        two processes of one thread; 29M-parameter Llama
    python examples/benchmark.py --rounds 1 --steps 3 --json step.json
    python examples/benchmark.py --accelerator gpu --devices 8 --precision bf16-mixed --layers 24 --hidden 2048
    python examples/benchmark.py --offload                              offload, which has its own arguments

A step lasts from one batch's start to the next one's, so neither the optimizer nor what it leaves in flight is hidden.
"""

import argparse
import json
import os
import platform
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_zero import ZeROStrategy

CONTENDERS = ("ddp", "zero1", "zero2", "zero3")
ALONE = "none"
"""No strategy, on one device: what a rank alone is compared with."""
MIN_WARMUP = 3
HEAD_DIM = 64
LEARNING_RATE = 1e-3
SEED = 0


# One run: a fit of one contender, in a process of its own.


def llama_config(args: argparse.Namespace) -> LlamaConfig:
    """Heads of 64 and an MLP of 8/3 the width, as Llama has; 29,106,688 parameters by default."""
    return LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=8 * args.hidden // 3 // HEAD_DIM * HEAD_DIM,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // HEAD_DIM,
        max_position_embeddings=args.seq_len,
        tie_word_embeddings=False,
        use_cache=False,
    )


class RandomLlama(LightningModule):
    """A Llama with random weights on random tokens, both equal for every contender; built in the worker."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args

    def configure_model(self) -> None:
        torch.manual_seed(SEED)
        # Without a strategy Lightning would build it on the GPU, from other random numbers.
        with torch.device("cpu"):
            self.model = LlamaForCausalLM(llama_config(self.args))

    def train_dataloader(self) -> DataLoader[Tensor]:
        args = self.args
        num_rows = num_batches(args) * args.batch_size * args.devices
        draws = torch.rand(num_rows, args.seq_len, generator=torch.Generator().manual_seed(SEED))
        # Frequent and rare tokens: with equal frequencies there is nothing to learn, and any update gives one loss.
        tokens: Any = (draws**4 * args.vocab).long()
        # Of our own: Lightning's shuffles, and without a strategy there is none.
        sampler: Any = DistributedSampler(tokens, args.devices, self.global_rank, shuffle=False)
        return DataLoader(tokens, batch_size=args.batch_size, sampler=sampler)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> Optimizer:
        fused = True if self.args.optimizer == "fused" else None
        return AdamW(self.parameters(), lr=LEARNING_RATE, fused=fused)


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


class Recorder(Callback):
    """Measures steps, traffic and memory of every rank; rank 0 writes them to ``path`` as a JSON list."""

    def __init__(self, args: argparse.Namespace, path: Path) -> None:
        self.args = args
        self.path = path
        self.loss = torch.zeros(())
        self.traffic: dict[str, dict[str, float]] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        torch.set_num_threads(1)
        self.clock = Clock(trainer.strategy.root_device)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Tensor, batch_idx: int) -> None:
        self.clock.mark()
        engine = trainer.strategy.engine if isinstance(trainer.strategy, ZeROStrategy) else None
        if engine is not None and batch_idx == self.args.warmup:
            engine.collectives.reset_counts()
        if engine is not None and batch_idx == self.args.warmup + self.args.steps:
            counters = {"payload": engine.collectives.payload, "nbytes": engine.collectives.nbytes}
            self.traffic = {name: per_step(counter, self.args.steps) for name, counter in counters.items()}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        self.loss = outputs["loss"].detach()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        local = {
            "step_seconds": self.clock.intervals()[self.args.warmup :],
            "loss": self.loss.item(),
            "traffic_per_step": self.traffic,
            "peak_bytes": peak_bytes(pl_module.device),
            "num_threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name() if pl_module.device.type == "cuda" else platform.machine(),
            "numel": sum(parameter.numel() for parameter in pl_module.parameters()),
        }
        ranks: list[Any] = [local] * trainer.world_size
        if dist.is_initialized():
            dist.all_gather_object(ranks, local)
        if trainer.is_global_zero:
            self.path.write_text(json.dumps(ranks))


def num_batches(args: argparse.Namespace) -> int:
    """Batches of one run: the start of the last one ends the last timed step."""
    return int(args.warmup + args.steps + 1)


def per_step(counter: dict[str, int], steps: int) -> dict[str, float]:
    return {purpose: count / steps for purpose, count in counter.items()}


def peak_bytes(device: torch.device) -> int:
    """Most memory this process has held so far, bytes: allocated on its GPU, else resident on the host."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


def build_strategy(contender: str, accelerator: str) -> Strategy | str:
    if contender == ALONE:
        return "auto"
    # This process has only imported so far, so a fork is safe and spares each rank the imports; CUDA wants new ones.
    start_method: Any = "fork" if accelerator == "cpu" else "popen"
    if contender == "ddp":
        return DDPStrategy(start_method=start_method)
    strategy: Strategy = ZeROStrategy(stage=int(contender.removeprefix("zero")), start_method=start_method)
    return strategy


def fit(args: argparse.Namespace, path: Path) -> None:
    """Fit the one contender of ``args`` and let rank 0 write the ranks' measurements to ``path``."""
    trainer = Trainer(
        strategy=build_strategy(args.strategies[0], args.accelerator),
        accelerator=args.accelerator,
        devices=args.devices,
        precision=args.precision,
        max_steps=num_batches(args),
        callbacks=[Recorder(args, path)],
        default_root_dir=path.parent,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(RandomLlama(args))


# All runs.


def measure_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every contender once a round; each round starts with another contender."""
    runs = []
    for index in range(args.rounds):
        first = index % len(args.strategies)
        for contender in args.strategies[first:] + args.strategies[:first]:
            run = {"round": index + 1, "contender": contender} | measure_one(contender)
            print(f"round {run['round']}/{args.rounds}  {contender:<6}{run['seconds']:9.4f} s per step", flush=True)
            runs.append(run)
    return runs


def measure_one(contender: str) -> dict[str, Any]:
    """Run this script again for one contender: what one run leaves in a process cannot reach the next one.

    Raises:
        SystemExit: the run failed; its output is printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ranks.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--strategies", contender]
        done = subprocess.run(
            [*command, "--write-ranks", str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode or not path.exists():
            print(done.stdout, file=sys.stderr)
            raise SystemExit(
                f"{contender} failed with exit status {done.returncode}; its output is above. Run it alone:"
                f" `{shlex.join(command)} --rounds 1`."
            )
        ranks = json.loads(path.read_text())
    return {
        "seconds": max(median(rank["step_seconds"]) for rank in ranks),
        "loss": sum(rank["loss"] for rank in ranks) / len(ranks),
        "sent_bytes": sent_bytes(ranks),
        "peak_bytes": max(rank["peak_bytes"] for rank in ranks),
        "ranks": ranks,
    }


def sent_bytes(ranks: list[dict[str, Any]]) -> float | None:
    """Bytes that a rank puts on the wire in a step, W ranks sending (W - 1) / W of the payload; unknown for DDP."""
    traffic = ranks[0]["traffic_per_step"]
    if traffic is None:
        return None
    nbytes: float = sum(traffic["nbytes"].values())
    return nbytes * (len(ranks) - 1) / len(ranks)


# The report.


def summarize(runs: list[dict[str, Any]], contenders: list[str]) -> list[dict[str, Any]]:
    """One row a contender: medians and ranges over the rounds; a ratio pairs two runs of one round."""
    of_contender = {name: [run for run in runs if run["contender"] == name] for name in contenders}
    baseline = [run["seconds"] for run in of_contender.get(baseline_of(contenders), [])]
    rows = []
    for name, mine in of_contender.items():
        seconds = [run["seconds"] for run in mine]
        rows.append(
            {
                "contender": name,
                "seconds": spread(seconds),
                "ratio": spread([own / ddp for own, ddp in zip(seconds, baseline)]),
                "loss": spread([run["loss"] for run in mine]),
                "sent_bytes": mine[0]["sent_bytes"],
                "peak_bytes": max(run["peak_bytes"] for run in mine),
            }
        )
    return rows


def baseline_of(contenders: list[str]) -> str:
    return ALONE if ALONE in contenders else "ddp"


def spread(values: list[float]) -> dict[str, float] | None:
    return {"median": median(values), "min": min(values), "max": max(values)} if values else None


def format_table(rows: list[dict[str, Any]], memory: str, baseline: str = "ddp") -> str:
    """The rows of `summarize` for a terminal; "-" is what a contender does not have."""
    titles = ("contender", "s/step", "min - max", f"of {baseline}", "min - max", "last loss", "MB sent/step", memory)
    lines = [titles]
    for row in rows:
        sent = "-" if row["sent_bytes"] is None else f"{row['sent_bytes'] / 1e6:.1f}"
        times, ratios = format_spread(row["seconds"], 4), format_spread(row["ratio"], 3)
        loss = f"{row['loss']['median']:.5f}"
        lines.append((row["contender"], *times, *ratios, loss, sent, f"{row['peak_bytes'] / 1e6:.0f}"))
    widths = [max(len(line[column]) for line in lines) + 2 for column in range(len(titles))]
    return "\n".join(line[0].ljust(widths[0]) + "".join(map(str.rjust, line[1:], widths[1:])) for line in lines)


def format_spread(values: dict[str, float] | None, digits: int) -> tuple[str, str]:
    if values is None:
        return "-", "-"
    return f"{values['median']:.{digits}f}", f"{values['min']:.{digits}f} - {values['max']:.{digits}f}"


def environment() -> dict[str, Any]:
    """What the numbers depend on besides this script."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "lightning", "transformers")},
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }


def report(args: argparse.Namespace, runs: list[dict[str, Any]], about: dict[str, Any], seconds: float) -> None:
    rows = summarize(runs, args.strategies)
    losses = [run["loss"] for run in runs]
    tokens = args.batch_size * args.seq_len
    first = runs[0]["ranks"][0]
    memory = "peak MB/rank" if args.accelerator == "gpu" else "peak RSS MB/rank"
    print(f"""
{first["numel"]:,} parameters, {args.devices} ranks on {first["device"]}, {tokens} tokens per rank and step, \
{args.precision}, AdamW {args.optimizer}
{args.rounds} rounds of {args.warmup} warm-up and {args.steps} timed steps; a run is the median of its steps on the \
slowest rank; {seconds:.0f} s in all

{format_table(rows, memory, baseline_of(args.strategies))}

Losses of the last step differ by at most {max(losses) - min(losses):.1e} between all runs.""")
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name not in ("json", "write_ranks")}
        result = {"environment": about, "settings": settings, "summary": rows, "runs": runs}
        args.json.write_text(json.dumps(result, indent=1))
        print(f"Wrote {args.json}.")


# The command line.


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def contenders(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in (*CONTENDERS, ALONE):
            raise argparse.ArgumentTypeError(f"{name!r} is unknown; write some of {','.join((*CONTENDERS, ALONE))}")
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} names a contender twice; write {','.join(dict.fromkeys(names))}")
    return names


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Compare the step time of ZeRO stages 1 to 3 with plain DDP.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--offload", action="store_true", help="compare offload instead; see `--offload --help`")
    parser.add_argument("--rounds", type=positive, default=6, help="runs of each contender")
    parser.add_argument("--steps", type=positive, default=12, help="timed steps of a run")
    parser.add_argument("--warmup", type=positive, default=MIN_WARMUP, help=f"untimed steps, {MIN_WARMUP} or more")
    parser.add_argument("--strategies", type=contenders, default=",".join(CONTENDERS), help="contenders")
    parser.add_argument("--devices", type=positive, default=2, help="processes")
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu", help="device of a process")
    precisions = ("32-true", "bf16-mixed", "16-mixed", "bf16-true")
    parser.add_argument("--precision", choices=precisions, default="32-true", help="Lightning precision")
    optimizers = ("fused", "default")
    parser.add_argument("--optimizer", choices=optimizers, default="fused", help="AdamW(fused=True), or torch's choice")
    parser.add_argument("--layers", type=positive, default=8, help="decoder layers")
    parser.add_argument("--hidden", type=positive, default=512, help=f"width, a multiple of {HEAD_DIM}")
    parser.add_argument("--vocab", type=positive, default=4096, help="tokens of the vocabulary")
    parser.add_argument("--seq-len", type=positive, default=128, help="tokens of a sequence, 2 or more")
    parser.add_argument("--batch-size", type=positive, default=1, help="sequences per process and step")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    # How the script calls itself for one run.
    parser.add_argument("--write-ranks", type=Path, help=argparse.SUPPRESS)
    return parser


def complaint(args: argparse.Namespace) -> str | None:
    """What is wrong with arguments that are right one by one, and what to type instead."""
    if args.warmup < MIN_WARMUP:
        return f"--warmup {args.warmup} times steps that still allocate. Write --warmup {MIN_WARMUP}."
    if args.hidden % HEAD_DIM:
        nearest = max(1, round(args.hidden / HEAD_DIM)) * HEAD_DIM
        return f"--hidden {args.hidden} is no multiple of {HEAD_DIM}, the width of a head. Write --hidden {nearest}."
    if ALONE in args.strategies and args.devices > 1:
        return f"--strategies {ALONE} trains on one device. Write --devices 1."
    if args.seq_len < 2:
        return "--seq-len 1 leaves no next token to predict. Write --seq-len 128."
    if args.precision == "16-mixed" and args.accelerator == "cpu":
        return "--precision 16-mixed needs --accelerator gpu. Write --precision bf16-mixed."
    num_gpus = torch.cuda.device_count() if args.accelerator == "gpu" else args.devices
    if num_gpus < args.devices:
        instead = f"--devices {num_gpus}" if num_gpus else "--accelerator cpu"
        return f"--devices {args.devices} needs as many GPUs; torch sees {num_gpus}. Write {instead}."
    if args.json and (args.json.is_dir() or not args.json.parent.is_dir()):
        return f"--json {str(args.json)!r} is not a file in an existing folder. Write --json step.json."
    return None


def main() -> None:
    if "--offload" in sys.argv[1:]:
        import offload_benchmark

        sys.argv.remove("--offload")
        offload_benchmark.main()
        return
    parser = build_parser()
    args = parser.parse_args()
    if message := complaint(args):
        parser.error(message)
    if args.write_ranks:
        fit(args, args.write_ranks)
        return
    about = environment()
    print("\n".join(f"{name:<13}{value}" for name, value in about.items()), flush=True)
    started = time.perf_counter()
    runs = measure_all(args)
    report(args, runs, about, time.perf_counter() - started)


if __name__ == "__main__":
    main()
