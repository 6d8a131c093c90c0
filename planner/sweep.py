"""Sweeps: the same workflow over machines, models, thresholds and depths, each point simulated. All figures are
modelled."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from io import StringIO
from itertools import product

from planner import api
from planner.choose import Options
from planner.cost import CostTable
from planner.errors import UserError
from planner.machine import Machine
from planner.plan import Plan
from planner.report import Report
from planner.simulate import Demand, simulate
from planner.trace import Decided, Event
from planner.tune import ordered
from planner.workflow import RoleName, Workflow

SEED = 101
"""Of the drawn problems; no plan is chosen on them."""


@dataclass(frozen=True)
class Grid:
    """What is varied. An empty axis leaves the workflow as it is."""

    machines: tuple[str, ...]
    kinds: tuple[str, ...] = ("auto",)
    """Plans: `auto`, `solved` or presets."""
    models: Mapping[RoleName, tuple[str, ...]] | None = None
    """Role -> models to try in it; only their config.json is read."""
    thresholds: tuple[float, ...] = ()
    """Scores from which a draft is accepted. The share of drafts that they accept is read off a trace."""
    depths: tuple[int, ...] = ()
    """Steps drafted ahead, in place of what the plan chose."""


@dataclass(frozen=True)
class Point:
    """One combination and what it is worth. Times and energies are means a problem, modelled."""

    machine: str
    plan: str
    models: str
    threshold: float | None
    acceptance: float
    depth: int
    latency_us: float
    stderr_us: float
    p95_us: float
    energy_mj: float
    problems_per_s: float
    placement: str
    pareto: bool = False
    """No other point is better in both latency and energy."""


@dataclass(frozen=True)
class Swept:
    """The points of a sweep, and the combinations that no plan could be made for, with why."""

    points: tuple[Point, ...]
    left_out: tuple[str, ...] = ()


def sweep(
    workflow: Workflow,
    grid: Grid,
    *,
    costs: CostTable | None = None,
    scores: Sequence[float] = (),
    samples: int = 200,
    demand: Demand | None = None,
    options: Options | None = None,
    progress: Callable[[str], None] | None = None,
) -> Swept:
    """Simulate every combination of the grid.

    `scores` are those of drafts in a trace; thresholds need them. Raises UserError, also if no combination is left.
    """
    if grid.thresholds and not scores:
        raise UserError("a threshold says nothing without scores", mend="name a trace of a run with --trace")
    found, left_out = [], []
    for name, flow, threshold in product_of(workflow, grid, scores):
        for machine_name, kind in product(grid.machines, grid.kinds):
            if progress:
                progress(f"{machine_name}, {kind}, {name}")
            machine = Machine.load(machine_name)
            try:
                made = api.plan(flow, machine, kind, costs=costs, options=options)
            except UserError as error:
                left_out.append(f"{name + ': ' if name else ''}{error}")
                continue
            model = api.costs_of(made.workflow, machine, costs)
            for plan in at_depths(made, grid.depths):
                report = simulate(plan, model, samples, SEED, demand=demand)
                found.append(_point(plan, report, name, threshold, kind))
    if not found:
        raise UserError(left_out[0])
    return Swept(tuple(pareto(found)), tuple(dict.fromkeys(left_out)))


def _point(plan: Plan, report: Report, models: str, threshold: float | None, kind: str) -> Point:
    places = ", ".join(f"{role} on {device}" for role, device in plan.placement.items())
    return Point(
        plan.machine.name, kind, models, threshold, plan.workflow.statistics.accept, plan.draft_ahead,
        report.mean_us, report.stderr_us, report.p95_us, report.energy_mj / report.problems,
        report.problems_per_s, places,
    )  # fmt: skip


def product_of(workflow: Workflow, grid: Grid, scores: Sequence[float]) -> Iterator[tuple[str, Workflow, float | None]]:
    """The workflow with each combination of models and thresholds, and what to call it."""
    axes = grid.models or {}
    for chosen in product(*axes.values()):
        roles = dict(workflow.roles)
        for role, model in zip(axes, chosen, strict=True):
            if role not in roles:
                raise UserError(f"the workflow has no role {role}", mend=f"use one of {', '.join(roles)}")
            roles[role] = replace(roles[role], model=model)
        flow = replace(workflow, roles=roles)
        name = ", ".join(f"{role} {model}" for role, model in zip(axes, chosen, strict=True))
        for threshold in grid.thresholds or (None,):
            if threshold is None:
                yield name, flow, None
                continue
            share = sum(s >= threshold for s in scores) / len(scores)
            statistics, policy = replace(flow.statistics, accept=share), replace(flow.policy, accept=threshold)
            yield name, replace(flow, statistics=statistics, policy=policy), threshold


def at_depths(plan: Plan, depths: Sequence[int]) -> Iterator[Plan]:
    """The plan itself, or with each depth of drafting ahead."""
    if not depths or plan.name == "serial":
        yield plan
    for depth in depths if plan.name != "serial" else ():
        yield ordered(replace(plan, draft_ahead=depth))


def draft_scores(events: Sequence[Event]) -> list[float]:
    """The scores of the drafts in a trace."""
    return [e.scores["draft"] for e in events if isinstance(e, Decided) and "draft" in e.scores]


def pareto(points: Sequence[Point]) -> list[Point]:
    """The points, each marked whether no other is better in latency and in energy."""

    def beaten(p: Point) -> bool:
        return any(
            q.latency_us <= p.latency_us
            and q.energy_mj <= p.energy_mj
            and (q.latency_us, q.energy_mj) != (p.latency_us, p.energy_mj)
            for q in points
        )

    return [replace(p, pareto=not beaten(p)) for p in points]


def to_csv(points: Sequence[Point]) -> str:
    """A row a point, with a header."""
    text = StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(Point)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(p) for p in points)
    return text.getvalue()
