"""What rank 0 does for all: writes a file, a folder, an index."""

from __future__ import annotations

from collections.abc import Callable

from lightning_zero.collectives import Collectives

__all__ = ["on_first_rank"]


def on_first_rank(collectives: Collectives, work: Callable[[], object]) -> None:
    """Have rank 0 do ``work``, while the others wait: a collective.

    Raises:
        RuntimeError: on the others, where it failed there, with what rank 0 says.
    """
    error: Exception | None = None
    if collectives.rank == 0:
        try:
            work()
        except Exception as caught:
            error = caught
    if not collectives.on_any_rank(error is not None):
        return
    text = collectives.broadcast_object(f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    raise RuntimeError(f"on rank 0: {text}")
