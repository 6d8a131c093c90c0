"""Bits do not depend on how work is cut: the device functions, on shapes that kernels treat differently."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from models_jax.config import ModelConfig
from models_jax.generate import Sampler, advance, choose, feed, read_block, restricted, rewards, weights_of
from models_jax.transformer import Cache, Decoder

SHAPES = {
    "tiny": tiny_models.config("qwen3"),
    "wide": ModelConfig("llama", 43, 128, 344, 2, 4, 2, 32, tie_word_embeddings=False),
    "odd": ModelConfig("qwen2", 37, 72, 100, 2, 3, 1, 24, attention_bias=True),
}
CONTEXT = 61


class Machine:
    """The device functions with the host's side in a few lines."""

    def __init__(self, shape: str, row_block: int, dtype=jnp.float32):
        self.config, self.row_block, self.dtype = SHAPES[shape], row_block, dtype
        self.model = tiny_models.random_model(self.config, 3)
        self.weights = tuple(weight.astype(dtype) for weight in weights_of(self.model))
        self.stops = np.zeros((self.config.vocab_size, 1), np.int8)

    def start(self):
        return Cache.empty(self.config, CONTEXT + self.row_block, dtype=self.dtype)

    def run(self, cache, tokens, computed, max_new=0, key=(1, 2), temperature=0.0):
        padded = np.zeros(CONTEXT + self.row_block, np.int32)
        padded[: len(tokens)] = tokens
        sampler = Sampler(np.array(key, np.uint32), np.float32(temperature), self.stops)
        numbers = (np.int32(n) for n in (computed, len(tokens), len(tokens) + max_new))
        done = advance(self.weights, cache, padded, *numbers, sampler, config=self.config, row_block=self.row_block)
        return done.cache, np.asarray(done.tokens)[: int(done.length)].tolist(), int(done.computed)

    def bits(self, cache, count):
        return [np.asarray(part)[:, :, :count].tobytes() for part in (*cache.k, *cache.v)]


@functools.cache
def machine(shape, row_block, dtype="float32"):
    return Machine(shape, row_block, jnp.dtype(dtype))


def random_tokens(m, count, seed=0):
    return np.random.default_rng(seed).integers(0, m.config.vocab_size, count).tolist()


@pytest.mark.parametrize(
    ("shape", "rows", "dtype"),
    [
        ("tiny", 1, "float32"),
        ("tiny", 8, "float32"),
        ("tiny", 8, "bfloat16"),
        ("wide", 4, "float32"),
        ("wide", 8, "bfloat16"),
        ("wide", 16, "float32"),
        ("odd", 5, "float32"),
        ("odd", 8, "float32"),
    ],
)
def test_cut_feeds_leave_the_same_cache(shape, rows, dtype):
    m = machine(shape, rows, dtype)
    tokens = random_tokens(m, 40)
    whole, _, _ = m.run(m.start(), tokens, 0)
    for cuts in ([1], [3], [7, 9, 21], list(range(1, 40))):
        cache, at = m.start(), 0
        for end in [*cuts, 40]:
            cache, _, at = m.run(cache, tokens[:end], at)
        assert m.bits(cache, 40) == m.bits(whole, 40), cuts


@pytest.mark.parametrize(("shape", "rows"), [("tiny", 8), ("wide", 4), ("odd", 8)])
def test_generated_tokens_leave_the_cache_of_fed_ones(shape, rows):
    m = machine(shape, rows)
    prompt = random_tokens(m, 11)
    wrote, tokens, computed = m.run(m.start(), prompt, 0, 30, temperature=1.0)
    assert (len(tokens), computed) == (41, 40)
    fed, _, _ = m.run(m.start(), tokens[:40], 0)
    assert m.bits(wrote, 40) == m.bits(fed, 40)


