"""What sharding costs the host, and how that grows: torch's fake process group, near-zero computation.

    overhead     microseconds and Python calls per unit, forward + backward, and with the optimizer's step
    units        the same for 10 to 200 units: per unit it stays what it is, if nothing is looked for among all of them
    parameters   the same for 2 to 50 parameters in a unit
    ranks        8 to 1,024 ranks: seconds to shard, and bytes that a rank holds

    python examples/overhead.py
    python examples/overhead.py --only zero3 fsdp2 --rounds 3 --json overhead.json
    python examples/overhead.py --tables overhead
    python examples/overhead.py --tables overhead --at-most 0.5       fails where a stage adds more than that

Collectives of the fake group return at once and move nothing, so all that is left is Python, the dispatcher and small
copies. Contenders take turns in one process, a step each round. "Added" is what a contender adds to no sharding at all.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from measuring import environment, format_columns, positive, print_environment, private_bytes, resting_bytes
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD
from torch.testing._internal.distributed.fake_pg import FakeStore

import lightning_zero

NONE = "none"
PEER = "fsdp2"
CONTENDERS = (NONE, "zero1", "zero2", "zero3", PEER)
UNITS, PARAMETERS, WIDTH, RANKS = 50, 10, 4, 8
WARMUP = 3
TABLES = ("overhead", "units", "parameters", "ranks")


class Unit(nn.Module):
    """Small vectors, each added to the input: ``parameters`` of ``width`` elements."""

    def __init__(self, parameters: int, width: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.zeros(width)) for _ in range(parameters))

    def forward(self, x: Tensor) -> Tensor:
        for vector in self.vectors:
            x = x + vector
        return x


class Net(nn.Module):
    """Units, and a root that holds one parameter."""

    def __init__(self, units: int, parameters: int, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.units = nn.ModuleList(Unit(parameters, width) for _ in range(units))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for unit in self.units:
            x = unit(x)
        return x


def shard(model: Net, contender: str) -> nn.Module:
    """``model``, unit by unit; a contender is "none", "zero1" to "zero3", or "fsdp2"."""
    if contender == PEER:
        for unit in model.units:
            fully_shard(unit)
        return fully_shard(model)
    if contender != NONE:
        lightning_zero.shard(model, int(contender.removeprefix("zero")), units=[Unit])
    return model


class Loop:
    """One contender's model and optimizer, and the halves of its step."""

    def __init__(self, contender: str, units: int, parameters: int, width: int) -> None:
        self.model = shard(Net(units, parameters, width), contender)
        self.optimizer = SGD(self.model.parameters(), lr=1e-3)
        self.inputs = torch.ones(2, width)

    def forward_backward(self) -> None:
        self.model(self.inputs).sum().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.forward_backward()
        self.update()

    def seconds(self) -> tuple[float, float]:
        """Of forward + backward, and of a whole step."""
        started = time.perf_counter()
        self.forward_backward()
        between = time.perf_counter()
        self.update()
        return between - started, time.perf_counter() - started


def count_calls(work: Callable[[], object]) -> int:
    """Functions that ``work`` calls in this thread, of Python and of C: a cost that no other process disturbs."""
    count = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # a collection would call finalizers, and when it comes is chance
    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


class FakeGroup:
    """Context: this process is rank 0 of ``world_size``, and nobody is at the other end."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def __enter__(self) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=self.world_size)

    def __exit__(self, *_: Any) -> None:
        dist.destroy_process_group()


def measure(
    contenders: list[str], rounds: int, units: int = UNITS, parameters: int = PARAMETERS, width: int = WIDTH
) -> dict[str, dict[str, float]]:
    """Per unit and by contender: microseconds of forward + backward and of a step, medians over rounds, and calls."""
    loops = {name: Loop(name, units, parameters, width) for name in contenders}
    for loop in loops.values():
        for _ in range(WARMUP):
            loop.step()
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for index in range(rounds):
        first = index % len(contenders)
        for name in contenders[first:] + contenders[:first]:
            seconds[name].append(loops[name].seconds())
    found = {}
    for name, loop in loops.items():
        computing, whole = (median(times) * 1e6 / units for times in zip(*seconds[name]))
        calls = count_calls(loop.forward_backward) / units
        loop.update()
        found[name] = {"forward_backward": computing, "step": whole, "calls": calls}
    return found


def set_up(contender: str, world_size: int, units: int, parameters: int, width: int) -> dict[str, float]:
    """Seconds to shard on one of ``world_size`` ranks, and bytes that it holds after a step, gradients included."""
    with FakeGroup(world_size):
        gc.collect()
        before = private_bytes()
        model = Net(units, parameters, width)
        started = time.perf_counter()
        model = shard(model, contender)
        seconds = time.perf_counter() - started
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, width)).sum().backward()
        optimizer.step()
        gc.collect()
        return {"seconds": seconds, "resting": resting_bytes(model), "private": private_bytes() - before}


def in_a_process(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` in a fork of this process: what it leaves behind ends with it."""
    with get_context("fork").Pool(1) as pool:
        return pool.apply(function, args)


