"""What starts next: a pure function of the plan and of where a run stands. Simulation and runtime share it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace

from planner.graph import Op
from planner.plan import Plan, priority_key
from planner.policy import Node, Request, Result, Step
from planner.workflow import VERIFIER, RoleName


@dataclass(frozen=True)
class Situation:
    """Where one problem stands."""

    need: Request
    """What the policy asks for and does not have yet."""
    base: Node
    """The last committed place."""
    known: Mapping[Request, Result]
    """Results that are there, asked for or not."""
    ends: Callable[[Node], bool]
    """Whether a run that commits a place ends there: nothing is drafted after it."""
    cold: Set[RoleName] = frozenset()
    """Roles that have not read the prompt."""
    fallback: Request | None = None
    """What the policy would ask for if the refined step were weak."""
    streams: tuple[Request, ...] = ()
    """SYNC of the roles that lag behind the step that the target is writing."""
    handed: Set[RoleName] = frozenset()
    """Cold roles whose prompt another device has read."""
    unfit: Set[Request] = frozenset()
    """What cannot be done and is not needed."""
    batches: bool = False
    """Whether the draft writes several drafts of a step in one pass."""


@dataclass(frozen=True)
class Start:
    """A request that is worth working on."""

    request: Request
    round: int
    """Relative step: 0 is the step after the last committed place."""
    speculative: bool
    """Whether its result may turn out to be of no use."""
    problem: str = ""
    """The name of the problem that it is for."""
    also: tuple[Request, ...] = ()
    """Further steps that the same pass of the verifier scores, or further drafts that are written in one pass."""


def dispatch(plan: Plan, situations: Mapping[str, Situation], free: Set[str]) -> dict[str, Start]:
    """What each device that is free starts.

    `situations` are those of the problems at hand by name, the oldest first. Work goes in the order of the plan's
    priorities. With several problems at hand what is needed goes before what is speculative, and that of the oldest
    first, whatever it is: else a kind of work low in the order would wait as long as others come. Speculative work of a
    kind that the plan does not list for the device is never started. What runs and is no longer wanted is not asked for
    again: it ends with its chunk.
    """
    crowd = len(situations) > 1
    found = []
    for age, (problem, situation) in enumerate(situations.items()):
        for start in wanted_work(plan, situation):
            device = plan.place_of(start.request.op, start.request.role)
            rank = _rank(plan, device, start)
            if not start.speculative or rank < _UNLISTED:
                needed = crowd and not start.speculative
                key = (not needed, age if needed else rank, start.speculative, age)
                found.append((key, device, problem, start))
    found.sort(key=lambda item: item[0])
    starts: dict[str, Start] = {}
    left = set(free)
    for _, device, problem, start in found:
        members = plan.machine.members(device)
        if left.issuperset(members):
            mine = [s for _, d, p, s in found if (d, p) == (device, problem)]
            chosen = _batched(start, mine) if plan.batch_verify else start
            chosen = _with_siblings(plan, situations[problem], chosen)
            starts[device] = replace(chosen, problem=problem)
            left.difference_update(members)
        elif not start.speculative:
            # What is needed of a set of devices keeps those of them that are free until all are.
            left.difference_update(members)
    return starts


def wanted_work(plan: Plan, situation: Situation) -> Iterator[Start]:
    """The request that the policy waits for, and all that the plan lets run ahead of it. Nothing that is known.

    A role whose prompt is read elsewhere does nothing before its cache has come: that is needed in its place.
    """
    need, root = situation.need, list(situation.base.lineage())[-1]
    away = {role for role in situation.cold if role in plan.prefill_on}
    for role in sorted(away):
        op = Op.TRANSFER if role in situation.handed else Op.PREFILL
        yield Start(Request(op, root, role), 0, speculative=role is not need.role)
    for start in _warm_work(plan, situation, root):
        if start.request.role not in away and start.request not in situation.unfit - {need}:
            yield start


def _warm_work(plan: Plan, situation: Situation, root: Node) -> Iterator[Start]:
    need, base, known = situation.need, situation.base, situation.known
    yield Start(need, 0, speculative=False)
    for role in sorted(situation.cold):
        if role is not need.role:
            yield Start(Request(Op.PREFILL, root, role), 0, speculative=True)
    if plan.workflow.policy.kind not in VERIFIER:
        return
    if plan.shadow_sync:
        yield from (Start(stream, 0, speculative=True) for stream in situation.streams)
    if _verdict_open(need, base):
        yield from _ahead(plan, situation, base, 0)
    elif need.op is Op.VERIFY:
        if plan.alternatives and situation.fallback is not None and situation.fallback not in known:
            yield Start(situation.fallback, 0, speculative=True)
        if plan.early_next and not situation.ends(need.node):
            yield from _ahead(plan, situation, need.node, 1)


def _ahead(plan: Plan, situation: Situation, node: Node, round: int) -> Iterator[Start]:
    """What follows from `node` if it is committed, and if every draft after it is accepted; nothing that is known."""
    known, policy = situation.known, plan.workflow.policy
    verifier = VERIFIER[policy.kind]
    for ahead in range(plan.draft_ahead + 1):
        refine = Request(Op.REFINE, node, RoleName.TARGET)
        if plan.prefetch_refine and ahead <= plan.prefetch_ahead and refine not in known:
            yield Start(refine, round + ahead, speculative=True)
        if policy.drafts > 1:
            yield from _siblings(plan, situation, node, round + ahead)
            return
        draft = Request(Op.DRAFT, node, RoleName.DRAFT)
        step = known.get(draft)
        if not isinstance(step, Step):
            if draft != situation.need:
                yield Start(draft, round + ahead, speculative=True)
            return
        node = node.child(step)
        check = Request(Op.VERIFY, node, verifier)
        score = known.get(check)
        if score is None and check != situation.need:
            yield Start(check, round + ahead, speculative=True)
        rejected = isinstance(score, float) and score < policy.accept
        if rejected or situation.ends(node):
            return


def _siblings(plan: Plan, situation: Situation, node: Node, round: int) -> Iterator[Start]:
    """The drafts of one step, and the check of each; what follows depends on which is best, so nothing does here."""
    policy, known = plan.workflow.policy, situation.known
    for attempt in range(policy.drafts if plan.draft_ahead else 0):
        draft = Request(Op.DRAFT, node, RoleName.DRAFT, attempt)
        step = known.get(draft)
        request = Request(Op.VERIFY, node.child(step), VERIFIER[policy.kind]) if isinstance(step, Step) else draft
        if request not in known and request != situation.need:
            yield Start(request, round, speculative=True)


def _batched(first: Start, allowed: list[Start]) -> Start:
    """A VERIFY with the others that lie on the same path: one pass over the longest of them scores all."""
    if first.request.op is not Op.VERIFY:
        return first
    checks = sorted({w.request for w in allowed if w.request.op is Op.VERIFY}, key=lambda r: r.node.depth)
    lineage = set(checks[-1].node.lineage())
    also = tuple(r for r in checks if r != first.request and r.node in lineage)
    return replace(first, also=also) if first.request.node in lineage else first


def _with_siblings(plan: Plan, situation: Situation, first: Start) -> Start:
    """A DRAFT with the other drafts of the same step, which the policy asks for next: one pass writes all."""
    request = first.request
    if request.op is not Op.DRAFT or not situation.batches:
        return first
    drafts = (replace(request, attempt=attempt) for attempt in range(plan.workflow.policy.drafts))
    done = {request, *situation.known, *situation.unfit}
    return replace(first, also=tuple(draft for draft in drafts if draft not in done))


def _verdict_open(need: Request, base: Node) -> bool:
    """Whether the step after `base` is still being drafted or verified."""
    if need.op is Op.VERIFY and need.node.step is not None:
        return need.node.parent == base and need.node.step.source is RoleName.DRAFT
    return need.op is Op.DRAFT


_UNLISTED = 1_000_000


def _rank(plan: Plan, device: str, start: Start) -> int:
    order = plan.priorities.get(device, ())
    key = priority_key(start.request.op, start.round)
    return order.index(key) if key in order else _UNLISTED
