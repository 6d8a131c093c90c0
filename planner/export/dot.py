"""Task graph -> DOT, the language of Graphviz."""

from __future__ import annotations

from planner.export import style
from planner.export.order import GUARD, pictured
from planner.export.text import clean, tokens
from planner.graph import EdgeKind, Task, TaskGraph


def dot(graph: TaskGraph) -> str:
    """Tasks as boxes coloured by op, dashed if speculative; guards as dashed edges with their verdict."""
    lines = [f"  {_quoted(t.id)} [{_node(t)}];" for t in graph.tasks]
    for source, target, attributes in pictured(graph).edges(data=True):
        lines.append(f"  {_quoted(source)} -> {_quoted(target)} [{_edge(attributes)}];")
    head = [
        "digraph tasks {",
        '  graph [rankdir=TB, fontname="Helvetica"];',
        '  node [shape=box, style="filled,rounded", fontname="Helvetica", fontsize=11];',
        '  edge [fontname="Helvetica", fontsize=10];',
    ]
    return "\n".join([*head, *lines, "}"]) + "\n"


def _node(task: Task) -> str:
    fill, outline = style.of(task.op)
    label = f"{task.id}\n{task.op} on {task.role}\n{tokens(task.tokens_in, task.tokens_out)}"
    dashes = ', style="filled,rounded,dashed"' if task.speculative else ""
    return f'label={_quoted(label)}, fillcolor="{fill}", color="{outline}"{dashes}'


def _edge(attributes: dict[str, str]) -> str:
    if attributes["kind"] == GUARD:
        colour = style.ACCEPT if attributes["verdict"] == "accept" else style.REJECT
        return f'style=dashed, color="{colour}", fontcolor="{colour}", label="{attributes["verdict"]}"'
    if attributes["kind"] == EdgeKind.STREAM:
        return f'color="{style.STREAM}", label="stream"'
    return f'color="{style.DATA}"'


def _quoted(text: str) -> str:
    escaped = clean(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", " ")
    return f'"{escaped}"'
