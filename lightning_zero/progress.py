"""A progress bar for work that takes longer than a few seconds, on one rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from tqdm import tqdm

__all__ = ["progress"]

DELAY = 3.0
"""Seconds before a bar appears."""

T = TypeVar("T")


def progress(items: Sequence[T], what: str, shows: bool) -> Iterable[T]:
    """``items`` one by one, with a bar called ``what`` where this rank ``shows`` it."""
    bar: Iterable[T] = tqdm(items, desc=what, delay=DELAY, disable=not shows, leave=False)
    return bar
