"""The Python API: `plan` a workflow for a machine, `run` a plan on problems."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from planner.checkpoint import model_config, model_folder, model_hash
from planner.choose import Options, auto, solved
from planner.cost import Costs, CostTable, cost_model
from planner.errors import UserError
from planner.goal import Wish
from planner.machine import Machine
from planner.plan import Plan
from planner.presets import PRESETS, preset
from planner.problems import problem_set
from planner.problems.base import Problem
from planner.report import Report, report
from planner.runtime.engine import Engine, Load
from planner.runtime.host import Journal, Solved
from planner.runtime.process import ProcessWorkers
from planner.runtime.watch import Live, Ratios, ScaledCosts
from planner.runtime.worker import Patience, Shelf, Shelved, VirtualWorkers, Workers, modelled
from planner.schedule.search import Progress
from planner.shape import ModelShape
from planner.trace import ClockKind, Event, Sink, collector, logged
from planner.workflow import NEEDED_ROLES, Arithmetic, RoleName, WeightKind, Workflow

PLAN_NAMES = ("auto", "solved", *PRESETS)
"""What a plan can be asked for by: the best of all, the solver's own, or a preset."""


@dataclass(frozen=True)
class Run:
    """What `run` gives: an answer a problem, what it took, and all that happened."""

    solved: tuple[Solved, ...]
    report: Report
    trace: tuple[Event, ...]


