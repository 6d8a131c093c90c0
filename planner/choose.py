"""Plans from the solver, and `auto`: the best of the solver's plan and the presets, judged by simulation."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from planner.cost import Costs
from planner.graph import Op, TaskGraph, to_text
from planner.lower import lower
from planner.machine import Machine
from planner.passes import (
    DraftAhead,
    EarlyNext,
    Pass,
    PrefetchAhead,
    PrefetchAlternative,
    PrefetchRefine,
    run_passes,
)
from planner.plan import Plan, Solver, priorities_of, priority_key
from planner.presets import PRESETS, costs_label, preset
from planner.report import Report
from planner.schedule.cpsat import Progress, solve
from planner.schedule.heft import list_schedule, shift_left
from planner.schedule.instance import CHUNK_TOKENS, Instance, Placement, Schedule, build
from planner.simulate import simulate
from planner.tune import Goal, ordered, tune
from planner.workflow import RoleName, Workflow

CHOICE_SEED = 7
"""Seed of the problems that plans are chosen by."""
PLACEMENTS = 4
"""Placements that are tried when a plan's knobs are tuned: the best by list schedule."""


@dataclass(frozen=True)
class Options:
    """How hard to look for a plan, and for what."""

    rounds: int = 3
    """Rounds of the window that is scheduled."""
    limit_s: float = 5.0
    """Wall-clock limit of the solver."""
    samples: int = 60
    """Problems that a plan is simulated on to be chosen."""
    goal: Goal = field(default_factory=Goal)


