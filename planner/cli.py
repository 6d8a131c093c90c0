"""The command line: `heteroreason`. Bad input ends with one sentence and exit code 2."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from importlib.metadata import entry_points
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from planner import api, batch, cli_costs, cli_export, cli_run, cli_sweep, show
from planner.choose import Options
from planner.cost import CostTable
from planner.doctor import examine
from planner.errors import UserError
from planner.evaluate import evaluate as evaluate_policies
from planner.goal import Wish, read_caps
from planner.machine import Machine, catalogue
from planner.plan import Plan
from planner.problems import problem_set
from planner.problems.base import Problem, ProblemSet
from planner.problems.jsonl import read_jsonl
from planner.schedule.aim import Objective
from planner.show import err, out
from planner.simulate import Demand
from planner.stopping import hear, hear_no_more
from planner.trace import ClockKind
from planner.workflow import Policy, Workflow

app = typer.Typer(
    help="Compile speculative reasoning for mixed FPGA and GPU machines, and run it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


class Kind(StrEnum):
    """Which plan to make."""

    AUTO = "auto"
    SOLVED = "solved"
    SERIAL = "serial"
    OVERLAPPED = "overlapped"
    HETEROREASON = "heteroreason"


UsageError = typer.BadParameter.__mro__[1]
"""The parser's error for a wrong command line; typer has kept it in more than one place."""

