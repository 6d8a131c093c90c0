"""The problem sets that ship, and JSONL files of problems."""

from __future__ import annotations

from planner.errors import UserError
from planner.problems.base import Problem, ProblemSet
from planner.problems.countdown import Countdown
from planner.problems.jsonl import Text, read_jsonl
from planner.problems.sums import Sums

__all__ = ["Problem", "ProblemSet", "names", "problem_set", "read_jsonl"]

_SETS: dict[str, type[Sums] | type[Countdown] | type[Text]] = {"sums": Sums, "countdown": Countdown, "text": Text}


def names() -> tuple[str, ...]:
    """The names that `problem_set` knows."""
    return tuple(_SETS)


def problem_set(name: str) -> ProblemSet:
    """The problem set called `name`. Raises UserError for a name that is not known."""
    if name not in _SETS:
        raise UserError(f"no problem set is called {name!r}", where="problems", mend=f"use one of {', '.join(_SETS)}")
    return _SETS[name]()
