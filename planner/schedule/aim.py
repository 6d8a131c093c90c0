"""What a schedule is made to be small in, and what it must not pass. All figures are expectations a round."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import NamedTuple

from planner.schedule.instance import Schedule

KEPT = 1e-5
"""By how much of itself a cap may be passed: the solver's weights are rounded."""


class Objective(StrEnum):
    """What a plan is made to be small in."""

    LATENCY = "latency"
    ENERGY = "energy"
    EDP = "edp"
    """Energy-delay product: energy x latency."""

    def of(self, latency_us: float, energy_mj: float) -> float:
        """The objective, in us, mJ or mJ x us."""
        return {"latency": latency_us, "energy": energy_mj, "edp": latency_us * energy_mj}[self]


@dataclass(frozen=True)
class Cap:
    """A limit on the mean of a problem: so much, or so many times what the fastest plan takes; or none."""

    amount: float | None = None
    """us or mJ."""
    factor: float | None = None

    def of(self, reference: float) -> float:
        """The limit, where the fastest plan takes `reference`."""
        if self.factor is not None:
            return self.factor * reference
        return inf if self.amount is None else self.amount


NO_CAP = Cap()


class Weights(NamedTuple):
    """A weighted sum of time and energy: what the solver can minimise."""

    time: float
    energy: float

    def value(self, schedule: Schedule) -> float:
        """The sum for a schedule."""
        return self.time * schedule.objective_us + self.energy * schedule.energy_mj


@dataclass(frozen=True)
class Aim:
    """The objective, and caps on the expected time and energy of a round."""

    objective: Objective = Objective.LATENCY
    max_latency_us: float = inf
    max_energy_mj: float = inf

    def value(self, schedule: Schedule) -> float:
        """The objective of a schedule."""
        return self.objective.of(schedule.objective_us, schedule.energy_mj)

    def over(self, schedule: Schedule) -> float:
        """By what factor the schedule passes a cap; 0 if it keeps them."""
        factor = max(schedule.objective_us / self.max_latency_us, schedule.energy_mj / self.max_energy_mj)
        return factor if factor > 1 + KEPT else 0.0
