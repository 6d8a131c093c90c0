"""Plans from the solver, and `auto`: the best of the solver's plan and the presets, judged by simulation."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from planner.cost import CACHES, Costs, shortages
from planner.errors import UserError
from planner.goal import Goal, Wish
from planner.graph import Op, TaskGraph, to_text
from planner.lower import lower
from planner.machine import Machine
from planner.passes import (
    BatchVerify,
    DisaggregatePrefill,
    DraftAhead,
    EarlyNext,
    Pass,
    PrefetchAhead,
    PrefetchAlternative,
    PrefetchRefine,
    Prune,
    ShadowSync,
    run_passes,
)
from planner.plan import Plan, Solver, priorities_of, priority_key
from planner.presets import PRESETS, costs_label, preset
from planner.report import Report
from planner.schedule.aim import Aim, Objective
from planner.schedule.bounds import lower_bound_mj, lower_bound_us
from planner.schedule.heft import best_list_schedule, list_schedule, shift_left
from planner.schedule.instance import CHUNK_TOKENS, Instance, Placement, Schedule, build
from planner.schedule.search import PROVEN, Limit, Progress, solve
from planner.simulate import Demand
from planner.tune import MOVES, SCREEN, WINDOW_MOVES, Judge, Moves, improvements, ordered
from planner.workflow import NEEDED_ROLES, RoleName, Workflow

CHOICE_SEED = 7
"""Seed of the problems that plans are chosen by."""
PLACEMENTS = 4
"""Placements that are tried when a plan's knobs are tuned: the best by list schedule."""
TIMELINE_WORK = 0.02
"""Deterministic seconds for the timeline of the knobs that were chosen."""
PREFILL_GAIN = 0.99
"""Reading the prompt elsewhere must bring the first round below so much of what it was."""
PRUNE_BELOW = {5: 0.01, 6: 0.03}
"""Rounds of a window -> probability below which it is cut short: the number of outcomes doubles with each round."""


@dataclass(frozen=True)
class Options:
    """How hard to look for a plan, and for what."""

    rounds: int = 3
    """Rounds of the window that is scheduled."""
    limit_s: float = 60.0
    """Wall-clock limit of the solver. A plan that it cuts off need not come out the same again."""
    work: float = 0.1
    """Limit of the solver's work, in CP-SAT's deterministic seconds (`planner.schedule.search.Limit`)."""
    samples: int = 20
    """Problems that a plan is simulated on to be chosen."""
    wish: Wish = field(default_factory=Wish)
    demand: Demand = field(default_factory=Demand)
    """Problems at once that the plan is chosen for."""
    best_when_stopped: bool = True
    """Whether a KeyboardInterrupt ends the search only, with the best plan so far."""


@dataclass(frozen=True)
class _Task:
    """What plans are made for, and how."""

    workflow: Workflow
    machine: Machine
    costs: Costs
    models: dict[RoleName, str]
    options: Options
    progress: Progress | None
    windows: dict[object, Instance] = field(default_factory=dict)
    """Those that were built."""
    simulated: dict[tuple[object, int], Report] = field(default_factory=dict)
    """What all judges have seen."""

    @property
    def limit(self) -> Limit:
        return Limit(self.options.work, self.options.limit_s)

    @property
    def caches(self) -> int:
        """Caches that a role holds: two for each problem at hand."""
        return CACHES * self.options.demand.concurrency

    def judge(self, goal: Goal) -> Judge:
        return Judge(self.costs, goal, self.options.samples, CHOICE_SEED, self.options.demand, self.simulated)

    def window(self, passes: tuple[Pass, ...], chunk_tokens: int = CHUNK_TOKENS) -> Instance:
        """The steady window that the passes allow, on every placement."""
        if (passes, chunk_tokens) not in self.windows:
            rare = Prune(PRUNE_BELOW.get(self.options.rounds, 0.0))
            graph = run_passes(lower(self.workflow, self.options.rounds, steady=True), (rare, *passes))
            instance = build(graph, self.workflow, self.machine, self.costs, chunk_tokens, caches=self.caches)
            self.windows[passes, chunk_tokens] = instance
        return self.windows[passes, chunk_tokens]


