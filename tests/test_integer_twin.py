"""The JAX twin gives the bits of the reference: random models, extremes, chunks, rewinds, sampling."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models_jax.integer import decode, gumbel, twin
from models_jax.integer.files import Shape, check_tensors, limits
from models_jax.integer.random_model import random_model
from models_jax.integer.reference import Cache, Reference

SHAPE = Shape(19, 24, 40, 2, 4, 2, 8, 64, True)
SHAPES = {8: SHAPE, 4: replace(SHAPE, weight_bits=4)}
SLOTS = SHAPE.context_tokens + decode.FEED_ROWS


def reference_logits(model, tokens):
    reference, cache = Reference(model), Cache.empty(model.shape)
    return np.stack([reference.step(int(token), i, cache) for i, token in enumerate(tokens)]), cache


@st.composite
def shapes(draw):
    kv_heads = draw(st.integers(1, 2))
    return Shape(
        vocab_size=draw(st.integers(2, 40)),
        hidden_size=draw(st.integers(1, 40)),
        intermediate_size=draw(st.integers(1, 60)),
        num_hidden_layers=draw(st.integers(1, 2)),
        num_attention_heads=kv_heads * draw(st.integers(1, 3)),
        num_key_value_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 10)),
        context_tokens=draw(st.integers(33, 70)),
        tied=draw(st.booleans()),
        weight_bits=draw(st.sampled_from([8, 4])),
    )


@given(shapes(), st.integers(0, 2**32), st.booleans(), st.integers(1, 33))
@settings(max_examples=6, deadline=None, derandomize=True)
def test_random_models_give_the_same_logits(shape, seed, wild, length):
    model = random_model(shape, seed, wild)
    check_tensors(shape, model.tensors, "random")
    tokens = np.random.default_rng(seed).integers(0, shape.vocab_size, length)
    np.testing.assert_array_equal(decode.sequence_logits(model, tokens), reference_logits(model, tokens)[0])


@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize(("seed", "bits"), [(0, 8), (1, 8), (2, 4), (3, 4)])
def test_whole_context(seed, bits, wild):
    model = random_model(SHAPES[bits], seed, wild)
    tokens = np.random.default_rng(seed).integers(0, SHAPE.vocab_size, SHAPE.context_tokens)
    wanted, _ = reference_logits(model, tokens)
    np.testing.assert_array_equal(decode.sequence_logits(model, tokens), wanted)
    assert wild or len(np.unique(wanted)) > 10


def saturated(shape, value):
    """Every weight, gain and multiplier at its end, shifts at their lowest: everything overflows if anything can."""
    model = random_model(shape, 0)
    tensors = dict(model.tensors)
    for name, tensor in tensors.items():
        kind = name.split(".")[-1]
        if kind == "weight":
            low, high = limits(shape, name)
            tensors[name] = np.full_like(tensor, np.clip(value, low, high))
        elif kind in ("gain", "multiplier"):
            tensors[name] = np.full_like(tensor, 32767)
        elif kind == "shift" and "softmax" not in name:
            tensors[name] = np.full_like(tensor, limits(shape, name)[0])
        elif kind == "scale":
            tensors[name] = np.full_like(tensor, 255)
    return type(model)(shape, tensors, "saturated")


@pytest.mark.parametrize("value", [-127, 127])
@pytest.mark.parametrize("bits", [8, 4])
def test_everything_saturated(bits, value):
    shape = replace(SHAPES[bits], hidden_size=1100)
    model = saturated(shape, value)
    check_tensors(shape, model.tensors, "saturated")
    tokens = np.arange(20) % SHAPE.vocab_size
    np.testing.assert_array_equal(decode.sequence_logits(model, tokens), reference_logits(model, tokens)[0])


class Driver:
    """A sequence on the twin, with the host's bookkeeping in its simplest form."""

    def __init__(self, model, temperature=0.0, key=0, stops=()):
        self.parameters, self.cache = twin.parameters(model), twin.empty_cache(SHAPE, SLOTS)
        table = np.zeros((SHAPE.vocab_size, 1), np.int8)
        table[list(stops)] = 1
        self.sampler = decode.sampler(key, temperature, table)
        self.tokens, self.computed = [], 0

    def run(self, keep, feed, max_new):
        self.tokens = self.tokens[:keep] + list(feed)
        self.computed = min(self.computed, keep)
        length = len(self.tokens)
        if max_new:
            self.computed = min(self.computed, length - 1)
        padded = np.zeros(SLOTS, np.int32)
        padded[:length] = self.tokens
        numbers = [jnp.int32(n) for n in (self.computed, length, length + max_new)]
        done = decode.advance(self.parameters, self.cache, jnp.asarray(padded), *numbers, self.sampler, shape=SHAPE)
        self.cache, self.computed = done.cache, int(done.computed)
        self.tokens = np.asarray(done.tokens)[: int(done.length)].tolist()
        return self.tokens[length:]