def solved(
    workflow: Workflow,
    machine: Machine,
    costs: Costs,
    models: dict[RoleName, str],
    options: Options | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The solver's own plan. Raises UserError if the workflow does not fit on the machine."""
    options = options or Options()
    began = time.monotonic()
    graph = run_passes(lower(workflow, options.rounds), all_passes(options.rounds))
    instance = build(graph, workflow, machine, costs)
    schedule = shift_left(instance, solve(instance, options.limit_s, progress))
    text = to_text(graph)
    first = Plan(
        name="solved",
        workflow=workflow,
        machine=machine,
        models=models,
        placement=dict(schedule.placement),
        draft_ahead=_draft_ahead(graph, schedule),
        prefetch_refine=_open(graph, schedule, Op.REFINE) > 0,
        chunk_tokens=CHUNK_TOKENS,
        priorities=_as_asked(priorities_of(schedule, text)),
        graph=text,
        timeline=schedule.slots,
        objective_us=schedule.objective_us,
        lower_bound_us=schedule.lower_bound_us,
        status=schedule.status,
        cost_source=costs_label(costs, schedule.placement),
        prefetch_ahead=max(0, _open(graph, schedule, Op.REFINE) - 1),
        early_next=_goes_on_early(graph, schedule),
        batch_verify=True,
        alternatives=_open(graph, schedule, Op.BACKTRACK) > 0,
    )

    def worth(plan: Plan) -> float:
        return options.goal.value(simulate(plan, costs, options.samples, CHOICE_SEED))

    # CP-SAT's own order of work on each device, or the one by rule where that simulates better.
    start = min((first, ordered(first)), key=worth)
    tuned = tune(start, _good_placements(instance), costs, options.goal, options.samples, CHOICE_SEED)
    final = _with_timeline(tuned, costs, options)
    return replace(final, solver=Solver("cp-sat", round(time.monotonic() - began, 3)))


def all_passes(rounds: int) -> tuple[Pass, ...]:
    """Everything that may run ahead in a window of `rounds`."""
    return (DraftAhead(rounds - 1), PrefetchRefine(), PrefetchAhead(rounds - 1), EarlyNext(), PrefetchAlternative())


def passes_of(plan: Plan) -> tuple[Pass, ...]:
    """The passes that allow what the plan does, and nothing else."""
    passes: list[Pass] = [DraftAhead(plan.draft_ahead)] if plan.draft_ahead else []
    passes += [PrefetchRefine()] if plan.prefetch_refine else []
    passes += [PrefetchAhead(plan.prefetch_ahead)] if plan.prefetch_refine and plan.prefetch_ahead else []
    passes += [EarlyNext()] if plan.early_next else []
    passes += [PrefetchAlternative()] if plan.alternatives else []
    return tuple(passes)


def _with_timeline(plan: Plan, costs: Costs, options: Options) -> Plan:
    """The plan with the window scheduled anew as its knobs and its placement allow; the bound stays."""
    graph = run_passes(lower(plan.workflow, options.rounds), passes_of(plan))
    instance = build(graph, plan.workflow, plan.machine, costs)
    here = replace(instance, placements=(plan.placement,))
    schedule = shift_left(here, solve(here, options.limit_s / 2))
    bound = min(plan.lower_bound_us, schedule.objective_us)
    return replace(
        plan,
        graph=to_text(graph),
        timeline=schedule.slots,
        objective_us=schedule.objective_us,
        lower_bound_us=bound,
        status=plan.status if schedule.objective_us <= plan.objective_us * (1 + 1e-9) else "feasible",
        cost_source=costs_label(costs, plan.placement),
    )


def _good_placements(instance: Instance) -> list[Placement]:
    ranked = sorted(instance.placements, key=lambda p: list_schedule(instance, p).objective_us)
    return ranked[:PLACEMENTS]


def auto(
    workflow: Workflow,
    machine: Machine,
    costs: Costs,
    models: dict[RoleName, str],
    options: Options | None = None,
    progress: Progress | None = None,
) -> tuple[Plan, Mapping[str, Report]]:
    """The plan with the least simulated latency, and the simulation of each that was looked at, by name."""
    options = options or Options()
    candidates = [solved(workflow, machine, costs, models, options, progress)]
    candidates += [preset(name, workflow, machine, costs, models, options.rounds) for name in PRESETS]
    judged = {p.name: simulate(p, costs, options.samples, CHOICE_SEED) for p in candidates}
    best = min(candidates, key=lambda p: options.goal.value(judged[p.name]))
    return replace(best, name="auto"), judged


def _as_asked(priorities: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The schedule's order in the words of the runtime: it asks for a backtrack in the round being decided."""

    def asked(key: str) -> str:
        return priority_key(Op.BACKTRACK, 0) if key.startswith(Op.BACKTRACK) else key

    return {device: tuple(dict.fromkeys(map(asked, keys))) for device, keys in priorities.items()}


def _draft_ahead(graph: TaskGraph, schedule: Schedule) -> int:
    """How many accepts of drafts were open at most when a draft began."""
    return max((_trail(graph, schedule, t.id) for t in graph.tasks if t.op is Op.DRAFT), default=0)


def _trail(graph: TaskGraph, schedule: Schedule, task: str) -> int:
    drafts = [l.verify for l in graph.by_id[task].guard if l.verify.split(".")[0] == "verify"]
    return _open_at_start(schedule, task, drafts)


def _open(graph: TaskGraph, schedule: Schedule, op: Op) -> int:
    """How many verdicts were open at most when a task of the op began."""
    tasks = [t for t in graph.tasks if t.op is op]
    return max((_open_at_start(schedule, t.id, [l.verify for l in t.guard]) for t in tasks), default=0)


def _goes_on_early(graph: TaskGraph, schedule: Schedule) -> bool:
    """Whether a draft began before the verdict on the refined step that it follows."""
    drafts = [t for t in graph.tasks if t.op is Op.DRAFT]
    refined = {t.id: [l.verify for l in t.guard if l.verify.split(".")[0] == "reverify"] for t in drafts}
    return any(_open_at_start(schedule, task, verdicts) for task, verdicts in refined.items())


def _open_at_start(schedule: Schedule, task: str, verdicts: list[str]) -> int:
    start = schedule.by_task[task].start_us
    return sum(schedule.by_task[v].end_us > start for v in verdicts)
