"""Derivations to learn from: right ones, and ones that go wrong somewhere and on from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from planner.problems import countdown, sums
from planner.problems.base import Problem
from planner.problems.countdown import Countdown
from planner.problems.sums import Sums
from planner.problems.vocabulary import held_out

SETS: dict[str, Sums | Countdown] = {"sums": Sums(), "countdown": Countdown()}


@dataclass(frozen=True)
class Derivation:
    """A problem and the steps of one run, right or not."""

    problem: Problem
    steps: tuple[str, ...]

    @property
    def labels(self) -> list[bool]:
        """For each step, whether all up to it is right."""
        return SETS[self.problem.set].label(self.problem, self.steps)


TRAINING_SETS: dict[str, Sums | Countdown] = {"sums": Sums(fewest_terms=2), "countdown": Countdown()}
"""What training draws from: sums of two terms as well, where the addition is easiest to find."""


def draw_problem(name: str, rng: np.random.Generator, sets: Mapping[str, Sums | Countdown] = TRAINING_SETS) -> Problem:
    """A problem of the training part: held-out problems are passed over."""
    problems = sets[name]
    while True:
        problem = problems.draw(rng)
        if not held_out(problems.prompt(problem)):
            return problem


def derive(problem: Problem, rng: np.random.Generator) -> Derivation:
    """A right derivation; where several next steps are right, each is as likely."""
    problems = SETS[problem.set]
    steps: list[str] = []
    while options := problems.right_steps(problem, steps):
        steps.append(options[int(rng.integers(len(options)))])
    return Derivation(problem, tuple(steps))


def corrupt(problem: Problem, rng: np.random.Generator) -> Derivation:
    """A derivation with one wrong step, which goes on after it as if nothing had happened."""
    right = derive(problem, rng).steps
    at = int(rng.integers(len(right)))
    before = right[:at]
    if problem.set == "sums":
        return Derivation(problem, (*before, *_wrong_sum(right[at], rng)))
    if rng.random() < FORCED_SHARE:
        return Derivation(problem, (*right[:-1], _forced(right[-1], problem, rng)))
    previous = before[-1] if before else _opening(problem)
    return Derivation(problem, (*before, *_wrong_countdown(previous, problem, rng)))


FORCED_SHARE = 0.4
"""Share of the made-up mistakes of `countdown` that are a last line which claims the target."""


def _forced(last: str, problem: Problem, rng: np.random.Generator) -> str:
    """A last line that is wrong and claims the target: another operation, or an operand that is not there."""
    move = countdown.read(last)
    assert move is not None
    target, left, right = int(problem.answer), move.left, move.right
    if rng.random() < 0.25:
        left = int(np.clip(left + rng.integers(-10, 11), 0, countdown.HIGHEST))
    wrong = [op for op in "+-*" if (left, op) != (move.left, move.op) and countdown.compute(left, op, right) != target]
    op = wrong[int(rng.integers(len(wrong)))] if wrong else move.op
    claimed = target if wrong or rng.random() < 0.5 else (target + int(rng.integers(1, 10))) % 100
    if not wrong and claimed == target:
        claimed = (target + 1) % 100
    return countdown.write(countdown.Move(left, op, right, claimed, (claimed,), None))


def _change_digit(text: str, places: list[int], rng: np.random.Generator) -> str:
    at = places[int(rng.integers(len(places)))]
    other = "0123456789".replace(text[at], "")[int(rng.integers(9))]
    return text[:at] + other + text[at + 1 :]


def _wrong_sum(step: str, rng: np.random.Generator) -> list[str]:
    """A slip in one line of a sum, and the lines that follow from it."""
    width = sums.DIGITS + 1
    kind = rng.random()
    if kind < 0.35:
        step = _change_digit(step, list(range(1, width)), rng)
    elif kind < 0.65:
        terms = sums.read(step) or [0]
        terms[0] += int(rng.choice([-1, 1])) * 10 ** int(rng.integers(4))
        step = sums.write([min(max(terms[0], 1 - sums.LIMIT), sums.LIMIT - 1), *terms[1:]])
    elif kind < 0.75:
        step = ("+" if step[0] == "-" else "-") + step[1:]
    else:
        step = _change_digit(step, [i for i, c in enumerate(step) if c.isdigit()], rng)
    lines = [step]
    while len(terms := sums.read(lines[-1]) or [0]) > 1:
        total = sums.reduce(terms)
        if abs(total[0]) >= sums.LIMIT:
            break
        lines.append(sums.write(total))
    return lines


def _opening(problem: Problem) -> str:
    """The state before the first step, as a step that leaves all the numbers."""
    numbers, target = problem.question.split("->")
    rest = tuple(sorted(int(number) for number in numbers.split()))
    return countdown.write(countdown.Move(0, "+", 0, 0, rest, int(target)))


def _wrong_countdown(previous: str, problem: Problem, rng: np.random.Generator) -> list[str]:
    """A move that leads nowhere, or a slip in one line; then the moves that follow from it."""
    target = int(problem.answer)
    lines: list[str] = []
    slip = rng.random() < 0.35
    while True:
        move = countdown.read(lines[-1] if lines else previous)
        if move is None or (lines and move.target is None):
            return lines
        options = list(countdown.moves(move.rest))
        if not options:
            return lines
        if lines:
            chosen = [o for o in options if countdown.reachable(o[-1]) >> target & 1] or options
        else:
            chosen = options if slip else [o for o in options if not countdown.reachable(o[-1]) >> target & 1]
            slip = slip or not chosen
        left, op, right, result, rest = (chosen or options)[int(rng.integers(len(chosen or options)))]
        last = len(rest) == 1
        if last and result != target and rng.random() < 0.6:
            result = target
        line = countdown.write(countdown.Move(left, op, right, result, rest, None if last else target))
        if slip and not lines:
            line = _slip(line, rng)
        lines.append(line)


def _slip(line: str, rng: np.random.Generator) -> str:
    """One digit of the line changed; a changed result is mostly carried on into the rest."""
    if len(line) > 8 and rng.random() < 0.6:
        changed = _change_digit(line, [6, 7], rng)
        end = line.index(">")
        return changed[: end - 2] + changed[6:8] + changed[end:]
    return _change_digit(line, [i for i, c in enumerate(line) if c.isdigit()], rng)
