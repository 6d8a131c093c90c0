"""Countdown: combine all the numbers with + - * to reach a target, one operation a step.

Several next steps can be right, and a wrong one is often legal: it leads nowhere, which only later steps show.
Numbers, results and targets lie in 0..99, so that two digits write each of them; a difference is never negative.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from planner.errors import UserError
from planner.problems.base import Problem, shown
from planner.problems.vocabulary import COUNTDOWN, DELIMITER, held_out

HIGHEST = 99
COUNTS = (3, 4)

_STEP = re.compile(r"(\d\d)([+*-])(\d\d)=(\d\d)(?:((?: \d\d)+)>(\d\d))?")
_HUMAN = re.compile(r"(\d+(?:[\s,]+\d+)*)\s*(?:->|=)\s*(\d+)")


@dataclass(frozen=True)
class Move:
    """One step: `left` op `right` = `result`, then what is left, and the target (None once one number is left)."""

    left: int
    op: str
    right: int
    result: int
    rest: tuple[int, ...]
    target: int | None


def write_number(number: int) -> str:
    """Two digits, least significant first: 7 is `70`."""
    return f"{number:02d}"[::-1]


def read_number(text: str) -> int:
    """The inverse of `write_number`."""
    return int(text[::-1])


def write(move: Move) -> str:
    """The model's form: `52-40=12 30 70 12>05`, and `52-40=12` for a last step."""
    head = f"{write_number(move.left)}{move.op}{write_number(move.right)}={write_number(move.result)}"
    if move.target is None:
        return head
    return head + "".join(" " + write_number(n) for n in move.rest) + ">" + write_number(move.target)


def read(text: str) -> Move | None:
    """The step in the model's form, or None if it is not one."""
    match = _STEP.fullmatch(text)
    if match is None:
        return None
    left, op, right, result, rest, target = match.groups()
    numbers = tuple(read_number(number) for number in rest.split()) if rest else (read_number(result),)
    return Move(
        read_number(left),
        op,
        read_number(right),
        read_number(result),
        numbers,
        read_number(target) if target else None,
    )


def compute(left: int, op: str, right: int) -> int | None:
    """The result, or None if it leaves the range."""
    result = left + right if op == "+" else left - right if op == "-" else left * right
    return result if 0 <= result <= HIGHEST else None


def moves(numbers: tuple[int, ...]) -> Iterator[tuple[int, str, int, int, tuple[int, ...]]]:
    """Every legal (left, op, right, result, rest), the larger number first; the result ends the rest."""
    for i, a in enumerate(numbers):
        for j in range(i + 1, len(numbers)):
            b = numbers[j]
            others = numbers[:i] + numbers[i + 1 : j] + numbers[j + 1 :]
            left, right = max(a, b), min(a, b)
            for op in "+-*":
                result = compute(left, op, right)
                if result is not None:
                    yield left, op, right, result, (*others, result)


def reachable(numbers: Sequence[int]) -> int:
    """The targets within reach, as a bit mask."""
    return _reachable(tuple(sorted(numbers)))


@lru_cache(maxsize=400_000)
def _reachable(numbers: tuple[int, ...]) -> int:
    if len(numbers) == 1:
        return 1 << numbers[0]
    mask = 0
    for *_, rest in moves(numbers):
        mask |= _reachable(tuple(sorted(rest)))
    return mask


