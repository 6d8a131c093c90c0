"""Dispatch: what starts, as a function of plan and situation alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from planner_cases import APART, DRAFT, PRM, ROOT, SEEDS, TARGET, THREE, quick_plan, random_plan, step, workflow

from planner.dispatch import Situation, Start, dispatch, wanted_work
from planner.graph import Op
from planner.plan import Plan
from planner.policy import Node, Request, Result
from planner.workflow import NEEDED_ROLES, VERIFIER, Policy

FLOW = workflow()
EVERYTHING = tuple(f"{op}@{r}" for r in range(4) for op in (Op.PREFILL, Op.VERIFY, Op.DRAFT, Op.REFINE, Op.BACKTRACK))
ONE = ROOT.child(step("one"))
TWO = ONE.child(step("two"))


def plan(**more: Any) -> Plan:
    fields: dict[str, Any] = {"placement": APART, "draft_ahead": 2, "prefetch_refine": True}
    fields |= {"priorities": dict.fromkeys("abc", EVERYTHING)}
    return replace(quick_plan(FLOW), **fields | more)


def draft(node: Node) -> Request:
    return Request(Op.DRAFT, node, DRAFT)


def check(node: Node) -> Request:
    return Request(Op.VERIFY, node, PRM)


REFINE = Request(Op.REFINE, ROOT, TARGET)


def never(node: Node) -> bool:
    return False


def at(need: Request, ends: Callable[[Node], bool] = never, **known: Result) -> Situation:
    """At the root, with the drafts `one`, `two` known by name."""
    place = {"one": draft(ROOT), "two": draft(ONE), "checked": check(ONE)}
    return Situation(need, ROOT, {place[k]: v for k, v in known.items()}, ends)


def wanted(plan: Plan, situation: Situation) -> list[tuple[Request, int, bool]]:
    return [(s.request, s.round, s.speculative) for s in wanted_work(plan, situation)]


def test_while_the_first_draft_is_written_the_target_may_prefetch() -> None:
    assert wanted(plan(), at(draft(ROOT))) == [(draft(ROOT), 0, False), (REFINE, 0, True)]
    assert wanted(plan(prefetch_refine=False), at(draft(ROOT))) == [(draft(ROOT), 0, False)]


def test_while_a_draft_is_verified_the_next_is_written() -> None:
    found = wanted(plan(), at(check(ONE), one=step("one")))
    assert found == [(check(ONE), 0, False), (REFINE, 0, True), (draft(ONE), 1, True)]


def test_drafts_ahead_are_verified_too() -> None:
    found = wanted(plan(prefetch_refine=False), at(check(ONE), one=step("one"), two=step("two")))
    assert found == [(check(ONE), 0, False), (check(TWO), 1, True), (draft(TWO), 2, True)]


@pytest.mark.parametrize(("depth", "rounds"), [(0, []), (1, [1]), (2, [1, 2])])
def test_no_further_ahead_than_the_plan_says(depth: int, rounds: list[int]) -> None:
    situation = at(check(ONE), one=step("one"), two=step("two"))
    found = wanted(plan(draft_ahead=depth, prefetch_refine=False), situation)
    assert [r for _, r, speculative in found if speculative] == rounds


def test_nothing_is_drafted_after_a_step_that_would_end_the_run() -> None:
    for depth in range(4):
        found = wanted(plan(draft_ahead=depth), at(check(ONE), lambda node: node == ONE, one=step("one")))
        assert [r for r, *_ in found] == [check(ONE), REFINE]


def test_what_is_known_is_not_wanted() -> None:
    situation = Situation(check(ONE), ROOT, {draft(ROOT): step("one"), REFINE: step("ONE", TARGET)}, never)
    assert REFINE not in [r for r, *_ in wanted(plan(), situation)]


@pytest.mark.parametrize(
    "need",
    [
        REFINE,
        check(ROOT.child(step("ONE", TARGET))),
        Request(Op.BACKTRACK, ROOT, TARGET),
        check(ONE.child(step("other"))),
    ],
    ids=["refine", "verify refined", "backtrack", "verify elsewhere"],
)
def test_once_the_verdict_is_in_nothing_runs_ahead(need: Request) -> None:
    assert wanted(plan(), Situation(need, ROOT, {draft(ROOT): step("one")}, never)) == [(need, 0, False)]


@pytest.mark.parametrize("kind", [Policy.DRAFT_ONLY, Policy.TARGET_ONLY])
def test_one_role_alone_has_nothing_to_run_ahead(kind: Policy) -> None:
    role, op = (DRAFT, Op.DRAFT) if kind is Policy.DRAFT_ONLY else (TARGET, Op.REFINE)
    alone = quick_plan(workflow(kind), placement={role: "a"}, draft_ahead=3, prefetch_refine=True)
    need = Request(op, ROOT, role)
    assert wanted(alone, Situation(need, ROOT, {}, never)) == [(need, 0, False)]


def test_cold_roles_read_the_prompt_where_it_is_listed() -> None:
    cold = Situation(draft(ROOT), ROOT, {}, never, frozenset({DRAFT, PRM, TARGET}))
    starts = dispatch(plan(prefetch_refine=False), {"p": cold}, {"a", "b", "c"})
    assert {d: (s.request.op, s.request.role) for d, s in starts.items()} == {
        "a": (Op.DRAFT, DRAFT),
        "b": (Op.PREFILL, PRM),
        "c": (Op.PREFILL, TARGET),
    }
    assert dispatch(plan(priorities={}), {"p": cold}, {"a", "b", "c"}).keys() == {"a"}


def test_with_specreason_the_target_checks_and_prefetches() -> None:
    flow = workflow(Policy.SPECREASON)
    two = {DRAFT: "a", TARGET: "c"}
    made = plan(workflow=flow, placement=two, draft_ahead=1)
    need = Request(Op.VERIFY, ONE, TARGET)
    found = wanted(made, at(need, one=step("one"), two=step("two")))
    ahead = Request(Op.VERIFY, TWO, TARGET)
    assert found == [(need, 0, False), (REFINE, 0, True), (ahead, 1, True)]
    starts = dispatch(made, {"p": at(need, one=step("one"))}, {"a", "c"})
    assert starts == {"a": Start(draft(ONE), 1, True, "p"), "c": Start(need, 0, False, "p")}


@pytest.mark.parametrize("kind", [Policy.RSD, Policy.SPECREASON])
def test_several_drafts_of_a_step_run_ahead_and_nothing_behind_them(kind: Policy) -> None:
    flow = workflow(kind, drafts=3)
    made = plan(workflow=flow, placement={r: d for r, d in APART.items() if r in NEEDED_ROLES[kind]})
    verifier = VERIFIER[kind]
    first, second, third = (Request(Op.DRAFT, ROOT, DRAFT, attempt) for attempt in range(3))
    at_first = Situation(second, ROOT, {first: step("one")}, never)
    assert wanted(made, at_first) == [
        (second, 0, False),
        (REFINE, 0, True),
        (Request(Op.VERIFY, ONE, verifier), 0, True),
        (third, 0, True),
    ]
    alone = replace(made, draft_ahead=0, prefetch_refine=False)
    assert wanted(alone, at_first) == [(second, 0, False)]


@pytest.mark.parametrize("ahead", [0, 1])
def test_drafts_of_a_step_are_written_in_one_pass_where_the_model_does_that(ahead: int) -> None:
    made = plan(workflow=workflow(drafts=3), draft_ahead=ahead)
    first, second, third = (Request(Op.DRAFT, ROOT, DRAFT, attempt) for attempt in range(3))
    alone = Situation(first, ROOT, {}, never)
    assert dispatch(made, {"p": alone}, {"a"})["a"].also == ()
    together = replace(alone, batches=True)
    assert dispatch(made, {"p": together}, {"a"}) == {"a": Start(first, 0, False, "p", (second, third))}
    rest = replace(together, need=second, known={first: step("one")}, unfit={third})
    assert dispatch(made, {"p": rest}, {"a"}) == {"a": Start(second, 0, False, "p")}


# --- order ---


def test_the_order_of_the_plan_decides() -> None:
    together = dict.fromkeys(APART, "a")
    situation = at(check(ONE), one=step("one"), two=step("two"))
    for first, request in (("VERIFY@0", check(ONE)), ("DRAFT@2", draft(TWO)), ("REFINE@0", REFINE)):
        order = {"a": (first, *EVERYTHING)}
        starts = dispatch(plan(placement=together, priorities=order), {"p": situation}, {"a"})
        assert starts["a"].request == request
    starts = dispatch(plan(placement=together, priorities={}), {"p": situation}, {"a"})
    assert starts == {"a": Start(check(ONE), 0, False, "p")}


def test_needed_work_goes_before_speculative_work_of_its_kind() -> None:
    together = dict.fromkeys(APART, "a")
    cold = Situation(Request(Op.PREFILL, ROOT, DRAFT), ROOT, {}, never, frozenset({PRM}))
    starts = dispatch(plan(placement=together), {"p": cold}, {"a"})
    assert not starts["a"].speculative


def test_speculative_work_that_is_not_listed_never_starts() -> None:
    situation = at(check(ONE), one=step("one"), two=step("two"))
    listed = plan(priorities={"a": ("DRAFT@1",), "b": ("VERIFY@0",), "c": ("REFINE@1",)})
    starts = dispatch(listed, {"p": situation}, {"a", "b", "c"})
    assert starts == {"b": Start(check(ONE), 0, False, "p")}


def test_only_free_devices_start() -> None:
    situation = at(check(ONE), one=step("one"))
    assert set(dispatch(plan(), {"p": situation}, {"a", "c"})) == {"a", "c"}


def test_what_is_no_longer_wanted_is_not_gone_on_with() -> None:
    rejected = Situation(REFINE, ROOT, {draft(ROOT): step("one"), check(ONE): 0.1}, never)
    assert set(dispatch(plan(), {"p": rejected}, {"a", "b"})) == set()
    accepted = Situation(draft(ONE), ONE, {draft(ROOT): step("one"), check(ONE): 0.9}, never)
    starts = dispatch(plan(), {"p": accepted}, {"a", "c"})
    assert {s.request for s in starts.values()} == {draft(ONE), Request(Op.REFINE, ONE, TARGET)}


# --- several problems ---


def test_what_one_problem_needs_goes_before_what_another_may_need() -> None:
    ahead = at(check(ONE), one=step("one"))
    early = Situation(draft(ROOT), ROOT, {}, never)
    starts = dispatch(plan(prefetch_refine=False), {"old": ahead, "new": early}, {"a"})
    assert (starts["a"].problem, starts["a"].request) == ("new", draft(ROOT))
    starts = dispatch(plan(prefetch_refine=False), {"old": ahead}, {"a"})
    assert (starts["a"].problem, starts["a"].request) == ("old", draft(ONE))


def test_of_two_problems_that_need_the_same_device_the_older_goes_first() -> None:
    early = Situation(draft(ROOT), ROOT, {}, never)
    assert dispatch(plan(), {"old": early, "new": early}, {"a"})["a"].problem == "old"
    assert dispatch(plan(), {"new": early, "old": early}, {"a"})["a"].problem == "new"


def test_of_many_problems_the_oldest_gets_what_it_needs_wherever_the_plan_has_it() -> None:
    on_one = plan(placement=dict.fromkeys(APART, "a"), priorities={"a": ("DRAFT@0", "VERIFY@0", "REFINE@0")})
    refused, fresh = Situation(REFINE, ROOT, {}, never), Situation(draft(ROOT), ROOT, {}, never)
    assert dispatch(on_one, {"old": refused, "new": fresh, "newer": fresh}, {"a"})["a"].problem == "old"


def test_a_verifier_pass_holds_steps_of_one_problem() -> None:
    situation = at(check(ONE), one=step("one"), two=step("two"))
    starts = dispatch(plan(batch_verify=True), {"old": situation, "new": situation}, {"b"})
    assert (starts["b"].problem, starts["b"].also) == ("old", (check(TWO),))


def test_a_set_of_devices_waits_for_all_of_them_and_keeps_those_that_are_free() -> None:
    both = plan(placement={DRAFT: "a", PRM: "b", TARGET: "a+c"}, priorities={"a": EVERYTHING, "a+c": EVERYTHING})
    refine, other = Situation(REFINE, ROOT, {}, never), Situation(draft(ROOT), ROOT, {}, never)
    assert set(dispatch(both, {"p": refine}, {"a", "c"})) == {"a+c"}
    assert not dispatch(both, {"p": refine}, {"a"})
    assert not dispatch(both, {"p": refine, "q": replace(other, need=check(ONE))}, {"a"})


@given(SEEDS)
@settings(max_examples=40, deadline=None)
def test_dispatch_is_pure_and_keeps_to_the_plan(seed: int) -> None:
    random = Random(seed)
    made = random_plan(random, FLOW)
    known = {draft(ROOT): step("one"), draft(ONE): step("two"), check(TWO): 0.5}
    kept = dict(list(known.items())[: random.randint(1, 3)])
    situation = Situation(check(ONE), ROOT, kept, never, frozenset(random.sample(list(APART), random.randint(0, 3))))
    free = {d.name for d in THREE.devices if random.random() < 0.7}
    before = dict(situation.known)
    starts = dispatch(made, {"p": situation}, free)
    assert starts == dispatch(made, {"p": situation}, free)
    assert situation.known == before
    assert set(starts) <= free
    for device, start in starts.items():
        assert made.place_of(start.request.op, start.request.role) == device
        assert start.request not in known or start.request not in kept
        key = f"{start.request.op}@{start.round}"
        assert not start.speculative or key in made.priorities[device]
    if made.placement[PRM] in free:
        # What the policy waits for is begun unless the plan puts something listed before it.
        assert made.placement[PRM] in starts
