"""Bits do not depend on how work is cut: the device functions, on shapes that kernels treat differently."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from models_jax.config import ModelConfig
from models_jax.generate import Sampler, advance, choose, read_block, rewards, weights_of
from models_jax.transformer import Cache

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
        self.stops = np.zeros(self.config.vocab_size, bool)

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
    m.stops[free[10]] = True
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
    stops = jnp.zeros(logits.shape, bool)
    return choose(logits, positions, Sampler(keys, jnp.float32(1.0), stops))


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
