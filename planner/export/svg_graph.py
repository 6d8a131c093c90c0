"""Task graph -> SVG, laid out here: no other program is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.export import style
from planner.export.layout import Layout, Rect, Sizes, layered
from planner.export.order import GUARD, guard_text, pictured
from planner.export.svg import badge, document, legend, line, rect, swatch, tag, tooltip, words
from planner.export.text import fitted, number, tokens, width
from planner.graph import EdgeKind, Op, Task, TaskGraph

MARGIN = 28.0
HEAD = 64.0
NARROWEST, WIDEST_BOX = 640.0, 230.0


def svg_graph(graph: TaskGraph) -> str:
    """Tasks as boxes coloured by op, dashed if speculative; guards as dashed edges that end at their verdict."""
    edges = pictured(graph)
    layout = layered(edges, Sizes(_box_width(graph), 50.0))
    w = max(NARROWEST, layout.width + 2 * MARGIN)
    title = f"Task graph of {graph.rounds} round{'s' if graph.rounds > 1 else ''}"
    head = [words(MARGIN, 40, title, 19, font_weight=600)]
    count = f"{len(graph.tasks)} tasks, {len(graph.outcomes)} outcomes"
    head.append(words(MARGIN + 1.1 * width(title, 19) + 14, 40, count, 12.5, style.FAINT_INK))
    key, top = legend(_legend(graph, edges), MARGIN, HEAD, w - MARGIN)
    left = (w - layout.width) / 2
    drawn = [_edge(route, edges.edges[edge]) for edge, route in layout.routes.items()]
    drawn += [_box(task, layout.boxes[task.id]) for task in graph.tasks]
    moved = tag("g", "\n".join(["", *drawn, ""]), transform=f"translate({number(left)} {number(top + 12)})")
    return document(w, top + 12 + layout.height + MARGIN, title, [*head, key, moved])


def graph_layout(graph: TaskGraph) -> Layout:
    """Where `svg_graph` puts the boxes, before margins."""
    return layered(pictured(graph), Sizes(_box_width(graph), 50.0))


def _box_width(graph: TaskGraph) -> float:
    lines = [(t.id, 13.0) for t in graph.tasks] + [(_facts(t), 11.0) for t in graph.tasks]
    return min(WIDEST_BOX, 24 + max((width(text, size) for text, size in lines), default=100.0))


def _facts(task: Task) -> str:
    chance = "" if task.accept is None else f", accepts {100 * task.accept:.0f} %"
    return tokens(task.tokens_in, task.tokens_out) + chance


def _box(task: Task, box: Rect) -> str:
    """The id and what it reads and writes; the rest shows when the pointer rests on it."""
    fill, outline = style.of(task.op)
    dashes = "6 4" if task.speculative else None
    shape = rect(box.x, box.y, box.w, box.h, rx=7, fill=fill, stroke=outline, stroke_width=1.6, stroke_dasharray=dashes)
    guard = f"\nif {guard_text(task)}" if task.guard else ""
    more = tooltip(f"{task.op} on {task.role}, round {task.round}\n{_facts(task)}, after {task.context}{guard}")
    name = words(box.middle, box.y + 21, fitted(task.id, 13, box.w - 16), 13, text_anchor="middle", font_weight=600)
    facts = words(box.middle, box.y + 38, fitted(_facts(task), 11, box.w - 12), 11, text_anchor="middle")
    return tag("g", more, shape, name, facts)


def _edge(route: Sequence[tuple[float, float]], attributes: dict[str, str]) -> str:
    colour = _colour(attributes)
    (x, y), dashes = route[-1], "5 4" if attributes["kind"] == GUARD else None
    wide = 2.4 if attributes["kind"] == EdgeKind.STREAM else 1.5
    path = tag("path", d="".join(_path(route)), fill="none", stroke=colour, stroke_width=wide, stroke_dasharray=dashes)
    head = tag("path", d=f"M{number(x)} {number(y)}l-4 -8h8z", fill=colour)
    mark = badge(x, y - 16, attributes["verdict"] == "accept") if attributes["kind"] == GUARD else ""
    return path + head + mark


def _path(route: Sequence[tuple[float, float]]) -> Iterator[str]:
    """Curves between the rows, straight lines through them; the last one ends where its arrow head begins."""
    for i in range(0, len(route), 2):
        (x1, y1), (x2, y2) = route[i], route[i + 1]
        last = i + 2 == len(route)
        stop = y2 - 8 if last else y2
        bend = (stop - y1) * 0.55
        yield f"{'L' if i else 'M'}{number(x1)} {number(y1)}"
        yield f"C{number(x1)} {number(y1 + bend)} {number(x2)} {number(stop - bend)} {number(x2)} {number(stop)}"


def _colour(attributes: dict[str, str]) -> str:
    if attributes["kind"] == GUARD:
        return style.ACCEPT if attributes["verdict"] == "accept" else style.REJECT
    return style.STREAM if attributes["kind"] == EdgeKind.STREAM else style.DATA


def _legend(graph: TaskGraph, edges) -> Iterator[tuple[str, str]]:
    ops = {t.op for t in graph.tasks}
    yield from ((swatch(style.of(op)), op.lower()) for op in Op if op in ops)
    if any(t.speculative for t in graph.tasks):
        grey = style.Colours("#ffffff", style.FAINT_INK)
        yield swatch(grey, stroke_dasharray="4 3"), "may start before its guard is known"
    kinds = {a.get("verdict", a["kind"]) for _, _, a in edges.edges(data=True)}
    if EdgeKind.STREAM in kinds:
        yield line(0, -4, 18, -4, style.STREAM, stroke_width=2.4), "stream"
    if "accept" in kinds:
        yield badge(9, -4, True), "if accepted"
    if "reject" in kinds:
        yield badge(9, -4, False), "if rejected"
