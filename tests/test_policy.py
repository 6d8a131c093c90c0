"""The policy: driven by hand-written results, branch by branch, and by random ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from planner_cases import DRAFT, PRM, ROOT, SEEDS, TARGET, step, workflow, workflows

from planner.graph import Op
from planner.policy import (
    Decision,
    Event,
    Node,
    Outcome,
    Request,
    Result,
    Status,
    Step,
    ended,
    reason,
    rounded,
    temperature,
)
from planner.workflow import NEEDED_ROLES, VERIFIER, Budget, Policy, RoleName, Sampling, Workflow

FLOW = workflow(accept=0.7, accept_refined=0.6)


def answer_of(text: str) -> str | None:
    return text.removeprefix("=") if text.startswith("=") else None


class Drive:
    """Sends a policy its results one by one and notes what it asked for."""

    def __init__(self, flow: Workflow, root: Node = ROOT) -> None:
        self.decisions: list[Decision] = []
        self.asked: list[Request] = []
        self.outcome: Outcome | None = None
        self._policy = reason(flow, root, answer_of, self.decisions.append)
        self.asked.append(next(self._policy))

    @property
    def need(self) -> Request:
        return self.asked[-1]

    def send(self, result: Result) -> None:
        try:
            self.asked.append(self._policy.send(result))
        except StopIteration as stop:
            self.outcome = stop.value

    def draft(self, text: str, score: float, tokens: int | None = None, verifier: RoleName = PRM) -> None:
        """A drafted step and its score."""
        assert (self.need.op, self.need.role) == (Op.DRAFT, DRAFT)
        place = self.need.node
        self.send(step(text, tokens=tokens))
        assert (self.need.op, self.need.role) == (Op.VERIFY, verifier)
        assert self.need.node == place.child(step(text, tokens=tokens))
        self.send(score)

    def target(self, op: Op, text: str, score: float | None = None) -> None:
        """A step of the target, and its score if one is asked for."""
        assert (self.need.op, self.need.role) == (op, TARGET)
        place = self.need.node
        self.send(step(text, TARGET))
        if score is not None:
            assert self.need.op is Op.VERIFY and self.need.node == place.child(step(text, TARGET))
            self.send(score)

    @property
    def path(self) -> list[str]:
        return [s.text for s in self.decisions[-1].node.path]

    @property
    def events(self) -> list[Event]:
        return [d.event for d in self.decisions]


def test_a_good_draft_is_accepted() -> None:
    run = Drive(FLOW)
    run.draft("one", 0.9)
    assert run.decisions == [Decision(Event.ACCEPTED, ROOT.child(step("one")), {"draft": 0.9})]
    assert run.need == Request(Op.DRAFT, ROOT.child(step("one")), DRAFT)


@pytest.mark.parametrize(("score", "accepted"), [(0.7, True), (0.69996, True), (0.69994, False), (0.6999, False)])
def test_a_tie_accepts_after_rounding(score: float, accepted: bool) -> None:
    run = Drive(FLOW)
    run.draft("one", score)
    assert (run.events == [Event.ACCEPTED]) is accepted
    assert rounded(0.69996) == 0.7


def test_a_refused_first_step_is_refined_unscored() -> None:
    # There is nothing to go back to, so nothing could follow from a score.
    run = Drive(FLOW)
    run.draft("one", 0.1)
    run.target(Op.REFINE, "ONE")
    assert run.decisions == [Decision(Event.REFINED, ROOT.child(step("ONE", TARGET)), {"draft": 0.1})]
    assert run.need.op is Op.DRAFT


def test_a_refined_step_that_scores_well_is_taken() -> None:
    run = Drive(FLOW)
    run.draft("one", 0.9)
    run.draft("two", 0.1)
    run.target(Op.REFINE, "TWO", 0.6)
    assert run.events == [Event.ACCEPTED, Event.REFINED]
    assert run.decisions[-1].scores == {"draft": 0.1, "refined": 0.6}
    assert run.path == ["one", "TWO"]


def test_a_weak_refined_step_goes_back_to_a_better_alternative() -> None:
    run = Drive(FLOW)
    run.draft("one", 0.9)
    run.draft("two", 0.1)
    run.target(Op.REFINE, "TWO", 0.2)
    assert run.need.node == ROOT
    run.target(Op.BACKTRACK, "OTHER", 0.6)
    last = run.decisions[-1]
    assert (last.event, last.went_back) == (Event.BACKTRACKED, 1)
    assert last.scores == {"draft": 0.1, "refined": 0.2, "alternative": 0.6}
    assert run.path == ["OTHER"]
    # The target wrote at the root, so it may not be asked there again.
    run.draft("two", 0.1)
    run.target(Op.REFINE, "TWO")
    assert run.events[-1] is Event.REFINED


def test_a_weak_alternative_keeps_the_weak_step() -> None:
    run = Drive(FLOW)
    run.draft("one", 0.9)
    run.draft("two", 0.1)
    run.target(Op.REFINE, "TWO", 0.2)
    run.target(Op.BACKTRACK, "OTHER", 0.59)
    assert run.events[-1] is Event.KEPT_WEAK
    assert run.path == ["one", "TWO"]
    assert run.decisions[-1].went_back == 0


def test_an_alternative_of_the_same_text_is_none() -> None:
    run = Drive(FLOW)
    run.draft("one", 0.9)
    run.draft("two", 0.9)
    run.draft("three", 0.1)
    run.target(Op.REFINE, "THREE", 0.2)
    run.target(Op.BACKTRACK, "two")
    assert run.need == Request(Op.BACKTRACK, ROOT, TARGET)
    run.target(Op.BACKTRACK, "one")
    assert run.events[-1] is Event.KEPT_WEAK
    assert "alternative" not in run.decisions[-1].scores


def test_the_nearest_open_ancestor_is_taken() -> None:
    run = Drive(FLOW)
    run.draft("one", 0.9)
    run.draft("two", 0.1)
    run.target(Op.REFINE, "TWO", 0.9)  # the target has now written after `one`
    run.draft("three", 0.9)
    run.draft("four", 0.1)
    run.target(Op.REFINE, "FOUR", 0.2)
    assert [s.text for s in run.need.node.path] == ["one", "TWO"]
    run.target(Op.BACKTRACK, "three")  # no alternative; `one` is not open, the root is
    assert run.need.node == ROOT
    run.target(Op.BACKTRACK, "OTHER", 0.9)
    assert run.decisions[-1].went_back == 3
    assert run.path == ["OTHER"]


def test_at_most_so_many_backtracks() -> None:
    run = Drive(replace(FLOW, policy=replace(FLOW.policy, max_backtracks=1)))
    run.draft("one", 0.9)
    run.draft("two", 0.9)
    run.draft("three", 0.1)
    run.target(Op.REFINE, "THREE", 0.2)
    run.target(Op.BACKTRACK, "OTHER", 0.1)
    assert run.events[-1] is Event.KEPT_WEAK
    run.draft("four", 0.9)
    run.draft("five", 0.1)
    run.target(Op.REFINE, "FIVE")  # unscored: no backtrack is left, and this one was not even taken
    assert run.events[-1] is Event.REFINED


def test_at_most_so_many_ancestors() -> None:
    run = Drive(replace(FLOW, policy=replace(FLOW.policy, max_ancestors=1)))
    run.draft("one", 0.9)
    run.draft("two", 0.9)
    run.draft("three", 0.1)
    run.target(Op.REFINE, "THREE", 0.2)
    run.target(Op.BACKTRACK, "two")
    assert run.events[-1] is Event.KEPT_WEAK  # the root would be two back


@pytest.mark.parametrize("none", [{"max_backtracks": 0}, {"max_ancestors": 0}])
def test_without_backtracks_nothing_refined_is_scored(none: dict[str, int]) -> None:
    run = Drive(replace(FLOW, policy=replace(FLOW.policy, **none)))
    run.draft("one", 0.9)
    run.draft("two", 0.1)
    run.target(Op.REFINE, "TWO")
    assert run.events[-1] is Event.REFINED


def test_rsd_never_scores_what_was_refined() -> None:
    run = Drive(replace(FLOW, policy=replace(FLOW.policy, kind=Policy.RSD)))
    run.draft("one", 0.9)
    run.draft("two", 0.1)
    run.target(Op.REFINE, "TWO")
    assert run.events == [Event.ACCEPTED, Event.REFINED]
    assert run.need.op is Op.DRAFT


@pytest.mark.parametrize(("kind", "op", "role"), [("draft_only", Op.DRAFT, DRAFT), ("target_only", Op.REFINE, TARGET)])
def test_one_role_alone(kind: str, op: Op, role: object) -> None:
    run = Drive(replace(FLOW, policy=replace(FLOW.policy, kind=Policy(kind))))
    for text in ("one", "two", "=3"):
        assert (run.need.op, run.need.role) == (op, role)
        run.send(step(text))
    assert run.outcome is not None
    assert (run.outcome.status, run.outcome.answer) == (Status.ANSWER, "3")
    assert {d.event for d in run.decisions} == {Event.ACCEPTED if op is Op.DRAFT else Event.REFINED}


def speculative(kind: Policy = Policy.BACKTRACK, **options: Any) -> Workflow:
    return replace(FLOW, policy=replace(FLOW.policy, kind=kind, **options))


def test_specreason_has_the_target_score_and_refine() -> None:
    run = Drive(speculative(Policy.SPECREASON))
    run.draft("one", 0.9, verifier=TARGET)
    run.draft("two", 0.1, verifier=TARGET)
    run.target(Op.REFINE, "TWO")  # not scored, and nothing is gone back to
    run.draft("=3", 0.7, verifier=TARGET)
    assert run.events == [Event.ACCEPTED, Event.REFINED, Event.ACCEPTED]
    assert run.path == ["one", "TWO", "=3"]
    assert run.outcome is not None and run.outcome.status is Status.ANSWER


@pytest.mark.parametrize("kind", list(VERIFIER))
def test_the_first_steps_are_the_targets(kind: Policy) -> None:
    run = Drive(speculative(kind, first_target_steps=2))
    run.target(Op.REFINE, "ONE")
    run.target(Op.REFINE, "TWO")
    run.draft("three", 0.1, verifier=VERIFIER[kind])
    run.target(Op.REFINE, "THREE")  # unscored: the target has written at every place before
    assert run.events == [Event.REFINED] * 3
    assert run.path == ["ONE", "TWO", "THREE"]


def test_the_best_of_several_drafts_is_kept() -> None:
    run = Drive(speculative(drafts=3))
    for attempt, text in enumerate(("a", "b", "c")):
        assert run.need == Request(Op.DRAFT, ROOT, DRAFT, attempt)
        run.send(step(text))
    for text, score in (("a", 0.2), ("b", 0.9), ("c", 0.9)):
        assert run.need == Request(Op.VERIFY, ROOT.child(step(text)), PRM)
        run.send(score)
    # A tie goes to the earliest.
    assert run.decisions == [Decision(Event.ACCEPTED, ROOT.child(step("b")), {"draft": 0.9})]


def test_equal_drafts_are_scored_once_and_a_weak_best_is_refined() -> None:
    run = Drive(speculative(Policy.RSD, drafts=3))
    for text in ("a", "b", "a"):
        run.send(step(text))
    run.send(0.1)
    run.send(0.2)
    run.target(Op.REFINE, "A")
    assert run.decisions == [Decision(Event.REFINED, ROOT.child(step("A", TARGET)), {"draft": 0.2})]


def test_a_further_alternative_is_sampled_where_the_target_has_written() -> None:
    flow = speculative(resample_alternatives=1)
    run = Drive(flow)
    run.draft("one", 0.1)
    run.target(Op.REFINE, "ONE")  # nowhere to go back to
    run.draft("two", 0.1)
    run.target(Op.REFINE, "TWO", 0.2)
    assert run.need == Request(Op.BACKTRACK, ROOT, TARGET, attempt=1)
    assert temperature(flow, run.need) == flow.policy.alternative_temperature > 0
    run.target(Op.BACKTRACK, "OTHER", 0.9)
    assert run.events[-1] is Event.BACKTRACKED
    # Twice is all there is: the next weak step finds no place.
    run.draft("two", 0.1)
    run.target(Op.REFINE, "THREE")
    assert run.events[-1] is Event.REFINED


def test_a_further_alternative_that_was_tried_before_is_none() -> None:
    run = Drive(speculative(resample_alternatives=2))
    run.draft("one", 0.9)
    run.draft("two", 0.1)
    run.target(Op.REFINE, "TWO", 0.2)
    run.target(Op.BACKTRACK, "OTHER", 0.1)
    assert run.events[-1] is Event.KEPT_WEAK
    run.draft("three", 0.1)
    run.target(Op.REFINE, "THREE", 0.2)
    assert run.need == Request(Op.BACKTRACK, ROOT.child(step("one")), TARGET, attempt=1)
    run.target(Op.BACKTRACK, "TWO")  # the step that would be replaced
    assert run.need == Request(Op.BACKTRACK, ROOT, TARGET, attempt=1)
    run.target(Op.BACKTRACK, "OTHER")  # weak before, so weak again
    assert run.events[-1] is Event.KEPT_WEAK
    assert "alternative" not in run.decisions[-1].scores


def voted(*answers: str | None) -> Outcome:
    """The outcome of one run for each answer; None goes round in circles."""
    run = Drive(speculative(Policy.TARGET_ONLY, vote=len(answers)))
    for answer in answers:
        for text in ("go on", f"={answer}" if answer else "go on"):
            run.send(step(text, TARGET))
    assert run.outcome is not None
    roots = [r.node for r in run.asked if r.node.step is None]
    assert [r.label for r in roots] == [ROOT.label, *(f"{ROOT.label}/{i}" for i in range(1, len(answers)))]
    assert len({r.sampling_key(0) for r in run.asked}) == len(run.asked)
    return run.outcome


@pytest.mark.parametrize(
    ("answers", "winner", "run"),
    [
        (("1",), "1", 0),
        (("1", "2", "2"), "2", 1),
        (("1", "2"), "1", 0),
        (("3", "1", "2", "2", "1"), "1", 1),
        ((None, "2"), "2", 1),
        ((None, None), None, 0),
    ],
)
def test_the_answer_of_most_runs_is_taken(answers: tuple[str | None, ...], winner: str | None, run: int) -> None:
    outcome = voted(*answers)
    assert outcome.answer == winner
    assert list(outcome.node.lineage())[-1].label == (f"{ROOT.label}/{run}" if run else ROOT.label)
    assert len(outcome.decisions) == 2 * len(answers)


@given(workflows(), SEEDS)
@settings(max_examples=30, deadline=None)
def test_the_first_of_several_runs_is_the_run_alone(flow: Workflow, seed: int) -> None:
    alone = run_drawn(replace(flow, policy=replace(flow.policy, vote=1)), seed)
    first = run_drawn(replace(flow, policy=replace(flow.policy, vote=3)), seed)
    assert first.decisions[: len(alone.decisions)] == alone.decisions


def test_who_writes_at_which_temperature() -> None:
    flow = replace(speculative(alternative_temperature=0.5), sampling=Sampling(0.0, 0, draft_temperature=0.9))
    assert temperature(flow, Request(Op.DRAFT, ROOT, DRAFT, 2)) == 0.9
    assert temperature(flow, Request(Op.REFINE, ROOT, TARGET)) == 0.0
    assert temperature(flow, Request(Op.BACKTRACK, ROOT, TARGET)) == 0.0
    assert temperature(flow, Request(Op.BACKTRACK, ROOT, TARGET, 1)) == 0.5
    flow = replace(flow, sampling=Sampling(0.3))
    assert temperature(flow, Request(Op.DRAFT, ROOT, DRAFT)) == 0.3


def test_the_outcome_has_the_path_and_the_decisions() -> None:
    run = Drive(FLOW)
    run.draft("one", 0.9)
    run.draft("=4", 0.8)
    assert run.outcome == Outcome(Status.ANSWER, "4", run.decisions[-1].node, tuple(run.decisions))
    assert run.path == ["one", "=4"]


def test_an_answer_that_is_refused_does_not_end_the_run() -> None:
    run = Drive(FLOW)
    run.draft("=4", 0.1)
    run.target(Op.REFINE, "go on")
    assert run.outcome is None


# --- ends ---


def path(*texts: str, tokens: int = 1, last_ended: bool = False) -> Node:
    node = ROOT
    for i, text in enumerate(texts):
        node = node.child(step(text, tokens=tokens, ended=last_ended and i == len(texts) - 1))
    return node


@pytest.mark.parametrize(
    ("node", "status"),
    [
        (ROOT, None),
        (path("a"), None),
        (path("a", "=b"), Status.ANSWER),
        (path("=b", "=b"), Status.ANSWER),
        (path("a", "a"), Status.REPEAT),
        (path("a", "b", "a"), None),
        (path("a", last_ended=True), Status.ENDED),
        (path("a", "b", "c", "d"), Status.STEPS),
        (path("a", "b", "c", tokens=4), Status.TOKENS),
        (path("a", "b", tokens=5), None),
        (path("a", "b", tokens=9), Status.TOKENS),
        (path("a", "=b", tokens=9), Status.ANSWER),
    ],
)
def test_why_a_run_ends(node: Node, status: Status | None) -> None:
    flow = replace(FLOW, budget=Budget(steps=4, tokens=12, step_tokens=9))
    assert ended(flow, node, answer_of) is status


# --- keys ---


def test_a_place_is_known_by_its_whole_path() -> None:
    one = ROOT.child(step("one"))
    assert one == ROOT.child(step("one")) and hash(one) == hash(ROOT.child(step("one")))
    assert one != ROOT.child(step("two"))
    assert one != ROOT.child(step("one", TARGET))
    assert one != ROOT.child(step("one", tokens=4))
    assert one != Node(None, None, "other").child(step("one"))
    assert one.child(step("two")) != ROOT.child(step("two"))
    assert one != "one"
    assert (ROOT.depth, one.depth, one.child(step("two")).depth) == (0, 1, 2)
    assert list(one.lineage()) == [one, ROOT]


def test_sampling_keys_differ_by_all_that_they_should() -> None:
    one = ROOT.child(step("one"))
    requests = [
        Request(op, node, role, attempt)
        for op, role in ((Op.DRAFT, DRAFT), (Op.REFINE, TARGET))
        for node in (ROOT, one, ROOT.child(step("two")), Node(None, None, "other"))
        for attempt in (0, 1, 2)
    ]
    keys = [r.sampling_key(seed) for r in requests for seed in (0, 1, 2**63 - 1)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)
    # Refining and going back to a place are the same draw: a prefetch of one is the other.
    refine, back = (Request(op, one, TARGET).sampling_key(5) for op in (Op.REFINE, Op.BACKTRACK))
    assert refine == back


# --- anything ---


def drawn(seed: int, request: Request, flow: Workflow) -> Result:
    """A result that depends on the request alone."""
    random = Random(f"{seed}{request.op}{request.node.key}{request.role}{request.attempt}")
    if request.op is Op.VERIFY:
        return random.choice([0.0, 0.25, 0.5, 0.75, 1.0, random.random()])
    left = flow.budget.tokens - sum(len(s.tokens) for s in request.node.path)
    size = random.randint(1, max(1, min(left, flow.budget.step_tokens)))
    text = random.choice(["a", "b", "c", "dd", "=1"])
    return Step(text, tuple(range(size)), request.role, random.random() < 0.05)


def run_drawn(flow: Workflow, seed: int, ahead: Mapping[Request, Result] | None = None) -> Drive:
    run = Drive(flow)
    known = dict(ahead or {})
    while run.outcome is None:
        run.send(known.setdefault(run.need, drawn(seed, run.need, flow)))
        assert len(run.asked) < 2000
    return run


@given(workflows(), SEEDS)
@settings(max_examples=60, deadline=None)
def test_anything_terminates_within_its_budget(flow: Workflow, seed: int) -> None:
    run = run_drawn(flow, seed)
    assert run.outcome is not None
    path = run.outcome.node.path
    assert 1 <= len(path) <= flow.budget.steps
    assert sum(len(s.tokens) for s in path) <= flow.budget.tokens
    assert run.outcome.status is ended(flow, run.outcome.node, answer_of)
    policy = flow.policy
    assert sum(d.event is Event.BACKTRACKED for d in run.decisions) <= policy.max_backtracks * policy.vote
    assert all(d.went_back <= policy.max_ancestors for d in run.decisions)
    # The target never writes the same twice, and at a place only so often.
    written = [(r.node.key, r.attempt) for r in run.asked if r.op in (Op.REFINE, Op.BACKTRACK)]
    assert len(written) == len(set(written))
    assert all(attempt <= policy.resample_alternatives for _, attempt in written)
    assert {r.op for r in run.asked} <= allowed(policy.kind)
    assert {r.role for r in run.asked} <= set(NEEDED_ROLES[policy.kind])


def allowed(kind: Policy) -> set[Op]:
    alone = {Policy.DRAFT_ONLY: {Op.DRAFT}, Policy.TARGET_ONLY: {Op.REFINE}}
    both = {Op.DRAFT, Op.VERIFY, Op.REFINE}
    return alone.get(kind, both | {Op.BACKTRACK} if kind is Policy.BACKTRACK else both)


@given(workflows(), SEEDS)
@settings(max_examples=30, deadline=None)
def test_the_same_results_ask_the_same(flow: Workflow, seed: int) -> None:
    first, second = run_drawn(flow, seed), run_drawn(flow, seed)
    assert first.asked == second.asked
    assert first.outcome == second.outcome


@given(workflows(), SEEDS)
@settings(max_examples=30, deadline=None)
def test_each_turn_moves_on_or_goes_back_as_it_says(flow: Workflow, seed: int) -> None:
    node, runs = ROOT, 1
    for decision in run_drawn(flow, seed).decisions:
        after = decision.node
        if ended(flow, node, answer_of) is not None:
            node, runs = Node(None, None, f"{ROOT.label}/{runs}"), runs + 1
        assert after.parent is not None
        if decision.event is Event.BACKTRACKED:
            assert after.depth == node.depth - decision.went_back + 1
            assert after.parent in list(node.lineage())[1:]
        else:
            assert after.parent == node and decision.went_back == 0
        assert after.step is not None
        assert (after.step.source is DRAFT) == (decision.event is Event.ACCEPTED)
        node = after
    assert runs == flow.policy.vote
