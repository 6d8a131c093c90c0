"""Simulation: the engine itself, with outcomes drawn from the workflow's statistics in place of models.

The same policy, dispatch and engine as in a run, on the virtual clock. What a step turns out to be depends on its
random key alone, so plans that are compared meet the same outcomes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from planner.cost import Costs
from planner.plan import Plan
from planner.problems.base import Problem
from planner.report import Report, report
from planner.runtime.backend import ModelInfo, Output, Work
from planner.runtime.engine import Engine
from planner.runtime.worker import VirtualWorkers
from planner.trace import Event, Sink
from planner.workflow import Role, RoleName, Statistics, Workflow

DELIMITER = 1
FILLER = 2
FIRST = 1 << 16
"""Tokens from here on begin a step; they tell who wrote it and carry its luck."""


def simulate(plan: Plan, costs: Costs, problems: int = 100, seed: int = 0, sink: Sink | None = None) -> Report:
    """What the plan is worth on `problems` problems whose outcomes are drawn from its statistics.

    `sink` is called with each event.
    """
    events: list[Event] = []
    plan = replace(plan, workflow=_drawn(plan.workflow, seed))
    backend = SampledBackend(plan.workflow.statistics)
    workers = VirtualWorkers(plan.machine, costs, dict.fromkeys(plan.placement.values(), backend))

    def note(event: Event) -> None:
        events.append(event)
        if sink is not None:
            sink(event)

    engine = Engine(plan, workers, _SampledProblems(), note)
    for number in range(problems):
        engine.solve(Problem("sampled", f"{seed}/{number}", ""))
    return report(plan, events)


def _drawn(workflow: Workflow, seed: int) -> Workflow:
    """The workflow with the budgets and the thresholds that the drawn problems need."""
    longest = 2 * max(workflow.statistics.draft_step_tokens, workflow.statistics.target_step_tokens)
    steps = workflow.statistics.steps
    budget = replace(workflow.budget, steps=steps, tokens=longest * (steps + 1), step_tokens=longest)
    # Drawn scores are 0 and 1, which no threshold of 0 could tell apart.
    policy = replace(workflow.policy, accept=0.5, accept_refined=0.5)
    return replace(workflow, policy=policy, budget=budget, sampling=replace(workflow.sampling, seed=seed))


class _SampledProblems:
    """Problems that are nothing but a number; they end after the mean number of steps."""

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
        return None

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
        """A prompt of the expected length, whatever the text."""
        return (FILLER,) * (self._statistics.prompt_tokens - 1) + (DELIMITER,)

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
        written = self._step(work)[begun : begun + work.max_new] if work.max_new else ()
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

    def _step(self, work: Work) -> tuple[int, ...]:
        """The whole step of a key: between half and one and a half times the mean length."""
        drafted = work.role == RoleName.DRAFT
        mean = self._statistics.draft_step_tokens if drafted else self._statistics.target_step_tokens
        length = max(2, round(mean * (0.5 + _uniform("length", work.key))))
        first = FIRST + 2 * int(_uniform("first", work.key) * FIRST * FIRST) + drafted
        return (first, *(FILLER,) * (length - 2), DELIMITER)

    def _score(self, tokens: list[int]) -> float:
        """1 or 0 for the last step."""
        first = next(t for t in reversed(tokens) if t >= FIRST)
        share = self._statistics.accept if first % 2 else self._statistics.accept_refined
        return float(_uniform("verdict", first) < share)


def _length_of_last_step(tokens: list[int]) -> int:
    """Tokens after the last delimiter."""
    for length, token in enumerate(reversed(tokens)):
        if token == DELIMITER:
            return length
    return len(tokens)


def _uniform(what: str, number: int) -> float:
    digest = hashlib.blake2b(f"{what}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
