"""What a session needs of the engine that it runs in, and what it gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from planner.errors import UserError
from planner.plan import Plan
from planner.policy import Outcome, Result
from planner.problems.base import Problem, ProblemSet
from planner.runtime.backend import ModelInfo
from planner.trace import Event
from planner.workflow import RoleName


class Journal(Protocol):
    """What a run notes so that another can go on from there."""

    def results(self, label: str) -> Mapping[str, Result]:
        """What the policy of a problem was given so far, by the name of the request."""
        ...

    def result(self, label: str, request: str, result: Result) -> None:
        """The policy is about to go on with a result."""
        ...

    def end(self, solved: Solved) -> None:
        """A problem is over."""
        ...

    def ended(self, label: str) -> bool:
        """Whether a problem was over in an earlier run."""
        ...


class Host(Protocol):
    """What a session needs of the engine that it runs in."""

    problems: ProblemSet
    journal: Journal | None

    @property
    def plan(self) -> Plan:
        """The plan that is followed now."""
        ...

    @property
    def models(self) -> Mapping[RoleName, ModelInfo]:
        """What is known of each role's model."""
        ...

    def sink(self, event: Event, /) -> None:
        """Put an event into the trace."""
        ...

    def encode(self, role: RoleName, text: str) -> tuple[int, ...]:
        """Token ids of a text for a role."""
        ...

    def encode_prompt(self, role: RoleName, text: str) -> tuple[int, ...]:
        """Token ids of a prompt for a role."""
        ...

    def now_us(self) -> int:
        """The time now."""
        ...


@dataclass(frozen=True)
class Solved:
    """What a run gave for one problem."""

    problem: Problem
    outcome: Outcome
    steps: tuple[str, ...]
    """The committed steps as people read them."""
    answer: str | None
    correct: bool
    latency_us: int
    """From its arrival to its answer."""
    label: str = ""
    """Its name in trace and journal."""
    error: UserError | None = None
    """Why it could not be run, or not to its end; its status is `error` then."""
