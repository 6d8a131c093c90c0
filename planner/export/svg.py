"""The little that is needed to write SVG: elements, text, ticks and crosses, legends, the document around them."""

from __future__ import annotations

from collections.abc import Iterable

from planner.export.style import ACCEPT, FAINT_INK, INK, PAPER, REJECT, Colours
from planner.export.text import number, width, xml

FONT = "'Inter', 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


def tag(name: str, *inside: str, **attributes: object) -> str:
    """An element; `stroke_width` becomes stroke-width, numbers are rounded, None is left out."""
    shown = [f'{k.rstrip("_").replace("_", "-")}="{_value(v)}"' for k, v in attributes.items() if v is not None]
    head = " ".join([name, *shown])
    return f"<{head}>{''.join(inside)}</{name}>" if inside else f"<{head}/>"


def _value(value: object) -> str:
    return number(value) if isinstance(value, float) else xml(str(value))


def words(x: float, y: float, content: str, size: float, colour: str = INK, **attributes: object) -> str:
    """A line of text that begins at x, or is centred there with `text_anchor="middle"`."""
    return tag("text", xml(content), x=float(x), y=float(y), font_size=float(size), fill=colour, **attributes)


def line(x1: float, y1: float, x2: float, y2: float, stroke: str, **attributes: object) -> str:
    """A straight line."""
    return tag("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), stroke=stroke, **attributes)


def rect(x: float, y: float, w: float, h: float, *inside: str, **attributes: object) -> str:
    """A rectangle."""
    return tag("rect", *inside, x=float(x), y=float(y), width=float(w), height=float(h), **attributes)


def tooltip(content: str) -> str:
    """What a browser shows when the pointer rests on the element that this stands in."""
    return tag("title", xml(content))


def badge(x: float, y: float, good: bool, r: float = 6.5) -> str:
    """A green disc with a tick, or a red one with a cross."""
    a = r * 0.42
    tick = _path((x - a * 1.1, y), (x - a * 0.2, y + a), (x + a * 1.2, y - a))
    cross = _path((x - a, y - a), (x + a, y + a)) + _path((x - a, y + a), (x + a, y - a))
    mark = tag("path", d=tick if good else cross, fill="none", stroke=PAPER, stroke_width=1.6, stroke_linecap="round")
    return tag("circle", cx=float(x), cy=float(y), r=float(r), fill=ACCEPT if good else REJECT) + mark


def _path(*points: tuple[float, float]) -> str:
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)


def swatch(colours: Colours, **attributes: object) -> str:
    """A small box for a legend, at the origin."""
    return rect(0, -10, 18, 12, rx=3, fill=colours.fill, stroke=colours.line, stroke_width=1.2, **attributes)


def legend(entries: Iterable[tuple[str, str]], x: float, y: float, right: float) -> tuple[str, float]:
    """Pairs of a drawing 18 wide and its label in rows from (x, y); also where the row after them would be."""
    parts, at = [], x
    for drawing, label in entries:
        step = 24 + width(label, 11.5) + 20
        if at > x and at + step - 20 > right:
            at, y = x, y + 20
        parts.append(
            tag("g", drawing, words(24, 0, label, 11.5, FAINT_INK), transform=f"translate({number(at)} {number(y)})")
        )
        at += step
    return "".join(parts), y + 20


def document(w: float, h: float, title: str, body: Iterable[str], defs: str = "") -> str:
    """A whole SVG file on a light ground."""
    head = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {number(w)} {number(h)}", "role": "img"}
    ground = rect(0.5, 0.5, w - 1, h - 1, rx=10, fill=PAPER, stroke="#e5e7eb")
    inside = [tag("title", xml(title)), *([tag("defs", defs)] if defs else []), ground, *body]
    lines = "\n".join(part for part in inside if part)
    return tag("svg", f"\n{lines}\n", **head, width=float(w), height=float(h), font_family=FONT) + "\n"
