"""An estimate as a table for people, and as plain data for programs. GB is 1e9 bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from textwrap import fill
from typing import Any

from lightning_zero.planner.question import Question
from lightning_zero.planner.rows import Recommendation, Row
from lightning_zero.planner.subjects import Subject

__all__ = ["data_of", "text_of"]

_HEADINGS = (
    "", "params", "grads", "optim", "units", "activ", "card", "fits by", "host/node", "sent/step", "x DP", "at least",
)  # fmt: skip

_WIDTH = 120

Size = Callable[[float | None], str]


def text_of(
    subject: Subject, question: Question, rows: Sequence[Row], recommendation: Recommendation, gib: bool = False
) -> str:
    """A row for each way to train; then one recommendation, and the line to paste.

    Args:
        gib: say GiB (2**30 bytes) in place of GB (1e9).
    """
    unit, divisor = ("GiB", 2.0**30) if gib else ("GB", 1e9)

    def size(nbytes: float | None) -> str:
        if nbytes is None:
            return "?"
        value = nbytes / divisor
        return f"{value:,.1f}" if abs(value) >= 0.95 else f"{value:,.3f}" if value else "0"

    lines = [
        f"{subject.title}, {question.precision}, {question.optimizer}, on {question.gpus:,} cards of"
        f" {size(question.gpu_memory)} {unit}, {question.num_nodes:,} nodes; {unit} a card,"
        " unless a column says otherwise:",
        "",
    ]
    if subject.sizes is not None:
        lines[1:1] = [fill(f"It is cut into {subject.sizes}.", _WIDTH)]
    table = [_HEADINGS, *(_cells(row, size) for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(_HEADINGS))]
    for line in table:
        cells = [cell.rjust(width) for cell, width in zip(line, widths)]
        lines.append("  ".join([line[0].ljust(widths[0]), *cells[1:]]).rstrip())
    notes = [fill(note, _WIDTH) for note in _notes(question, rows, size, unit)]
    lines += ["", *notes, "", fill(recommendation.reason, _WIDTH)]
    if recommendation.trainer:
        lines.append(recommendation.trainer)
    return "\n".join(lines)


def _name(row: Row) -> str:
    choice = row.choice
    extras = [choice.activation_checkpointing, choice.offload and f"offload {choice.offload}"]
    return " + ".join([f"stage {choice.stage}", *(extra for extra in extras if extra)])


def _cells(row: Row, size: Size) -> tuple[str, ...]:
    need = row.need
    return (
        _name(row),
        size(need.on_device.parameters),
        size(need.on_device.gradients),
        size(need.on_device.optimizer),
        size(need.whole_units + need.unit_gradients),
        size(need.activations),
        size(need.device),
        size(row.spare) if row.fits else f"no, {size(row.spare)}",
        size(row.host or row.disk) + (" disk" if row.disk else ""),
        size(row.sent),
        f"{row.traffic:.2f}",
        f"{row.seconds * 1e3:,.0f} ms",
    )


def _notes(question: Question, rows: Sequence[Row], size: Size, unit: str) -> list[str]:
    notes = [
        "units: whole weights and gradients of the units that are computed with, and of the root. x DP: elements sent"
        " in a step of one micro-batch, in multiples of plain data parallelism. at least: on the slowest link,"
        f" {question.slowest_link / 1e9:,.4g} GB/s."
    ]
    if question.seq_len is None:
        notes.append("activ: not counted; say how long sequences are, `--seq-len 4096`. No stage shards them.")
    counted = [
        f"{_name(row)} {size(row.need.paper.total)}"
        for row in rows
        if row.need.paper is not None and not row.choice.activation_checkpointing
    ]
    if counted:
        notes.append(
            f"As the ZeRO paper counts, with 2-byte gradients, model states take: {', '.join(counted)} {unit}. Here"
            " gradients are fp32, as unmodified optimizers of torch require: `PrecisionRecipe(main_grad=...)` rests"
            " them in 2 bytes."
        )
    if question.optimizer == "8bit":
        notes.append("8-bit optimizers are for comparison: this package does not step them yet.")
    return notes


def data_of(
    subject: Subject, question: Question, rows: Sequence[Row], recommendation: Recommendation
) -> dict[str, Any]:
    """The same figures, in bytes and seconds, of types that JSON knows."""
    return {
        "subject": subject.title,
        "parameters": subject.numel,
        "units": None if subject.sizes is None else asdict(subject.sizes),
        "question": asdict(question),
        "rows": [_row_data(row) for row in rows],
        "recommendation": {
            "row": None if recommendation.row is None else _row_data(recommendation.row),
            "gpus": recommendation.gpus,
            "reason": recommendation.reason,
            "trainer": recommendation.trainer,
        },
    }


def _row_data(row: Row) -> dict[str, Any]:
    return {**asdict(row), "device": row.need.device, "fits": row.fits}