@settings(max_examples=25, deadline=None)
@given(chunks=st.lists(st.integers(1, 9), min_size=1, max_size=12), rewinds=st.lists(st.integers(0, 6), max_size=12))
def test_chunks_and_rewinds_do_not_matter(chunks, rewinds):
    m = machine("tiny", 8)
    prompt = random_tokens(m, 6)
    expected = m.run(m.start(), prompt, 0, CONTEXT - 6, temperature=1.3)[1]
    cache, tokens, computed = m.start(), prompt, 0
    for chunk, back in zip(chunks, [*rewinds, *[0] * len(chunks)], strict=False):
        chunk = min(chunk, CONTEXT - len(tokens))
        if chunk:
            start = min(computed, len(tokens) - 1)
            cache, tokens, computed = m.run(cache, tokens, start, chunk, temperature=1.3)
        assert tokens == expected[: len(tokens)]
        keep = max(len(prompt), len(tokens) - back)
        # Something else is tried in between, and forgotten.
        cache, _, _ = m.run(cache, tokens[:keep] + prompt[:2], min(computed, keep), 0) if keep < 50 else (cache, 0, 0)
        tokens, computed = tokens[:keep], min(computed, keep)


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_agree_with_a_plain_forward_pass(shape):
    m = machine(shape, 8)
    tokens = random_tokens(m, 40)
    padded = jnp.asarray(tokens + [0] * (CONTEXT + 8 - 40))
    cache, found = m.start(), []
    read = nnx.jit(read_block, static_argnums=4)
    for start in range(0, 40, 8):
        hidden, cache = read(m.model, cache, padded, jnp.int32(start), 8)
        found.append(hidden)
    np.testing.assert_allclose(np.concatenate(found), tiny_models.full_hidden(m.model, jnp.asarray(tokens)), atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_tokens_are_those_of_a_plain_forward_pass(shape):
    m = machine(shape, 8)
    prompt = random_tokens(m, 9)
    _, tokens, _ = m.run(m.start(), prompt, 0, 25)
    logits = np.asarray(m.model.logits(tiny_models.full_hidden(m.model, jnp.asarray(tokens[:-1]))))[8:]
    best, ordered = np.argmax(logits, axis=-1), np.sort(logits, axis=-1)
    sure = ordered[:, -1] - ordered[:, -2] > 1e-3
    assert sure.sum() > 10
    np.testing.assert_array_equal(np.asarray(tokens[9:])[sure], best[sure])


def test_reading_only_writes_nothing():
    m = machine("tiny", 8)
    _, tokens, computed = m.run(m.start(), [3, 4, 5], 0)
    assert (tokens, computed) == ([3, 4, 5], 3)


def test_stop_token_stops():
    m = Machine("tiny", 8)
    _, free, _ = m.run(m.start(), [3, 4, 5], 0, 20, temperature=1.0)
    m.stops[free[10]] = 1
    _, tokens, computed = m.run(m.start(), [3, 4, 5], 0, 20, temperature=1.0)
    first = free.index(free[10], 3)
    assert tokens == free[: first + 1]
    assert computed == len(tokens) - 1


def test_context_can_be_filled():
    m = machine("tiny", 8)
    _, tokens, _ = m.run(m.start(), random_tokens(m, 6), 0, CONTEXT - 6)
    cache, again, computed = m.run(m.start(), tokens, 0)
    assert again == tokens and computed == CONTEXT
    assert m.bits(cache, CONTEXT) == m.bits(m.run(m.start(), tokens, 0)[0], CONTEXT)


@jax.jit
@functools.partial(jax.vmap, in_axes=(0, 0, None))
def pick(keys, positions, logits):
    """One token for each key and position."""
    stops = jnp.zeros((logits.size, 1), jnp.int8)
    return choose(logits, positions, Sampler(keys, jnp.float32(1.0), stops))


@pytest.mark.parametrize(("shape", "rows"), [("tiny", 8), ("wide", 2), ("wide", 8), ("odd", 2), ("odd", 8)])
def test_a_long_block_has_the_bits_of_short_ones(shape, rows):
    """What is summed over a row is summed in the class's shape. Very small products have kernels of their own."""
    m = machine(shape, rows)
    config = dataclasses.replace(m.config, class_rows=rows)
    tokens = np.array(random_tokens(m, 64), np.int32)
    found = []
    for block in (rows, 32):
        cache = feed(
            m.weights, Cache.empty(config, 64), tokens, np.int32(0), np.int32(64), config=config, row_block=block
        )
        found.append(m.bits(cache, 64))
    assert found[0] == found[1]


def test_int8_weights_are_not_converted_before_the_loop():
    """As XLA would do by itself, at four times their memory. With one row they are converted within the product."""
    rows = 1
    config = ModelConfig("llama", 43, 256, 512, 6, 4, 4, 64, tie_word_embeddings=False, int8_weights=True)
    weights = tuple(jax.tree.leaves(nnx.state(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))))
    cache = jax.eval_shape(lambda: Cache.empty(config, CONTEXT + rows))
    sampler = Sampler(np.zeros(2, np.uint32), np.float32(0), np.zeros((43, 1), np.int8))
    inputs = (weights, cache, np.zeros(CONTEXT + rows, np.int32), *np.zeros(3, np.int32), sampler)
    memory = advance.lower(*inputs, config=config, row_block=rows).compile().memory_analysis()
    assert memory.temp_size_in_bytes < sum(weight.size for weight in weights if weight.dtype == jnp.int8)


def test_noise_depends_on_key_and_position():
    low = jnp.array([(0, k) for k in range(12)], jnp.uint32)
    same, flat = jnp.zeros((12, 2), jnp.uint32), jnp.zeros(8)
    fives, counting = jnp.full(12, 5), jnp.arange(12)
    for keys, positions in ((low, fives), (low[:, ::-1], fives), (same, counting)):
        assert len(set(pick(keys, positions, flat).tolist())) > 3
        assert (pick(keys, positions, flat.at[7].set(99.0)) == 7).all()
    assert len(set(pick(same, fives, flat).tolist())) == 1


