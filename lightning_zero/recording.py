"""One step of a sharded module as it happened: which unit was whole when, what was sent, and what was waited for."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from lightning_zero.engine import Engine
from lightning_zero.param_group import ParamGroup

__all__ = ["Recording", "Span"]


@dataclass(frozen=True)
class Span:
    """Something that lasted from ``begin`` to ``end``, seconds since the recording began."""

    name: str
    begin: float
    end: float
    nbytes: int = 0


@dataclass
class Recording:
    """Spans and marks of one rank, between `start` and `stop`.

    Args:
        whole: a span for each whole buffer that was held for a while.
        sent: a mark for each collective, by purpose, where it began.
        waits: a span for each time that this rank waited.
        in_flight: bytes of whole buffers after each change.
        seconds: from start to stop.
    """

    whole: list[Span] = field(default_factory=list)
    sent: list[Span] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)
    in_flight: list[tuple[float, int]] = field(default_factory=list)
    seconds: float = 0.0

    def start(self, engine: Engine) -> None:
        """Begin to listen to ``engine``."""
        self._began = time.monotonic()
        self._open: dict[ParamGroup, float] = {}
        names = {group: unit.name or "the root" for unit in (engine.root, *engine.units) for group in unit.groups}

        def changed(group: ParamGroup, is_whole: bool) -> None:
            now = time.monotonic() - self._began
            self.in_flight.append((now, engine.in_flight.nbytes))
            if is_whole:
                self._open[group] = now
            else:
                self._close(group, names[group], now)

        def began(purpose: str, nbytes: int) -> None:
            now = time.monotonic() - self._began
            self.sent.append(Span(purpose, now, now, nbytes))

        def waited(what: str, begin: float, end: float) -> None:
            self.waits.append(Span(what, begin - self._began, end - self._began))

        self._names = names
        self.in_flight.append((0.0, engine.in_flight.nbytes))
        for group in engine.in_flight.values():
            self._open[group] = 0.0
        engine.in_flight.on_change = changed
        engine.collectives.on_begin = began
        engine.collectives.watch.on_wait = waited

    def _close(self, group: ParamGroup, name: str, now: float) -> None:
        nbytes = group.layout.total * group.model_dtype.itemsize
        self.whole.append(Span(name, self._open.pop(group, 0.0), now, nbytes))

    def stop(self, engine: Engine) -> None:
        """Listen no more."""
        engine.in_flight.on_change = None
        engine.collectives.on_begin = None
        engine.collectives.watch.on_wait = None
        self.seconds = time.monotonic() - self._began
        self.in_flight.append((self.seconds, engine.in_flight.nbytes))
        for group in list(self._open):
            self._close(group, self._names[group], self.seconds)
        self._names = {}

    def data(self) -> dict[str, Any]:
        """Of types that JSON knows."""

        def spans(found: list[Span]) -> list[list[Any]]:
            return [[span.name, round(span.begin, 6), round(span.end, 6), span.nbytes] for span in found]

        return {
            "seconds": round(self.seconds, 6),
            "whole": spans(self.whole),
            "sent": spans(self.sent),
            "waits": spans(self.waits),
            "inFlight": [[round(at, 6), nbytes] for at, nbytes in self.in_flight],
        }
