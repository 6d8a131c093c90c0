"""Mermaid, which Markdown viewers draw: a task graph as a flowchart, a plan as a Gantt chart."""

from __future__ import annotations

import re

from planner.export import style
from planner.export.order import GUARD, pictured
from planner.export.text import clean, duration, one_line, tokens
from planner.export.timeline import Box, planned
from planner.graph import EdgeKind, Task, TaskGraph
from planner.plan import Plan


def flowchart(graph: TaskGraph) -> str:
    """Tasks as boxes coloured by op, dashed if speculative; guards as dashed edges with their verdict."""
    name = {t.id: f"t{i}" for i, t in enumerate(graph.tasks)}
    lines = ["flowchart TD", *(f"  {name[t.id]}{_label(t)}:::{_class(t)}" for t in graph.tasks)]
    for source, target, attributes in pictured(graph).edges(data=True):
        lines.append(f"  {name[source]} {_arrow(attributes)} {name[target]}")
    for task in {_class(t): t for t in graph.tasks}.values():
        fill, outline = style.of(task.op)
        dashes = ",stroke-dasharray:5 3" if task.speculative else ""
        lines.append(f"  classDef {_class(task)} fill:{fill},stroke:{outline},color:{style.INK}{dashes}")
    return "\n".join(lines) + "\n"


def _label(task: Task) -> str:
    lines = (task.id, f"{task.op} on {task.role}", tokens(task.tokens_in, task.tokens_out))
    return '["' + "<br/>".join(map(_entities, lines)) + '"]'


def _class(task: Task) -> str:
    return task.op.lower() + ("_ahead" if task.speculative else "")


def _arrow(attributes: dict[str, str]) -> str:
    if attributes["kind"] == GUARD:
        return f"-. {attributes['verdict']} .->"
    return "== stream ==>" if attributes["kind"] == EdgeKind.STREAM else "-->"


def _entities(text: str) -> str:
    """Whatever could be taken for syntax as a numbered entity."""
    return re.sub(r"""["#&<>`{}\[\]()|\\;:%@'*_~$\n\t]""", lambda found: f"#{ord(found[0])};", clean(text))


def gantt(plan: Plan) -> str:
    """The most likely outcome: a section a device, speculative tasks active, cancelled ones done."""
    timeline = planned(plan)
    unit, us = ("ms", 1000) if timeline.end_us >= 1_000_000 else ("µs", 1)
    facts = f"{duration(plan.objective_us)} a step, {plan.cost_source}, axis in {unit}"
    lines = ["gantt", f"  title {_plain(plan.name)}: {_plain(facts)}", "  dateFormat x", "  axisFormat %Q"]
    for device in timeline.devices:
        boxes = [b for b in timeline.boxes if b.device == device]
        if boxes:
            lines.append(f"  section {_plain(device)}")
            lines += [f"  {_task(box, us)}" for box in boxes]
    return "\n".join(lines) + "\n"


def _task(box: Box, us: int) -> str:
    """Mermaid knows points in time and lengths; its millisecond stands for the unit of the axis."""
    state = "done, " if box.wasted else "active, " if box.speculative else ""
    start, end = round(box.start_us / us), round(box.end_us / us)
    return f"{box.op} {_plain(box.name)} :{state}{start}, {max(1, end - start)}ms"


def _plain(text: str) -> str:
    """A Gantt chart has no way to escape what it takes for syntax."""
    return re.sub(r"[:;#%{}<>]", " ", one_line(text))