def solved(
    workflow: Workflow,
    machine: Machine,
    costs: Costs,
    models: dict[RoleName, str],
    options: Options | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The solver's own plan.

    A KeyboardInterrupt ends the search: the best plan so far has status `interrupted`, unless the options say that it
    is passed on. Raises UserError if the workflow does not fit on the machine, or if no plan that was found keeps the
    caps.
    """
    task = _Task(workflow, machine, costs, models, options or Options(), progress)
    return _solved(task)[0]


def _solved(task: _Task) -> tuple[Plan, Goal]:
    """The plan, and the goal in figures that it was chosen by."""
    began, wish = time.monotonic(), task.options.wish
    plan, goal = _tuned(task, Aim(), task.judge(Goal())), Goal()
    if not wish.plain:
        fastest = task.judge(Goal()).report(plan)
        goal = wish.goal(fastest)
        if plan.status != "interrupted":
            plan = _tuned(task, _aim(goal, plan, fastest), task.judge(goal), plan)
        plan = replace(plan, **vars(wish))
        _keep_caps(goal, task.judge(goal).report(plan))
    plan = _with_prefill(task, plan, task.judge(goal)) if plan.status != "interrupted" else plan
    return replace(plan, solver=Solver("cp-sat", round(time.monotonic() - began, 3))), goal


def _aim(goal: Goal, fastest: Plan, simulated: Report) -> Aim:
    """The goal for a round of the window. Caps shrink from a problem to a round as the fastest plan's figures do."""
    energy = simulated.energy_mj / max(1, simulated.problems)
    latency_cap = goal.max_latency_us * fastest.objective_us / simulated.mean_us
    energy_cap = goal.max_energy_mj * fastest.energy_mj / energy if energy else inf
    return Aim(goal.objective, latency_cap, energy_cap)


def _keep_caps(goal: Goal, simulated: Report) -> None:
    """Raise UserError if a plan, the best that was found, passes a cap."""
    if goal.excess(simulated) > 1:
        energy = simulated.energy_mj / max(1, simulated.problems)
        caps = [f"{goal.max_latency_us / 1e3:.4g} ms"] * (goal.max_latency_us < inf)
        caps += [f"{goal.max_energy_mj / 1e3:.4g} J"] * (goal.max_energy_mj < inf)
        what = f"no plan was found that takes at most {' and '.join(caps)} a problem"
        near = f"the nearest takes {simulated.mean_us / 1e3:.4g} ms and {energy / 1e3:.4g} J, simulated"
        raise UserError(f"{what}; {near}", mend="raise the caps, or use another machine")


def _tuned(task: _Task, aim: Aim, judge: Judge, other: Plan | None = None) -> Plan:
    """The plan that simulates best, of the solver's, of one by list schedule, and of `other`, all with tuned knobs.

    What the window's tasks and chunks depend on is tuned first, so that the solver's bound is of the plan's window.
    """
    free = task.window(all_passes(task.options.rounds))
    listed = _plan(task, free, best_list_schedule(free, lambda s: (aim.over(s), aim.value(s))))
    best, bounds, stopped = other or listed, _own_bounds(free, aim), False
    try:
        best = _best([listed, ordered(listed), *([other] if other else [])], judge)
        best = _improved(best, _good_placements(free), judge, (*MOVES, *WINDOW_MOVES))
        free = task.window(_free_passes(task, best), best.chunk_tokens)
        bounds = _own_bounds(free, aim)
        schedule = solve(free, task.limit, aim, task.progress if aim.objective is Objective.LATENCY else None)
        bounds = _Bounds(schedule.lower_bound_us, schedule.bound)
        if aim.objective is Objective.LATENCY:
            schedule = shift_left(free, schedule)
        first = _plan(task, free, schedule, best)
        stopped = schedule.status == "interrupted"
        if not stopped:
            # CP-SAT's own order of work on each device, or the one by rule where that simulates better.
            best = _best([best, first, ordered(first)], judge)
            best = _improved(best, _good_placements(free), judge, MOVES)
        best = replace(best, status=schedule.status)
    except UserError:  # the caps cannot be kept in the window, as they may be in the simulation
        if other is None:
            raise
    except KeyboardInterrupt:
        stopped = True
    if stopped and not task.options.best_when_stopped:
        raise KeyboardInterrupt
    return _with_timeline(task, best, aim, bounds, stopped)


def _best(plans: list[Plan], judge: Judge) -> Plan:
    """The best of some plans: of the two that are best on a few problems."""
    few = sorted(plans, key=lambda plan: judge.worth(plan, 2 * SCREEN))
    return min(few[:2], key=judge.worth)


def _improved(plan: Plan, placements: list[Placement], judge: Judge, moves: Sequence[Moves]) -> Plan:
    """The plan after all improvements, or after those that there was time for."""
    best = plan
    for best in improvements(plan, placements, judge, moves):  # noqa: B007
        pass
    return best


class _Bounds(NamedTuple):
    """Of the time a round, and of the objective if that is another."""

    time_us: float
    value: float


def _own_bounds(free: Instance, aim: Aim) -> _Bounds:
    """Bounds that need no solver."""
    least_us = lower_bound_us(free)
    if aim.objective is Objective.LATENCY:
        return _Bounds(least_us, 0.0)
    return _Bounds(least_us, aim.objective.of(least_us, lower_bound_mj(free)))


def _plan(task: _Task, instance: Instance, schedule: Schedule, window: Plan | None = None) -> Plan:
    """The rules that a schedule follows. `window` has the chunks and the tasks that it was made for."""
    graph, text = instance.graph, to_text(instance.graph)
    return Plan(
        name="solved",
        workflow=task.workflow,
        machine=task.machine,
        models=task.models,
        placement=dict(schedule.placement),
        draft_ahead=_draft_ahead(graph, schedule),
        prefetch_refine=_open(graph, schedule, Op.REFINE) > 0,
        chunk_tokens=window.chunk_tokens if window else CHUNK_TOKENS,
        priorities=_as_asked(priorities_of(schedule, text), schedule.placement),
        graph=text,
        timeline=schedule.slots,
        objective_us=schedule.objective_us,
        lower_bound_us=schedule.lower_bound_us,
        status=schedule.status,
        cost_source=costs_label(task.costs, schedule.placement),
        prefetch_ahead=max(0, _open(graph, schedule, Op.REFINE) - 1),
        early_next=_goes_on_early(graph, schedule),
        batch_verify=True,
        alternatives=_open(graph, schedule, Op.BACKTRACK) > 0,
        shadow_sync=window.shadow_sync if window else False,
        sync_ahead=window.sync_ahead if window else False,
        energy_mj=schedule.energy_mj,
    )


def all_passes(rounds: int) -> tuple[Pass, ...]:
    """Everything that may run ahead in a window of `rounds`."""
    ahead = (DraftAhead(rounds), PrefetchRefine(), PrefetchAhead(rounds - 1), EarlyNext(), PrefetchAlternative())
    return (*ahead, BatchVerify())


def _free_passes(task: _Task, plan: Plan) -> tuple[Pass, ...]:
    """Everything that may run ahead, in a window that has the tasks of the plan."""
    return (*all_passes(task.options.rounds), *_sync_passes(plan))


def _sync_passes(plan: Plan) -> tuple[Pass, ...]:
    return (ShadowSync(ahead=plan.sync_ahead),) if plan.shadow_sync else ()


def passes_of(plan: Plan) -> tuple[Pass, ...]:
    """The passes that allow what the plan does, and nothing else."""
    passes: list[Pass] = [DraftAhead(plan.draft_ahead)] if plan.draft_ahead else []
    passes += [PrefetchRefine()] if plan.prefetch_refine else []
    passes += [PrefetchAhead(plan.prefetch_ahead)] if plan.prefetch_refine and plan.prefetch_ahead else []
    passes += [EarlyNext()] if plan.early_next else []
    passes += [PrefetchAlternative()] if plan.alternatives else []
    passes += [BatchVerify()] if plan.batch_verify else []
    return (*passes, *_sync_passes(plan))


def _with_timeline(task: _Task, plan: Plan, aim: Aim, bounds: _Bounds, stopped: bool) -> Plan:
    """The plan with the window scheduled anew as its knobs and its placement allow.

    `bounds` are those of the free window with the plan's tasks and chunks.
    """
    instance = replace(task.window(passes_of(plan), plan.chunk_tokens), placements=(plan.placement,))
    limit = replace(task.limit, work=0.0 if stopped else TIMELINE_WORK)
    try:
        schedule = solve(instance, limit, aim)
    except UserError:  # the caps cannot be kept in the window with these knobs, as they are in the simulation
        schedule = solve(instance, limit, Aim(aim.objective))
    if aim.objective is Objective.LATENCY:
        schedule = shift_left(instance, schedule)
    value = aim.value(schedule)
    least_us, bound = min(bounds.time_us, schedule.objective_us), min(bounds.value, value)
    proven = (least_us if aim.objective is Objective.LATENCY else bound) >= value * (1 - PROVEN)
    ended = "feasible" if plan.status == "optimal" else plan.status
    return replace(
        plan,
        graph=to_text(instance.graph),
        timeline=schedule.slots,
        objective_us=schedule.objective_us,
        lower_bound_us=least_us,
        status="interrupted" if stopped else "optimal" if proven else ended,
        cost_source=costs_label(task.costs, plan.placement),
        energy_mj=schedule.energy_mj,
        bound=bound,
    )


def _good_placements(instance: Instance) -> list[Placement]:
    ranked = sorted(instance.placements, key=lambda p: list_schedule(instance, p).objective_us)
    return ranked[:PLACEMENTS]


def _with_prefill(task: _Task, plan: Plan, judge: Judge) -> Plan:
    """The plan with the draft's prompt read where a problem's first round then ends first, if that simulates better."""
    role = RoleName.DRAFT
    if role not in NEEDED_ROLES[task.workflow.policy.kind]:
        return plan
    numerics = task.workflow.roles[role].numerics
    places = [d.name for d in task.machine.candidates(numerics) if d.name != plan.placement[role]]
    graph = run_passes(lower(task.workflow, 1), (*passes_of(plan), DisaggregatePrefill(role)))
    found: dict[str, float] = {}
    for place in (plan.placement[role], *places):
        also = {} if place == plan.placement[role] else {role: place}
        if shortages(task.machine, plan.placement, task.workflow, task.costs, task.caches, also=also):
            continue
        instance = build(graph, task.workflow, task.machine, task.costs, plan.chunk_tokens, {role: place}, task.caches)
        here = replace(instance, placements=(plan.placement,))
        found[place] = best_list_schedule(here).objective_us
    best = min(found, key=found.__getitem__)
    if found[best] >= found[plan.placement[role]] * PREFILL_GAIN:
        return plan
    elsewhere = read_elsewhere(plan, role, best)
    return elsewhere if judge.worth(elsewhere) < judge.worth(plan) else plan


def read_elsewhere(plan: Plan, role: RoleName, place: str) -> Plan:
    """The plan with a role's prompt read in another place. The cache is moved before all else that needs no verdict."""
    orders = dict(plan.priorities)
    for device, op in ((place, Op.PREFILL), (plan.placement[role], Op.TRANSFER)):
        orders[device] = tuple(dict.fromkeys([priority_key(op, 0), *orders.get(device, ())]))
    return replace(plan, prefill_on={role: place}, priorities=orders)


def auto(
    workflow: Workflow,
    machine: Machine,
    costs: Costs,
    models: dict[RoleName, str],
    options: Options | None = None,
    progress: Progress | None = None,
) -> tuple[Plan, Mapping[str, Report]]:
    """The plan that simulates best by the goal, and the simulation of each that was looked at, by name."""
    task = _Task(workflow, machine, costs, models, options or Options(), progress)
    plan, goal = _solved(task)
    judge = task.judge(goal)
    problems = SCREEN if plan.status == "interrupted" else None
    candidates = [plan, *(preset(name, workflow, machine, costs, models, task.options.rounds) for name in PRESETS)]
    judged = {p.name: judge.report(p, problems) for p in candidates}
    best = min(candidates, key=lambda p: judge.worth(p, problems))
    return replace(best, name="auto", **vars(task.options.wish)), judged


def _as_asked(priorities: dict[str, tuple[str, ...]], placement: Placement) -> dict[str, tuple[str, ...]]:
    """The schedule's order in the words of the runtime: it asks for a backtrack in the round being decided.

    A window amid a problem says nothing of prompts: they are read at once.
    """

    def asked(key: str) -> str:
        return priority_key(Op.BACKTRACK, 0) if key.startswith(Op.BACKTRACK) else key

    prompt = priority_key(Op.PREFILL, 0)
    devices = dict.fromkeys(placement.values())
    return {device: tuple(dict.fromkeys([prompt, *map(asked, priorities.get(device, ()))])) for device in devices}


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
