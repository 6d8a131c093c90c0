"""Latency against energy as SVG: a dot a plan, and the front that no other plan beats in both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from planner.export.style import FAINT_INK, INK, OPS, PAPER, RULE, Colours
from planner.export.svg import document, legend, line, swatch, tag, tooltip, words
from planner.export.text import duration, number

WIDTH, HEIGHT = 760.0, 480.0
LEFT, RIGHT, TOP, BOTTOM = 86.0, 28.0, 64.0, 60.0
PALETTE = (*OPS.values(),)


@dataclass(frozen=True)
class Dot:
    """One plan on one machine."""

    series: str
    """What its colour stands for."""
    label: str
    latency_us: float
    energy_mj: float
    pareto: bool


@dataclass(frozen=True)
class _Axis:
    """From a value to a place; both axes are logarithmic, for plans differ by factors."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        share = (log10(value) - log10(self.low)) / (log10(self.high) - log10(self.low))
        return self.begin + share * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """1, 2 and 5 times the powers of ten in the range."""
        powers = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        return [m * 10.0**p for p in powers for m in (1, 2, 5) if self.low <= m * 10.0**p <= self.high]


def svg_pareto(dots: Sequence[Dot], title: str, label: str) -> str:
    """The picture; `label` says where the figures come from. Values must be above 0."""
    x = _axis([d.latency_us for d in dots], LEFT, WIDTH - RIGHT)
    y = _axis([d.energy_mj for d in dots], HEIGHT - BOTTOM, TOP + 24)
    colours = {s: PALETTE[i % len(PALETTE)] for i, s in enumerate(dict.fromkeys(d.series for d in dots))}
    body = [words(LEFT, 30, title, 17, font_weight=600), words(LEFT, 50, label, 12, FAINT_INK)]
    body += _grid(x, y)
    front = sorted((d for d in dots if d.pareto), key=lambda d: d.latency_us)
    path = "L".join(f"{number(x(d.latency_us))} {number(y(d.energy_mj))}" for d in front)
    body.append(tag("path", d=f"M{path}", fill="none", stroke=INK, stroke_width=1.4, stroke_dasharray="4 3"))
    body += [_dot(d, x(d.latency_us), y(d.energy_mj), colours[d.series]) for d in dots]
    entries = [(swatch(c), s) for s, c in colours.items()]
    drawn, below = legend(entries, LEFT, HEIGHT + 4, WIDTH - RIGHT)
    return document(WIDTH, below + 8, title, [*body, drawn])


def _axis(values: Sequence[float], begin: float, end: float) -> _Axis:
    return _Axis(min(values) / 1.15, max(values) * 1.15, begin, end)


def _grid(x: _Axis, y: _Axis) -> list[str]:
    floor_y, parts = HEIGHT - BOTTOM, []
    for value in x.ticks():
        parts.append(line(x(value), TOP + 24, x(value), floor_y, RULE))
        parts.append(words(x(value), floor_y + 18, duration(value), 11, FAINT_INK, text_anchor="middle"))
    for value in y.ticks():
        parts.append(line(LEFT, y(value), WIDTH - RIGHT, y(value), RULE))
        shown = f"{value / 1000:g} J" if value >= 1000 else f"{value:g} mJ"
        parts.append(words(LEFT - 8, y(value) + 4, shown, 11, FAINT_INK, text_anchor="end"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(words(middle, floor_y + 40, "time a problem, mean", 12, INK, text_anchor="middle"))
    parts.append(words(LEFT - 60, TOP + 14, "energy a problem", 12, INK))
    return parts


def _dot(dot: Dot, x: float, y: float, colours: Colours) -> str:
    shown = tooltip(f"{dot.series}: {dot.label}; {duration(dot.latency_us)}, {dot.energy_mj / 1000:.3g} J")
    circle = tag("circle", cx=x, cy=y, r=6.0 if dot.pareto else 4.5, fill=colours.fill if dot.pareto else PAPER,
                 stroke=colours.line, stroke_width=1.6)  # fmt: skip
    return tag("g", shown, circle)
