"""Simulation: the engine itself, with outcomes drawn from the workflow's statistics in place of models.

The same policy, dispatch and engine as in a run, on the virtual clock. What a step turns out to be depends on its
random key alone, so plans that are compared meet the same outcomes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from planner.cost import Costs
from planner.lengths import LONGEST, factor
from planner.plan import Plan
from planner.problems.base import Problem
from planner.report import Report, report
from planner.runtime.backend import Work
from planner.runtime.engine import Engine, Load
from planner.runtime.worker import VirtualWorkers, modelled
from planner.shape import ModelShape
from planner.stand_in import DELIMITER, FILLER, StandInBackend, StandInProblems
from planner.trace import Sink, collector
from planner.workflow import RoleName, Statistics, Workflow

STEPS = 16
"""A prompt begins with this and the number of the problem's steps."""
FIRST = 1 << 16
"""Tokens from here on begin a step; they tell who wrote it, whether it is the last, and carry its luck."""
DRAFTED, LAST = 1, 2


@dataclass(frozen=True)
class Demand:
    """How many problems are at hand at once, and how often new ones arrive."""

    concurrency: int = 1
    arrivals_per_s: float | None = None
    """Mean rate of a Poisson stream; None: a new problem begins whenever one ends."""

    def load(self, problems: int, seed: int) -> Load:
        """The load of so many problems; the arrivals are drawn from the seed."""
        if self.arrivals_per_s is None:
            return Load(self.concurrency)
        gaps = np.random.default_rng(seed).exponential(1e6 / self.arrivals_per_s, problems)
        return Load(self.concurrency, [int(at) for at in np.cumsum(gaps)])


def simulate(
    plan: Plan,
    costs: Costs,
    problems: int = 100,
    seed: int = 0,
    sink: Sink | None = None,
    demand: Demand | None = None,
) -> Report:
    """What the plan is worth on `problems` problems whose outcomes are drawn from its statistics.

    `sink` is called with each event.
    """
    events, note = collector(sink)
    plan = replace(plan, workflow=_drawn(plan.workflow, seed))
    backend = SampledBackend(plan.workflow.statistics, costs.shapes)
    workers = VirtualWorkers(modelled(costs), dict.fromkeys(plan.places, backend))

    engine = Engine(plan, workers, _SampledProblems(), note)
    drawn = _SampledProblems().generate(problems, seed)
    for _ in engine.solve_all(drawn, (demand or Demand()).load(problems, seed)):
        pass
    return report(plan, events)


def _drawn(workflow: Workflow, seed: int) -> Workflow:
    """The workflow with the budgets and the thresholds that the drawn problems need."""
    longest = LONGEST * max(workflow.statistics.draft_step_tokens, workflow.statistics.target_step_tokens)
    steps = ceil(LONGEST * workflow.statistics.steps)
    budget = replace(workflow.budget, steps=steps, tokens=longest * (steps + 1), step_tokens=longest)
    # Drawn scores are 0 and 1, which no threshold of 0 could tell apart.
    policy = replace(workflow.policy, accept=0.5, accept_refined=0.5)
    return replace(workflow, policy=policy, budget=budget, sampling=replace(workflow.sampling, seed=seed))


class _SampledProblems(StandInProblems):
    """Problems that are nothing but a number; they end after a drawn number of steps."""

    name = "sampled"

    def generate(self, count: int, seed: int) -> list[Problem]:
        return [self.parse(f"{seed}/{number}") for number in range(count)]

    def answer(self, step: str) -> str | None:
        return step if int(step) >= FIRST and int(step) & LAST else None


class SampledBackend(StandInBackend):
    """A backend whose steps have a drawn length and a drawn verdict, both from the step's random key."""

    name = "sampled"

    def __init__(self, statistics: Statistics, shapes: Mapping[RoleName, ModelShape] | None = None) -> None:
        """Lengths and shares come from `statistics`."""
        super().__init__(shapes)
        self._statistics = statistics
        self._steps: dict[tuple[str, int], tuple[int, ...]] = {}

    def encode(self, name: str, text: str) -> tuple[int, ...]:
        """A prompt of the expected length; its first token says how many steps the problem has."""
        stats = self._statistics
        steps = _drawn_length(stats.steps, stats.steps_spread, f"steps/{text}", 0)
        return (STEPS + steps, *(FILLER,) * (stats.prompt_tokens - 2), DELIMITER)

    def decode(self, name: str, tokens: Sequence[int]) -> str:
        """The first token is the step's text."""
        return f"{tokens[0]}\n"

    def write(self, held: list[int], work: Work) -> tuple[int, ...]:
        """As drawn."""
        key = (work.role, work.key)
        if key not in self._steps:
            self._steps[key] = self._step(work, held)
        begun = len(work.begun)
        return self._steps[key][begun : begun + work.max_new]

    def score(self, held: list[int]) -> float:
        """1 or 0."""
        steps = [t for t in held if t >= FIRST]
        last, before = steps[-1], steps[-2] if len(steps) > 1 else None
        if last & DRAFTED:
            share = self._statistics.accept_after(None if before is None else bool(before & DRAFTED))
        else:
            share = self._statistics.accept_refined
        return float(_uniform("verdict", last) < share)

    def _step(self, work: Work, held: list[int]) -> tuple[int, ...]:
        """The whole step of a key."""
        drafted, stats = work.role == RoleName.DRAFT, self._statistics
        mean = stats.draft_step_tokens if drafted else stats.target_step_tokens
        spread = stats.draft_step_spread if drafted else stats.target_step_spread
        length = max(2, _drawn_length(mean, spread, "length", work.key))
        last = held.count(DELIMITER) >= held[0] - STEPS
        luck = int(_uniform("first", work.key) * FIRST * FIRST)
        first = FIRST + 4 * luck + LAST * last + drafted
        return (first, *(FILLER,) * (length - 2), DELIMITER)


def _drawn_length(mean: float, spread: float, what: str, number: int) -> int:
    """A whole number, at least 1."""
    return max(1, round(mean * factor(spread, _uniform(what, number))))


def _uniform(what: str, number: int) -> float:
    digest = hashlib.blake2b(f"{what}/{number}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") + 0.5) / 2**64
