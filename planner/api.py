"""The Python API: `plan` a workflow for a machine, `run` a plan on problems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from planner.checkpoint import model_config, model_folder, model_hash
from planner.choose import Options, auto, solved
from planner.cost import Costs, CostTable, cost_model
from planner.errors import UserError
from planner.machine import Machine
from planner.plan import Plan
from planner.presets import PRESETS, preset
from planner.problems import problem_set
from planner.problems.base import Problem
from planner.report import Report, report
from planner.runtime.engine import Engine, Solved
from planner.runtime.process import ProcessWorkers
from planner.runtime.worker import Shelf, VirtualWorkers, Workers
from planner.schedule.cpsat import Progress
from planner.shape import ModelShape
from planner.trace import ClockKind, Event, Sink
from planner.workflow import NEEDED_ROLES, RoleName, Workflow

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
    `PLAN_NAMES`. `costs` are measured figures that go before the roofline. Raises UserError.
    """
    if kind not in PLAN_NAMES:
        raise UserError(f"there is no kind of plan {kind!r}", mend=f"use one of {', '.join(PLAN_NAMES)}")
    workflow = as_workflow(workflow)
    machine = as_machine(machine)
    model, hashes = costs_of(workflow, machine, costs), models_of(workflow)
    options = options or Options()
    if kind in PRESETS:
        return preset(kind, workflow, machine, model, hashes, options.rounds)
    if kind == "solved":
        return solved(workflow, machine, model, hashes, options, progress)
    return auto(workflow, machine, model, hashes, options, progress)[0]


def run(
    plan: Plan | str | Path,
    problems: Problem | str | Sequence[Problem | str],
    clock: ClockKind | str = ClockKind.WALL,
    *,
    seed: int | None = None,
    costs: CostTable | str | Path | None = None,
    sink: Sink | None = None,
) -> Run:
    """Run a plan on problems, one after another.

    A problem is a `Problem` or a question of the workflow's problem set. On the clock `wall` each device is a
    process of this computer and times are measured; on `virtual` the work runs in this process and times come from
    the cost model. `seed` replaces the workflow's. `sink` is called with each event as it happens. Raises UserError.
    """
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    if seed is not None:
        plan = with_seed(plan, seed)
    todo = [problems] if isinstance(problems, Problem | str) else list(problems)
    if not todo:
        raise UserError("there is no problem to run", mend="give at least one")
    kinds = problem_set(plan.workflow.problems)
    asked = [p if isinstance(p, Problem) else kinds.parse(p) for p in todo]
    events: list[Event] = []

    def note(event: Event) -> None:
        events.append(event)
        if sink is not None:
            sink(event)

    with open_workers(plan, ClockKind(clock), costs) as workers:
        engine = Engine(plan, workers, kinds, note)
        answers = tuple(engine.solve(problem) for problem in asked)
    return Run(answers, report(plan, events), tuple(events))


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
    shapes = {}
    for name in NEEDED_ROLES[workflow.policy.kind]:
        role = workflow.roles[name]
        folder = _folder(workflow, name)
        config = model_config(folder)
        where = str(folder / "config.json")
        shapes[name] = ModelShape.from_config(config, role.numerics.arithmetic, where, role.numerics.weights)
    table = CostTable.load(table) if isinstance(table, str | Path) else table
    return cost_model(machine, workflow, shapes, table)


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
            used = dict.fromkeys(plan.placement.values())
            backends = {d: shelf.backend(plan.machine.device(d)) for d in used}
            workers = VirtualWorkers(plan.machine, costs_of(plan.workflow, plan.machine, costs), backends)
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
    """The same problems by the plans serial, overlapped and auto; each gives the same answers."""
    shelf = Shelf()
    kinds = problem_set(workflow.problems)
    found = {}
    with closing(shelf):
        for kind in (*PRESETS, "auto"):
            made = plan(workflow, machine, kind, costs=costs, options=options, progress=progress)
            events: list[Event] = []
            with open_workers(made, clock, costs, shelf) as workers:
                engine = Engine(made, workers, kinds, events.append)
                answers = tuple(engine.solve(p) for p in problems)
            found[kind] = (made, Run(answers, report(made, events), tuple(events)))
    return found
