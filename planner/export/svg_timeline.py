"""Timelines as SVG: what a plan predicts, and what happened. A lane a device, a box a task or a chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from statistics import median

from planner.errors import UserError
from planner.export import style
from planner.export.svg import badge, document, legend, line, rect, swatch, tag, tooltip, words
from planner.export.text import duration, fitted, one_line, tokens, width
from planner.export.timeline import Box, Episode, Mark, Timeline, episodes, happened, likely_outcome, planned, run_of
from planner.graph import Op
from planner.plan import Plan
from planner.trace import Event

WIDTH, WIDEST = 1040.0, 4000.0
MARGIN, NAMES = 28.0, 128.0
LANE, BAR = 62.0, 34.0
MARK_ROWS, MARK_ROW = 3, 18.0


def svg_timeline(plan: Plan) -> str:
    """The plan's most likely outcome."""
    outcome, chance = likely_outcome(plan.task_graph)
    verdicts = ", ".join(f"{task} {verdict}" for task, verdict in outcome.items()) or "the only one"
    facts = (
        f"{duration(plan.objective_us)} a round expected, bound of this window {duration(plan.lower_bound_us)}, "
        f"gap {100 * plan.gap:.1f} % ({plan.status})"
    )
    lines = (facts, f"Most likely outcome, {100 * chance:.0f} %: {verdicts}")
    roles = {d: [r for r in plan.roles if plan.placement.get(r) == d] for d in plan.placement.values()}
    kinds = {d.name: d.kind_of_processor for d in plan.machine.devices}
    under = {d: ", ".join(roles.get(d, [])) or kinds[d] for d in kinds}
    return _Picture(planned(plan), f"Plan {plan.name}", lines, plan.cost_source, under).svg()


def svg_trace(events: Sequence[Event], problem: str | None = None) -> str:
    """What happened for one problem: the first of the trace if none is named. Raises UserError if it is not there."""
    found = episodes(events)
    chosen = [e for e in found if problem in (None, e.problem)]
    if not chosen:
        mend = f"name one of {', '.join(e.problem for e in found[:5])}" if found else "let a run solve a problem first"
        raise UserError(f"holds no problem {problem or ''}".rstrip(), where="trace", mend=mend)
    episode, run = chosen[0], run_of(events)
    lines = [one_line(episode.question) or episode.problem]
    lines.append(_ending(episode))
    if len(found) > 1:
        lines[-1] += f" (problem {found.index(episode) + 1} of {len(found)} in the trace)"
    title = f"Run of plan {run.plan_name}" if run else "Run"
    label = run.clock.label if run else ""
    return _Picture(happened([episode]), title, lines, label, {}).svg()


def _ending(episode: Episode) -> str:
    """How a problem ended."""
    end = episode.end
    if end is None:
        return "Broken off"
    said = "No answer" if end.answer is None else f"Answer {one_line(end.answer)}"
    graded = {True: ", right", False: ", wrong", None: ""}[end.correct]
    took = duration(end.at_us - min(episode.times_us()))
    steps = "1 step" if len(end.steps) == 1 else f"{len(end.steps)} steps"
    return f"{said}{graded}; {steps}, ended by {end.status}, {took}"


