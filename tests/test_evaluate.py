"""Intervals and the paired test, against scipy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from planner.api import as_workflow
from planner.errors import UserError
from planner.evaluate import evaluate, evaluate_cases, mcnemar, wilson
from planner.problems import problem_set
from planner.workflow import Policy

EXAMPLES = Path(__file__).parent.parent / "examples"


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson(case: tuple[int, int]) -> None:
    correct, problems = case
    low, high = wilson(correct, problems)
    expected = binomtest(correct, problems).proportion_ci(0.95, method="wilson")
    assert low == pytest.approx(expected.low, abs=1e-6) and high == pytest.approx(expected.high, abs=1e-6)


@given(st.integers(0, 200), st.integers(0, 200))
def test_mcnemar(a: int, b: int) -> None:
    expected = binomtest(min(a, b), a + b).pvalue if a + b else 1.0
    assert mcnemar(a, b) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_policies_meet_the_same_problems() -> None:
    flow = as_workflow(EXAMPLES / "countdown-specreason.yaml")
    problems = problem_set("countdown").generate(4, 3)
    kinds = Policy.DRAFT_ONLY, Policy.TARGET_ONLY, Policy.SPECREASON
    told: list[str] = []
    found = evaluate(flow, [*problems, problems[0]], "this-computer", kinds, lambda case, n: told.extend([case] * n))
    assert [row.policy for row in found.rows] == list(kinds)
    assert told == [kind for kind in kinds for _ in range(5)]
    assert (found.problem_set, found.distinct) == ("countdown", 4)
    rows = {row.policy: row for row in found.rows}
    (pair,) = found.pairs
    assert (pair.one, pair.other) == ("specreason", "target_only")
    assert rows[pair.one].correct - rows[pair.other].correct == pair.only_one - pair.only_other
    assert rows["target_only"].acceptance is None and rows["specreason"].acceptance is not None


def test_a_case_that_no_run_could_honour_is_named() -> None:
    flow = as_workflow(EXAMPLES / "countdown.yaml")
    with pytest.raises(UserError, match=r"many: policy\.vote is 3"):
        evaluate_cases({"many": replace(flow, policy=replace(flow.policy, vote=3))}, [])
