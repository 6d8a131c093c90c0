"""The target's self-score head, trained above the finished target: its weights, and so its text, stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors.numpy import save_file

from models_jax.self_score import FILE_NAME, Head, log_odds, shapes
from models_jax.training.data import Batch
from models_jax.transformer import Decoder
from planner.problems.vocabulary import DELIMITER, ID


@dataclass(frozen=True)
class HeadRecipe:
    """All that decides the training of the head."""

    width: int = 64
    steps: int = 2500
    rows: int = 16
    rate: float = 3e-3
    seed: int = 21
    sums_share: float = 0.2
    traces: int = 12_000
    trace_share: float = 0.5
    corrupt_share: float = 0.3
    token_weight: float = 0.5
    """Weight of the labels of single tokens beside those of steps."""


HEAD = HeadRecipe()


def first_weights(model: Decoder, recipe: HeadRecipe) -> Head:
    """Random, so that at first the score is the step's probability."""
    rng = np.random.default_rng(recipe.seed)
    drawn = {name: np.zeros(shape, np.float32) for name, shape in shapes(model.config, recipe.width).items()}
    features, width = drawn["inner"].shape
    drawn["inner"] = (rng.standard_normal((features, width)) * features**-0.5 * 0.3).astype(np.float32)
    drawn["outer"] = (rng.standard_normal(width) * width**-0.5 * 0.1).astype(np.float32)
    drawn["outer_bias"], drawn["slope"] = np.full((), 3.0, np.float32), np.full((), 1.0, np.float32)
    return Head(**{name: jnp.asarray(value) for name, value in drawn.items()})


def row_log_odds(head: Head, model: Decoder, tokens: jax.Array, positions: jax.Array, segments: jax.Array) -> jax.Array:
    """Log-odds of each token (rows, tokens); the first of a text has none that mean anything."""
    order = jnp.arange(tokens.shape[1])
    mask = (segments[:, :, None] == segments[:, None, :]) & (order[None, :, None] >= order[None, None, :])
    hidden, _ = model.hidden(tokens, positions, mask)
    before = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
    return log_odds(head, model, before, hidden, tokens)


def step_log_chances(odds: jax.Array, tokens: jax.Array) -> jax.Array:
    """At each delimiter the log-probability that its step is right: the sum over its tokens. (rows, tokens)"""
    order = jnp.arange(tokens.shape[1])
    ends = tokens == ID[DELIMITER]
    total = jnp.cumsum(jax.nn.log_sigmoid(odds), axis=1)
    last_end = jax.lax.cummax(jnp.where(ends, order, -1), axis=1)
    previous = jnp.pad(last_end[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    until = jnp.where(previous >= 0, jnp.take_along_axis(total, jnp.maximum(previous, 0), axis=1), 0.0)
    return total - until


def loss(head: Head, model: Decoder, batch: tuple[jax.Array, ...], token_weight: float) -> jax.Array:
    """Cross-entropy of the verdict on each step that follows right ones, and of the labels of its tokens.

    A token has a label up to the one where the text goes wrong; a step after a wrong one is not looked at, since no
    run asks for it: the wrong one was refused.
    """
    tokens, positions, segments, _, _, right, right_weights = batch
    odds = row_log_odds(head, model, tokens, positions, segments)
    order = jnp.arange(tokens.shape[1])
    ends = (tokens == ID[DELIMITER]) & (right_weights > 0)
    last_end = jax.lax.cummax(jnp.where(tokens == ID[DELIMITER], order, -1), axis=1)
    previous = jnp.maximum(jnp.pad(last_end[:, :-1], ((0, 0), (1, 0))), 0)
    alive_before = jnp.take_along_axis(right, previous, axis=1)
    chance = jnp.minimum(step_log_chances(odds, tokens), -1e-6)
    verdict = -(right * chance + (1.0 - right) * jnp.log1p(-jnp.exp(chance)))
    counts = ends * alive_before
    steps = jnp.sum(verdict * counts) / jnp.maximum(jnp.sum(counts), 1.0)
    alive = jnp.pad(right[:, :-1], ((0, 0), (1, 0))) * (right_weights > 0) * ~ends
    single = -(right * jax.nn.log_sigmoid(odds) + (1.0 - right) * jax.nn.log_sigmoid(-odds)) * alive
    return steps + token_weight * jnp.sum(single) / jnp.maximum(jnp.sum(ends), 1.0)


@lru_cache(maxsize=4)
def _update(recipe: HeadRecipe, graph: nnx.GraphDef[Decoder]) -> Callable[..., tuple[Head, optax.OptState, jax.Array]]:
    transform = _optimiser(recipe)

    @jax.jit
    def update(head, memory, state, batch):
        value, gradient = jax.value_and_grad(loss)(head, nnx.merge(graph, state), batch, recipe.token_weight)
        change, memory = transform.update(gradient, memory, head)
        return optax.apply_updates(head, change), memory, value

    return update


def _optimiser(recipe: HeadRecipe) -> optax.GradientTransformation:
    rate = optax.warmup_cosine_decay_schedule(0.0, recipe.rate, max(1, recipe.steps // 20), recipe.steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b1=0.9, b2=0.98, weight_decay=0.01))


def train_head(
    recipe: HeadRecipe, model: Decoder, batches: Iterator[Batch], log: Callable[[str], None] = print
) -> tuple[Head, list[float]]:
    """The head above `model`, and the loss of each step. The model is read and not changed."""
    graph, state = nnx.split(model)
    head = first_weights(model, recipe)
    memory, update = _optimiser(recipe).init(head), _update(recipe, graph)
    history: list[jax.Array] = []
    for step in range(1, recipe.steps + 1):
        head, memory, value = update(head, memory, state, next(batches).arrays())
        history.append(value)
        if step % 200 == 0:
            log(f"self-score head step {step} loss {float(np.mean([float(v) for v in history[-200:]])):.4f}")
    return head, [float(value) for value in history]


@partial(jax.jit, static_argnums=(0,))
def _chances(graph, state, head: Head, tokens: jax.Array) -> jax.Array:
    order = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    odds = row_log_odds(head, nnx.merge(graph, state), tokens, order, jnp.ones_like(tokens))
    return jnp.exp(step_log_chances(odds, tokens))


def chances(head: Head, model: Decoder, tokens: np.ndarray) -> np.ndarray:
    """At each delimiter of rows (rows, tokens) of one text each, the score of its step."""
    graph, state = nnx.split(model)
    return np.asarray(_chances(graph, state, head, tokens))


def save_head(head: Head, folder: Path) -> None:
    """Write the head beside the model."""
    path = folder / FILE_NAME
    save_file({name: np.asarray(value, np.float32) for name, value in head._asdict().items()}, path)
    path.chmod(0o644)
