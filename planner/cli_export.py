"""The command `export`: graphs, plans and traces as pictures or for other tools."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from planner import api, show
from planner.export import FORMATS, export
from planner.graph import TaskGraph
from planner.lower import lower
from planner.passes import DraftAhead, PrefetchRefine, run_passes
from planner.plan import Plan
from planner.trace import Event, read_trace


def export_file(
    what: Annotated[
        Path, typer.Argument(help="A workflow (YAML), a plan (JSON) or a trace (JSONL).", show_default=False)
    ],
    format: Annotated[
        str,
        typer.Option("--format", "-f", help=f"One of {', '.join(sorted({f for k in FORMATS.values() for f in k}))}."),
    ] = "svg",
    graph: Annotated[bool, typer.Option(help="Of a plan: its task graph instead of its timeline.")] = False,
    rounds: Annotated[int, typer.Option(min=1, max=6, help="Rounds of the window that is scheduled.")] = 2,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write here instead of to the terminal.")
    ] = None,
) -> None:
    """Export a task graph, a plan or a trace as a picture or for another tool.

    Examples:

      heteroreason export examples/sums.yaml -f mermaid

      heteroreason export plan.json -f svg -o plan.svg

      heteroreason export out/trace.jsonl -f perfetto -o trace.json
    """
    text = export(_exportable(what, graph, rounds), format)
    if output is None:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        return
    show.write_file(output, text)
    show.out.print(f"left {output}", highlight=False)


def _exportable(what: Path, graph: bool, rounds: int) -> TaskGraph | Plan | list[Event]:
    if what.suffix in (".yaml", ".yml"):
        passes = (DraftAhead(max(1, rounds - 1)), PrefetchRefine())
        return run_passes(lower(api.as_workflow(what), rounds), passes)
    if what.suffix == ".jsonl":
        return read_trace(what)
    plan = Plan.load(what)
    return plan.task_graph if graph else plan
