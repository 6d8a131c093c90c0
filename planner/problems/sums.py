"""Chained sums: each step is the expression after one left-to-right reduction, the last one is the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.errors import UserError
from planner.problems.base import Problem, shown
from planner.problems.vocabulary import DELIMITER, SUMS, held_out

DIGITS = 5
LIMIT = 10**DIGITS
"""Every number and every result stays below it in size."""
MOST_TERMS = 7
"""More would pass 200 tokens with all the steps."""

_MODEL_FORM = re.compile(rf"(?:[+-]\d{{{DIGITS}}})+")
_HUMAN_FORM = re.compile(r"[+-]?\d+(?:[+-]\d+)*")


def write(terms: Sequence[int]) -> str:
    """The model's form: sign and five digits a number, least significant first: `[90, -4]` is `+09000-40000`."""
    return "".join(("-" if term < 0 else "+") + f"{abs(term):0{DIGITS}d}"[::-1] for term in terms)


def read(text: str) -> list[int] | None:
    """The numbers of a line in the model's form, or None if it is not one."""
    if not _MODEL_FORM.fullmatch(text):
        return None
    width = DIGITS + 1
    numbers = [text[i : i + width] for i in range(0, len(text), width)]
    return [int(number[0] + number[:0:-1]) for number in numbers]


def human(terms: Sequence[int]) -> str:
    """What people read: `[90, -4]` is `90-4`."""
    return "".join(f"{term:+d}" for term in terms).removeprefix("+")


def reduce(terms: Sequence[int]) -> list[int]:
    """The terms after the first two were added."""
    return [terms[0] + terms[1], *terms[2:]]


@dataclass(frozen=True)
class Sums:
    """The problem set. The fields shape what `generate` gives."""

    fewest_terms: int = 3
    most_terms: int = 6
    most_digits: int = 4

    name = "sums"
    delimiter = DELIMITER

    def draw(self, rng: np.random.Generator) -> Problem:
        """One problem, from the training or from the held-out part. The first term is positive."""
        count = int(rng.integers(self.fewest_terms, self.most_terms + 1))
        digits = rng.integers(1, self.most_digits + 1, size=count)
        sizes = rng.integers(10 ** (digits - 1), 10**digits)
        signs = np.where(rng.random(count) < 0.5, -1, 1)
        signs[0] = 1
        return _problem([int(term) for term in sizes * signs])

    def generate(self, count: int, seed: int) -> list[Problem]:
        """`count` problems that training never saw; the same seed gives the same problems."""
        rng = np.random.default_rng(seed)
        found: list[Problem] = []
        while len(found) < count:
            problem = self.draw(rng)
            if held_out(self.prompt(problem)):
                found.append(problem)
        return found

    def parse(self, question: str) -> Problem:
        """A problem from text such as `4123 - 871 + 90`."""
        text = "".join(question.split()).replace("−", "-").removesuffix("?").removesuffix("=")
        where = f"question {shown(question)}"
        if not text:
            raise UserError("the question is empty", where="sums", mend="write a sum such as 4123-871+90")
        split = re.search(r"\d\s+\d", question)  # two numbers, or one: it is not ours to say
        if split or not _HUMAN_FORM.fullmatch(text) or not text.isascii():
            raise UserError(
                "not a sum of whole numbers", where=where, mend="use digits, + and - only, as in 4123-871+90"
            )
        written = re.findall(r"[+-]?\d+", text)
        if not 2 <= len(written) <= MOST_TERMS:
            raise UserError(f"{len(written)} terms", where=where, mend=f"write 2 to {MOST_TERMS} terms")
        for number in (term.lstrip("+-") for term in written):
            if len(number.lstrip("0")) > DIGITS:
                mend = f"write numbers of at most {DIGITS} digits"
                raise UserError(f"{shown(number)[1:-1]} is too long", where=where, mend=mend)
        terms = list(map(int, written))
        for partial in np.cumsum(terms).tolist():
            if abs(partial) >= LIMIT:
                raise UserError(
                    f"the sum passes {partial} on the way", where=where, mend=f"keep every sum below {LIMIT}"
                )
        return _problem(terms)

    def prompt(self, problem: Problem) -> str:
        """The set's marker and the whole expression in the model's form."""
        return SUMS + write(_terms(problem)) + DELIMITER

    def readable(self, step: str) -> str:
        """The expression as people write it."""
        terms = read(step)
        return step if terms is None else human(terms)

    def answer(self, step: str) -> str | None:
        """The number, if the step is a single one."""
        terms = read(step)
        return str(terms[0]) if terms is not None and len(terms) == 1 else None

    def grade(self, problem: Problem, steps: Sequence[str]) -> bool:
        """Whether the last step is the right number."""
        return bool(steps) and self.answer(steps[-1]) == problem.answer

    def right_steps(self, problem: Problem, steps: Sequence[str]) -> list[str]:
        """The right step after `steps`, which are right themselves; none after the answer."""
        terms = _terms(problem)
        for _ in steps:
            terms = reduce(terms)
        return [write(reduce(terms))] if len(terms) > 1 else []

    def label(self, problem: Problem, steps: Sequence[str]) -> list[bool]:
        """For each step, whether it and all before it are right."""
        terms: list[int] = _terms(problem)
        labels: list[bool] = []
        right = True
        for step in steps:
            right = right and len(terms) > 1
            if right:
                terms = reduce(terms)
                right = read(step) == terms and step == write(terms)
            labels.append(right)
        return labels


def _problem(terms: list[int]) -> Problem:
    return Problem("sums", human(terms), str(sum(terms)))


def _terms(problem: Problem) -> list[int]:
    return [int(term) for term in re.findall(r"[+-]?\d+", problem.question)]
