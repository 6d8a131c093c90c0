"""Training rows: derivations as tokens with targets and labels, packed side by side with segment numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from models_jax.training.traces import SETS, TRAINING_SETS, Derivation, corrupt, derive, draw_problem
from planner.problems.countdown import Countdown
from planner.problems.sums import Sums
from planner.problems.vocabulary import DELIMITER, EOS, ID, SELF_SCORE, TOKENS, encode

ROW_TOKENS = 144
"""The longest derivation of `sums` takes 134 tokens."""
COMPUTED = {"sums": 6, "countdown": 8}
"""Tokens at the start of a step that are worked out; the rest of it is copied from the line before."""


@dataclass
class Example:
    """One derivation as tokens, with what each position is to predict and whether the text is right up to it."""

    tokens: list[int]
    targets: np.ndarray
    """(tokens, vocabulary): distribution of the next token, uniform over the right steps."""
    weights: np.ndarray
    """(tokens,): weight of the prediction; 0 in the prompt and after a mistake."""
    right: np.ndarray
    """(tokens,): 1 while the text up to this token can still become a right one."""
    right_weights: np.ndarray
    """(tokens,): weight of that label, largest where a step ends."""


def example(
    derivation: Derivation, emphasis: float = 3.0, step_end: float = 4.0, first_mistake: float = 8.0
) -> Example:
    """Tokens, targets and labels of a derivation; a right and whole one ends with the end-of-text token.

    The three factors are weights: of tokens that are worked out, and for the reward of the end of a step and of the
    token where the text goes wrong, from which the model learns to compare what came with what should have come.
    """
    problem, problems = derivation.problem, SETS[derivation.problem.set]
    tokens = encode(problems.prompt(problem))
    opening = len(tokens)
    size = opening + sum(len(step) + 1 for step in derivation.steps) + 1
    targets = np.zeros((size, len(TOKENS)), np.float32)
    weights, right = np.zeros(size, np.float32), np.ones(size, np.float32)
    right_weights = np.zeros(size, np.float32)
    computed = COMPUTED[problem.set]
    for number, (step, good) in enumerate(zip(derivation.steps, derivation.labels, strict=True)):
        begin = len(tokens)
        text = step + DELIMITER
        alive = number == 0 or bool(right[begin - 1])
        live = [s + DELIMITER for s in problems.right_steps(problem, derivation.steps[:number])] if alive else []
        unusual = good and text not in live
        for place, character in enumerate(text):
            at = begin + place
            if live:
                _spread(targets[at - 1], live, place)
                weights[at - 1] = emphasis if place < computed else 1.0
            live = [s for s in live if s[place : place + 1] == character]
            right[at] = unusual or bool(live)
            right_weights[at] = 0.0 if unusual else 1.0 if right[at] else first_mistake if right[at - 1] else 0.3
        right[begin + len(text) - 1] = good
        right_weights[begin + len(text) - 1] = step_end
        tokens += encode(text)
    if derivation.steps and right[len(tokens) - 1] and problems.answer(derivation.steps[-1]) is not None:
        targets[len(tokens) - 1, ID[EOS]] = 1.0
        weights[len(tokens) - 1] = 1.0
    right[len(tokens) :] = right[len(tokens) - 1]
    tokens.append(ID[EOS])
    return Example(tokens, targets, weights, right, right_weights)


def _spread(row: np.ndarray, live: list[str], place: int) -> None:
    for step in live:
        row[ID[step[place]]] += 1.0 / len(live)


def self_score(derivation: Derivation, weight: float = 3.0) -> Example:
    """The derivation, then `?`, answered by 9 if all its steps are right and by 0 if not."""
    made = example(derivation)
    last = len(made.tokens) - 1
    if all(derivation.labels):
        made.weights[last - 1] = 0.0
    made.tokens[last] = ID[SELF_SCORE]
    made.targets[last] = 0.0
    made.targets[last, ID["9" if all(derivation.labels) else "0"]] = 1.0
    made.weights[last] = weight
    return made


def right_examples(
    seed: int,
    sums_share: float,
    self_score_share: float = 0.0,
    sets: Mapping[str, Sums | Countdown] = TRAINING_SETS,
) -> Iterator[Example]:
    """An endless stream of right derivations, some of them followed by the self-score prompt."""
    rng = np.random.default_rng(seed)
    while True:
        problem = draw_problem("sums" if rng.random() < sums_share else "countdown", rng, sets)
        if rng.random() >= self_score_share:
            yield example(derive(problem, rng))
            continue
        whole = corrupt(problem, rng) if rng.random() < 0.5 else derive(problem, rng)
        kept = int(rng.integers(1, len(whole.steps) + 1))
        yield self_score(Derivation(problem, whole.steps[:kept]))


def mixed_examples(
    seed: int, sums_share: float, traces: list[Derivation], trace_share: float, corrupt_share: float
) -> Iterator[Example]:
    """An endless stream for the reward model: sampled traces, corrupted derivations and right ones."""
    rng = np.random.default_rng(seed)
    pools = {name: [trace for trace in traces if trace.problem.set == name] for name in SETS}
    while True:
        name = "sums" if rng.random() < sums_share else "countdown"
        kind = rng.random()
        if pools[name] and kind < trace_share:
            yield example(pools[name][int(rng.integers(len(pools[name])))])
        elif kind < trace_share + corrupt_share:
            yield example(corrupt(draw_problem(name, rng), rng))
        else:
            yield example(derive(draw_problem(name, rng), rng))


@dataclass
class Batch:
    """Rows of packed examples; segment 0 is padding."""

    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    right: np.ndarray
    right_weights: np.ndarray

    def arrays(self) -> tuple[np.ndarray, ...]:
        """All the fields, in order."""
        return tuple(vars(self).values())


def pack(examples: Iterator[Example], rows: int, length: int = ROW_TOKENS) -> Iterator[Batch]:
    """Batches of `rows` rows, each filled with the first examples that fit; what no row could hold is passed over."""
    examples = (item for item in examples if len(item.tokens) <= length)
    waiting: list[Example] = []
    while True:
        batch, used = _empty(rows, length), [0] * rows
        left_over: list[Example] = []
        while len(left_over) < 6:
            item = waiting.pop() if waiting else next(examples)
            row = next((r for r in range(rows) if used[r] + len(item.tokens) <= length), None)
            if row is None:
                left_over.append(item)
            else:
                _place(batch, item, row, used[row])
                used[row] += len(item.tokens)
        waiting += left_over
        yield batch


def _empty(rows: int, length: int) -> Batch:
    shape = (rows, length)
    return Batch(
        tokens=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        segments=np.zeros(shape, np.int32),
        targets=np.zeros((*shape, len(TOKENS)), np.float32),
        weights=np.zeros(shape, np.float32),
        right=np.zeros(shape, np.float32),
        right_weights=np.zeros(shape, np.float32),
    )


def _place(batch: Batch, item: Example, row: int, begin: int) -> None:
    where = (row, slice(begin, begin + len(item.tokens)))
    batch.tokens[where] = item.tokens
    batch.positions[where] = np.arange(len(item.tokens))
    batch.segments[where] = batch.segments[row].max() + 1
    batch.targets[where] = item.targets
    batch.weights[where] = item.weights
    batch.right[where] = item.right
    batch.right_weights[where] = item.right_weights
