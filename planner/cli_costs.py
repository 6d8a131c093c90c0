"""Commands about costs: `fit` makes a cost table of a trace, `simulate` says what a plan is worth by one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.table import Table

from planner import api, show
from planner.cost import CostTable
from planner.errors import UserError
from planner.fit import fit_events, fit_steps
from planner.plan import Plan
from planner.replay import replay
from planner.simulate import Demand
from planner.simulate import simulate as simulate_plan
from planner.step_trace import read_step_trace, warmed
from planner.trace import read_trace
from planner.workflow import RoleName
from planner.yaml_file import to_mapping

DEVICES = ("draft=gpu0", "prm=gpu1", "target=gpu2")
"""Where the roles of a step trace ran, if nothing else is said."""


def fit(
    trace: Annotated[Path, typer.Argument(help="A trace (JSONL) that `run` left, or a step trace (CSV).")],
    plan: Annotated[Path | None, typer.Option(help="The plan (JSON) of a JSONL trace.")] = None,
    device: Annotated[list[str], typer.Option(help="ROLE=DEVICE, where a role of a CSV trace ran.")] = list(DEVICES),  # noqa: B006
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the cost table (YAML) here.")] = None,
) -> None:
    """Fit costs and statistics to a trace, robust against cold starts.

    Examples:

      heteroreason fit out/trace.jsonl --plan out/plan.json -o costs.yaml

      heteroreason fit steps.csv --device draft=gpu0 --device prm=gpu1 --device target=gpu2
    """
    if trace.suffix == ".csv":
        table = fit_steps(read_step_trace(trace), _devices(device), trace.name)
    elif plan is None:
        raise UserError("a JSONL trace needs its plan", where=str(trace), mend="name it with --plan")
    else:
        table = fit_events(Plan.load(plan), read_trace(trace), trace.name)
    text = yaml.safe_dump(to_mapping(table), sort_keys=False, allow_unicode=True)
    if output is not None:
        show.write_file(output, text)
    show.out.print(_fit_table(table))
    if output is not None:
        show.out.print(f"left {output}", highlight=False)


def simulate(
    plan: Annotated[Path, typer.Argument(help="A plan (JSON).")],
    count: Annotated[int, typer.Option("--problems", "-n", min=1, help="Problems to draw.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the drawn outcomes.")] = 0,
    trace: Annotated[Path | None, typer.Option(help="Replay a step trace (CSV) instead of drawing outcomes.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="Problems that are worked on at once.")] = 1,
    arrivals: Annotated[float | None, typer.Option(min=1e-6, help="Problems that arrive a second, on average.")] = None,
    costs: Annotated[Path | None, typer.Option(help="Measured or fitted costs (YAML).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Simulate a plan, on outcomes drawn from its workflow's statistics or over a step trace. All figures are modelled;
    in a replay the tasks take the times that the trace holds.

    Examples:

      heteroreason simulate plan.json -n 500 --costs costs.yaml

      heteroreason simulate plan.json --concurrency 8 --arrivals 2.5

      heteroreason simulate plan.json --trace steps.csv
    """
    loaded = Plan.load(plan)
    model = api.costs_of(loaded.workflow, loaded.machine, costs)
    if trace is not None:
        if concurrency > 1 or arrivals is not None:
            raise UserError("a trace is replayed problem by problem", mend="leave out --concurrency and --arrivals")
        result = replay(loaded, warmed(read_step_trace(trace)), model)
        shown, extra = result.report, {"serial_us": result.serial_us, "foresight_us": result.foresight_us}
    else:
        shown, extra = simulate_plan(loaded, model, count, seed, demand=Demand(concurrency, arrivals)), {}
    if as_json:
        show.print_json({**shown.to_mapping(), **extra})
        return
    table = show.report_table(loaded, shown, graded=False)
    if trace is not None:
        show.add_floor(table, shown.mean_us, extra["serial_us"], extra["foresight_us"])
    else:
        show.add_floor(table, shown.mean_us, None, shown.foresight_us)
    show.out.print(table)


def _devices(words: list[str]) -> dict[RoleName, str]:
    found = {}
    for word in words:
        role, _, device = word.partition("=")
        if role not in list(RoleName) or not device:
            raise UserError(f"--device is {word!r}", mend="write ROLE=DEVICE with a role draft, prm or target")
        found[RoleName(role)] = device
    missing = [r for r in RoleName if r not in found]
    if missing:
        raise UserError(f"--device names no device of role {missing[0]}", mend="name one for each role")
    return found


def _fit_table(table: CostTable) -> Table:
    shown = show.table(table.description, "role", "device", "rows", "left out", "median error", "error of the total")
    for f in table.fits:
        shown.add_row(f.role, f.device, str(f.rows), str(f.left_out), f"{f.median_error:.1%}", f"{f.total_error:+.2%}")
    return shown
