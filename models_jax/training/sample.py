"""A batched sampler: many derivations at once, all rows at the same position."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models_jax.training.data import ROW_TOKENS
from models_jax.training.traces import SETS, Derivation
from models_jax.transformer import Cache, Decoder
from planner.problems.base import Problem
from planner.problems.vocabulary import DELIMITER, EOS, ID, PAD, decode, encode

LONGEST = {"sums": ROW_TOKENS, "countdown": ROW_TOKENS // 2}
"""Tokens after which a run is cut."""


@partial(jax.jit, static_argnums=(0,))
def _run(graph, state, prompts: jax.Array, lengths: jax.Array, key: jax.Array, temperature: jax.Array) -> jax.Array:
    """Write on from each prompt (rows of `prompts`, padded) until the end-of-text token or the end of the row."""
    model = nnx.merge(graph, state)
    rows, length = prompts.shape
    slots = jnp.arange(length)

    def step(carry, position):
        token, done, cache = carry
        places = jnp.full((rows, 1), position)
        mask = jnp.broadcast_to(slots <= position, (rows, 1, length))
        hidden, cache = model.hidden(token[:, None], places, mask, cache)
        logits = model.logits(hidden[:, 0])
        noise = jax.random.gumbel(jax.random.fold_in(key, position), logits.shape) * temperature
        given = position + 1 < lengths
        chosen = jnp.where(given, prompts[:, jnp.minimum(position + 1, length - 1)], jnp.argmax(logits + noise, -1))
        chosen = jnp.where(done, ID[PAD], chosen)
        return (chosen, done | (~given & (chosen == ID[EOS])), cache), chosen

    cache = Cache.empty(model.config, length, rows)
    first = prompts[:, 0]
    _, written = jax.lax.scan(step, (first, jnp.zeros(rows, bool), cache), jnp.arange(length - 1))
    return jnp.concatenate([first[:, None], written.T], axis=1)


def sample(
    model: Decoder,
    problems: Sequence[Problem],
    seed: int,
    temperature: float = 0.0,
    opening: Sequence[Sequence[str]] | None = None,
    rows: int = 128,
) -> list[Derivation]:
    """One derivation for each problem, going on from the steps of `opening` if given; temperature 0 is greedy."""
    graph, state = nnx.split(model)
    made: list[Derivation | None] = [None] * len(problems)
    order = sorted(range(len(problems)), key=lambda i: problems[i].set)
    for begin in range(0, len(order), rows):
        part = order[begin : begin + rows]
        length = max(LONGEST[problems[i].set] for i in part)
        prompts, lengths = np.zeros((rows, length), np.int32), np.ones(rows, np.int32)
        for row, i in enumerate(part):
            given = opening[i] if opening is not None else ()
            ids = encode(SETS[problems[i].set].prompt(problems[i]) + "".join(step + DELIMITER for step in given))
            ids = ids[:length]
            prompts[row, : len(ids)], lengths[row] = ids, len(ids)
        key = jax.random.fold_in(jax.random.key(seed), begin)
        written = np.asarray(_run(graph, state, prompts, lengths, key, jnp.float32(temperature)))
        for i, tokens in zip(part, written, strict=False):
            made[i] = _derivation(problems[i], tokens.tolist())
    return [run for run in made if run is not None]


def _derivation(problem: Problem, tokens: list[int]) -> Derivation:
    """Cut a row into its whole steps, up to the first answer."""
    _, *lines = decode(tokens).split(DELIMITER)
    steps: list[str] = []
    for line in lines[:-1]:
        steps.append(line)
        if SETS[problem.set].answer(line) is not None:
            break
    return Derivation(problem, tuple(steps))
