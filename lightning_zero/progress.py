"""A progress bar for work that takes longer than a few seconds, on one rank."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

__all__ = ["progress"]

DELAY = 3.0
"""Seconds before a bar appears."""

T = TypeVar("T")


def progress(items: Sequence[T], what: str, shows: bool) -> Iterator[T]:
    """``items`` one by one, with a bar called ``what`` where this rank ``shows`` it."""
    began = time.monotonic()
    bar: Any = None
    for done, item in enumerate(items):
        if shows and bar is None and time.monotonic() - began >= DELAY:
            # Not before it is needed: a bar takes a lock that is shared between processes.
            from tqdm import tqdm

            bar = tqdm(total=len(items), initial=done, desc=what, leave=False)
        yield item
        if bar is not None:
            bar.update()
    if bar is not None:
        bar.close()
