"""``lightning-zero estimate`` and ``lightning-zero page``: the planner from a terminal."""

from __future__ import annotations

import argparse
import json
import tempfile
import webbrowser
from pathlib import Path
from typing import Any

from lightning_zero.placements import STAGES
from lightning_zero.planner.estimate import estimate
from lightning_zero.planner.formulas import OPTIMIZERS
from lightning_zero.planner.page import page_of
from lightning_zero.planner.question import PlanError
from lightning_zero.planner.report import data_of, text_of
from lightning_zero.precision import RECIPES

__all__ = ["add_commands", "run_estimate", "run_page"]


def add_commands(commands: Any) -> None:
    """Add both to an `argparse` parser's ``commands``."""
    plan = commands.add_parser(
        "estimate",
        help="will it fit? bytes a card, a host and a link, for each stage, and the cheapest way that fits",
        description="What training needs, before a card is rented.",
    )
    what = plan.add_mutually_exclusive_group(required=True)
    what.add_argument("--params", help="parameters: 7.5e9, 7.5B, 135M")
    what.add_argument("--model", help="the folder or config.json of a Hugging Face model, or package.module:Class")
    plan.add_argument("--gpus", required=True, help="cards in all")
    plan.add_argument("--gpu-memory", required=True, help="of a card: 80GB (1e9 bytes), 80GiB (2**30)")
    plan.add_argument("--precision", default="bf16-mixed", help=f"as the Trainer's: {', '.join(RECIPES)}")
    plan.add_argument("--optimizer", default="adamw", help=", ".join(OPTIMIZERS))
    plan.add_argument("--stage", type=int, help=f"this one alone: {', '.join(map(str, STAGES))}")
    plan.add_argument("--offload", choices=("none", "cpu", "disk"), help="always, or never; default: weigh it")
    plan.add_argument(
        "--activation-checkpointing",
        choices=("none", "full", "selective", "offload"),
        help="always, or never; default: weigh full",
    )
    plan.add_argument("--micro-batch", default=1, help="sequences a card computes with at once")
    plan.add_argument("--seq-len", help="tokens of a sequence; without it activations are left out")
    plan.add_argument("--accumulate", default=1, help="micro-batches of an optimizer step")
    plan.add_argument("--lora-rank", help="train adapters of this rank, keep the rest frozen")
    plan.add_argument("--nodes", help="hosts; default: few, of at most 8 cards each")
    plan.add_argument("--bandwidth", help="bytes a second a card sends within a node, between nodes: 300GB/s,25GB/s")
    plan.add_argument("--gib", action="store_true", help="print GiB (2**30 bytes), not GB (1e9)")
    plan.add_argument("--json", action="store_true", help="for programs: bytes and seconds")
    plan.add_argument("--html", type=Path, metavar="FILE", help="write the interactive page, set to this")
    page = commands.add_parser("page", help="open the interactive planner in a browser")
    page.add_argument("--html", type=Path, metavar="FILE", help="write it here, and open nothing")


def run_estimate(args: argparse.Namespace) -> None:
    """Print what was asked for.

    Raises:
        PlanError: a value makes no sense; the message names the option.
    """
    found = estimate(
        args.params or args.model,
        _number(args.gpus, "gpus"),
        args.gpu_memory,
        precision=args.precision,
        optimizer=args.optimizer,
        stage=args.stage,
        offload=_unless_none(args.offload),
        activation_checkpointing=_unless_none(args.activation_checkpointing),
        micro_batch=_number(args.micro_batch, "micro_batch"),
        seq_len=None if args.seq_len is None else _number(args.seq_len, "seq_len"),
        accumulate=_number(args.accumulate, "accumulate"),
        lora_rank=None if args.lora_rank is None else _number(args.lora_rank, "lora_rank"),
        nodes=None if args.nodes is None else _number(args.nodes, "nodes"),
        bandwidth=args.bandwidth,
    )
    parts = (found.subject, found.question, found.rows, found.recommendation)
    if args.html is not None:
        args.html.write_text(page_of(found))
    print(json.dumps(data_of(*parts), indent=2) if args.json else text_of(*parts, gib=args.gib))


def run_page(args: argparse.Namespace) -> None:
    """Write the page, and open it."""
    html = page_of(estimate(7.5e9, 64, "80GB", seq_len=4096))
    if args.html is not None:
        args.html.write_text(html)
        return
    with tempfile.NamedTemporaryFile("w", suffix=".html", prefix="lightning-zero-", delete=False) as file:
        file.write(html)
    if not webbrowser.open(Path(file.name).as_uri()):
        print(f"No browser opens here: the page is `{file.name}`.")


def _number(value: Any, name: str) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise PlanError(f"{name}={value!r} must be a whole number above 0.") from error


def _unless_none(value: str | None) -> str | None:
    return "" if value == "none" else value
