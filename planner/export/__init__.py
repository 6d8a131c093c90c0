"""What people and other programs look at: graphs, plans and traces as text in the formats of other tools.

Every function here is pure: the same input gives the same text, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from planner.errors import UserError
from planner.export.dot import dot
from planner.export.graphml import graphml
from planner.export.jsonout import graph_json, plan_json, trace_json
from planner.export.mermaid import flowchart, gantt
from planner.export.perfetto import perfetto_plan, perfetto_trace, planned_and_happened
from planner.export.svg_graph import svg_graph
from planner.export.svg_timeline import svg_timeline, svg_trace
from planner.graph import TaskGraph
from planner.plan import Plan
from planner.trace import KINDS, Event

__all__ = [
    "FORMATS",
    "dot",
    "export",
    "flowchart",
    "gantt",
    "graph_json",
    "graphml",
    "perfetto_plan",
    "perfetto_trace",
    "plan_json",
    "planned_and_happened",
    "svg_graph",
    "svg_timeline",
    "svg_trace",
    "trace_json",
]

FORMATS: Mapping[str, Mapping[str, Callable[[Any], str]]] = {
    "graph": {"dot": dot, "graphml": graphml, "json": graph_json, "mermaid": flowchart, "svg": svg_graph},
    "plan": {"json": plan_json, "mermaid": gantt, "perfetto": perfetto_plan, "svg": svg_timeline},
    "trace": {"json": trace_json, "perfetto": perfetto_trace, "svg": svg_trace},
}
"""What can be exported -> the formats that fit it."""


def export(thing: TaskGraph | Plan | Sequence[Event], format: str) -> str:
    """The thing as text in a format. Raises UserError that names the formats that fit."""
    kind = _kind(thing)
    fitting = FORMATS[kind]
    if format not in fitting:
        mend = f"use one of {', '.join(fitting)}"
        raise UserError(f"a {kind} cannot be exported as {format!r}", mend=mend)
    return fitting[format](thing)


def _kind(thing: object) -> str:
    if isinstance(thing, TaskGraph):
        return "graph"
    if isinstance(thing, Plan):
        return "plan"
    events = tuple(KINDS.values())
    if isinstance(thing, Sequence) and not isinstance(thing, str) and all(isinstance(e, events) for e in thing):
        if not thing:
            raise UserError("the trace is empty", mend="export one that `heteroreason run` left")
        return "trace"
    raise UserError(f"a {type(thing).__name__} cannot be exported", mend="export a graph, a plan or a trace")
