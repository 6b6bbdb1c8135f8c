"""One row for each way to train, and the cheapest one that fits: the lowest stage first, since traffic grows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lightning_zero.placements import STAGES
from lightning_zero.planner.models import module_subject
from lightning_zero.planner.need import Choice
from lightning_zero.planner.question import CARDS_PER_NODE, PlanError, Question, count_of, memory_of, rate_of
from lightning_zero.planner.report import text_of
from lightning_zero.planner.rows import Recommendation, Row
from lightning_zero.planner.subjects import SizeSubject, Subject

__all__ = ["Estimate", "estimate"]

MOST_GPUS = 2**17


@dataclass(frozen=True)
class Estimate:
    """What training needs, for each way to train."""

    subject: Subject
    question: Question
    rows: tuple[Row, ...]
    recommendation: Recommendation

    def row(self, stage: int, offload: str = "", activation_checkpointing: str = "") -> Row:
        """The row of one way to train.

        Raises:
            KeyError: it was not asked for.
        """
        wanted = Choice(stage, offload, activation_checkpointing)
        for row in self.rows:
            if row.choice == wanted:
                return row
        raise KeyError(f"no row for {wanted}")

    def __str__(self) -> str:
        return text_of(self.subject, self.question, self.rows, self.recommendation)


def estimate(
    params: Any,
    gpus: int,
    gpu_memory: Any,
    *,
    precision: str = "bf16-mixed",
    optimizer: str = "adamw",
    stage: int | None = None,
    offload: str | None = None,
    activation_checkpointing: str | None = None,
    micro_batch: int = 1,
    seq_len: int | None = None,
    accumulate: int = 1,
    lora_rank: int | None = None,
    nodes: int | None = None,
    bandwidth: Any = None,
) -> Estimate:
    """What training needs of each card, host and link, and the cheapest way that fits::

        print(lightning_zero.estimate(7.5, 64, 80))         billions of parameters, cards, GB of a card

    Args:
        params: a number of parameters (7.5e9, "7.5B"; below 100,000 in billions), a module, the folder or the
            ``config.json`` of a Hugging Face model, or ``package.module:Class`` of a LightningModule.
        gpus: cards in all.
        gpu_memory: of a card: bytes, "80GB" (1e9), "80GiB" (2**30); below 1,000,000 in GB.
        precision: as the Trainer's.
        optimizer: "adamw", "adam", "momentum", "sgd", "lion", "adafactor" or "8bit".
        stage: this stage alone; default: all.
        offload: "cpu" or "disk" always, "" never; default: both without and "cpu" are weighed.
        activation_checkpointing: "full", "selective" or "offload" always, "" never; default: both without and "full".
        micro_batch: sequences a card computes with at once.
        seq_len: tokens of a sequence; default: activations are left out.
        accumulate: micro-batches of an optimizer step.
        lora_rank: train adapters of this rank on all products, and keep the rest frozen.
        nodes: hosts, of equally many cards; default: as few as there can be with at most 8 each.
        bandwidth: bytes a second that a card sends within a node and between nodes, "300GB/s,25GB/s"; default: those.

    Raises:
        PlanError: a value makes no sense.
    """
    memory = memory_of(gpu_memory)
    question = Question(
        gpus=gpus,
        gpu_memory=memory,
        precision=precision,
        optimizer=optimizer,
        stage=stage,
        offload=offload,
        activation_checkpointing=activation_checkpointing,
        micro_batch=micro_batch,
        seq_len=seq_len,
        accumulate=accumulate,
        nodes=nodes,
        **({} if bandwidth is None else {"bandwidth": _rates(bandwidth)}),
    )
    subject = _subject(params, question, lora_rank)
    rows = tuple(_row(subject, choice, question) for choice in _choices(question))
    return Estimate(subject, question, rows, _recommended(subject, question, rows))


def _subject(params: Any, question: Question, lora_rank: int | None) -> Subject:
    is_module = isinstance(params, nn.Module)
    try:
        size = None if is_module else count_of(params)
    except PlanError:
        if not isinstance(params, str) or not any(mark in params for mark in "/.:\\") or params[:1] in "-+0123456789":
            raise
        size = None
    if size is None:
        return module_subject(params, question.precision, lora_rank)
    if lora_rank is not None:
        raise PlanError(f"lora_rank={lora_rank!r} adapts the matrices of a model: name it, `--model FOLDER`.")
    return SizeSubject(size)


def _rates(value: Any) -> tuple[float, float]:
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, tuple | list) else (value,)
    if len(parts) not in (1, 2):
        raise PlanError(f"bandwidth={value!r}: expected one rate, or two, within a node and between: '300GB/s,25GB/s'.")
    return rate_of(parts[0]), rate_of(parts[-1])


def _choices(question: Question) -> Iterator[Choice]:
    """All that is asked about, the cheapest first."""
    stages = STAGES if question.stage is None else (question.stage,)
    checkpointing = question.activation_checkpointing
    kept = [checkpointing] if checkpointing is not None else ["", "full"] if question.seq_len is not None else [""]
    offloads = [question.offload] if question.offload is not None else ["", "cpu"]
    for offload in offloads:
        for policy in kept:
            yield from (Choice(stage, offload, policy) for stage in stages if stage or not offload)


def _row(subject: Subject, choice: Choice, question: Question) -> Row:
    gpus = question.gpus
    need = subject.need(choice, question, gpus)
    sent = (need.gathered + need.reduced) * (gpus - 1) / gpus
    off = need.off_device.total * gpus / question.num_nodes
    return Row(
        choice=choice,
        need=need,
        sent=sent,
        seconds=sent / question.slowest_link,
        traffic=need.elements / 2,
        host=off if choice.offload == "cpu" else 0.0,
        disk=off if choice.offload == "disk" else 0.0,
        spare=question.gpu_memory - need.device,
    )


def _recommended(subject: Subject, question: Question, rows: tuple[Row, ...]) -> Recommendation:
    for row in rows:
        if row.fits:
            return Recommendation(row, question.gpus, _why(row, rows), _trainer_line(row.choice, question))
    found = _with_more_cards(subject, question)
    if found is None:
        least = min(row.need.device for row in rows)
        return Recommendation(
            None,
            question.gpus,
            f"Nothing fits on any number of cards: one holds {least / 1e9:,.1f} GB at least. Take larger cards, a"
            " smaller micro-batch or shorter sequences.",
            "",
        )
    row, asked = found
    reason = (
        f"Nothing fits on {question.gpus} cards of {question.gpu_memory / 1e9:,.4g} GB; on {asked.gpus}"
        f" {_name(row.choice)} does, with {row.need.device / 1e9:,.1f} GB a card."
    )
    return Recommendation(row, asked.gpus, reason, _trainer_line(row.choice, asked))


def _with_more_cards(subject: Subject, question: Question) -> tuple[Row, Question] | None:
    """The fewest cards that something fits on: whole nodes, beyond one."""
    per_node = question.gpus // question.num_nodes if question.nodes else CARDS_PER_NODE

    def asked_for(size: int) -> Question:
        """With ``size`` nodes; where nobody said how many cards these have, those of the first one come one by one."""
        if question.nodes:
            return replace(question, gpus=size * per_node, nodes=size)
        return replace(question, gpus=size if size <= per_node else (size - per_node + 1) * per_node)

    def fitting(size: int) -> tuple[Row, Question] | None:
        asked = asked_for(size)
        rows = (_row(subject, choice, asked) for choice in _choices(asked))
        return next(((row, asked) for row in rows if row.fits), None)

    low, high = 0, 1
    while (found := fitting(high)) is None:
        low, high = high, 2 * high
        if asked_for(high).gpus > MOST_GPUS:
            return None
    # More cards never need more memory.
    while high - low > 1:
        middle = (low + high) // 2
        better = fitting(middle)
        if better is None:
            low = middle
        else:
            high, found = middle, better
    return found


def _name(choice: Choice) -> str:
    extras = [f"offload to {choice.offload}"] if choice.offload else []
    if choice.activation_checkpointing:
        extras.insert(0, f"activation checkpointing ({choice.activation_checkpointing})")
    name = f"stage {choice.stage}" if choice.stage else "plain data parallelism"
    return " with ".join([name, " and ".join(extras)]) if extras else name


def _why(row: Row, rows: tuple[Row, ...]) -> str:
    holds = f"{_name(row.choice)} holds {row.need.device / 1e9:,.1f} GB a card, {row.spare / 1e9:,.1f} GB to spare"
    before = rows[: rows.index(row)]
    if not before:
        return f"{holds[0].upper()}{holds[1:]}: nothing cheaper is asked for."
    nearest = max(before, key=lambda other: other.spare)
    return (
        f"{holds[0].upper()}{holds[1:]}; of what is cheaper {_name(nearest.choice)} comes nearest, and lacks"
        f" {-nearest.spare / 1e9:,.1f} GB."
    )


def _trainer_line(choice: Choice, question: Question) -> str:
    extras = {"offload": choice.offload, "activation_checkpointing": choice.activation_checkpointing}
    arguments = "".join(f", {name}={value!r}" for name, value in extras.items() if value)
    strategy = f"ZeROStrategy(stage={choice.stage}{arguments})" if arguments else repr(f"zero{choice.stage}")
    if choice.stage == 0:
        strategy = f"ZeROStrategy(stage=0{arguments})" if arguments else "'ddp'"
    devices = question.gpus // question.num_nodes
    nodes = f", num_nodes={question.num_nodes}" if question.num_nodes > 1 else ""
    steps = f", accumulate_grad_batches={question.accumulate}" if question.accumulate > 1 else ""
    return (
        f"Trainer(accelerator='gpu', devices={devices}{nodes}, precision={question.precision!r}{steps},"
        f" strategy={strategy})"
    )