MachineOption = Annotated[str, typer.Option("--machine", "-m", help="A name of the catalogue, or a YAML file.")]
CostsOption = Annotated[Path | None, typer.Option(help="Measured costs (YAML); they go before the roofline.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
SeedOption = Annotated[int | None, typer.Option(min=0, help="Seed of the problems and of sampling.")]
ProblemsOption = Annotated[int, typer.Option("--problems", "-n", min=1, help="Fresh problems of the workflow's set.")]
RoundsOption = Annotated[int, typer.Option(min=1, max=6, help="Rounds of the window that is scheduled.")]
WorkOption = Annotated[
    float, typer.Option(min=0.0, max=1000, help="Limit of the solver's work: its deterministic seconds; repeatable.")
]
LimitOption = Annotated[
    float, typer.Option(min=0.1, max=3600, help="Seconds after which the solver is cut off, repeatable or not.")
]
ObjectiveOption = Annotated[Objective, typer.Option(help="What the plan is made to be small in.")]
MaxLatencyOption = Annotated[
    str | None, typer.Option(help="Most time a problem: 250ms, or 1.2x of what the fastest plan takes.")
]
MaxEnergyOption = Annotated[
    str | None, typer.Option(help="Most energy a problem: 30J, or 0.8x of what the fastest plan takes.")
]


@app.command()
def run(
    context: typer.Context,
    what: Annotated[Path | None, typer.Argument(help="A workflow (YAML) or a plan (JSON).", show_default=False)] = None,
    questions: Annotated[list[str] | None, typer.Argument(help="Problems, as people write them.")] = None,
    machine: MachineOption = "this-computer",
    kind: Annotated[Kind, typer.Option("--plan", help="Which plan to make of a workflow.")] = Kind.AUTO,
    clock: Annotated[
        ClockKind, typer.Option(help="wall: measured here; virtual: a rehearsal, modelled.")
    ] = ClockKind.WALL,
    count: ProblemsOption = 5,
    file: Annotated[Path | None, typer.Option(help="Problems from a JSONL file with question and answer.")] = None,
    seed: SeedOption = None,
    objective: ObjectiveOption = Objective.LATENCY,
    max_latency: MaxLatencyOption = None,
    max_energy: MaxEnergyOption = None,
    costs: CostsOption = None,
    folder: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Leave plan, journal, answers, pictures, trace and report here."),
    ] = None,
    going_on: Annotated[
        Path | None, typer.Option("--resume", help="Go on with the run that was stopped in this folder.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="Problems that are worked on at once.")] = 1,
    deadline: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds for a problem; then what is committed is its end.")
    ] = None,
    replan: Annotated[
        bool, typer.Option(help="Plan anew, meanwhile, when acceptance or costs are not what the plan assumes.")
    ] = False,
    fsync: Annotated[bool, typer.Option(help="Have each line of the journal on the disk before going on.")] = False,
    shown: Annotated[int, typer.Option(min=0, help="Problems whose steps are shown.")] = 5,
    as_json: JsonOption = False,
) -> None:
    """Solve problems by a plan, and show the steps, the answers, and planned against happened.

    Examples:

      heteroreason run examples/sums.yaml "4123-871+90"

      heteroreason run examples/countdown.yaml -n 20 --out out

      heteroreason run examples/sums.yaml --file problems.jsonl --concurrency 4 --out out

      heteroreason run --resume out

      heteroreason run examples/sums.yaml -m u280-2x3090 --clock virtual
    """
    options = Options(wish=Wish(objective, *read_caps(max_latency, max_energy)), demand=Demand(concurrency))
    if going_on is not None:
        _refuse_with_resume(context)
        job = cli_run.resume(going_on, fsync)
    else:
        if what is None:
            raise UserError("what to run is not named", mend="name a workflow or a plan, or a folder with --resume")
        made = Plan.load(what) if what.suffix == ".json" else api.as_workflow(what)
        workflow = made.workflow if isinstance(made, Plan) else made
        problems = _problems(workflow, questions or [], file, count, seed or 0)
        if folder is not None:
            batch.check_folder(folder)
        plan = made if isinstance(made, Plan) else _plan_for(made, machine, kind, costs, options, quiet=as_json)
        if seed is not None:
            plan = api.with_seed(plan, seed)
        if deadline is not None and not isfinite(deadline):
            raise UserError(f"--deadline is {deadline}", mend="give seconds, or leave it out")
        deadline_us = None if deadline is None else round(1e6 * deadline)
        job = cli_run.begin(
            cli_run.Settings(clock, concurrency, deadline_us, costs, replan), plan, problems, folder, fsync
        )
    code = cli_run.carry_out(job, options, shown, as_json)
    if code:
        raise typer.Exit(code)


WITH_RESUME = {"going_on", "objective", "max_latency", "max_energy", "fsync", "shown", "as_json"}
"""What may be said anew when a run goes on: all else is in its folder."""


def _refuse_with_resume(context: typer.Context) -> None:
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and name not in WITH_RESUME:
            shown = parameter.opts[0] if parameter.opts[0].startswith("-") else name.upper()
            mend = "leave it out: the folder holds plan, problems and settings"
            raise UserError(f"{shown} is given together with --resume", mend=mend)


@app.command("plan")
def make_plan(
    workflow: Annotated[Path, typer.Argument(help="A workflow (YAML).", show_default=False)],
    machine: MachineOption = "this-computer",
    kind: Annotated[Kind, typer.Option(help="auto is the best of the solver's plan and the presets.")] = Kind.AUTO,
    objective: ObjectiveOption = Objective.LATENCY,
    max_latency: MaxLatencyOption = None,
    max_energy: MaxEnergyOption = None,
    rounds: RoundsOption = 3,
    work: WorkOption = Options.work,
    limit: LimitOption = Options.limit_s,
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="Problems at once that the plan is for.")] = 1,
    costs: CostsOption = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan (JSON) here.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Schedule a workflow on a machine, with a lower bound that tells how good the schedule is.

    Examples:

      heteroreason plan examples/sums.yaml -m 3x3090 -o plan.json

      heteroreason plan examples/countdown.yaml -m u280-2x3090 --kind solved --rounds 4 --work 2

      heteroreason plan examples/countdown.yaml -m v80-2x3090 --objective energy --max-latency 1.2x

      heteroreason plan examples/countdown.yaml -m 3x3090 --concurrency 8
    """
    wish = Wish(objective, *read_caps(max_latency, max_energy))
    demand = Demand(concurrency)
    options = Options(rounds=rounds, work=work, limit_s=limit, wish=wish, demand=demand)
    plan = _plan_for(api.as_workflow(workflow), machine, kind, costs, options, quiet=as_json)
    if output is not None:
        show.write_file(output, plan.to_json())
    if as_json:
        out.print(plan.to_json(), markup=False, highlight=False, soft_wrap=True)
        return
    out.print(show.plan_table(plan))
    if output is not None:
        out.print(f"left {output}", highlight=False)


@app.command()
def compare(
    workflow: Annotated[Path, typer.Argument(help="A workflow (YAML).", show_default=False)],
    machine: MachineOption = "this-computer",
    count: ProblemsOption = 30,
    clock: Annotated[ClockKind, typer.Option(help="wall: measured; virtual: modelled.")] = ClockKind.VIRTUAL,
    seed: SeedOption = None,
    objective: ObjectiveOption = Objective.LATENCY,
    max_latency: MaxLatencyOption = None,
    max_energy: MaxEnergyOption = None,
    rounds: RoundsOption = 3,
    work: WorkOption = Options.work,
    limit: LimitOption = Options.limit_s,
    costs: CostsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the plans serial, overlapped, heteroreason and auto on the same problems, side by side.

    Examples:

      heteroreason compare examples/countdown.yaml -m 3x3090

      heteroreason compare examples/sums.yaml --clock wall -n 50
    """
    flow, on = api.as_workflow(workflow), Machine.load(machine)
    problems = _problems(flow, [], None, count, seed or 0)
    table = CostTable.load(costs) if costs else None
    wish = Wish(objective, *read_caps(max_latency, max_energy))
    options = Options(rounds=rounds, work=work, limit_s=limit, wish=wish)
    with err.status("planning and running") as status:
        found = api.compare(flow, on, problems, clock, costs=table, options=options, progress=_watch(status))
    if as_json:
        rows = {
            name: {"plan": p.hash, "bound_us": p.lower_bound_us, **r.report.to_mapping(),
                   "answers": [s.answer for s in r.solved]}
            for name, (p, r) in found.items()
        }  # fmt: skip
        show.print_json(rows)
        return
    out.print(show.compare_table(found))
    steps = [[s.steps for s in r.solved] for _, r in found.values()]
    same = all(s == steps[0] for s in steps)
    out.print("all plans gave the same steps" if same else "[red]the plans gave different steps: this is a fault[/red]")
    if not same:
        raise typer.Exit(1)


@app.command()
def evaluate(
    workflows: Annotated[list[Path], typer.Argument(help="Workflows (YAML), one for each problem set.")],
    count: ProblemsOption = 1000,
    seed: SeedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Accuracy of every policy on the same fresh problems, with 95 % intervals.

    Example:

      heteroreason evaluate examples/sums.yaml examples/countdown.yaml -n 1000
    """
    results = []
    for path in workflows:
        flow = api.as_workflow(path)
        problems = _problems(flow, [], None, count, 1_000_000 if seed is None else seed)
        with _bar() as bar:
            job = bar.add_task(flow.problems, total=count * len(Policy))
            done = lambda policy, n, bar=bar, job=job: bar.update(job, advance=n, description=str(policy))  # noqa: E731
            results.append(evaluate_policies(flow, problems, progress=done))
    if as_json:
        show.print_json([asdict(r) for r in results])
        return
    out.print(show.evaluation_table(results))
    for result in results:
        out.print(show.evaluation_note(result), highlight=False)


@app.command()
def machines(
    name: Annotated[str | None, typer.Argument(help="A name of the catalogue, or a YAML file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the catalogue of machines, or one machine with the source of each figure.

    Examples:

      heteroreason machines

      heteroreason machines u280-2x3090
    """
    found = [Machine.load(name)] if name else [Machine.load(n) for n in catalogue()]
    if as_json:
        show.print_json([m.to_mapping() for m in found])
    elif name:
        out.print(show.device_table(found[0]))
    else:
        out.print(show.machine_table(found))


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Say what of heteroreason works on this computer, and what would mend the rest.

    Example:

      heteroreason doctor
    """
    checks = examine()
    if as_json:
        show.print_json([asdict(c) for c in checks])
    else:
        for check in checks:
            mark = (
                "[green]ok[/green]  " if check.ok else ("[red]no[/red]  " if check.needed else "[yellow]--[/yellow]  ")
            )
            mend = f"  [dim]{escape(check.mend)}[/dim]" if check.mend and not check.ok else ""
            out.print(f"{mark}{check.name}: {check.found}{mend}", highlight=False)
    if any(c.needed and not c.ok for c in checks):
        raise typer.Exit(1)


app.command()(cli_costs.simulate)
app.command()(cli_costs.fit)
app.command("sweep")(cli_sweep.run_sweep)
app.command("export")(cli_export.export_file)
app.command()(cli_costs.profile)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command."""
    there = {group.name for group in app.registered_groups}
    for entry in entry_points(group="heteroreason.commands"):
        if entry.name not in there:
            app.add_typer(entry.load(), name=entry.name)
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    before = hear()
    try:
        code = app(args=words, prog_name="heteroreason", standalone_mode=False)
    except SystemExit as stop:
        code = stop.code
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except UserError as error:
        _fail(str(error))
    except Exception as error:
        if not isinstance(error, UsageError):
            raise
        message = " ".join(str(error.format_message()).split()).rstrip(".")  # pyright: ignore[reportAttributeAccessIssue]
        known = {c.name or getattr(c.callback, "__name__", "") for c in app.registered_commands}
        command = f"heteroreason {words[0]}" if words[0] in known else "heteroreason"
        _fail(f"{message}; see {command} --help")
    finally:
        if arguments is not None:  # else the process ends here, and no later signal is to disturb that
            hear_no_more(before)
    code = code if isinstance(code, int) else 0
    if arguments is None and code > 128:
        # A signal ended it, all is closed. Threads of a model may be at work, and the interpreter's own end could
        # crash on them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _fail(sentence: str) -> NoReturn:
    err.print(f"error: {sentence}", style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(2)


def _plan_for(
    workflow: Workflow, machine: str, kind: Kind, costs: Path | None, options: Options, *, quiet: bool
) -> Plan:
    """A plan of the workflow, with the solver's progress shown meanwhile."""
    on = Machine.load(machine)
    if quiet:
        return api.plan(workflow, on, kind, costs=costs, options=options)
    with err.status("planning") as status:
        return api.plan(workflow, on, kind, costs=costs, options=options, progress=_watch(status))


def _watch(status: Any) -> Any:
    def watch(seconds: float, objective_us: float, bound_us: float) -> None:
        status.update(f"{seconds:.1f} s: {show.ms(objective_us)} a round, bound {show.ms(bound_us)}")

    return watch


def _problems(workflow: Workflow, questions: list[str], file: Path | None, count: int, seed: int) -> list[Problem]:
    if questions and file is not None:
        raise UserError("problems are given twice", mend="name questions or --file, not both")
    kinds = problem_set(workflow.problems)
    if file is not None:
        rows = read_jsonl(file)
        return rows if workflow.problems == rows[0].set else [_parsed(kinds, row.question, file) for row in rows]
    if questions:
        return [kinds.parse(q) for q in questions]
    return kinds.generate(count, seed)


def _parsed(kinds: ProblemSet, question: str, file: Path) -> Problem:
    try:
        return kinds.parse(question)
    except UserError as error:
        raise UserError(error.what, where=f"{file}: {error.where}", mend=error.mend) from None


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=err)


if __name__ == "__main__":
    main()
