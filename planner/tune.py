"""Fit a plan's knobs to how the runtime really goes on: coordinate descent, judged by simulation.

CP-SAT schedules a window; the runtime repeats it for as long as a problem lasts, by rules. Where the two differ, the
simulation of the rules decides: how far to draft ahead, what to prefetch, which device takes what first, how long a
chunk is, and which of the good placements to use. Candidates meet the same drawn problems. Most are seen to be no
better on a few of them; only the others are simulated on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from planner.cost import Costs
from planner.goal import Goal
from planner.graph import Op
from planner.plan import Plan, priority_key
from planner.report import Report
from planner.schedule.instance import Placement
from planner.simulate import Demand, simulate
from planner.workflow import VERIFIER, RoleName

WORTH = 0.998
"""A change must bring the objective below so much of what it was."""
PROMISING = 1.005
"""On a few problems it may be worse by chance, up to so many times what it was."""
SCREEN = 8
"""Problems on which a candidate has to be better first."""
CHUNKS = (4, 8, 16)
"""Sizes of a chunk that are tried, in tokens."""


@dataclass
class Judge:
    """Simulates plans on the same drawn problems, each plan once."""

    costs: Costs
    goal: Goal
    samples: int
    seed: int
    demand: Demand = field(default_factory=Demand)
    seen: dict[tuple[object, int], Report] = field(default_factory=dict)
    """By knobs and number of problems. It may be shared with judges by other goals: what is simulated is the same."""

    def report(self, plan: Plan, problems: int | None = None) -> Report:
        """The simulation of a plan on the first `problems` of the drawn problems, or on all."""
        count = self.samples if problems is None else min(problems, self.samples)
        key = (_knobs(plan), count)
        if key not in self.seen:
            self.seen[key] = simulate(plan, self.costs, count, self.seed, demand=self.demand)
        return self.seen[key]

    def worth(self, plan: Plan, problems: int | None = None) -> tuple[float, float]:
        """For comparison, least first: plans within the caps by the objective, others by how far they are beyond."""
        report = self.report(plan, problems)
        return max(1.0, self.goal.excess(report)), self.goal.value(report)

    def better(self, plan: Plan, than: Plan) -> bool:
        """Whether a plan is clearly better on all problems, and not clearly worse on a few of them."""
        return _below(self.worth(plan, SCREEN), self.worth(than, SCREEN), PROMISING) and _below(
            self.worth(plan), self.worth(than), WORTH
        )


def _below(new: tuple[float, float], old: tuple[float, float], share: float) -> bool:
    if old[0] > 1.0:
        return new < old
    return new[0] == 1.0 and new[1] < old[1] * share


def _knobs(plan: Plan) -> object:
    """All that a simulation of the plan depends on, the workflow and the machine left out."""
    switches = (plan.prefetch_refine, plan.early_next, plan.batch_verify, plan.alternatives)
    syncs, depths = (plan.shadow_sync, plan.sync_ahead), (plan.draft_ahead, plan.prefetch_ahead, plan.chunk_tokens)
    places = tuple(plan.placement.items()), tuple(plan.prefill_on.items())
    return places, depths, switches, syncs, tuple(sorted(plan.priorities.items()))


Moves = Callable[[Plan], Iterator[Plan]]
"""Plans that differ from one in a knob."""


def improvements(plan: Plan, placements: Sequence[Placement], judge: Judge, kinds: Sequence[Moves]) -> Iterator[Plan]:
    """Plans with other knobs, another order or placement, each clearly better than the one before."""
    best = plan
    tried = {_knobs(plan)}
    improved = True
    while improved:
        improved = False
        for moves in (*kinds, _places(placements)):
            for candidate in moves(best):
                if _knobs(candidate) in tried:
                    continue
                tried.add(_knobs(candidate))
                if judge.better(candidate, best):
                    best, improved = candidate, True
                    yield best


def _depths(plan: Plan) -> Iterator[Plan]:
    for depth in range(4):
        if depth != plan.draft_ahead:
            yield ordered(replace(plan, draft_ahead=depth))


def _prefetches(plan: Plan) -> Iterator[Plan]:
    for on, ahead in ((False, 0), (True, 0), (True, 1), (True, 2)):
        if (on, ahead) != (plan.prefetch_refine, plan.prefetch_ahead):
            yield ordered(replace(plan, prefetch_refine=on, prefetch_ahead=ahead))


def _switches(plan: Plan) -> Iterator[Plan]:
    for name in ("early_next", "batch_verify", "alternatives"):
        yield ordered(replace(plan, **{name: not getattr(plan, name)}))


def _syncs(plan: Plan) -> Iterator[Plan]:
    for sync, ahead in ((False, False), (True, False), (True, True)):
        if (sync, ahead) != (plan.shadow_sync, plan.sync_ahead):
            yield ordered(replace(plan, shadow_sync=sync, sync_ahead=ahead))


def _chunks(plan: Plan) -> Iterator[Plan]:
    longest = max(plan.workflow.statistics.draft_step_tokens, plan.workflow.statistics.target_step_tokens)
    for tokens in CHUNKS:
        if tokens != plan.chunk_tokens and tokens <= 2 * longest:
            yield replace(plan, chunk_tokens=tokens)


def _orders(plan: Plan) -> Iterator[Plan]:
    for order in Order:
        if order is Order.SYNC and not plan.shadow_sync:
            continue
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
    SYNC = "what the target writes is read before drafts run ahead"


def ordered(plan: Plan, order: Order = Order.NEEDED) -> Plan:
    """The plan with the priorities of its devices written anew for its knobs."""
    verifier = VERIFIER.get(plan.workflow.policy.kind)
    if verifier is None:
        return plan
    now: list[tuple[Op, int, RoleName]] = [
        (Op.PREFILL, 0, RoleName.DRAFT), (Op.PREFILL, 0, RoleName.PRM), (Op.PREFILL, 0, RoleName.TARGET),
        (Op.VERIFY, 0, verifier), (Op.DRAFT, 0, RoleName.DRAFT),
    ]  # fmt: skip
    last = 1 + plan.draft_ahead if plan.early_next else plan.draft_ahead
    refines = [(Op.REFINE, r, RoleName.TARGET) for r in range(last + 1)] if plan.prefetch_refine else []
    drafts = [item for r in range(1, last + 1) for item in ((Op.VERIFY, r, verifier), (Op.DRAFT, r, RoleName.DRAFT))]
    syncs = [(Op.SYNC, 0, RoleName.DRAFT), (Op.SYNC, 0, RoleName.PRM)] if plan.shadow_sync else []
    ahead = {
        Order.NEEDED: [*refines[:1], *drafts, *refines[1:]],
        Order.AHEAD: [*drafts, *refines],
        Order.TARGET: [*refines, *drafts],
        Order.SYNC: [*syncs, *refines, *drafts],
    }[order]
    if not plan.prefetch_refine:
        now.append((Op.REFINE, 0, RoleName.TARGET))
    # Where a backtrack is needed nothing else is wanted of the target; ahead of need it is the least likely of all.
    kinds = dict.fromkeys([*now, *ahead, (Op.BACKTRACK, 0, RoleName.TARGET), *syncs])
    devices = dict.fromkeys(plan.placement.values())
    priorities = {
        device: tuple(priority_key(op, r) for op, r, role in kinds if plan.placement.get(role) == device)
        for device in devices
    }
    return replace(plan, priorities=priorities)


MOVES: tuple[Moves, ...] = (_depths, _prefetches, _switches, _orders, _late_prefills)
"""What leaves the tasks of the window and their durations as they are."""
WINDOW_MOVES: tuple[Moves, ...] = (_syncs, _chunks)
"""What changes them."""
