"""The whole buffers that are held for a while: by storage, and how many bytes they were together at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import Tensor

__all__ = ["InFlight"]


class _Group(Protocol):
    @property
    def whole(self) -> Tensor | None: ...


G = TypeVar("G", bound=_Group)


class InFlight(dict[int, G]):
    """The group of each whole buffer that does not rest, by the identity of its storage."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        """Held now."""
        self.peak = 0
        """Held at most since somebody set this to `nbytes`."""
        self.on_change: Callable[[G, bool], None] | None = None
        """Called with a group that takes a whole buffer (true), or lets go of it."""

    def __setitem__(self, storage: int, group: G) -> None:
        super().__setitem__(storage, group)
        assert group.whole is not None
        self.nbytes += group.whole.nbytes
        self.peak = max(self.peak, self.nbytes)
        if self.on_change is not None:
            self.on_change(group, True)

    def __delitem__(self, storage: int) -> None:
        group = self[storage]
        super().__delitem__(storage)
        assert group.whole is not None
        self.nbytes -= group.whole.nbytes
        if self.on_change is not None:
            self.on_change(group, False)
