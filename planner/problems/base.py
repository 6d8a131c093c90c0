"""What a problem set is: it makes problems, writes the prompt, reads the steps and grades the answer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Problem:
    """One problem as people read it."""

    set: str
    question: str
    answer: str
    """The reference answer. For `countdown` the target number, since many derivations are right."""

    @property
    def key(self) -> str:
        """Hash of the content: a problem is known by it, and random keys are derived from it."""
        text = "\x1f".join((self.set, self.question, self.answer))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def shown(question: str) -> str:
    """A question as a message names it: in quotes, its middle left out where it is long."""
    return repr(question if len(question) <= 80 else f"{question[:40]}...{question[-36:]}")


def label_of(problem: Problem, times: int) -> str:
    """The name of a problem in trace and journal where it comes for the `times`-th time: its key, and a number if it
    comes again."""
    return problem.key if times == 1 else f"{problem.key}#{times}"


class ProblemSet(Protocol):
    """A kind of problem. Steps are given and taken in the form that the model writes, delimiter left off."""

    name: str
    delimiter: str
    """Text that ends a step, as the model writes it."""

    def generate(self, count: int, seed: int) -> list[Problem]:
        """`count` problems; the same seed gives the same problems."""
        ...

    def parse(self, question: str) -> Problem:
        """A problem from the question that a person typed. Raises UserError if it cannot be read."""
        ...

    def prompt(self, problem: Problem) -> str:
        """The prompt in the form that the model reads, up to where the first step begins."""
        ...

    def readable(self, step: str) -> str:
        """The step as people read it; text that has no such form is returned as it is."""
        ...

    def answer(self, step: str) -> str | None:
        """The final answer if this step gives one, as people read it, else None."""
        ...

    def grade(self, problem: Problem, steps: Sequence[str]) -> bool:
        """Whether the steps, taken as the whole run, solve the problem."""
        ...
