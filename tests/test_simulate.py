"""Simulation: the same by seed, fair between plans, true to the statistics it draws from."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from planner_cases import APART, DRAFT, PRM, TARGET, LinearCosts, plan_for, quick_plan, workflow, workflows

from planner.lengths import LONGEST
from planner.report import Report
from planner.runtime.backend import Work
from planner.simulate import DELIMITER, FIRST, SampledBackend, simulate
from planner.trace import Chunk, ClockKind, Event
from planner.workflow import VERIFIER, Budget, Policy, RoleName, Statistics, Workflow

COSTS = LinearCosts({(TARGET, "c"): 60, (PRM, "b"): 30})
FLOW = workflow(statistics=Statistics(0.8, 0.6, 10, 12, 14, 4))


def run(flow: Workflow, name: str = "overlapped", problems: int = 20, seed: int = 0) -> Report:
    return simulate(quick_plan(flow, name, placement=placed(flow)), COSTS, problems, seed)


def placed(flow: Workflow) -> dict[RoleName, str]:
    return {role: APART[role] for role in quick_plan(flow).placement}


def test_the_same_seed_gives_the_same_report() -> None:
    assert run(FLOW, seed=3) == run(FLOW, seed=3)
    assert run(FLOW, seed=3).total_us != run(FLOW, seed=4).total_us


@given(workflows())
@settings(max_examples=20, deadline=None)
def test_plans_that_are_compared_meet_the_same_outcomes(flow: Workflow) -> None:
    serial, overlapped = run(flow, "serial", 6), run(flow, "overlapped", 6)
    assert serial.turns == overlapped.turns
    assert (serial.problems, serial.rounds) == (overlapped.problems, overlapped.rounds)
    assert serial.acceptance == overlapped.acceptance
    assert serial.waste == 0
    assert serial.clock is ClockKind.VIRTUAL


def test_overlap_saves_time_where_it_can() -> None:
    assert run(FLOW, "overlapped", 40).mean_us < run(FLOW, "serial", 40).mean_us


@pytest.mark.parametrize("accept", [0.0, 0.3, 0.9, 1.0])
def test_the_share_of_accepted_drafts_is_that_of_the_statistics(accept: float) -> None:
    drawn = run(replace(FLOW, statistics=replace(FLOW.statistics, accept=accept)), problems=150)
    assert drawn.acceptance == pytest.approx(accept, abs=0.07)


@pytest.mark.parametrize("kind", list(VERIFIER))
@pytest.mark.parametrize("name", ["serial", "overlapped"])
def test_the_best_of_several_drafts_is_accepted_more_often(kind: Policy, name: str) -> None:
    flow = replace(FLOW, policy=replace(FLOW.policy, kind=kind, drafts=3, max_backtracks=0))
    flow = replace(flow, statistics=replace(FLOW.statistics, accept=0.4))
    drawn = run(flow, name, problems=100)
    assert drawn.acceptance == pytest.approx(1 - 0.6**3, abs=0.08)
    assert name != "serial" or drawn.waste == 0


@pytest.mark.parametrize("kind", list(VERIFIER))
def test_first_steps_and_votes_are_simulated(kind: Policy) -> None:
    flow = replace(FLOW, policy=replace(FLOW.policy, kind=kind, first_target_steps=3, vote=2, max_backtracks=0))
    drawn = run(replace(flow, statistics=replace(FLOW.statistics, accept=1.0)), problems=5)
    assert drawn.turns == {"accepted": 5 * 2 * (FLOW.statistics.steps - 3), "refined": 5 * 2 * 3}


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_thresholds_do_not_change_what_is_drawn(threshold: float) -> None:
    flow = replace(FLOW, policy=replace(FLOW.policy, accept=threshold, accept_refined=threshold))
    assert run(flow).turns == run(FLOW).turns


@pytest.mark.parametrize("kind", list(Policy))
def test_problems_end_after_the_mean_number_of_steps(kind: Policy) -> None:
    flow = replace(FLOW, policy=replace(FLOW.policy, kind=kind), budget=Budget(1, 5, 1))
    drawn = run(flow, problems=5)
    assert drawn.problems == 5
    backtracked = drawn.turns.get("backtracked", 0)
    assert drawn.rounds >= 5 * FLOW.statistics.steps
    assert kind is Policy.BACKTRACK or drawn.rounds == 5 * FLOW.statistics.steps
    assert kind is Policy.BACKTRACK or backtracked == 0


# --- the backend that draws ---


def test_a_step_depends_on_its_key_alone_not_on_chunks() -> None:
    def written(chunk: int, key: int) -> tuple[int, ...]:
        backend, tokens = SampledBackend(FLOW.statistics), ()
        prompt = backend.encode("draft", "")
        while True:
            feed = prompt if not tokens else ()
            out = backend.run(
                Work("draft", "0", len(prompt) + len(tokens) if tokens else 0, feed, chunk, key=key, begun=tokens)
            )
            tokens += out.tokens
            if out.complete:
                return tokens

    for key in range(20):
        whole = written(100, key)
        assert all(written(chunk, key) == whole for chunk in (1, 2, 7))
        assert whole[0] >= FIRST and whole[-1] == DELIMITER
        assert 2 <= len(whole) <= LONGEST * FLOW.statistics.draft_step_tokens
    assert len({written(100, key) for key in range(20)}) == 20


def test_a_cache_is_never_longer_than_believed() -> None:
    backend = SampledBackend(FLOW.statistics)
    backend.run(Work("draft", "0", 0, (2, 2, 2)))
    with pytest.raises(ValueError, match="sequence 0 holds 3 tokens, not 4"):
        backend.run(Work("draft", "0", 4, ()))
    with pytest.raises(ValueError, match="sequence 0 holds 3 tokens, not 4"):
        backend.rewind("draft", "0", 4)
    backend.rewind("draft", "0", 2)
    with pytest.raises(ValueError, match="holds 2 tokens"):
        backend.run(Work("draft", "0", 3, ()))
    backend.close()
    backend.close()


def test_a_verdict_depends_on_the_step_alone() -> None:
    backend = SampledBackend(FLOW.statistics)
    tokens = (2, DELIMITER, FIRST + 11, 2, DELIMITER)
    scores = {
        backend.run(Work(PRM.value, name, 0, tokens[cut:], score=(len(tokens) - cut - 1,))).scores
        for name, cut in (("0", 0), ("1", 1), ("2", 2))
    }
    assert len(scores) == 1
    assert scores.pop()[0] in (0.0, 1.0)
    assert backend.load("draft", FLOW.roles[DRAFT], "\n").tokenizer_hash == "sampled"


def test_the_engine_takes_its_time_before_each_chunk() -> None:
    plan, sent = plan_for(FLOW, "serial"), 250
    slow = replace(plan, machine=replace(plan.machine, dispatch_us=sent))
    events: list[Event] = []
    before, after = simulate(plan, COSTS, 30, 5, events.append), simulate(slow, COSTS, 30, 5)
    chunks = sum(isinstance(e, Chunk) for e in events)
    assert after.total_us - before.total_us == pytest.approx(sent * chunks, rel=0.05)
    assert [d.busy_us for d in after.devices] == [d.busy_us for d in before.devices]
