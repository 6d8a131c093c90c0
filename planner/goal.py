"""What a plan is made to be small in, and its caps, as a user says them and as simulation judges them."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from planner.errors import UserError
from planner.report import Report
from planner.schedule.aim import NO_CAP, Cap, Objective
from planner.units import MICROSECONDS, quantity

MILLIJOULES = {"mJ": 1, "J": 10**3, "kJ": 10**6}


def read_cap(text: str | None, units: dict[str, float], example: str, where: str) -> Cap:
    """A cap as it is written on a command line: `1.2x`, or a number and a unit. Raises UserError."""
    if text is None:
        return NO_CAP
    try:
        factor = float(text[:-1]) if text.endswith("x") else None
        amount = None if factor is not None else quantity(text, units, example)
    except ValueError:
        factor, amount = None, 0.0
    if not 0 < (factor or amount or 0.0) < inf:
        raise UserError(f"{where} is {text!r}", mend=f"use a factor such as 1.2x, or an amount such as {example}")
    return Cap(amount, factor)


def read_caps(latency: str | None, energy: str | None) -> tuple[Cap, Cap]:
    """The caps on latency and energy of a command line."""
    return (
        read_cap(latency, dict(MICROSECONDS), "250ms", "--max-latency"),
        read_cap(energy, dict(MILLIJOULES), "30J", "--max-energy"),
    )


@dataclass(frozen=True)
class Goal:
    """The objective, and caps on the mean latency and energy of a problem."""

    objective: Objective = Objective.LATENCY
    max_latency_us: float = inf
    max_energy_mj: float = inf

    def value(self, report: Report) -> float:
        """The objective of a simulated run, a problem; infinity beyond a cap."""
        latency, energy = report.mean_us, report.energy_mj / max(1, report.problems)
        over = latency > self.max_latency_us or energy > self.max_energy_mj
        return inf if over else self.objective.of(latency, energy)

    def excess(self, report: Report) -> float:
        """By what factor a run passes a cap at worst; at most 1 if it keeps them."""
        energy = report.energy_mj / max(1, report.problems)
        return max(report.mean_us / self.max_latency_us, energy / self.max_energy_mj)


@dataclass(frozen=True)
class Wish:
    """A goal as a user says it: the caps may be relative to the fastest plan."""

    objective: Objective = Objective.LATENCY
    max_latency: Cap = field(default=NO_CAP)
    max_energy: Cap = field(default=NO_CAP)

    @property
    def plain(self) -> bool:
        """Whether it is the least latency and nothing else."""
        return self == Wish()

    def goal(self, fastest: Report) -> Goal:
        """The goal in figures, where `fastest` is the simulation of the plan with the least latency."""
        energy = fastest.energy_mj / max(1, fastest.problems)
        return Goal(self.objective, self.max_latency.of(fastest.mean_us), self.max_energy.of(energy))
