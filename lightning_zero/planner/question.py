"""What a plan is asked for: cards, their memory, how one trains; read from numbers and from text with units."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from lightning_zero.placements import STAGES
from lightning_zero.planner.formulas import OPTIMIZERS
from lightning_zero.precision import RECIPES

__all__ = ["CARDS_PER_NODE", "PlanError", "Question", "count_of", "memory_of", "rate_of"]

LARGEST_COUNT = 10**15
"""Parameters: beyond any model, so a slip of the keyboard."""

CARDS_PER_NODE = 8

_PREFIX = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "KI": 2.0**10, "MI": 2.0**20, "GI": 2.0**30,
           "TI": 2.0**40}  # fmt: skip


class PlanError(ValueError):
    """A plan was asked for that makes no sense; the message says what would."""


def count_of(value: Any) -> float:
    """Parameters: 7.5e9, "7.5B", "135M"; a number below 100,000 is in billions.

    Raises:
        PlanError: it is no such count.
    """
    number = _number(value, r"([KMGBT]?)", "params", "7.5e9, '7.5B' or '135M'")
    if not isinstance(value, str) and number < 1e5:
        number *= 1e9
    if not 1 <= number <= LARGEST_COUNT:
        raise PlanError(f"params={value!r} must be above 0 and at most 1e15 parameters, as 7.5e9 or '7.5B'.")
    return number


def memory_of(value: Any, name: str = "gpu_memory") -> float:
    """Bytes: "80GB" (1e9), "80GiB" (2**30), 80e9; a number below 1,000,000 is in GB.

    Raises:
        PlanError: it is no such size.
    """
    number = _number(value, r"([KMGT]?I?)B?", name, "'80GB', '80GiB' or 80")
    plain = not isinstance(value, str) or re.fullmatch(r"[\d.eE+]+", value.strip())
    if plain and number < 1e6:
        number *= 1e9
    if not 0 < number <= 1e18:
        raise PlanError(f"{name}={value!r} must be above 0, as '80GB'.")
    return number


def rate_of(value: Any) -> float:
    """Bytes a second: "300GB/s"; a number below 1,000,000 is in GB/s."""
    return memory_of(value.strip().removesuffix("/s") if isinstance(value, str) else value, "bandwidth")


def _number(value: Any, unit: str, name: str, example: str) -> float:
    text = str(value).strip().upper()
    found = re.fullmatch(r"([-+]?[\d.]+(?:E[-+]?\d+)?)\s*" + unit, text)
    try:
        number = float(found[1]) * _PREFIX[found[2]] if found else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or isinstance(value, bool):
        raise PlanError(f"{name}={value!r} is not understood. Write {example}.")
    return number


def _whole(value: Any, name: str, most: int = 10**9) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if isinstance(value, bool) or number != value or not 1 <= number <= most:
        raise PlanError(f"{name}={value!r} must be a whole number from 1 to {most:,}.")
    return number


@dataclass(frozen=True)
class Question:
    """How one wants to train, on what.

    Args:
        gpus: cards in all; each is a rank.
        gpu_memory: of a card, bytes.
        precision: as the Trainer's.
        optimizer: of `formulas.OPTIMIZERS`.
        stage: this stage alone; ``None`` weighs all.
        offload: "cpu" or "disk" always, "" never; ``None`` weighs without and "cpu".
        activation_checkpointing: "full", "selective" or "offload" always, "" never; ``None`` weighs without and "full".
        micro_batch: sequences a card computes with at once.
        seq_len: tokens of a sequence; ``None`` leaves activations out.
        accumulate: micro-batches of an optimizer step.
        nodes: hosts, of equally many cards; default: as few as there can be with at most 8 each.
        bandwidth: bytes a second that a card sends within a node, and between nodes.

    Raises:
        PlanError: a value makes no sense.
    """

    gpus: int
    gpu_memory: float
    precision: str = "bf16-mixed"
    optimizer: str = "adamw"
    stage: int | None = None
    offload: str | None = None
    activation_checkpointing: str | None = None
    micro_batch: int = 1
    seq_len: int | None = None
    accumulate: int = 1
    nodes: int | None = None
    bandwidth: tuple[float, float] = field(default=(300e9, 25e9))

    def __post_init__(self) -> None:
        for name, most in (("gpus", 10**6), ("micro_batch", 10**6), ("accumulate", 10**6)):
            _whole(getattr(self, name), name, most)
        if self.seq_len is not None:
            _whole(self.seq_len, "seq_len", 10**9)
        if self.nodes is not None and _whole(self.nodes, "nodes") > self.gpus:
            raise PlanError(f"nodes={self.nodes} are more than gpus={self.gpus}. Write `nodes=1`.")
        if self.nodes is not None and self.gpus % self.nodes:
            raise PlanError(f"gpus={self.gpus} cannot be split evenly over nodes={self.nodes}.")
        _one_of(self.precision, RECIPES, "precision")
        _one_of(self.optimizer, OPTIMIZERS, "optimizer")
        _one_of(self.stage, (None, *STAGES), "stage")
        _one_of(self.offload, (None, "", "cpu", "disk"), "offload")
        _one_of(self.activation_checkpointing, (None, "", "full", "selective", "offload"), "activation_checkpointing")
        if self.stage == 0 and self.offload:
            raise PlanError("stage=0 keeps everything on every card, offload needs stage 1, 2 or 3: `stage=1`.")

    @property
    def num_nodes(self) -> int:
        """Hosts."""
        if self.nodes:
            return self.nodes
        fewest = -(-self.gpus // CARDS_PER_NODE)
        return next(nodes for nodes in range(fewest, self.gpus + 1) if self.gpus % nodes == 0)

    @property
    def slowest_link(self) -> float:
        """Bytes a second of the link that bounds a collective of all cards."""
        within, between = self.bandwidth
        return within if self.num_nodes == 1 else min(within, between)


def _one_of(value: Any, known: Any, name: str) -> None:
    if isinstance(value, bool) or value not in known:
        choices = [choice for choice in known if choice not in (None, "")]
        raise PlanError(f"{name}={value!r} is unknown: expected one of {choices}.")