def test_sampled_shares_are_those_of_the_softmax():
    logits = jnp.asarray([0.0, 0.5, 1.0])
    keys = jnp.tile(jnp.array([7, 9], jnp.uint32), (20_000, 1))
    shares = np.bincount(np.asarray(pick(keys, jnp.arange(20_000), logits)), minlength=3) / 20_000
    np.testing.assert_allclose(shares, jax.nn.softmax(logits), atol=0.015)


def narrowed(logits, **options):
    """The plain way: sort, cut, cut, cut."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    kept = order[: options.get("top_k") or None]
    shares = np.exp(np.array(logits)[kept] - max(logits))
    shares = shares / shares.sum()
    before = np.cumsum(shares) - shares
    kept = [i for i, b in zip(kept, before, strict=True) if b < options.get("top_p", 1) - 1e-6]
    return {i for i in kept if logits[i] >= max(logits) + np.log(max(options.get("min_p", 0), 1e-30))}


narrow = jax.jit(restricted)


def sampler_of(top_k=0, top_p=1.0, min_p=0.0, key=(0, 0), temperature=1.0):
    numbers = np.int32(top_k), np.float32(top_p), np.float32(min_p)
    return Sampler(np.array(key, np.uint32), np.float32(temperature), np.zeros((9, 1), np.int8), np.int32(0), *numbers)


@settings(deadline=None)
@given(
    logits=st.lists(st.integers(-40, 40), min_size=9, max_size=9, unique=True),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.03, 0.31, 0.77, 0.93]),
    min_p=st.sampled_from([0.0, 0.011, 0.13, 1.0]),
)
def test_narrowing_is_the_plain_way(logits, top_k, top_p, min_p):
    values = [x / 8 for x in logits]
    expected = narrowed(values, top_k=top_k, top_p=top_p, min_p=min_p)
    found = np.asarray(narrow(jnp.asarray(values, jnp.float32), sampler_of(top_k, top_p, min_p)))
    assert set(np.flatnonzero(np.isfinite(found)).tolist()) == expected
    assert {i: found[i] for i in expected} == {i: values[i] for i in expected}


def test_ties_stay():
    found = narrow(jnp.asarray([1.0, 2.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0]), sampler_of(2))
    assert np.isfinite(found).tolist() == [False, True, True, True, *[False] * 5]


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.4}])
def test_a_narrow_choice_takes_the_same_token_where_it_may(options):
    logits = jnp.asarray(np.random.default_rng(0).standard_normal(9), jnp.float32)
    allowed = narrowed(np.asarray(logits).tolist(), **options)
    chosen = jax.jit(lambda at, sampler: choose(logits, at, sampler))
    free = [int(chosen(np.int32(n), sampler_of())) for n in range(60)]
    held = [int(chosen(np.int32(n), sampler_of(**options))) for n in range(60)]
    assert set(held) <= allowed and len(set(held)) > 1
    assert all(f == h for f, h in zip(free, held, strict=True) if f in allowed)
    assert sum(f not in allowed for f in free) > 5


def test_steps_end_where_the_delimiter_is_whole():
    m = Machine("tiny", 8)
    _, free, _ = m.run(m.start(), [3, 4, 5], 0, 30, temperature=1.0)
    first = next(n for n in range(5, 30) if free[n] != free[n + 1])
    m.stops = np.zeros((m.config.vocab_size, 2), np.int8)
    m.stops[free[first], 0] = 1
    m.stops[free[first], 1] = 1
    m.stops[free[first + 1], 1] = 2
    _, tokens, _ = m.run(m.start(), [3, 4, 5], 0, 27, temperature=1.0)
    pairs = list(itertools.pairwise(free[3:]))
    assert tokens == free[: pairs.index((free[first], free[first + 1])) + 5]


@pytest.mark.parametrize(("shape", "rows"), [("tiny", 4), ("wide", 16)])
def test_feeding_is_reading(shape, rows):
    m = machine(shape, rows)
    tokens = random_tokens(m, 40)
    padded = np.zeros(CONTEXT + rows, np.int32)
    padded[:40] = tokens
    fed = feed(m.weights, m.start(), padded, np.int32(0), np.int32(40), config=m.config, row_block=rows)
    assert m.bits(fed, 40) == m.bits(m.run(m.start(), tokens, 0)[0], 40)


def test_rewards_are_cut_invariant_bit_for_bit():
    config = tiny_models.config("llama", reward=True)
    weights = weights_of(tiny_models.random_model(config))
    tokens = np.arange(48, dtype=np.int32) % config.vocab_size

    def score(cuts):
        cache, found, at = Cache.empty(config, 48), np.zeros(48, np.float32), 0
        for end in (*cuts, 40):
            cache, part = rewards(weights, cache, tokens, np.int32(at), np.int32(end), config=config, row_block=8)
            found[at:end], at = np.asarray(part)[at:end], end
        return found[:40].tobytes()

    assert score([]) == score([1, 2, 3, 11]) == score(range(1, 40))