def plan(
    workflow: Workflow | str | Path,
    machine: Machine | str | Path,
    kind: str = "auto",
    *,
    costs: CostTable | str | Path | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Compile a workflow for a machine.

    `workflow` and `machine` are objects, files or, for a machine, a name of the catalogue. `kind` is one of
    `PLAN_NAMES`. `costs` are measured figures that go before the roofline; what they were fitted to also says how
    often drafts are accepted and how long steps are, in place of the workflow's statistics. Raises UserError.
    """
    if kind not in PLAN_NAMES:
        raise UserError(f"there is no kind of plan {kind!r}", mend=f"use one of {', '.join(PLAN_NAMES)}")
    workflow = as_workflow(workflow)
    machine = as_machine(machine)
    costs = CostTable.load(costs) if isinstance(costs, str | Path) else costs
    if costs is not None and costs.statistics is not None:
        workflow = replace(workflow, statistics=costs.statistics)
    if costs is not None and costs.dispatch_us is not None:
        machine = replace(machine, dispatch_us=costs.dispatch_us)
    model, hashes = costs_of(workflow, machine, costs), models_of(workflow)
    return _planned(kind, workflow, machine, model, hashes, options or Options(), progress)


def _planned(
    kind: str,
    workflow: Workflow,
    machine: Machine,
    costs: Costs,
    models: dict[RoleName, str],
    options: Options,
    progress: Progress | None,
) -> Plan:
    if kind in PRESETS:
        return preset(kind, workflow, machine, costs, models, options.rounds)
    if kind == "solved":
        return solved(workflow, machine, costs, models, options, progress)
    return auto(workflow, machine, costs, models, options, progress)[0]


def run(
    plan: Plan | str | Path,
    problems: Problem | str | Sequence[Problem | str],
    clock: ClockKind | str = ClockKind.WALL,
    *,
    seed: int | None = None,
    costs: CostTable | str | Path | None = None,
    sink: Sink | None = None,
    load: Load | None = None,
    options: Options | None = None,
    journal: Journal | None = None,
    on_solved: Callable[[Solved], None] | None = None,
    live: bool = False,
) -> Run:
    """Run a plan on problems: one after another, or as `load` says.

    A problem is a `Problem` or a question of the workflow's problem set. On the clock `wall` each device is a
    process of this computer and times are measured; on `virtual` the work runs in this process and times come from
    the cost model. `seed` replaces the workflow's. `sink` is called with each event as it happens, `on_solved` with
    each result as it is ready.

    When a device is lost the run goes on by a plan of the same kind, goal and `options` for what is left. With
    `live` it also goes on by a plan made anew, in a process of its own meanwhile, when acceptance or costs turn out
    to be others than the plan assumes. Problems that `journal` knows to be over are left out. A problem that cannot
    be run has the status `error`. Raises UserError, also if no problem at all can be run.
    """
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    if seed is not None:
        plan = with_seed(plan, seed)
    todo = [problems] if isinstance(problems, Problem | str) else list(problems)
    if not todo:
        raise UserError("there is no problem to run", mend="give at least one")
    kinds = problem_set(plan.workflow.problems)
    asked = [p if isinstance(p, Problem) else kinds.parse(p) for p in todo]
    events, note = collector(sink)
    found: list[Solved] = []

    model = costs_of(plan.workflow, plan.machine, costs)
    again = replanner(plan, costs, options)
    watch = Live(model, again) if live else None
    with ExitStack() as stack:
        if watch is not None:
            stack.enter_context(closing(watch))
        workers = stack.enter_context(open_workers(plan, ClockKind(clock), costs))
        more = {"replan": again, "patience": Patience(modelled(model)), "watch": watch}
        engine = Engine(plan, workers, kinds, logged(note), journal=journal, **more)
        for solved in engine.solve_all(asked, load):
            found.append(solved)
            if on_solved is not None:
                on_solved(solved)
    errors = [s.error for s in found if s.error is not None]
    if errors and len(errors) == len(asked):
        raise errors[0]
    return Run(in_order(found, asked), report(plan, events), tuple(events))


def replanner(
    plan: Plan, costs: CostTable | str | Path | None = None, options: Options | None = None
) -> Callable[..., Plan]:
    """Makes plans of the kind and for the goal of this one: `make(machine, workflow, ratios={})`.

    See `planner.runtime.watch.Make`. A Ctrl-C meanwhile is for the run that the plan is for, not for the search alone.
    """
    kind = plan.name if plan.name in PLAN_NAMES else "auto"
    wish = Wish(plan.objective, plan.max_latency, plan.max_energy)
    options = replace(options or Options(), wish=wish, best_when_stopped=False)
    return partial(_plan_on, kind=kind, costs=costs, options=options)


def _plan_on(
    machine: Machine,
    workflow: Workflow,
    ratios: Ratios | None = None,
    *,
    kind: str,
    costs: CostTable | str | Path | None,
    options: Options,
) -> Plan:
    """`plan`, by the workflow's own statistics and by costs that a run has put right."""
    table = CostTable.load(costs) if isinstance(costs, str | Path) else costs
    model = costs_of(workflow, machine, table.on(machine) if table else None)
    model = ScaledCosts(model, ratios) if ratios else model
    return _planned(kind, workflow, machine, model, models_of(workflow), options, None)


def in_order(found: Iterable[Solved], asked: Sequence[Problem]) -> tuple[Solved, ...]:
    """Results in the order in which the problems were asked, those left out that a journal had."""
    waiting: dict[str, list[Solved]] = {}
    for result in found:
        waiting.setdefault(result.problem.key, []).append(result)
    return tuple(waiting[problem.key].pop(0) for problem in asked if waiting.get(problem.key))


def as_workflow(workflow: Workflow | str | Path) -> Workflow:
    """The workflow itself, or read from its file. Its problem set must be known."""
    workflow = workflow if isinstance(workflow, Workflow) else Workflow.load(workflow)
    problem_set(workflow.problems)
    return workflow


def as_machine(machine: Machine | str | Path) -> Machine:
    """The machine itself, or read from its file, or from the catalogue."""
    return machine if isinstance(machine, Machine) else Machine.load(machine)


def with_seed(plan: Plan, seed: int) -> Plan:
    """The plan with another seed of the workflow's sampling: other answers, the same schedule."""
    workflow = replace(plan.workflow, sampling=replace(plan.workflow.sampling, seed=seed))
    return replace(plan, workflow=workflow)


def models_of(workflow: Workflow) -> dict[RoleName, str]:
    """The hash of each role's checkpoint."""
    needed = NEEDED_ROLES[workflow.policy.kind]
    return {name: model_hash(_folder(workflow, name)) for name in needed}


def costs_of(workflow: Workflow, machine: Machine, table: CostTable | str | Path | None = None) -> Costs:
    """Costs of the workflow's models on the machine; only their config.json is read."""
    shapes = {name: _shape(workflow, name) for name in NEEDED_ROLES[workflow.policy.kind]}
    table = CostTable.load(table) if isinstance(table, str | Path) else table
    return cost_model(machine, workflow, shapes, table)


def _shape(workflow: Workflow, name: RoleName) -> ModelShape:
    """Of a role's model, and of one that proposes tokens to it, whose weights are as the arithmetic has them."""
    role = workflow.roles[name]
    numerics, draft = role.numerics, None
    if role.speculate is not None:
        place = f"workflow {workflow.name}: roles.{name}.speculate.model"
        draft = _counted(model_folder(role.speculate.model, place), numerics.arithmetic)
    return replace(_counted(_folder(workflow, name), numerics.arithmetic, numerics.weights), draft=draft)


def _counted(folder: Path, arithmetic: Arithmetic, weights: WeightKind = WeightKind.SAME) -> ModelShape:
    return ModelShape.from_config(model_config(folder), arithmetic, str(folder / "config.json"), weights)


def _folder(workflow: Workflow, name: RoleName) -> Path:
    return model_folder(workflow.roles[name].model, f"workflow {workflow.name}: roles.{name}.model")


def check_models(plan: Plan) -> None:
    """Raise UserError if a checkpoint is not the one that the plan was made for."""
    for name, found in models_of(plan.workflow).items():
        if plan.models.get(name) != found:
            raise UserError(
                f"model {plan.workflow.roles[name].model} of role {name} is not the one that the plan was made for",
                where=f"plan {plan.name}",
                mend="make the plan anew with `heteroreason plan`",
            )


@contextmanager
def open_workers(
    plan: Plan, clock: ClockKind, costs: CostTable | str | Path | None = None, shelf: Shelf | None = None
) -> Iterator[Workers]:
    """Workers for a plan's machine, closed at the end. A `shelf` keeps loaded models from one rehearsal to the next."""
    check_models(plan)
    with ExitStack() as stack:
        if clock is ClockKind.WALL:
            workers: Workers = ProcessWorkers(plan.machine)
        else:
            shelf = shelf or stack.enter_context(closing(Shelf()))
            duration = modelled(costs_of(plan.workflow, plan.machine, costs))
            workers = VirtualWorkers(duration, Shelved(shelf, plan.machine))
        stack.enter_context(closing(workers))
        yield workers


def compare(
    workflow: Workflow,
    machine: Machine,
    problems: Sequence[Problem],
    clock: ClockKind = ClockKind.VIRTUAL,
    *,
    costs: CostTable | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
) -> Mapping[str, tuple[Plan, Run]]:
    """The same problems by each preset and auto; each gives the same answers."""
    shelf = Shelf()
    kinds = problem_set(workflow.problems)
    found = {}
    with closing(shelf):
        for kind in (*PRESETS, "auto"):
            made = plan(workflow, machine, kind, costs=costs, options=options, progress=progress)
            events: list[Event] = []
            with open_workers(made, clock, costs, shelf) as workers:
                engine = Engine(made, workers, kinds, events.append)
                answers = in_order(engine.solve_all(problems), problems)
            found[kind] = (made, Run(answers, report(made, events), tuple(events)))
    return found