@dataclass(frozen=True)
class _Picture:
    timeline: Timeline
    title: str
    lines: Sequence[str]
    label: str
    """Where the times come from."""
    under: Mapping[str, str]
    """Device -> what stands under its name."""

    @cached_property
    def width(self) -> float:
        """Wide enough that half of the boxes can be told apart."""
        lengths = [b.end_us - b.start_us for b in self.timeline.boxes if b.end_us > b.start_us]
        wanted = 22 * self.end_us / median(lengths) if lengths else 0.0
        return min(WIDEST, max(WIDTH, NAMES + 2 * MARGIN + wanted))

    @cached_property
    def end_us(self) -> float:
        """The right end of the axis."""
        return max(1.0, 1.0 * self.timeline.end_us)

    def x(self, us: float) -> float:
        """Where a point in time is."""
        return MARGIN + NAMES + (self.width - 2 * MARGIN - NAMES) * us / self.end_us

    def svg(self) -> str:
        """The file."""
        key, top = legend(self.legend(), MARGIN, 102, self.width - MARGIN)
        rows = self.mark_rows()
        top += 6 + MARK_ROW * (1 + max((row for row in rows if row is not None), default=-1))
        bottom = top + LANE * max(1, len(self.timeline.devices))
        body = [*self.head(), key, *self.lanes(top), *self.axis(top, bottom)]
        body += self.marks(rows, top, bottom)
        for i, device in enumerate(self.timeline.devices):
            body += self.bars([b for b in self.timeline.boxes if b.device == device], top + i * LANE)
        if not self.timeline.boxes:
            body.append(words(self.x(0) + 14, top + LANE / 2 + 4, "No timeline was predicted.", 13, style.FAINT_INK))
        return document(self.width, bottom + 48, self.title, body, _hatches(self.timeline))

    def head(self) -> Iterator[str]:
        """Title, where the times come from, and the lines under it."""
        room = self.width - 2 * MARGIN
        tail = width(self.label, 12) + 24 if self.label else 0.0
        yield words(MARGIN, 40, fitted(self.title, 20, room - tail - 10), 20, font_weight=600)
        if self.label:
            right = self.width - MARGIN
            yield rect(right - tail, 23, tail, 24, rx=12, fill="#eef2ff", stroke="#c7d2fe")
            yield words(right - tail / 2, 39, self.label, 12, "#3730a3", text_anchor="middle")
        for i, text in enumerate(self.lines):
            yield words(MARGIN, 61 + 18 * i, fitted(text, 12.5, room), 12.5, style.FAINT_INK)

    def lanes(self, top: float) -> Iterator[str]:
        """A stripe a device with its name."""
        for i, device in enumerate(self.timeline.devices):
            y = top + i * LANE
            yield rect(MARGIN, y + 3, self.width - 2 * MARGIN, LANE - 6, rx=6, fill=style.LANE)
            under = self.under.get(device, "")
            name_y = y + LANE / 2 + (-2 if under else 4)
            yield words(MARGIN + 12, name_y, fitted(device, 14, NAMES - 20), 14, font_weight=600)
            if under:
                yield words(MARGIN + 12, name_y + 17, fitted(under, 11.5, NAMES - 20), 11.5, style.FAINT_INK)

    def axis(self, top: float, bottom: float) -> Iterator[str]:
        """Vertical rules and their times in milliseconds."""
        step = _tick_us(self.end_us, (self.width - NAMES) / 110)
        count = int(self.end_us // step)
        for i in range(count + 1):
            x = self.x(i * step)
            yield line(x, top, x, bottom + 5, style.RULE)
            unit = " ms" if i == count else ""
            yield words(x, bottom + 20, f"{i * step / 1000:g}{unit}", 11.5, style.FAINT_INK, text_anchor="middle")

    def mark_rows(self) -> list[int | None]:
        """Row of each mark's label, counted from below; None where there is no room for one."""
        free_from, rows = [MARGIN] * MARK_ROWS, []
        for mark in self.timeline.marks:
            begin, end = self.label_span(mark)
            row = next((r for r in range(MARK_ROWS) if free_from[r] <= begin), None)
            if row is not None:
                free_from[row] = end + 8
            rows.append(row)
        return rows

    def label_span(self, mark: Mark) -> tuple[float, float]:
        """Left and right end of a mark's badge and label; it stands to the left where the picture ends."""
        x, long = self.x(mark.at_us), 10 + width(mark.label, 11)
        return (x - 7, x + long) if x + long <= self.width - MARGIN / 2 else (x - long, x + 7)

    def marks(self, rows: Sequence[int | None], top: float, bottom: float) -> Iterator[str]:
        """A dashed line where something is decided, its badge and its label on top."""
        for mark, row in zip(self.timeline.marks, rows, strict=True):
            x = self.x(mark.at_us)
            colour = style.ACCEPT if mark.good else style.REJECT
            y = top - 8 - MARK_ROW * (row or 0)
            parts = [tooltip(f"{mark.label} at {duration(mark.at_us)}\n{mark.detail}")]
            parts.append(line(x, y, x, bottom, colour, stroke_width=1, stroke_dasharray="3 3", opacity=0.75))
            parts.append(badge(x, y, mark.good, 6.0 if row is not None else 3.5))
            if row is not None:
                left = self.label_span(mark)[0] < x - 8
                side = {"text_anchor": "end"} if left else {}
                parts.append(words(x + (-10 if left else 10), y + 4, mark.label, 11, colour, **side))
            yield tag("g", *parts)

    def bars(self, boxes: Sequence[Box], y: float) -> Iterator[str]:
        """The boxes of a lane, the pieces of one request as one bar; a label that does not fit stands below."""
        top, free_from = y + (LANE - BAR) / 2 - 5, 0.0
        runs = [list(self.touching(group)) for _, group in groupby(boxes, key=_look)]
        for run in (r for touching in runs for r in touching):
            yield self.bar(run, top)
            left, right = self.x(run[0].start_us), self.x(run[-1].end_us)
            text, colour = _label(run[0]), style.FAINT_INK if run[0].wasted else style.INK
            if width(text, 12) + 6 <= right - left:
                look = {"text_anchor": "middle", "font_weight": None if run[0].wasted else 600}
                yield words((left + right) / 2, top + BAR / 2 + 4.2, text, 12, colour, **look)
                continue
            begin = min(left, self.width - MARGIN - width(text, 10))
            if begin >= free_from:
                yield words(begin, top + BAR + 11, text, 10, colour)
                free_from = begin + width(text, 10) + 6

    def touching(self, boxes: Iterable[Box]) -> Iterator[list[Box]]:
        """The boxes in runs without a gap that could be seen."""
        run: list[Box] = []
        for box in boxes:
            if run and self.x(box.start_us) - self.x(run[-1].end_us) > 1.5:
                yield run
                run = []
            run.append(box)
        yield run

    def bar(self, run: Sequence[Box], top: float) -> str:
        """One bar: hatched with a dashed line if it ran ahead of what was known, pale if for nothing."""
        first, left = run[0], self.x(run[0].start_us) + 0.5
        wide = max(1.2, self.x(run[-1].end_us) - left - 0.5)
        fill, outline = style.of(first.op)
        if first.speculative and first.op in style.OPS:
            fill = f"url(#ahead-{first.op})"
        rounded, dashes = min(5.0, wide / 2), "4 3" if first.speculative else None
        look = {"stroke": outline, "stroke_width": 1.3, "stroke_dasharray": dashes}
        shape = rect(left, top, wide, BAR, tooltip(_story(run)), rx=rounded, fill=fill, **look)
        borders = (self.x(box.start_us) for box in run[1:])
        cuts = [line(x, top + 1, x, top + BAR - 1, outline, stroke_width=0.8, opacity=0.35) for x in borders]
        return tag("g", shape, *cuts, opacity=style.WASTED_OPACITY if first.wasted else None)

    def legend(self) -> Iterator[tuple[str, str]]:
        """What is in the picture and no more."""
        boxes = self.timeline.boxes
        ops = {b.op for b in boxes}
        yield from ((swatch(style.of(op)), op.lower()) for op in Op if op in ops)
        grey = style.Colours("#e5e7eb", style.FAINT_INK)
        if any(b.speculative for b in boxes):
            hatched = style.Colours("url(#ahead-any)", style.FAINT_INK)
            yield swatch(hatched, stroke_dasharray="4 3"), "speculative"
        if any(b.wasted for b in boxes):
            yield swatch(grey, opacity=style.WASTED_OPACITY), "not needed in the end"
        goods = {m.good for m in self.timeline.marks}
        if True in goods:
            yield badge(9, -4, True), "accepted"
        if False in goods:
            yield badge(9, -4, False), "not accepted"


def _label(box: Box) -> str:
    """A task's id; of a request, whose name is long, the op."""
    return box.op.lower() if ":" in box.name else box.name


def _look(box: Box) -> tuple[object, ...]:
    """What the pieces of one bar have in common."""
    return box.name, box.op, box.wasted, box.speculative


def _story(run: Sequence[Box]) -> str:
    """All that is known of a bar."""
    box = run[0]
    kind = ", speculative" if box.speculative else ""
    kind += ", not needed in the end" if box.wasted else ""
    pieces = f" in {len(run)} chunks" if len(run) > 1 else ""
    when = f"{duration(box.start_us)} to {duration(run[-1].end_us)} on {box.device}{pieces}"
    moved = tokens(sum(b.tokens_in for b in run), sum(b.tokens_out for b in run))
    return f"{box.name}\n{box.op} by {box.role}, round {box.round}{kind}\n{moved}\n{when}"


def _hatches(timeline: Timeline) -> str:
    """Slanted stripes in the colours of the ops that run ahead."""
    ops = sorted({b.op for b in timeline.boxes if b.speculative and b.op in style.OPS})
    named = [(f"ahead-{op}", style.of(op)) for op in ops]
    if ops:
        named.append(("ahead-any", style.Colours("#e5e7eb", style.FAINT_INK)))
    return "".join(_hatch(name, colours) for name, colours in named)


def _hatch(name: str, colours: style.Colours) -> str:
    ground = rect(0, 0, 7, 7, fill="#ffffff")
    stripe = rect(0, 0, 4, 7, fill=colours.fill)
    turn = {"patternUnits": "userSpaceOnUse", "patternTransform": "rotate(45)"}
    return tag("pattern", ground, stripe, id=name, width=7, height=7, **turn)


def _tick_us(end_us: float, most: float) -> float:
    """The smallest round step that gives at most so many ticks."""
    step = 1.0
    for factor, following in _factors():
        if end_us / (step * factor) <= most:
            return step * factor
        step *= following
    return step


def _factors() -> Iterator[tuple[int, int]]:
    while True:
        yield from ((1, 1), (2, 1), (5, 10))
