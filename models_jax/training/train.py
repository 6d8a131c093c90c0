"""The training loop: AdamW with warm-up and a late linear decay over packed rows, seeded throughout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import lru_cache

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from models_jax.training.data import Batch
from models_jax.training.recipes import Recipe
from models_jax.transformer import Decoder


def optimiser(recipe: Recipe) -> optax.GradientTransformation:
    """Clipped AdamW; the rate rises, holds and falls linearly to a hundredth."""
    decay = max(1, int(recipe.steps * recipe.decay_share))
    warm = min(recipe.warm_up, max(1, recipe.steps // 10))
    hold = max(0, recipe.steps - decay - warm)
    rate = optax.join_schedules(
        [
            optax.linear_schedule(0.0, recipe.rate, warm),
            optax.constant_schedule(recipe.rate),
            optax.linear_schedule(recipe.rate, recipe.rate / 100, decay),
        ],
        [warm, warm + hold],
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b1=0.9, b2=0.98, weight_decay=0.01))


def losses(model: Decoder, batch: tuple[jax.Array, ...], reward: bool) -> tuple[jax.Array, jax.Array]:
    """Weighted means of the next-token cross-entropy and of the reward's cross-entropy."""
    tokens, positions, segments, targets, weights, right, right_weights = batch
    order = jnp.arange(tokens.shape[1])
    mask = (segments[:, :, None] == segments[:, None, :]) & (order[None, :, None] >= order[None, None, :])
    hidden, _ = model.hidden(tokens, positions, mask)
    assert isinstance(model.embed_tokens, nnx.Embed), "weights of 8 bits are not trained"
    log_probability = jax.nn.log_softmax(model.embed_tokens.attend(hidden) if reward else model.logits(hidden))
    entropy = -jnp.sum(targets * log_probability, axis=-1)
    language = jnp.sum(entropy * weights) / jnp.maximum(jnp.sum(weights), 1.0)
    if not reward or model.score is None:
        return language, jnp.zeros(())
    verdict = jax.nn.log_softmax(model.score(hidden))
    cross = -(right * verdict[..., 1] + (1.0 - right) * verdict[..., 0])
    return language, jnp.sum(cross * right_weights) / jnp.maximum(jnp.sum(right_weights), 1.0)


Update = Callable[..., tuple[nnx.State, optax.OptState, jax.Array, jax.Array]]


@lru_cache(maxsize=8)
def update_of(recipe: Recipe, graph: nnx.GraphDef[Decoder]) -> Update:
    """The compiled training step: weights, optimiser's memory and a batch to new ones, the loss and its two parts."""
    transform, reward = optimiser(recipe), recipe.config.reward_head is not None

    def objective(state: nnx.State, batch: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        language, verdict = losses(nnx.merge(graph, state), batch, reward)
        return language + recipe.reward_weight * verdict, jnp.stack([language, verdict])

    @jax.jit
    def update(state, memory, batch):
        (loss, parts), gradient = jax.value_and_grad(objective, has_aux=True)(state, batch)
        change, memory = transform.update(gradient, memory, state)
        return optax.apply_updates(state, change), memory, loss, parts

    return update


def train(
    recipe: Recipe,
    batches: Iterator[Batch],
    start: Decoder | None = None,
    on_checkpoint: Callable[[Decoder, int], None] | None = None,
    every: int = 1000,
    log: Callable[[str], None] = print,
) -> tuple[Decoder, list[float]]:
    """Train a new decoder, or go on from `start`. Gives it back with the loss of each step."""
    model = start if start is not None else Decoder(recipe.config, nnx.Rngs(recipe.seed))
    graph, state = nnx.split(model)
    memory = optimiser(recipe).init(state)
    update = update_of(recipe, graph)
    history: list[jax.Array] = []
    begun = time.monotonic()
    for step in range(1, (recipe.stop or recipe.steps) + 1):
        state, memory, loss, parts = update(state, memory, next(batches).arrays())
        history.append(loss)
        if step % 100 == 0:
            language, verdict = (float(part) for part in parts)
            spent = time.monotonic() - begun
            log(f"{recipe.name} step {step} next-token {language:.4f} reward {verdict:.4f} {spent:.0f} s")
        if on_checkpoint is not None and step % every == 0:
            on_checkpoint(nnx.merge(graph, state), step)
    return nnx.merge(graph, state), [float(loss) for loss in history]