def measure_in_a_group(*args: Any) -> dict[str, dict[str, float]]:
    with FakeGroup(RANKS):
        return measure(*args)


# The report.


def added(found: dict[str, dict[str, float]], contender: str, what: str) -> float | None:
    """What ``contender`` adds to no sharding, as a fraction of what `fully_shard` adds."""
    if NONE not in found or PEER not in found:
        return None
    base = found[NONE][what]
    return (found[contender][what] - base) / (found[PEER][what] - base)


def overhead_table(found: dict[str, dict[str, float]]) -> str:
    columns = {"forward_backward": "us / unit", "step": "us / unit, step", "calls": "calls / unit"}
    lines = [("contender", *(title for name in columns.values() for title in (name, "added")))]
    for contender, row in found.items():
        cells = []
        for what in columns:
            fraction = added(found, contender, what)
            cells += [f"{row[what]:.0f}", "-" if fraction is None else f"{fraction:.2f}"]
        lines.append((contender, *cells))
    return format_columns(lines)


def growth_table(title: str, found: dict[int, dict[str, Any]], form: Callable[[dict[str, Any]], str]) -> str:
    contenders = list(next(iter(found.values())))
    lines = [(title, *contenders)]
    lines += [(f"{size:,}", *(form(row[name]) for name in contenders)) for size, row in found.items()]
    return format_columns(lines)


def run_tables(args: argparse.Namespace) -> dict[str, Any]:
    """Measure and print the tables of ``args``."""
    found: dict[str, Any] = {}
    names, rounds = args.only, args.rounds
    if "overhead" in args.tables:
        found["overhead"] = in_a_process(measure_in_a_group, names, rounds, args.units, PARAMETERS, WIDTH)
        print(f"\n{args.units} units of {PARAMETERS} parameters of {WIDTH} elements, {RANKS} ranks; {rounds} rounds")
        print("added: to no sharding, as a fraction of what fully_shard adds\n")
        print(overhead_table(found["overhead"]), flush=True)
    grown = {
        "units": {units: (units, PARAMETERS, WIDTH) for units in (10, 50, 100, 200)},
        "parameters": {parameters: (20, parameters, WIDTH) for parameters in (2, 10, 50)},
    }
    for table, sizes in grown.items():
        if table in args.tables:
            rows = {size: in_a_process(measure_in_a_group, names, rounds, *shape) for size, shape in sizes.items()}
            found[table] = rows
            title = "units" if table == "units" else "parameters of each of 20 units"
            for what, form in (
                ("us / unit, forward + backward", lambda row: f"{row['forward_backward']:.0f}"),
                ("calls / unit", lambda row: f"{row['calls']:.0f}"),
            ):
                print(f"\n{what}\n{growth_table(title, rows, form)}", flush=True)
    if "ranks" in args.tables:
        # 50 units of 10 vectors of 8,192 elements: 16 MB of weights.
        found["ranks"] = {
            ranks: {name: in_a_process(set_up, name, ranks, UNITS, PARAMETERS, 8192) for name in names}
            for ranks in (8, 64, 256, 1024)
        }
        for what, form in (
            ("seconds to shard", lambda row: f"{row['seconds']:.3f}"),
            ("MB of tensors at rest, with Adam's moments and gradients", lambda row: f"{row['resting'] / 1e6:.1f}"),
            ("MB of private memory", lambda row: f"{row['private'] / 1e6:.0f}"),
        ):
            print(f"\n{what}; {UNITS * PARAMETERS * 8192:,} parameters\n{growth_table('ranks', found['ranks'], form)}")
    return found


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Host overhead of sharding, and its growth, with a fake process group.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="contenders")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES), help="what is measured")
    parser.add_argument("--rounds", type=positive, default=15, help="timed steps of each contender")
    parser.add_argument("--units", type=positive, default=UNITS, help="units of the first table")
    parser.add_argument(
        "--at-most",
        type=float,
        metavar="RATIO",
        help="fail if a stage adds more than this of the time that fully_shard adds to forward + backward",
    )
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    torch.set_num_threads(1)
    about = environment()
    print_environment(about)
    found = run_tables(args)
    if args.json:
        args.json.write_text(json.dumps({"environment": about, **found}, indent=1))
        print(f"Wrote {args.json}.")
    if args.at_most is not None:
        check(found.get("overhead", {}), args.at_most)


def check(found: dict[str, dict[str, float]], at_most: float) -> None:
    """See that no stage adds more than ``at_most`` of what `fully_shard` adds: a ratio does not depend on the machine.

    Raises:
        SystemExit: one does, or there is nothing to compare.
    """
    ratios = {name: added(found, name, "forward_backward") for name in found if name not in (NONE, PEER)}
    if not ratios or None in ratios.values():
        raise SystemExit(f"--at-most needs the table `overhead` of {NONE}, a stage and {PEER}.")
    above = {name: round(ratio, 2) for name, ratio in ratios.items() if ratio is not None and ratio > at_most}
    if above:
        raise SystemExit(f"Sharding adds more than {at_most} of what fully_shard adds: {above}.")
    print(f"No stage adds more than {at_most} of what fully_shard adds.")


if __name__ == "__main__":
    main()
