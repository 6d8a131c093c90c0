"""Simulation: the engine itself, with outcomes drawn from the workflow's statistics in place of models.

The same policy, dispatch and engine as in a run, on the virtual clock. What a step turns out to be depends on its
random key alone, so plans that are compared meet the same outcomes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.cost import Costs
from planner.lengths import LONGEST, factor
from planner.plan import Plan
from planner.problems.base import Problem
from planner.report import Report, report
from planner.runtime.backend import ModelInfo, Output, Work
from planner.runtime.engine import Engine, Load
from planner.runtime.worker import VirtualWorkers, modelled
from planner.trace import Sink, collector
from planner.workflow import Role, RoleName, Statistics, Workflow

DELIMITER = 1
FILLER = 2
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
    backend = SampledBackend(plan.workflow.statistics)
    workers = VirtualWorkers(modelled(costs), dict.fromkeys(plan.placement.values(), backend))

    engine = Engine(plan, workers, _SampledProblems(), note)
    drawn = _SampledProblems().generate(problems, seed)
    for _ in engine.solve_all(drawn, (demand or Demand()).load(problems, seed)):
        pass
    return report(plan, events)


def _drawn(workflow: Workflow, seed: int) -> Workflow:
    """The workflow with the budgets and the thresholds that the drawn problems need."""
    longest = LONGEST * max(workflow.statistics.draft_step_tokens, workflow.statistics.target_step_tokens)
    steps = LONGEST * workflow.statistics.steps
    budget = replace(workflow.budget, steps=steps, tokens=longest * (steps + 1), step_tokens=longest)
    # Drawn scores are 0 and 1, which no threshold of 0 could tell apart.
    policy = replace(workflow.policy, accept=0.5, accept_refined=0.5)
    return replace(workflow, policy=policy, budget=budget, sampling=replace(workflow.sampling, seed=seed))


class _SampledProblems:
    """Problems that are nothing but a number; they end after a drawn number of steps."""

    name = "sampled"
    delimiter = "\n"

    def generate(self, count: int, seed: int) -> list[Problem]:
        return [Problem(self.name, f"{seed}/{number}", "") for number in range(count)]

    def parse(self, question: str) -> Problem:
        return Problem(self.name, question, "")

    def prompt(self, problem: Problem) -> str:
        return problem.question

    def readable(self, step: str) -> str:
        return step

    def answer(self, step: str) -> str | None:
        return step if int(step) >= FIRST and int(step) & LAST else None

    def grade(self, problem: Problem, steps: Sequence[str]) -> bool:
        return False


class SampledBackend:
    """A backend whose steps have a drawn length and a drawn verdict, both from the step's random key."""

    def __init__(self, statistics: Statistics) -> None:
        """Lengths and shares come from `statistics`."""
        self._statistics = statistics
        self._sequences: dict[tuple[str, str], list[int]] = {}

    def load(self, name: str, role: Role, delimiter: str) -> ModelInfo:
        """Nothing to load."""
        return ModelInfo("sampled", "sampled", 0, 0, 1 << 40)

    def encode(self, name: str, text: str) -> tuple[int, ...]:
        """A prompt of the expected length; its first token says how many steps the problem has."""
        stats = self._statistics
        steps = _drawn_length(stats.steps, stats.steps_spread, f"steps/{text}", 0)
        return (STEPS + steps, *(FILLER,) * (stats.prompt_tokens - 2), DELIMITER)

    def encode_prompt(self, name: str, text: str) -> tuple[int, ...]:
        """See `encode`."""
        return self.encode(name, text)

    def decode(self, name: str, tokens: Sequence[int]) -> str:
        """The first token is the step's text."""
        return f"{tokens[0]}\n"

    def run(self, work: Work) -> Output:
        """Read, write or score as drawn."""
        held = self._sequences.setdefault((work.role, work.sequence), [])
        if work.keep > len(held):
            raise ValueError(f"sequence {work.sequence} holds {len(held)} tokens, not {work.keep}")
        held[work.keep :] = work.feed
        if work.score:
            return Output(scores=tuple(self._score(held[: at + 1]) for at in work.score))
        begun = _length_of_last_step(held)
        written = self._step(work, held)[begun : begun + work.max_new] if work.max_new else ()
        held += written
        return Output(written, complete=bool(written) and written[-1] == DELIMITER)

    def rewind(self, name: str, sequence: str, tokens: int) -> None:
        """Forget the rest."""
        held = self._sequences.setdefault((name, sequence), [])
        if tokens > len(held):
            raise ValueError(f"sequence {sequence} holds {len(held)} tokens, not {tokens}")
        del held[tokens:]

    def fork(self, name: str, sequence: str, new_sequence: str) -> None:
        """Copy the tokens."""
        self._sequences[name, new_sequence] = list(self._sequences[name, sequence])

    def close(self) -> None:
        """Forget all."""
        self._sequences.clear()

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

    def _score(self, tokens: list[int]) -> float:
        """1 or 0 for the last step."""
        steps = [t for t in tokens if t >= FIRST]
        last, before = steps[-1], steps[-2] if len(steps) > 1 else None
        if last & DRAFTED:
            share = self._statistics.accept_after(None if before is None else bool(before & DRAFTED))
        else:
            share = self._statistics.accept_refined
        return float(_uniform("verdict", last) < share)


def _length_of_last_step(tokens: list[int]) -> int:
    """Tokens after the last delimiter."""
    for length, token in enumerate(reversed(tokens)):
        if token == DELIMITER:
            return length
    return len(tokens)


def _drawn_length(mean: int, spread: float, what: str, number: int) -> int:
    """A whole number, at least 1."""
    return max(1, round(mean * factor(spread, _uniform(what, number))))


def _uniform(what: str, number: int) -> float:
    digest = hashlib.blake2b(f"{what}/{number}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") + 0.5) / 2**64
