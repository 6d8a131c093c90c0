"""Plans from the solver, and `auto`: the best of the solver's plan and the presets, judged by simulation."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.cost import Costs
from planner.graph import Op, TaskGraph, to_text
from planner.lower import lower
from planner.machine import Machine
from planner.passes import DraftAhead, PrefetchRefine, run_passes
from planner.plan import Plan, Solver, priorities_of
from planner.presets import PRESETS, costs_label, preset
from planner.report import Report
from planner.schedule.cpsat import Progress, solve
from planner.schedule.heft import shift_left
from planner.schedule.instance import CHUNK_TOKENS, Schedule, build
from planner.simulate import simulate
from planner.workflow import RoleName, Workflow

CHOICE_SEED = 7
"""Seed of the problems that `auto` chooses by."""


@dataclass(frozen=True)
class Options:
    """How hard to look for a plan."""

    rounds: int = 3
    """Rounds of the window that is scheduled."""
    limit_s: float = 5.0
    """Wall-clock limit of the solver."""
    samples: int = 60
    """Problems that a plan is simulated on to be chosen."""


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
    passes = (DraftAhead(options.rounds - 1), PrefetchRefine())
    graph = run_passes(lower(workflow, options.rounds), passes)
    instance = build(graph, workflow, machine, costs)
    schedule = shift_left(instance, solve(instance, options.limit_s, progress))
    text = to_text(graph)
    return Plan(
        name="solved",
        workflow=workflow,
        machine=machine,
        models=models,
        placement=dict(schedule.placement),
        draft_ahead=_draft_ahead(graph, schedule),
        prefetch_refine=_prefetches(graph, schedule),
        chunk_tokens=CHUNK_TOKENS,
        priorities=priorities_of(schedule, text),
        graph=text,
        timeline=schedule.slots,
        objective_us=schedule.objective_us,
        lower_bound_us=schedule.lower_bound_us,
        status=schedule.status,
        cost_source=costs_label(costs, schedule.placement),
        solver=Solver("cp-sat", round(time.monotonic() - began, 3)),
    )


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
    best = min(candidates, key=lambda p: judged[p.name].mean_us)
    return replace(best, name="auto"), judged


def _draft_ahead(graph: TaskGraph, schedule: Schedule) -> int:
    """How many verdicts were open at most when a draft began."""
    drafts = [t for t in graph.tasks if t.op is Op.DRAFT]
    return max((_open_at_start(schedule, t.id, [l.verify for l in t.guard]) for t in drafts), default=0)


def _prefetches(graph: TaskGraph, schedule: Schedule) -> bool:
    """Whether the target begins anywhere before the verdict that it is for."""
    refines = [t for t in graph.tasks if t.op is Op.REFINE]
    return any(_open_at_start(schedule, t.id, [l.verify for l in t.guard]) for t in refines)


def _open_at_start(schedule: Schedule, task: str, verdicts: list[str]) -> int:
    start = schedule.by_task[task].start_us
    return sum(schedule.by_task[v].end_us > start for v in verdicts)
