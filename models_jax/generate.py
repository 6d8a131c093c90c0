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
    """(vocabulary, n) int8: the table of `models_jax.stops.Stops`; nothing is generated past state n."""
    state: jax.Array | np.integer = np.int32(0)
    """int32: the state of the step that is begun, below n."""
    top_k: jax.Array | np.integer = np.int32(0)
    """int32: only so many of the likeliest tokens; 0: all."""
    top_p: jax.Array | np.floating = np.float32(1)
    """float32: only the likeliest tokens that have this share together."""
    min_p: jax.Array | np.floating = np.float32(0)
    """float32: only tokens with at least this share of the likeliest one's probability."""


class Progress(NamedTuple):
    """What a loop carries."""

    cache: Cache
    tokens: jax.Array
    """(slots,) int32: the sequence, then anything."""
    computed: jax.Array
    """int32: so many tokens are in the cache."""
    length: jax.Array
    """int32: so many tokens are in the sequence."""
    state: jax.Array
    """int32: how much of a delimiter the step ends with; see `Sampler.stops`."""


def restricted(logits: jax.Array, sampler: Sampler) -> jax.Array:
    """Logits (vocabulary,) with -inf where top_k, then top_p, then min_p leave a token out. Ties stay."""
    ordered = jnp.sort(logits, descending=True)
    ranks = jnp.arange(logits.size, dtype=jnp.int32)
    ordered = jnp.where((sampler.top_k == 0) | (ranks < sampler.top_k), ordered, -jnp.inf)
    share = jax.nn.softmax(ordered)
    before = jnp.cumsum(share) - share
    kept = (before < sampler.top_p) & (ordered >= ordered[0] + jnp.log(sampler.min_p))
    least = jnp.min(jnp.where(kept | (ranks == 0), ordered, jnp.inf))
    return jnp.where(logits >= least, logits, -jnp.inf)


def choose(logits: jax.Array, position: jax.Array, sampler: Sampler) -> jax.Array:
    """Token id for `position` from logits (vocabulary,): argmax(logits / temperature + Gumbel(key, position)).

    The noise of a token does not depend on which others are left out.
    """

    def sampled() -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(sampler.key), impl="threefry2x32"), position)
        scaled = logits / sampler.temperature
        narrow = (sampler.top_k > 0) | (sampler.top_p < 1) | (sampler.min_p > 0)
        scaled = jax.lax.cond(narrow, lambda: restricted(scaled, sampler), lambda: scaled)
        return jnp.argmax(scaled + jax.random.gumbel(key, logits.shape, jnp.float32))

    return jax.lax.cond(sampler.temperature > 0, sampled, lambda: jnp.argmax(logits)).astype(jnp.int32)


def read_block(
    model: Decoder, cache: Cache, tokens: jax.Array, start: jax.Array, row_block: int
) -> tuple[jax.Array, Cache]:
    """Run one block of `tokens` (slots,) from `start` on: hidden states (row_block, hidden) and the cache.

    Rows behind the last valid token are padding: what they write lies behind it and is overwritten before it
    is read.
    """
    block = jax.lax.dynamic_slice(tokens, (start,), (row_block,))
    # What is behind the last valid token may be of a larger vocabulary, and no lookup may give a NaN.
    block = jnp.minimum(block, model.config.vocab_size - 1)
    positions = start + jnp.arange(row_block, dtype=jnp.int32)
    mask = jnp.arange(tokens.size, dtype=jnp.int32) <= positions[:, None]
    hidden, written = model.hidden(block[None], positions[None], mask[None], cache)
    assert written is not None
    return hidden[0], written


def write(model: Decoder, at: Progress, limit: jax.Array, sampler: Sampler, row_block: int) -> Progress:
    """Feed what is unread, then generate until a step's end or `limit` tokens; see `advance`."""
    generate = limit > at.length

    def unfinished(at: Progress) -> jax.Array:
        done = (at.state == sampler.stops.shape[1]) | (generate & (at.length >= limit))
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
            state=jnp.where(write, sampler.stops[token, at.state].astype(jnp.int32), at.state),
        )

    return jax.lax.while_loop(unfinished, body, at)


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
    """Feed `tokens` (slots,) from `computed` up to `length`, then generate until a step's end or `limit` tokens.

    With `limit == length` it only reads. To generate, the last token must still be unread
    (`computed < length`): its logits give the next one. The last token generated is left unread. The cache has
    as many slots as `tokens`, at least `limit + row_block`, for the padding of the last block.
    """
    at = Progress(cache, tokens, computed, length, jnp.asarray(sampler.state))
    with jax.default_matmul_precision("highest"):
        return write(decoder(config, weights), at, limit, sampler, row_block)


