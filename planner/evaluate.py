"""Accuracy of policies on the same fresh problems, with intervals and a paired test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb, sqrt

from planner.api import Run, as_machine, open_workers, plan
from planner.policy import Event as Turn
from planner.problems import problem_set
from planner.problems.base import Problem
from planner.report import report
from planner.runtime.engine import Engine
from planner.runtime.worker import Shelf
from planner.trace import ClockKind, Event
from planner.workflow import Policy, Workflow, check

Z95 = 1.959964
"""Two-sided 95 % quantile of the normal distribution."""


@dataclass(frozen=True)
class Accuracy:
    """One policy on one set."""

    policy: str
    """Its kind, or the name of a case."""
    problems: int
    correct: int
    low: float
    """Lower end of the 95 % interval (Wilson)."""
    high: float
    backtracked: int
    """Problems in which a backtrack was taken at least once."""
    tried: int
    """Problems in which an alternative was at least written and scored."""
    acceptance: float | None
    mean_us: float
    """Mean latency, of the clock `virtual`: modelled."""

    @property
    def share(self) -> float:
        """Share of problems that were solved."""
        return self.correct / self.problems


@dataclass(frozen=True)
class Pair:
    """How two policies differ on the same problems."""

    one: str
    other: str
    only_one: int
    """Problems that `one` solved and `other` did not."""
    only_other: int
    p_value: float
    """By the exact McNemar test."""


@dataclass(frozen=True)
class Evaluation:
    """All policies on one set, and how some of them differ."""

    problem_set: str
    distinct: int
    """Different problems among those drawn: a set that is small or uneven gives some more than once."""
    rows: tuple[Accuracy, ...]
    pairs: tuple[Pair, ...]


COMPARED = (("backtrack", "rsd"), ("specreason", "rsd"), ("specreason", "target_only"))
"""Pairs of policies that `evaluate` compares."""


def evaluate(
    workflow: Workflow,
    problems: Sequence[Problem],
    machine: str = "this-computer",
    policies: Sequence[Policy] = tuple(Policy),
    progress: Callable[[str, int], None] | None = None,
) -> Evaluation:
    """Run each policy on the same problems, its options as the workflow has them."""
    cases = {str(kind): replace(workflow, policy=replace(workflow.policy, kind=kind)) for kind in policies}
    return evaluate_cases(cases, problems, machine, COMPARED, progress)


def evaluate_cases(
    cases: Mapping[str, Workflow],
    problems: Sequence[Problem],
    machine: str = "this-computer",
    compared: Sequence[tuple[str, str]] = (),
    progress: Callable[[str, int], None] | None = None,
) -> Evaluation:
    """Run workflows of one set on the same problems by the serial plan: answers do not depend on plans."""
    on, name = as_machine(machine), next(iter(cases.values())).problems
    shelf = Shelf()
    rows: list[Accuracy] = []
    solved: dict[str, list[bool]] = {}
    try:
        for case, workflow in cases.items():
            check(workflow, case)
            made = plan(workflow, on, "serial")
            events: list[Event] = []
            with open_workers(made, ClockKind.VIRTUAL, shelf=shelf) as workers:
                engine = Engine(made, workers, problem_set(workflow.problems), events.append)
                answers = []
                for problem in problems:
                    answers.append(engine.solve(problem))
                    if progress:
                        progress(case, 1)
            run = Run(tuple(answers), report(made, events), tuple(events))
            rows.append(_row(case, run))
            solved[case] = [s.correct for s in run.solved]
    finally:
        shelf.close()
    pairs = tuple(_pair(a, b, solved) for a, b in compared if a in solved and b in solved)
    return Evaluation(name, len({problem.key for problem in problems}), tuple(rows), pairs)


def wilson(correct: int, problems: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927)."""
    p, n = correct / problems, problems
    centre = (p + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 * sqrt(p * (1 - p) / n + Z95**2 / (4 * n * n)) / (1 + Z95**2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def mcnemar(only_a: int, only_b: int) -> float:
    """Exact two-sided p-value that two paired shares are equal (McNemar 1947), from the pairs that differ."""
    n, k = only_a + only_b, min(only_a, only_b)
    return min(1.0, 2 * sum(comb(n, i) for i in range(k + 1)) / 2**n) if n else 1.0


def _row(policy: str, run: Run) -> Accuracy:
    correct, n = run.report.correct, run.report.problems
    low, high = wilson(correct, n)
    backtracked = sum(any(d.event is Turn.BACKTRACKED for d in s.outcome.decisions) for s in run.solved)
    tried = sum(any("alternative" in d.scores for d in s.outcome.decisions) for s in run.solved)
    return Accuracy(policy, n, correct, low, high, backtracked, tried, run.report.acceptance, run.report.mean_us)


def _pair(one: str, other: str, solved: Mapping[str, list[bool]]) -> Pair:
    pairs = list(zip(solved[one], solved[other], strict=True))
    more, less = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    return Pair(one, other, more, less, mcnemar(more, less))
