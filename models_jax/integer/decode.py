"""Reading and writing tokens with the JAX twin: one compiled loop on the device for a whole chunk."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models_jax.integer import gumbel, tables, twin
from models_jax.integer.files import IntegerModel, Shape
from models_jax.integer.twin import Cache, Parameters, interpolate, shift_round

FEED_ROWS = 8
"""Tokens that are read together when a sequence is fed. Integers are exact, so any number gives the same bits."""


class Sampler(NamedTuple):
    """How the next token is chosen."""

    key: jax.Array | np.ndarray
    """Upper and lower word of the 64-bit key, uint32 (2,)."""
    temperature: jax.Array | np.int32
    """int32, UQ3.10; 0 is greedy."""
    stops: jax.Array | np.ndarray
    """int8 (vocabulary, n): the table of `models_jax.stops.Stops`; nothing is generated past state n."""
    state: jax.Array | np.int32
    """int32: the state of the step that is begun, below n."""


def sampler(key: int, temperature: float, stops: np.ndarray | jax.Array, state: int = 0) -> Sampler:
    """From a 64-bit key, a temperature, a table of stops and a state. Raises UserError for a bad temperature."""
    # Numpy's numbers go to the device with the call they are for; jnp's would each be a call of their own.
    words, units = np.array(gumbel.key_words(key), np.uint32), np.int32(gumbel.temperature_units(temperature))
    return Sampler(words, units, stops, np.int32(state))


class Progress(NamedTuple):
    """What the loops carry."""

    cache: Cache
    tokens: jax.Array
    """int32 (slots,): the sequence, then anything."""
    computed: jax.Array
    """int32: so many tokens are in the cache."""
    length: jax.Array
    """int32: so many tokens are in the sequence."""
    state: jax.Array
    """int32: how much of a delimiter the step ends with."""


def threefry(key: jax.Array | np.ndarray, x0: jax.Array, x1: jax.Array) -> jax.Array:
    """The first word of `gumbel.threefry`."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(gumbel.PARITY))
    x0, x1 = x0 + schedule[0], x1 + schedule[1]
    for block in range(5):
        for r in gumbel.ROTATIONS[block % 2]:
            x0 = x0 + x1
            x1 = ((x1 << r) | (x1 >> (32 - r))) ^ x0
        x0 = x0 + schedule[(block + 1) % 3]
        x1 = x1 + schedule[(block + 2) % 3] + jnp.uint32(block + 1)
    return x0


def gumbel_noise(bits: jax.Array) -> jax.Array:
    """See `gumbel.gumbel`. Both tables are joined; they hold as many entries."""
    low = bits < jnp.uint32(1 << 31)
    tail = jnp.where(low, bits, ~bits)
    w = jnp.maximum(2 * tail + 1, jnp.uint32(1 << 8))
    leading = jax.lax.clz(w)
    octave = (23 - leading).astype(jnp.int32)
    position = (octave << 13) + (((w << leading) >> 18) & 0x1FFF).astype(jnp.int32)
    joined = np.concatenate([tables.GUMBEL_LOW, tables.GUMBEL_HIGH])
    return interpolate(joined, position + jnp.where(low, 0, tables.GUMBEL_LOW.size << 8), 8)


def choose(logits: jax.Array, position: jax.Array, sampler: Sampler) -> jax.Array:
    """See `gumbel.choose`; logits (vocabulary,)."""

    def sampled() -> jax.Array:
        tokens = jnp.arange(logits.size, dtype=jnp.uint32)
        bits = threefry(sampler.key, jnp.broadcast_to(position.astype(jnp.uint32), tokens.shape), tokens)
        scaled = shift_round(gumbel_noise(bits) * sampler.temperature, gumbel.TEMPERATURE_BITS)
        return jnp.argmax(logits + scaled)

    return jax.lax.cond(sampler.temperature > 0, sampled, lambda: jnp.argmax(logits)).astype(jnp.int32)


def feed(p: Parameters, at: Progress, until: jax.Array, shape: Shape) -> Progress:
    """Read tokens in blocks until `until` are in the cache.

    What the last block writes behind them is overwritten before it is read.
    """

    def body(at: Progress) -> Progress:
        block = jax.lax.dynamic_slice(at.tokens, (at.computed,), (FEED_ROWS,))
        _, cache = twin.read_rows(p, block, at.computed, at.cache, shape)
        return at._replace(cache=cache, computed=jnp.minimum(at.computed + FEED_ROWS, until))

    return jax.lax.while_loop(lambda at: at.computed < until, body, at)


def generate(p: Parameters, at: Progress, limit: jax.Array, sampler: Sampler, shape: Shape) -> Progress:
    """Write tokens one by one, up to `limit` in the sequence or the end of a step. The last one is left unread."""

    def body(at: Progress) -> Progress:
        token = jax.lax.dynamic_slice(at.tokens, (at.computed,), (1,))
        x, cache = twin.read_rows(p, token, at.computed, at.cache, shape)
        chosen = choose(twin.logits(p, x)[0], at.length, sampler)
        tokens = jax.lax.dynamic_update_slice(at.tokens, chosen[None], (at.length,))
        state = sampler.stops[chosen, at.state].astype(jnp.int32)
        return Progress(cache, tokens, at.computed + 1, at.length + 1, state)

    complete = sampler.stops.shape[1]
    return jax.lax.while_loop(lambda at: (at.length < limit) & (at.state < complete), body, at)


@partial(jax.jit, static_argnames=("shape",), donate_argnames=("cache",))
def advance(
    p: Parameters,
    cache: Cache,
    tokens: jax.Array,
    computed: jax.Array,
    length: jax.Array,
    limit: jax.Array,
    sampler: Sampler,
    *,
    shape: Shape,
) -> Progress:
    """Feed `tokens` (slots,) from `computed` up to `length`, then generate until a step's end or `limit` tokens.

    With `limit == length` it only reads. To generate, the last token must still be unread (`computed < length`):
    its logits give the next one. The cache and `tokens` need `limit + FEED_ROWS` slots.
    """
    at = Progress(cache, tokens, computed, length, jnp.asarray(sampler.state))
    at = feed(p, at, jnp.where(limit > length, length - 1, length), shape)
    return generate(p, at, limit, sampler, shape)


@partial(jax.jit, static_argnames=("shape",))
def block_logits(
    p: Parameters, tokens: jax.Array, start: jax.Array, cache: Cache, *, shape: Shape
) -> tuple[jax.Array, Cache]:
    """Logits (rows, vocabulary) of a block of tokens, and the cache."""
    x, cache = twin.read_rows(p, tokens, start, cache, shape)
    return twin.logits(p, x), cache


def sequence_logits(model: IntegerModel, tokens: np.ndarray) -> np.ndarray:
    """Logits (tokens, vocabulary) of a whole sequence, to compare models with."""
    shape, rows = model.shape, 32
    padded = np.zeros(-(-len(tokens) // rows) * rows, np.int32)
    padded[: len(tokens)] = tokens
    p, cache = twin.parameters(model), twin.empty_cache(shape, shape.context_tokens + rows)
    found = []
    for start in range(0, len(padded), rows):
        block = jnp.asarray(padded[start : start + rows])
        logits, cache = block_logits(p, block, jnp.int32(start), cache, shape=shape)
        found.append(np.asarray(logits))
    return np.concatenate(found)[: len(tokens)]