class Together(NamedTuple):
    """What a loop over n sequences carries."""

    cache: Cache
    """Of n sequences."""
    tokens: jax.Array
    """(n, slots) int32: the sequences, then anything."""
    length: jax.Array
    """(n,) int32: so many tokens are in each, all but the last in its cache."""
    state: jax.Array
    """(n,) int32; see `Progress`."""


def write_together(model: Decoder, at: Together, limit: jax.Array, sampler: Sampler, row_block: int) -> Together:
    """Generate in all sequences until each is done; see `advance_together`."""
    count, slots = at.tokens.shape
    each = jnp.arange(count)

    def live(at: Together) -> jax.Array:
        return (at.state != sampler.stops.shape[1]) & (at.length < limit)

    def body(at: Together) -> Together:
        last = at.length - 1
        block, positions = (jnp.pad(part, (0, row_block - count)) for part in (at.tokens[each, last], last))
        block = jnp.minimum(block, model.config.vocab_size - 1)
        mask = jnp.arange(slots, dtype=jnp.int32) <= positions[:, None]
        hidden, cache = model.hidden(block[None], positions[None], mask[None], at.cache)
        assert cache is not None

        # One after the other: the head's product has the shape that it has for one sequence.
        def one(of: tuple[jax.Array, ...]) -> jax.Array:
            row, key, position, write = of
            own = sampler._replace(key=key)
            return jax.lax.cond(write, lambda: choose(model.logits(row), position, own), lambda: jnp.int32(0))

        write = live(at)
        token = jax.lax.map(one, (hidden[0, :count], jnp.asarray(sampler.key), at.length, write))
        return Together(
            cache=cache,
            tokens=at.tokens.at[each, at.length].set(jnp.where(write, token, at.tokens[each, at.length])),
            length=at.length + write,
            state=jnp.where(write, jnp.asarray(sampler.stops)[token, at.state].astype(jnp.int32), at.state),
        )

    return jax.lax.while_loop(lambda at: jnp.any(live(at)), body, at)


@partial(jax.jit, static_argnames=("config", "row_block"), donate_argnames=("caches",))
def advance_together(
    weights: Weights,
    caches: tuple[Cache, ...],
    tokens: jax.Array,
    length: jax.Array,
    limit: jax.Array,
    sampler: Sampler,
    *,
    config: ModelConfig,
    row_block: int,
) -> tuple[tuple[Cache, ...], tuple[jax.Array, ...]]:
    """Generate in n sequences at once, each until its step's end or its `limit` tokens; n is `row_block` at most.

    `tokens` are (n, slots), `length` and `limit` (n,), the sampler's keys (n, 2) and states (n,); all but the last
    token of each is read. Alone a sequence would fill one row of each block, and the others would be padding; here
    each has a row of the same block. Who is done reads its last token again until the others are. Gives the caches, and
    tokens, lengths and states as in `Together`.
    """
    wide = jax.tree.map(lambda *parts: jnp.concatenate(parts), *caches)
    at = Together(wide, tokens, length, jnp.asarray(sampler.state))
    with jax.default_matmul_precision("highest"):
        at = write_together(decoder(config, weights), at, limit, sampler, row_block)
    return tuple(jax.tree.map(lambda part, i=i: part[i : i + 1], at.cache) for i in range(len(caches))), at[1:]


@partial(jax.jit, static_argnames=("config", "row_block"), donate_argnames=("cache",))
def feed(
    weights: Weights,
    cache: Cache,
    tokens: jax.Array,
    computed: jax.Array,
    until: jax.Array,
    *,
    config: ModelConfig,
    row_block: int,
) -> Cache:
    """Read `tokens` (slots,) from `computed` up to `until`. The padding of the last block needs slots as well."""
    model = decoder(config, weights)

    def body(at: tuple[Cache, jax.Array]) -> tuple[Cache, jax.Array]:
        _, cache = read_block(model, at[0], tokens, at[1], row_block)
        return cache, at[1] + row_block

    with jax.default_matmul_precision("highest"):
        return jax.lax.while_loop(lambda at: at[1] < until, body, (cache, computed))[0]


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
