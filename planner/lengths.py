"""How lengths of steps, and of problems, differ from their mean: a log-normal distribution with a given spread."""

from __future__ import annotations

from functools import cache
from math import exp, log1p, sqrt
from statistics import NormalDist

STANDARD_NORMAL = NormalDist()
LONGEST = 8
"""No length is more than so many times the mean."""


def factor(spread: float, uniform: float) -> float:
    """Length over mean at the quantile `uniform`, above 0 and below 1; `spread` is standard deviation over mean."""
    sigma = sqrt(log1p(spread**2))
    return min(LONGEST, exp(sigma * STANDARD_NORMAL.inv_cdf(uniform) - sigma**2 / 2))


@cache
def factors(spread: float, count: int = 8) -> tuple[float, ...]:
    """Evenly spaced quantiles, scaled to a mean of 1: what an expectation over lengths is taken over."""
    found = [factor(spread, (n + 0.5) / count) for n in range(count)]
    mean = sum(found) / count
    return tuple(f / mean for f in found)
