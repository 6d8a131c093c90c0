"""What starts next: a pure function of the plan and of where a run stands. Simulation and runtime share it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass

from planner.graph import Op
from planner.plan import Plan, priority_key
from planner.policy import Node, Request, Result, Step
from planner.workflow import Policy, RoleName


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


@dataclass(frozen=True)
class Start:
    """A request that is worth working on."""

    request: Request
    round: int
    """Relative step: 0 is the step after the last committed place."""
    speculative: bool
    """Whether its result may turn out to be of no use."""


def dispatch(
    plan: Plan, situation: Situation, running: Mapping[str, Request], free: Set[str]
) -> tuple[dict[str, Start], set[str]]:
    """What each free device starts, and which devices work on something that is no longer wanted.

    A free device takes what is wanted of it in the order of the plan's priorities; speculative work of a kind that
    the plan does not list for the device is never started.
    """
    wanted = list(wanted_work(plan, situation))
    starts: dict[str, Start] = {}
    for device in sorted(free):
        mine = [w for w in wanted if plan.placement[w.request.role] == device]
        allowed = [w for w in mine if not w.speculative or _rank(plan, device, w) < _UNLISTED]
        if allowed:
            starts[device] = min(allowed, key=lambda w: (_rank(plan, device, w), w.speculative))
    asked = {w.request for w in wanted}
    return starts, {device for device, request in running.items() if request not in asked}


def wanted_work(plan: Plan, situation: Situation) -> Iterator[Start]:
    """The request that the policy waits for, and all that the plan lets run ahead of it. Nothing that is known."""
    need, base, known = situation.need, situation.base, situation.known
    yield Start(need, 0, speculative=False)
    root = list(base.lineage())[-1]
    for role in sorted(situation.cold):
        if role is not need.role:
            yield Start(Request(Op.PREFILL, root, role), 0, speculative=True)
    if plan.workflow.policy.kind not in (Policy.RSD, Policy.BACKTRACK) or not _verdict_open(need, base):
        return
    refine = Request(Op.REFINE, base, RoleName.TARGET)
    if plan.prefetch_refine and refine not in known:
        yield Start(refine, 0, speculative=True)
    yield from _draft_ahead(plan, situation)


def _draft_ahead(plan: Plan, situation: Situation) -> Iterator[Start]:
    """Drafts, and their verification, on the assumption that every draft before them is accepted."""
    node = situation.base
    for ahead in range(plan.draft_ahead + 1):
        draft = Request(Op.DRAFT, node, RoleName.DRAFT)
        step = situation.known.get(draft)
        if not isinstance(step, Step):
            if draft != situation.need:
                yield Start(draft, ahead, speculative=True)
            return
        node = node.child(step)
        check = Request(Op.VERIFY, node, RoleName.PRM)
        if check not in situation.known and check != situation.need:
            yield Start(check, ahead, speculative=True)
        if situation.ends(node):
            return


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
