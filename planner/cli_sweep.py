"""The command `sweep`: plans over machines, models, thresholds and depths, as a table, CSV and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from planner import api, show
from planner.choose import Options
from planner.cost import CostTable
from planner.errors import UserError
from planner.export.svg_pareto import Dot, svg_pareto
from planner.simulate import Demand
from planner.sweep import Grid, Point, draft_scores, sweep, to_csv
from planner.trace import read_trace
from planner.workflow import RoleName


def run_sweep(
    workflow: Annotated[Path, typer.Argument(help="A workflow (YAML).", show_default=False)],
    machine: Annotated[list[str], typer.Option("--machine", "-m", help="A machine; give it several times.")],
    kind: Annotated[list[str], typer.Option(help=f"A kind of plan: {', '.join(api.PLAN_NAMES)}.")] = ["auto"],  # noqa: B006
    model: Annotated[list[str], typer.Option(help="ROLE=MODEL, a model to try in a role.")] = [],  # noqa: B006
    threshold: Annotated[list[float], typer.Option(help="A score from which drafts are accepted; wants --trace.")] = [],  # noqa: B006
    depth: Annotated[list[int], typer.Option(min=0, max=8, help="Steps drafted ahead.")] = [],  # noqa: B006
    trace: Annotated[Path | None, typer.Option(help="A trace (JSONL) whose drafts were scored.")] = None,
    count: Annotated[int, typer.Option("--problems", "-n", min=1, help="Problems to draw for each point.")] = 200,
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="Problems that are worked on at once.")] = 1,
    limit: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds that the solver may take.")] = 2.0,
    costs: Annotated[Path | None, typer.Option(help="Measured or fitted costs (YAML).")] = None,
    table: Annotated[Path | None, typer.Option("--csv", help="Write the points (CSV) here.")] = None,
    picture: Annotated[Path | None, typer.Option("--svg", help="Draw latency against energy here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Simulate plans over machines, models, thresholds and depths. All figures are modelled.

    Examples:

      heteroreason sweep examples/countdown.yaml -m 1x3090 -m 3x3090 -m u280-2x3090 --csv points.csv --svg points.svg

      heteroreason sweep examples/sums.yaml -m 3x3090 --depth 0 --depth 1 --depth 2

      heteroreason sweep examples/sums.yaml -m 3x3090 --threshold 0.5 --threshold 0.9 --trace out/trace.jsonl
    """
    unknown = [k for k in kind if k not in api.PLAN_NAMES]
    if unknown:
        raise UserError(f"--kind is {unknown[0]!r}", mend=f"use one of {', '.join(api.PLAN_NAMES)}")
    grid = Grid(tuple(machine), tuple(kind), _models(model), tuple(threshold), tuple(depth))
    scores = draft_scores(read_trace(trace)) if trace else []
    with show.err.status("planning") as status:
        swept = sweep(
            api.as_workflow(workflow), grid, costs=CostTable.load(costs) if costs else None, scores=scores,
            samples=count, demand=Demand(concurrency), options=Options(limit_s=limit), progress=status.update,
        )  # fmt: skip
    points = swept.points
    if as_json:
        show.print_json({"points": [asdict(p) for p in points], "left_out": swept.left_out})
    else:
        show.out.print(_table(points))
        for why in swept.left_out:
            show.out.print(f"left out: {why}", highlight=False, markup=False)
    left = [(table, to_csv(points)), (picture, _picture(points))]
    for path, text in left:
        if path is not None:
            show.write_file(path, text)
            if not as_json:
                show.out.print(f"left {path}", highlight=False)


def _models(words: list[str]) -> dict[RoleName, tuple[str, ...]]:
    found: dict[RoleName, tuple[str, ...]] = {}
    for word in words:
        role, _, model = word.partition("=")
        if role not in list(RoleName) or not model:
            raise UserError(f"--model is {word!r}", mend="write ROLE=MODEL with a role draft, prm or target")
        found[RoleName(role)] = (*found.get(RoleName(role), ()), model)
    return found


def _table(points: Sequence[Point]) -> Table:
    varied = len({p.models for p in points}) > 1
    columns = ["machine", "plan", *(["models"] if varied else []), "accepted", "ahead", "time a problem", "95 %"]
    shown = show.table("sweep, modelled (cost model)", *columns, "energy", "problems a second", "best")
    for p in points:
        share = f"{p.acceptance:.2f}" + ("" if p.threshold is None else f" from score {p.threshold:g}")
        row = [p.machine, p.plan, *([p.models] if varied else []), share, str(p.depth)]
        times = [f"{show.ms(p.latency_us)} ± {show.ms(p.stderr_us)}", show.ms(p.p95_us)]
        shown.add_row(*row, *times, show.joule(p.energy_mj), f"{p.problems_per_s:.3g}", "*" if p.pareto else "")
    return shown


def _picture(points: Sequence[Point]) -> str:
    dots = [
        Dot(p.machine, ", ".join(filter(None, (p.plan, p.models, f"{p.depth} ahead"))), p.latency_us, p.energy_mj,
            p.pareto)
        for p in points
    ]  # fmt: skip
    return svg_pareto(dots, "Latency against energy", "modelled (cost model); filled: no other is better in both")