def reference_run(model, prompt, max_new, temperature, key, stops=()):
    reference, cache, tokens = Reference(model), Cache.empty(SHAPE), list(prompt)
    logits = np.zeros(0, np.int32)
    for i, token in enumerate(tokens):
        logits = reference.step(token, i, cache)
    written = []
    while len(written) < max_new and not (written and written[-1] in stops):
        token = gumbel.choose(logits, len(tokens), key, temperature)
        written.append(token)
        tokens.append(token)
        logits = reference.step(token, len(tokens) - 1, cache)
    return written


MODEL = random_model(SHAPE, 5)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 8.0])
@pytest.mark.parametrize("key", [0, 2**64 - 1])
def test_generated_tokens_are_the_same(temperature, key):
    wanted = reference_run(MODEL, PROMPT, 30, temperature, key)
    assert Driver(MODEL, temperature, key).run(0, PROMPT, 30) == wanted
    assert temperature < 8 or len(set(wanted)) > 3


def test_a_stop_token_is_the_last():
    free = reference_run(MODEL, PROMPT, 30, 8.0, 7)
    stops = {free[9]}
    wanted = reference_run(MODEL, PROMPT, 30, 8.0, 7, stops)
    assert Driver(MODEL, 8.0, 7, stops).run(0, PROMPT, 30) == wanted
    assert wanted[-1] in stops and len(wanted) <= 10


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.sampled_from([0.0, 8.0]))
@settings(max_examples=25, deadline=None)
def test_chunks_change_nothing(sizes, temperature):
    whole = Driver(MODEL, temperature, 9).run(0, PROMPT, 40)
    driver, written = Driver(MODEL, temperature, 9), []
    driver.run(0, PROMPT[:4], 0)
    driver.run(4, PROMPT[4:], 0)
    for size in sizes:
        size = min(size, 40 - len(written))
        if size:
            written += driver.run(len(driver.tokens), (), size)
    assert written == whole[: len(written)]


@given(st.lists(st.tuples(st.floats(0, 1), st.lists(st.integers(0, 18), max_size=9), st.integers(0, 9)), max_size=6))
@settings(max_examples=25, deadline=None)
def test_rewinds_change_nothing(works):
    driver = Driver(MODEL, 8.0, 11)
    driver.run(0, PROMPT, 5)
    for part, feed, max_new in works:
        keep = max(1, int(part * min(len(driver.tokens), 40)))
        before = driver.tokens[:keep] + feed
        assert driver.run(keep, feed, max_new) == Driver(MODEL, 8.0, 11).run(0, before, max_new)


def test_caches_are_the_same():
    driver = Driver(MODEL)
    driver.run(0, PROMPT, 20)
    _, cache = reference_logits(MODEL, driver.tokens[:-1])
    for layer in range(SHAPE.num_hidden_layers):
        np.testing.assert_array_equal(driver.cache.keys[layer][: driver.computed], cache.keys[layer, : driver.computed])
        np.testing.assert_array_equal(
            driver.cache.values[layer][: driver.computed], cache.values[layer, : driver.computed]
        )


def test_the_last_slot_of_the_context():
    model = random_model(SHAPE, 5)
    prompt = [1] * (SHAPE.context_tokens - 1)
    assert Driver(model, 8.0, 1).run(0, prompt, 1) == reference_run_last(model, prompt)


def reference_run_last(model, prompt):
    logits, _ = reference_logits(model, prompt)
    return [gumbel.choose(logits[-1], len(prompt), 1, 8.0)]
