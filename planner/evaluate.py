"""Accuracy of policies on the same fresh problems, with intervals and a paired test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb, sqrt

from planner.api import Run, as_machine, as_workflow, open_workers, plan
from planner.policy import Event as Turn
from planner.problems import problem_set
from planner.problems.base import Problem
from planner.report import report
from planner.runtime.engine import Engine
from planner.runtime.worker import Shelf
from planner.trace import ClockKind, Event
from planner.workflow import Policy, Workflow

Z95 = 1.959964
"""Two-sided 95 % quantile of the normal distribution."""


@dataclass(frozen=True)
class Accuracy:
    """One policy on one set."""

    policy: Policy
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
class Evaluation:
    """All policies on one set, and how `backtrack` differs from `rsd`."""

    problem_set: str
    distinct: int
    """Different problems among those drawn: a set that is small or uneven gives some more than once."""
    rows: tuple[Accuracy, ...]
    only_backtrack: int
    """Problems that `backtrack` solved and `rsd` did not."""
    only_rsd: int
    p_value: float | None
    """Of the two, by the exact McNemar test; None unless both ran."""


def evaluate(
    workflow: Workflow,
    problems: Sequence[Problem],
    machine: str = "this-computer",
    policies: Sequence[Policy] = tuple(Policy),
    progress: Callable[[Policy, int], None] | None = None,
) -> Evaluation:
    """Run each policy on the same problems by the serial plan on the virtual clock: answers do not depend on plans."""
    workflow, on = as_workflow(workflow), as_machine(machine)
    shelf = Shelf()
    rows, solved = [], {}
    try:
        for policy in policies:
            changed = replace(workflow, policy=replace(workflow.policy, kind=policy))
            made = plan(changed, on, "serial")
            events: list[Event] = []
            with open_workers(made, ClockKind.VIRTUAL, shelf=shelf) as workers:
                engine = Engine(made, workers, problem_set(workflow.problems), events.append)
                answers = []
                for problem in problems:
                    answers.append(engine.solve(problem))
                    if progress:
                        progress(policy, 1)
            run = Run(tuple(answers), report(made, events), tuple(events))
            rows.append(_row(policy, run))
            solved[policy] = [s.correct for s in run.solved]
    finally:
        shelf.close()
    distinct = len({problem.key for problem in problems})
    return _evaluation(workflow.problems, distinct, rows, solved)


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


def _row(policy: Policy, run: Run) -> Accuracy:
    correct, n = run.report.correct, run.report.problems
    low, high = wilson(correct, n)
    backtracked = sum(any(d.event is Turn.BACKTRACKED for d in s.outcome.decisions) for s in run.solved)
    tried = sum(any("alternative" in d.scores for d in s.outcome.decisions) for s in run.solved)
    return Accuracy(policy, n, correct, low, high, backtracked, tried, run.report.acceptance, run.report.mean_us)


def _evaluation(name: str, distinct: int, rows: list[Accuracy], solved: Mapping[Policy, list[bool]]) -> Evaluation:
    if not {Policy.RSD, Policy.BACKTRACK} <= solved.keys():
        return Evaluation(name, distinct, tuple(rows), 0, 0, None)
    pairs = list(zip(solved[Policy.BACKTRACK], solved[Policy.RSD], strict=True))
    more, less = sum(b and not r for b, r in pairs), sum(r and not b for b, r in pairs)
    return Evaluation(name, distinct, tuple(rows), more, less, mcnemar(more, less))
