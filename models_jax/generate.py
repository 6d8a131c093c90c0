"""Reading and writing tokens on the device: pure functions of weights, cache and tokens.

The bits of a float product depend on the shape of the block that it is computed in. So both functions move over
the sequence in blocks of exactly `row_block` tokens, padded, one block an iteration of one loop: a token gives
the same bits whether it was fed with others, fed alone or generated, and however the work was cut.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models_jax.config import ModelConfig
from models_jax.transformer import Cache, Decoder

Weights = tuple[jax.Array, ...]
"""The parameters of a decoder in the order of `structure`."""


@lru_cache(maxsize=64)
def structure(config: ModelConfig) -> tuple[Any, Any]:
    """Graph and tree of a decoder of this shape, without its weights."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
    return graph, jax.tree.structure(state)


def weights_of(model: Decoder) -> Weights:
    """The parameters of `model`, to hand to `advance` and `rewards`."""
    return tuple(jax.tree.leaves(nnx.state(model)))


def decoder(config: ModelConfig, weights: Weights) -> Decoder:
    """The inverse of `weights_of`."""
    graph, tree = structure(config)
    return nnx.merge(graph, jax.tree.unflatten(tree, weights))


class Sampler(NamedTuple):
    """How the next token is chosen."""

    key: jax.Array | np.ndarray
    """64-bit key as two uint32, (2,)."""
    temperature: jax.Array | np.floating
    """float32; 0 is greedy."""
    stops: jax.Array | np.ndarray
    """(vocabulary,) bool: nothing is generated past these tokens."""


class Progress(NamedTuple):
    """What a loop carries."""

    cache: Cache
    tokens: jax.Array
    """(slots,) int32: the sequence, then anything."""
    computed: jax.Array
    """int32: so many tokens are in the cache."""
    length: jax.Array
    """int32: so many tokens are in the sequence."""
    stopped: jax.Array
    """bool: a stop token was generated."""


def choose(logits: jax.Array, position: jax.Array, sampler: Sampler) -> jax.Array:
    """Token id for `position` from logits (vocabulary,): argmax(logits / temperature + Gumbel(key, position))."""

    def sampled() -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(sampler.key), impl="threefry2x32"), position)
        return jnp.argmax(logits / sampler.temperature + jax.random.gumbel(key, logits.shape, jnp.float32))

    return jax.lax.cond(sampler.temperature > 0, sampled, lambda: jnp.argmax(logits)).astype(jnp.int32)


def read_block(
    model: Decoder, cache: Cache, tokens: jax.Array, start: jax.Array, row_block: int
) -> tuple[jax.Array, Cache]:
    """Run one block of `tokens` (slots,) from `start` on: hidden states (row_block, hidden) and the cache.

    Rows behind the last valid token are padding: what they write lies behind it and is overwritten before it
    is read.
    """
    block = jax.lax.dynamic_slice(tokens, (start,), (row_block,))
    positions = start + jnp.arange(row_block, dtype=jnp.int32)
    mask = jnp.arange(tokens.size, dtype=jnp.int32) <= positions[:, None]
    hidden, written = model.hidden(block[None], positions[None], mask[None], cache)
    assert written is not None
    return hidden[0], written


@partial(jax.jit, static_argnames=("config", "row_block"), donate_argnames=("cache",))
def advance(
    weights: Weights,
    cache: Cache,
    tokens: jax.Array,
    computed: jax.Array,
    length: jax.Array,
    limit: jax.Array,
    sampler: Sampler,
    *,
    config: ModelConfig,
    row_block: int,
) -> Progress:
    """Feed `tokens` (slots,) from `computed` up to `length`, then generate until a stop token or `limit` tokens.

    With `limit == length` it only reads. To generate, the last token must still be unread
    (`computed < length`): its logits give the next one. The last token generated is left unread. The cache has
    as many slots as `tokens`, at least `limit + row_block`, for the padding of the last block.
    """
    model = decoder(config, weights)
    generate = limit > length

    def unfinished(at: Progress) -> jax.Array:
        done = at.stopped | (generate & (at.length >= limit))
        return (at.computed < at.length) & ~done

    def body(at: Progress) -> Progress:
        hidden, cache = read_block(model, at.cache, at.tokens, at.computed, row_block)
        computed = jnp.minimum(at.computed + row_block, at.length)
        last = jax.lax.dynamic_index_in_dim(hidden, computed - 1 - at.computed, keepdims=False)
        write = (computed == at.length) & (at.length < limit)
        token = jax.lax.cond(
            write, lambda: choose(model.logits(last), at.length, sampler), lambda: at.tokens[at.length]
        )
        return Progress(
            cache=cache,
            tokens=at.tokens.at[at.length].set(token),
            computed=computed,
            length=at.length + write,
            stopped=write & sampler.stops[token],
        )

    with jax.default_matmul_precision("highest"):
        return jax.lax.while_loop(unfinished, body, Progress(cache, tokens, computed, length, jnp.zeros((), jnp.bool_)))


@partial(jax.jit, static_argnames=("config", "row_block"), donate_argnames=("cache",))
def rewards(
    weights: Weights,
    cache: Cache,
    tokens: jax.Array,
    computed: jax.Array,
    length: jax.Array,
    *,
    config: ModelConfig,
    row_block: int,
) -> tuple[Cache, jax.Array]:
    """Feed `tokens` (slots,) from `computed` up to `length`; the reward of each of them, (slots,) float32."""
    model = decoder(config, weights)

    def body(at: tuple[Cache, jax.Array, jax.Array]) -> tuple[Cache, jax.Array, jax.Array]:
        cache, found, start = at
        hidden, cache = read_block(model, cache, tokens, start, row_block)
        found = jax.lax.dynamic_update_slice(found, model.reward(hidden), (start,))
        return cache, found, start + row_block

    with jax.default_matmul_precision("highest"):
        cache, found, _ = jax.lax.while_loop(
            lambda at: at[2] < length, body, (cache, jnp.zeros(tokens.shape, jnp.float32), computed)
        )
    return cache, found
