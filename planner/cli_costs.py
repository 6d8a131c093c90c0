"""Commands about costs: `profile` measures a cost table, `fit` makes one of a trace, `simulate` tries a plan by one."""

from __future__ import annotations

import statistics
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
from planner.problems import problem_set
from planner.profile import Sample, devices_of
from planner.profile import profile as measure_costs
from planner.replay import replay
from planner.simulate import Demand
from planner.simulate import simulate as simulate_plan
from planner.step_trace import read_step_trace, warmed
from planner.trace import read_trace
from planner.workflow import NEEDED_ROLES, Arithmetic, Numerics, Role, RoleName
from planner.yaml_file import to_mapping

DEVICES = ("draft=gpu0", "prm=gpu1", "target=gpu2")
"""Where the roles of a step trace ran, if nothing else is said."""


def fit(
    trace: Annotated[Path, typer.Argument(help="A trace (JSONL) that `run` left, or a step trace (CSV).")],
    plan: Annotated[Path | None, typer.Option(help="The plan (JSON) of a JSONL trace.")] = None,
    device: Annotated[list[str], typer.Option(help="ROLE=DEVICE, where a role of a CSV trace ran.")] = list(DEVICES),  # noqa: B006
    costs: Annotated[Path | None, typer.Option(help="Costs (YAML) to keep for what the trace does not show.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the cost table (YAML) here.")] = None,
) -> None:
    """Fit costs and statistics to a trace, robust against cold starts.

    Examples:

      heteroreason fit out/trace.jsonl --plan out/plan.json -o costs.yaml

      heteroreason fit out/trace.jsonl --plan out/plan.json --costs profiled.yaml -o costs.yaml

      heteroreason fit steps.csv --device draft=gpu0 --device prm=gpu1 --device target=gpu2
    """
    if trace.suffix == ".csv":
        table = fit_steps(read_step_trace(trace), _devices(device), trace.name)
    elif plan is None:
        raise UserError("a JSONL trace needs its plan", where=str(trace), mend="name it with --plan")
    else:
        table = fit_events(Plan.load(plan), read_trace(trace), trace.name)
    if costs is not None:
        table = table.over(CostTable.load(costs))
    if output is not None:
        _write(table, output)
    show.out.print(_fit_table(table))


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


def profile(
    what: Annotated[
        str, typer.Argument(help="A workflow (YAML), or a model: zoo/NAME or a folder.", show_default=False)
    ],
    device: Annotated[str | None, typer.Option("--device", "-d", help="A device; without it, all that fit.")] = None,
    machine: Annotated[
        str, typer.Option("--machine", "-m", help="The machine whose devices are here.")
    ] = "this-computer",
    role: Annotated[RoleName, typer.Option(help="The role that a single model plays.")] = RoleName.TARGET,
    arithmetic: Annotated[Arithmetic, typer.Option(help="Of a single model.")] = Arithmetic.FLOAT32,
    row_block: Annotated[int, typer.Option(min=1, max=256, help="Of a single model.")] = 8,
    cache_tokens: Annotated[int, typer.Option(min=8, help="Of a single model.")] = 256,
    repeats: Annotated[int, typer.Option(min=3, max=1000, help="Timings of each kind of chunk.")] = 7,
    limit: Annotated[float, typer.Option(min=1, max=3600, help="Seconds for a role on a device, loading apart.")] = 20,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the cost table (YAML) here.")] = None,
) -> None:
    """Measure on this computer how long models take to read and to write, for plans to go by.

    Examples:

      heteroreason profile examples/sums.yaml -o costs.yaml

      heteroreason plan examples/sums.yaml --costs costs.yaml

      heteroreason profile zoo/target --device cpu0
    """
    where = api.as_machine(machine)
    if what.endswith((".yaml", ".yml")):
        workflow = api.as_workflow(what)
        roles = {name: workflow.roles[name] for name in NEEDED_ROLES[workflow.policy.kind]}
        delimiter = problem_set(workflow.problems).delimiter
    else:
        roles, delimiter = {role: Role(what, Numerics(arithmetic, row_block, cache_tokens))}, "\n"
    placed = devices_of(where, roles, device)
    table, samples = measure_costs(where, placed, delimiter, repeats=repeats, limit_s=limit)
    if output is not None:
        _write(table, output)
    show.out.print(_profile_table(table, samples))


def _profile_table(table: CostTable, samples: list[Sample]) -> Table:
    columns = ("role", "device", "", "us a call", "us a token", "us a token of context", "spread", "error of the fit")
    shown = show.table(table.description, *columns)
    fits = {(fit.role, fit.device): fit for fit in table.fits}
    for e in table.entries:
        own = [s.spread for s in samples if (s.role, s.device, s.op) == (e.role, e.device, e.op)]
        figures = (e.base_us, e.per_token_us, e.per_context_us)
        fit = fits[e.role, e.device]
        shown.add_row(
            e.role, e.device, e.op, *(f"{f:.4g}" for f in figures),
            f"{statistics.median(own):.1%}", f"{fit.median_error:.1%}",
        )  # fmt: skip
    return shown


def _write(table: CostTable, output: Path) -> None:
    show.write_file(output, yaml.safe_dump(to_mapping(table), sort_keys=False, allow_unicode=True))
    show.out.print(f"left {output}", highlight=False)


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
