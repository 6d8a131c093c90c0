"""A task graph as networkx graphs for export: with all it holds, and with only the edges that a picture needs."""

from __future__ import annotations

import networkx as nx

from planner.export.text import clean
from planner.graph import Task, TaskGraph, Verdict

GUARD = "guard"
"""The `kind` of an edge from a VERIFY task to a task whose guard names it."""


def attributed(graph: TaskGraph) -> nx.DiGraph:
    """All tasks and edges, attributes as plain text, numbers and truth values; what does not apply is left out."""
    plain = nx.DiGraph(rounds=graph.rounds)
    for task in graph.tasks:
        plain.add_node(clean(task.id), **_attributes(task))
    for edge in graph.edges:
        plain.add_edge(clean(edge.source), clean(edge.target), kind=str(edge.kind))
    for task in graph.tasks:
        for literal in task.guard:
            ends = clean(literal.verify), clean(task.id)
            if not plain.has_edge(*ends):
                plain.add_edge(*ends, kind=GUARD)
            plain.edges[ends]["verdict"] = str(literal.verdict)
    return plain


def _attributes(task: Task) -> dict[str, str | int | float | bool]:
    return {
        "op": str(task.op),
        "role": str(task.role),
        "round": task.round,
        "tokens_in": task.tokens_in,
        "tokens_out": task.tokens_out,
        "context": task.context,
        "speculative": task.speculative,
        "guard": clean(guard_text(task)),
        **({} if task.accept is None else {"accept": task.accept}),
    }


def guard_text(task: Task) -> str:
    """The guard as in the text form of a graph: `!` before a rejection, `?` before what may still be unknown."""
    known = len(task.waits_for)
    marks = (
        ("?" if i >= known else "") + ("!" if l.verdict is Verdict.REJECT else "") for i, l in enumerate(task.guard)
    )
    return " & ".join(mark + l.verify for mark, l in zip(marks, task.guard, strict=True))


def pictured(graph: TaskGraph) -> nx.DiGraph:
    """The tasks with the edges that do not follow from the others: `kind`, and `verdict` on guard edges.

    Every task after a role's first needs the prompt too, and every guard holds the guards before it; drawn in
    full, such edges hide the rest.
    """
    full = nx.DiGraph()
    full.add_nodes_from(t.id for t in graph.tasks)
    for edge in graph.edges:
        full.add_edge(edge.source, edge.target, kind=str(edge.kind))
    for task in graph.tasks:
        for literal in task.guard:
            if not full.has_edge(literal.verify, task.id):
                full.add_edge(literal.verify, task.id, kind=GUARD, verdict=str(literal.verdict))
    kept = set(nx.transitive_reduction(full).edges)
    full.remove_edges_from([edge for edge in full.edges if edge not in kept])
    return full
