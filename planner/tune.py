"""Fit a plan's knobs to how the runtime really goes on: coordinate descent, judged by simulation.

CP-SAT schedules a window; the runtime repeats it for as long as a problem lasts, by rules. Where the two differ, the
simulation of the rules decides: how far to draft ahead, what to prefetch, which device takes what first, and which of
the good placements to use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from planner.cost import Costs
from planner.graph import Op
from planner.plan import Plan, priority_key
from planner.report import Report
from planner.schedule.instance import Placement
from planner.simulate import simulate
from planner.workflow import VERIFIER, RoleName

WORTH = 0.998
"""A change must bring the objective below so much of what it was."""


class Objective(StrEnum):
    """What a plan is made to be small in."""

    LATENCY = "latency"
    ENERGY = "energy"
    EDP = "edp"
    """Energy-delay product."""

    def of(self, report: Report) -> float:
        """The objective of a simulated run, a problem."""
        latency, energy = report.mean_us, report.energy_mj / max(1, report.problems)
        return {"latency": latency, "energy": energy, "edp": latency * energy}[self.value]


@dataclass(frozen=True)
class Goal:
    """The objective, and caps on the others."""

    objective: Objective = Objective.LATENCY
    max_latency_us: float = float("inf")
    """Mean latency a problem that must not be passed."""
    max_energy_mj: float = float("inf")

    def value(self, report: Report) -> float:
        """The objective, or infinity beyond a cap."""
        energy = report.energy_mj / max(1, report.problems)
        if report.mean_us > self.max_latency_us or energy > self.max_energy_mj:
            return float("inf")
        return self.objective.of(report)


def tune(plan: Plan, placements: Sequence[Placement], costs: Costs, goal: Goal, samples: int, seed: int) -> Plan:
    """The plan with the knobs, the order and the placement that simulate best; as it was if none is better."""
    worth: dict[str, float] = {}

    def value(candidate: Plan) -> float:
        key = candidate.hash
        if key not in worth:
            worth[key] = goal.value(simulate(candidate, costs, samples, seed))
        return worth[key]

    best = plan
    improved = True
    while improved:
        improved = False
        for moves in (_depths, _prefetches, _switches, _orders, _places(placements), _late_prefills):
            for candidate in moves(best):
                before = value(best)
                if value(candidate) < (before * WORTH if before < float("inf") else before):
                    best, improved = candidate, True
    return best


Moves = Callable[[Plan], Iterator[Plan]]


def _depths(plan: Plan) -> Iterator[Plan]:
    for depth in range(4):
        if depth != plan.draft_ahead:
            yield ordered(replace(plan, draft_ahead=depth))


def _prefetches(plan: Plan) -> Iterator[Plan]:
    for on, ahead in ((False, 0), (True, 0), (True, 1), (True, 2)):
        if (on, ahead) != (plan.prefetch_refine, plan.prefetch_ahead):
            yield ordered(replace(plan, prefetch_refine=on, prefetch_ahead=ahead))


def _switches(plan: Plan) -> Iterator[Plan]:
    for name in ("early_next", "batch_verify", "alternatives", "shadow_sync"):
        yield ordered(replace(plan, **{name: not getattr(plan, name)}))


def _orders(plan: Plan) -> Iterator[Plan]:
    for order in Order:
        yield ordered(plan, order)


def _late_prefills(plan: Plan) -> Iterator[Plan]:
    """No role reads the prompt before it is needed: on one device that only delays the first step."""
    late = {device: tuple(k for k in keys if not k.startswith(Op.PREFILL)) for device, keys in plan.priorities.items()}
    if late != plan.priorities:
        yield replace(plan, priorities=late)


def _places(placements: Sequence[Placement]) -> Moves:
    def moves(plan: Plan) -> Iterator[Plan]:
        for placement in placements:
            if dict(placement) != plan.placement:
                yield ordered(replace(plan, placement=dict(placement)))

    return moves


class Order(StrEnum):
    """What a device that has more than one thing to do takes first."""

    NEEDED = "what decides the step at hand, then drafts, then the target's"
    AHEAD = "drafts and their verification before the target's prefetch, needed or not"
    TARGET = "the target's prefetch before what runs ahead"


def ordered(plan: Plan, order: Order = Order.NEEDED) -> Plan:
    """The plan with the priorities of its devices written anew for its knobs."""
    verifier = VERIFIER.get(plan.workflow.policy.kind)
    if verifier is None:
        return plan
    now: list[tuple[Op, int, RoleName]] = [
        (Op.PREFILL, 0, RoleName.DRAFT), (Op.PREFILL, 0, RoleName.PRM), (Op.PREFILL, 0, RoleName.TARGET),
        (Op.VERIFY, 0, verifier), (Op.DRAFT, 0, RoleName.DRAFT), (Op.BACKTRACK, 0, RoleName.TARGET),
    ]  # fmt: skip
    last = 1 + plan.draft_ahead if plan.early_next else plan.draft_ahead
    refines = [(Op.REFINE, r, RoleName.TARGET) for r in range(last + 1)] if plan.prefetch_refine else []
    drafts = [item for r in range(1, last + 1) for item in ((Op.VERIFY, r, verifier), (Op.DRAFT, r, RoleName.DRAFT))]
    syncs = [(Op.SYNC, 0, RoleName.DRAFT), (Op.SYNC, 0, RoleName.PRM)] if plan.shadow_sync else []
    ahead = {
        Order.NEEDED: [*refines[:1], *drafts, *refines[1:]],
        Order.AHEAD: [*drafts, *refines],
        Order.TARGET: [*refines, *drafts],
    }[order]
    if not plan.prefetch_refine:
        now.append((Op.REFINE, 0, RoleName.TARGET))
    kinds = [*now, *ahead, *syncs]
    devices = dict.fromkeys(plan.placement.values())
    priorities = {
        device: tuple(priority_key(op, r) for op, r, role in kinds if plan.placement.get(role) == device)
        for device in devices
    }
    return replace(plan, priorities=priorities)
