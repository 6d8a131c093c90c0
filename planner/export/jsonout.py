"""JSON for other programs: a task graph as node-link data, a plan as its file, a trace as one list."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import networkx as nx

from planner.export.order import attributed
from planner.graph import TaskGraph
from planner.plan import Plan
from planner.trace import Event


def graph_json(graph: TaskGraph) -> str:
    """Node-link data, read back by `networkx.node_link_graph(data, edges="edges")`."""
    return _text(nx.node_link_data(attributed(graph), edges="edges"))


def plan_json(plan: Plan) -> str:
    """The plan's own file."""
    return plan.to_json()


def trace_json(events: Sequence[Event]) -> str:
    """A list of the events, each as in a line of the trace."""
    return _text([asdict(event) for event in events])


def _text(data: object) -> str:
    return json.dumps(data, indent=1, allow_nan=False) + "\n"
