"""What each rank sent, in turn: all ranks must send the same, order by order, or one takes one thing for another.

    rank 0   gathers: 3, 4, 5      reductions: 5, 4      flags: 1, 2
    rank 1   gathers: 3, 5         reductions: 5, 4      flags: 1, 2      differs in its second gather

On gloo a difference may go unnoticed, since tags tell messages from each other; on NCCL it is a hang, or wrong values.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_zero.collectives import Collectives

Journal = list[tuple[str, str, str, int]]


def begin() -> Journal:
    """A journal of this process from now on."""
    journal: Journal = []
    Collectives.record = lambda *entry: journal.append(entry)
    return journal


def compare(journals: Sequence[Journal]) -> None:
    """See that all ranks have equal journals.

    Raises:
        AssertionError: two differ, with the first difference.
    """
    for order in dict.fromkeys(entry[:2] for journal in journals for entry in journal):
        first, *others = ([entry[2:] for entry in journal if entry[:2] == order] for journal in journals)
        for rank, other in enumerate(others, start=1):
            if first == other:
                continue
            at = next((i for i, (a, b) in enumerate(zip(first, other)) if a != b), min(len(first), len(other)))
            raise AssertionError(
                f"ranks 0 and {rank} differ in {order[1]} from number {at} of {len(first)} and {len(other)}:"
                f" {first[at : at + 3]} and {other[at : at + 3]}"
            )
