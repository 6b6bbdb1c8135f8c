"""What a monitor found, as a table and as one self-contained page; all figures are those it was given."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Line", "html_of", "table_of"]

_WIDTH, _LANE, _LEFT = 900, 18, 190
"""Pixels: of a picture, of a lane in it, and of the names on its left."""


@dataclass(frozen=True)
class Line:
    """Bytes of one kind, by plan and as they were counted."""

    name: str
    planned: float
    measured: float

    @property
    def part(self) -> str:
        """Measured as a part of the plan."""
        if not self.planned:
            return "as planned" if not self.measured else "not planned"
        return f"{100 * self.measured / self.planned:.2f} %"


def table_of(lines: Sequence[Line]) -> str:
    """A row for each kind."""
    rows = [("", "planned", "measured", "of the plan")]
    rows += [(line.name, f"{line.planned:,.0f}", f"{line.measured:,.0f}", line.part) for line in lines]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    padded = [[cell.rjust(width) for cell, width in zip(row, widths)] for row in rows]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *cells[1:]]) for row, cells in zip(rows, padded))


def html_of(title: str, lines: Sequence[Line], averages: Mapping[str, float], recording: Mapping[str, Any]) -> str:
    """A page with the table, and one step as it happened: memory of whole units, and the timeline of collectives.

    Args:
        title: of the run.
        lines: planned and measured.
        averages: of an optimizer step, by name.
        recording: see `Recording.data`.
    """
    data = {"lines": [asdict(line) for line in lines], "averages": dict(averages), "recording": dict(recording)}
    rows = "".join(
        f"<tr><th>{html.escape(line.name)}</th><td>{line.planned:,.0f}</td><td>{line.measured:,.0f}</td>"
        f"<td>{line.part}</td></tr>"
        for line in lines
    )
    means = "".join(
        f"<tr><th>{html.escape(name.replace('_', ' '))}</th><td>{_figure(value)}</td></tr>"
        for name, value in averages.items()
    )
    # A name in the data must not end the element that it is in.
    packed = json.dumps(data).replace("</", "<\\/")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title><style>
:root {{ color-scheme: light dark; --ink: light-dark(#1a1a1a, #e8e8e8); --line: light-dark(#ccc, #555);
  --whole: light-dark(#3566a8, #7fb0f0); --sent: light-dark(#b5651d, #f0b070); --wait: light-dark(#a83545, #f08090); }}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
}}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th {{ text-align: left; font-weight: normal; padding-right: 2rem; }} td {{ text-align: right; padding-left: 1.5rem; }}
tr {{ border-bottom: 1px solid var(--line); }} svg {{ width: 100%; height: auto; }}
text {{ fill: var(--ink); font-size: 11px; }} .scroll {{ overflow-x: auto; }}
.whole {{ fill: var(--whole); }} .sent {{ fill: var(--sent); }} .wait {{ fill: var(--wait); }}
.curve {{ fill: none; stroke: var(--whole); stroke-width: 1.5; }}
</style></head><body>
<h1>{html.escape(title)}</h1>
<h2>Planned and measured</h2><p>Bytes of rank 0.</p>
<div class="scroll"><table><tr><th></th><td>planned</td><td>measured</td><td>of the plan</td></tr>{rows}</table></div>
<h2>Averages of an optimizer step</h2><div class="scroll"><table>{means}</table></div>
{_step(recording)}
<script type="application/json" id="figures">{packed}</script>
</body></html>
"""


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:,.4g}"


def _step(recording: Mapping[str, Any]) -> str:
    seconds = float(recording["seconds"])
    if not seconds:
        return "<p>No step was recorded: the run was too short.</p>"

    def x(at: float) -> float:
        return _LEFT + (_WIDTH - _LEFT) * at / seconds

    peak = max((nbytes for _, nbytes in recording["inFlight"]), default=0)
    return f"""<h2>One step, {seconds * 1e3:,.1f} ms</h2>
<h3>Whole weights in flight</h3><p>At most {peak:,} bytes.</p>{_curve(recording["inFlight"], peak, x)}
<h3>Which unit was whole when</h3>{_lanes(recording["whole"], "whole", x)}
<h3>Collectives</h3><p>Where each began.</p>{_lanes(_short(recording["sent"], seconds), "sent", x)}
<h3>Waits of rank 0</h3>{_lanes(recording["waits"], "wait", x)}"""


def _short(marks: Iterable[Sequence[Any]], seconds: float) -> list[Sequence[Any]]:
    return [(name, begin, begin + seconds / 300, nbytes) for name, begin, _, nbytes in marks]


def _curve(points: Sequence[Sequence[float]], peak: float, x: Any) -> str:
    height = 120
    if not peak:
        return "<p>None: whole weights rest.</p>"
    steps = []
    level = 0.0
    for at, nbytes in points:
        steps += [f"{x(at):.1f},{height * (1 - level / peak):.1f}", f"{x(at):.1f},{height * (1 - nbytes / peak):.1f}"]
        level = nbytes
    return (
        f'<svg viewBox="0 -4 {_WIDTH} {height + 8}" role="img" aria-label="bytes in flight over the step">'
        f'<polyline class="curve" points="{" ".join(steps)}"/><text x="0" y="10">{peak:,} bytes</text></svg>'
    )


def _lane(name: str) -> str:
    """Waits for "the weights of `net.0`" and "the weights of `net.1`" share one."""
    return name.split(" of `")[0]


def _lanes(spans: Sequence[Sequence[Any]], kind: str, x: Any) -> str:
    names = list(dict.fromkeys(_lane(span[0]) for span in spans))
    if not names:
        return "<p>None.</p>"
    drawn = [
        f'<text x="0" y="{_LANE * at + 13}">{html.escape(name if len(name) < 30 else f"...{name[-27:]}")}</text>'
        for at, name in enumerate(names)
    ]
    for name, begin, end, nbytes in spans:
        width = max(1.0, x(end) - x(begin))
        tip = f"{name}: {1e3 * begin:,.2f} to {1e3 * end:,.2f} ms" + (f", {nbytes:,} bytes" if nbytes else "")
        drawn.append(
            f'<rect class="{kind}" x="{x(begin):.1f}" y="{_LANE * names.index(_lane(name)) + 3}" width="{width:.1f}"'
            f' height="{_LANE - 5}"><title>{html.escape(tip)}</title></rect>'
        )
    size = f"0 0 {_WIDTH} {_LANE * len(names)}"
    return f'<svg viewBox="{size}" role="img" aria-label="{kind} over the step">{"".join(drawn)}</svg>'
