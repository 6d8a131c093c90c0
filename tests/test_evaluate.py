"""Intervals and the paired test, against scipy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from planner.evaluate import mcnemar, wilson


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
