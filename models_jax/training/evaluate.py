"""How good a model is, on problems that training never saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models_jax.self_score import Head
from models_jax.training.data import ROW_TOKENS
from models_jax.training.sample import sample
from models_jax.training.self_score import chances
from models_jax.training.traces import SETS, Derivation
from models_jax.transformer import Decoder
from planner.problems.vocabulary import DELIMITER, ID, SELF_SCORE, encode

EVALUATION_SEED = 1_000_003


@dataclass(frozen=True)
class Accuracy:
    """Greedy accuracy on one set."""

    problems: int
    step: float
    """Share of right steps among those that follow right steps only."""
    final: float
    """Share of problems solved."""


def accuracy(model: Decoder, name: str, count: int, seed: int = EVALUATION_SEED) -> Accuracy:
    """Write `count` held-out problems greedily, and grade them."""
    problems = SETS[name].generate(count, seed)
    right = tried = solved = 0
    for run in sample(model, problems, seed=0):
        labels = run.labels
        right += sum(labels)
        tried += sum(labels) + (not all(labels) or not labels)
        solved += SETS[name].grade(run.problem, run.steps)
    return Accuracy(count, right / max(1, tried), solved / count)


@dataclass(frozen=True)
class Scored:
    """Scores of the steps of many runs, side by side with what is true."""

    sets: np.ndarray
    index: np.ndarray
    """Place of the step in its run, from 0."""
    score: np.ndarray
    right: np.ndarray

    def auc(self, where: np.ndarray | None = None) -> float:
        """Chance that a right step scores above a wrong one, over the steps that `where` picks."""
        keep = np.ones(len(self.score), bool) if where is None else where
        return area_under_curve(self.score[keep], self.right[keep])

    def calibration_error(self, bins: int = 10) -> float:
        """Mean gap between score and share of right steps, over equal score ranges, weighted by size."""
        at = np.minimum((self.score * bins).astype(int), bins - 1)
        gaps = [abs((self.score - self.right)[at == b].sum()) for b in range(bins)]
        return float(sum(gaps) / len(self.score))


def area_under_curve(score: np.ndarray, right: np.ndarray) -> float:
    """Rank statistic with ties counted half; nan if one kind is missing."""
    values, place, sizes = np.unique(score, return_inverse=True, return_counts=True)
    del values
    rank = (np.cumsum(sizes) - (sizes - 1) / 2)[place]
    good, bad = int(right.sum()), int((~right).sum())
    if not good or not bad:
        return float("nan")
    return float((rank[right].sum() - good * (good + 1) / 2) / (good * bad))


@partial(jax.jit, static_argnums=(0,))
def _rewards(graph, state, tokens: jax.Array) -> jax.Array:
    model = nnx.merge(graph, state)
    return model.reward(_hidden(model, tokens))


@partial(jax.jit, static_argnums=(0,))
def _next(graph, state, tokens: jax.Array) -> jax.Array:
    model = nnx.merge(graph, state)
    return jax.nn.softmax(model.logits(_hidden(model, tokens)))


def _hidden(model: Decoder, tokens: jax.Array) -> jax.Array:
    rows, length = tokens.shape
    order = jnp.arange(length)
    mask = jnp.broadcast_to(order[:, None] >= order, (rows, length, length))
    return model.hidden(tokens, jnp.broadcast_to(order, (rows, length)), mask)[0]


def _rows(texts: Sequence[str], size: int = 64) -> list[np.ndarray]:
    parts = []
    for begin in range(0, len(texts), size):
        tokens = np.zeros((size, ROW_TOKENS), np.int32)
        for row, text in enumerate(texts[begin : begin + size]):
            ids = encode(text)[:ROW_TOKENS]
            tokens[row, : len(ids)] = ids
        parts.append(tokens)
    return parts


def _text(run: Derivation, steps: int) -> str:
    return SETS[run.problem.set].prompt(run.problem) + "".join(s + DELIMITER for s in run.steps[:steps])


def score(model: Decoder, runs: Sequence[Derivation]) -> Scored:
    """The reward at the delimiter of every step."""
    graph, state = nnx.split(model)
    texts = [_text(run, len(run.steps)) for run in runs]
    grid = np.concatenate([np.asarray(_rewards(graph, state, tokens)) for tokens in _rows(texts)])
    found = []
    for run, row in zip(runs, grid, strict=False):
        for index, right in enumerate(run.labels):
            found.append((run.problem.set, index, row[len(_text(run, index + 1)) - 1], right))
    return _scored(found)


def self_scores(model: Decoder, runs: Sequence[Derivation], seed: int = 0) -> Scored:
    """What the target answers to `?` after a random step of each run: its mean digit, divided by 9."""
    rng = np.random.default_rng(seed)
    return digit_scores(model, [(run, int(rng.integers(len(run.steps)))) for run in runs if run.steps])


def asked_steps(runs: Sequence[Derivation]) -> list[tuple[Derivation, int]]:
    """The steps that follow right ones alone, as a run would ask about them: a wrong one is refused there."""
    return [(run, at) for run in runs for at in range(len(run.steps)) if all(run.labels[:at])]


def head_scores(model: Decoder, head: Head, steps: Sequence[tuple[Derivation, int]]) -> Scored:
    """What the self-score head says of the step of each run that has the given place."""
    texts = [_text(run, at + 1) for run, at in steps]
    grid = np.concatenate([chances(head, model, tokens) for tokens in _rows(texts)])
    found = []
    for (run, at), text, row in zip(steps, texts, grid, strict=False):
        found.append((run.problem.set, at, row[len(text) - 1], run.labels[at]))
    return _scored(found)


def digit_scores(model: Decoder, steps: Sequence[tuple[Derivation, int]]) -> Scored:
    """The mean digit that the target itself answers to `?` after each step, divided by 9."""
    graph, state = nnx.split(model)
    texts = [_text(run, at + 1) + SELF_SCORE for run, at in steps]
    grid = np.concatenate([np.asarray(_next(graph, state, tokens)) for tokens in _rows(texts)])
    digits = [ID[digit] for digit in "0123456789"]
    found = []
    for (run, at), text, row in zip(steps, texts, grid, strict=False):
        chance = row[len(text) - 1][digits]
        found.append((run.problem.set, at, float(chance @ np.arange(10) / 9 / chance.sum()), run.labels[at]))
    return _scored(found)


def _scored(found: list[tuple[str, int, float, bool]]) -> Scored:
    sets, index, values, right = zip(*found, strict=True)
    return Scored(np.array(sets), np.array(index), np.array(values, np.float64), np.array(right, bool))