@dataclass(frozen=True)
class Countdown:
    """The problem set. The fields shape what `generate` gives."""

    highest_number: int = 9
    three_share: float = 0.7
    """Share of problems with three numbers; the others have four."""
    least_right_share: float = 0.3
    """Share of the legal first steps that are right, at least: the more, the easier."""

    name = "countdown"
    delimiter = DELIMITER

    def draw(self, rng: np.random.Generator) -> Problem:
        """One problem, from the training or from the held-out part. Its target is the end of a random derivation."""
        while True:
            problem = self._draw_any(rng)
            if self._right_share(problem) >= self.least_right_share:
                return problem

    def _right_share(self, problem: Problem) -> float:
        if self.least_right_share <= 0.0:
            return 1.0
        legal = {move[:3] for move in moves(_state(problem)[0])}
        return len(self.right_steps(problem, [])) / len(legal)

    def _draw_any(self, rng: np.random.Generator) -> Problem:
        count = COUNTS[0] if rng.random() < self.three_share else COUNTS[1]
        numbers = tuple(rng.integers(1, self.highest_number + 1, size=count).tolist())
        rest = numbers
        for _ in range(count - 1):
            choices = list(moves(rest))
            rest = choices[int(rng.integers(len(choices)))][-1]
        return _problem(numbers, rest[0])

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
        """A problem from text such as `3 7 25 4 -> 50`."""
        where = f"question {shown(question)}"
        example = "write numbers, an arrow and the target, as in 3 7 25 4 -> 50"
        if not question.strip():
            raise UserError("the question is empty", where="countdown", mend=example)
        match = _HUMAN.fullmatch(question.strip())
        if match is None or not question.isascii():
            raise UserError("not a countdown problem", where=where, mend=example)
        written = re.findall(r"\d+", match[1])
        if len(written) not in COUNTS:
            raise UserError(f"{len(written)} numbers", where=where, mend="write 3 or 4 numbers")
        for number in (*written, match[2]):
            if len(number.lstrip("0")) > len(str(HIGHEST)):
                mend = f"stay within 0 to {HIGHEST}"
                raise UserError(f"{shown(number)[1:-1]} is too long", where=where, mend=mend)
        numbers = list(map(int, written))
        if not reachable(numbers) >> int(match[2]) & 1:
            raise UserError(
                f"{match[2]} cannot be reached with every result within 0 to {HIGHEST}",
                where=where,
                mend="choose another target",
            )
        return _problem(numbers, int(match[2]))

    def prompt(self, problem: Problem) -> str:
        """The set's marker, the numbers in rising order and the target: `C 30 40 70 52>05`."""
        numbers, target = _state(problem)
        return COUNTDOWN + "".join(" " + write_number(n) for n in numbers) + f">{write_number(target)}" + DELIMITER

    def readable(self, step: str) -> str:
        """`25-4=21 (3 7 21 left)`, and `25-4=21` for a last step."""
        move = read(step)
        if move is None:
            return step
        head = f"{move.left}{move.op}{move.right}={move.result}"
        return head if move.target is None else f"{head} ({' '.join(map(str, move.rest))} left)"

    def answer(self, step: str) -> str | None:
        """The result, if the step leaves a single number."""
        move = read(step)
        return str(move.result) if move is not None and move.target is None else None

    def grade(self, problem: Problem, steps: Sequence[str]) -> bool:
        """Whether every step is legal and the last one gives the target."""
        return bool(steps) and all(self.label(problem, steps)) and self.answer(steps[-1]) == problem.answer

    def right_steps(self, problem: Problem, steps: Sequence[str]) -> list[str]:
        """Every right step after `steps`, which are right themselves; none after the answer."""
        numbers, target = _state(problem)
        if steps:
            last = read(steps[-1])
            numbers = last.rest if last is not None else ()
        return list(_right_steps(numbers, target))

    def label(self, problem: Problem, steps: Sequence[str]) -> list[bool]:
        """For each step, whether all up to it is legal and correct and the target is still within reach."""
        numbers, target = _state(problem)
        labels: list[bool] = []
        right = True
        for step in steps:
            move = read(step)
            right = right and move is not None and _legal(numbers, move, target)
            if right and move is not None:
                numbers = move.rest
                right = bool(reachable(numbers) >> target & 1)
            labels.append(right)
        return labels


@lru_cache(maxsize=100_000)
def _right_steps(numbers: tuple[int, ...], target: int) -> tuple[str, ...]:
    found = {}
    for left, op, right, result, rest in moves(numbers):
        if reachable(rest) >> target & 1:
            key = (left, op, right)
            move = Move(left, op, right, result, rest, target if len(rest) > 1 else None)
            found.setdefault(key, write(move))
    return tuple(found.values())


def _legal(numbers: tuple[int, ...], move: Move, target: int) -> bool:
    """Whether the move uses numbers that are there, computes rightly and carries the rest and the target on."""
    left = list(numbers)
    for operand in (move.left, move.right):
        if operand not in left:
            return False
        left.remove(operand)
    right_target = None if not left else target
    return (
        compute(move.left, move.op, move.right) == move.result
        and sorted((*left, move.result)) == sorted(move.rest)
        and move.target == right_target
    )


def _problem(numbers: Sequence[int], target: int) -> Problem:
    return Problem("countdown", f"{' '.join(map(str, numbers))} -> {target}", str(target))


def _state(problem: Problem) -> tuple[tuple[int, ...], int]:
    numbers, target = problem.question.split("->")
    return tuple(sorted(int(number) for number in numbers.split())), int(target)
