"""What an estimate says: one row for each way to train, and which one to take."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_zero.planner.need import Choice, Need

__all__ = ["Recommendation", "Row"]


@dataclass(frozen=True)
class Row:
    """One way to train on the cards that were asked about.

    Args:
        choice: the stage and its extras.
        need: of one rank.
        sent: bytes that a card sends in an optimizer step.
        seconds: that it takes at least, on the slowest link.
        traffic: ``sent`` of one micro-batch in elements, in multiples of plain data parallelism.
        host: bytes of a node's memory.
        disk: bytes of a node's disk.
        spare: bytes of a card that are left; negative where it does not fit.
    """

    choice: Choice
    need: Need
    sent: float
    seconds: float
    traffic: float
    host: float
    disk: float
    spare: float

    @property
    def fits(self) -> bool:
        """Whether a card holds it."""
        return self.spare >= 0


@dataclass(frozen=True)
class Recommendation:
    """What to do.

    Args:
        row: the way to train, on ``gpus`` cards; ``None`` where nothing fits on any number of them.
        gpus: cards.
        reason: why, a sentence.
        trainer: the line to paste.
    """

    row: Row | None
    gpus: int
    reason: str
    trainer: str
