"""Threefry against JAX's, Gumbel noise against the real function, choices against probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from models_jax.integer import decode, gumbel, tables
from planner.errors import UserError

GUMBEL_ERROR = 4.6e-4
"""Largest error of the noise, in nats: 1.9 units of 2^-12."""


def test_tables_have_the_digest_of_version_1():
    assert tables.digest() == "ae5bf29f2623496c9426fef37118fc217479e6be12f53ab75d73a0b9619dfdd2"


def test_threefry_is_the_generator_of_jax():
    rng = np.random.default_rng(0)
    for _ in range(5):
        key = rng.integers(0, 2**32, 2, dtype=np.uint32)
        counter = rng.integers(0, 2**32, (2, 1000), dtype=np.uint32)
        ours = gumbel.threefry((int(key[0]), int(key[1])), counter[0], counter[1])
        theirs = threefry_2x32(jnp.asarray(key), jnp.asarray(counter.reshape(-1)))
        np.testing.assert_array_equal(np.concatenate(ours), theirs)


def test_threefry_known_answer():
    # From the authors' Random123 test vectors.
    key, counter = (0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3)
    x0, x1 = gumbel.threefry(key, *(np.array([c], np.uint32) for c in counter))
    assert (int(x0[0]), int(x1[0])) == (0xC4923A9C, 0x483DF7A0)


def words() -> np.ndarray:
    rng = np.random.default_rng(1)
    powers = np.concatenate([[(1 << k) - 1, 1 << k, ~(1 << k) & 0xFFFFFFFF] for k in range(32)])
    return np.concatenate([rng.integers(0, 2**32, 200_000), powers, [0, 2**32 - 1]]).astype(np.uint32)


def test_gumbel_noise_is_near_the_real_function():
    bits = words()
    tail = np.minimum(bits, ~bits).astype(np.float64) + 0.5
    tail = np.maximum(tail, 2.0**7) / 2**32  # the last 2^-25 of each tail is clamped
    low = bits < 2**31
    real = np.where(low, -np.log(-np.log(tail)), -np.log(-np.log1p(-tail)))
    assert np.abs(gumbel.gumbel(bits) / 2**tables.GUMBEL_BITS - real).max() < GUMBEL_ERROR


def test_gumbel_noise_rises_with_the_uniform_number():
    assert (np.diff(gumbel.gumbel(np.sort(words()))) >= 0).all()


def test_twin_noise_is_the_same():
    bits = words()
    np.testing.assert_array_equal(jax.jit(decode.gumbel_noise)(bits), gumbel.gumbel(bits))
    key = np.array(gumbel.key_words(0xFEDCBA9876543210), np.uint32)
    tokens = np.arange(1000, dtype=np.uint32)
    ours = decode.gumbel_noise(decode.threefry(jnp.asarray(key), jnp.full(1000, 77, jnp.uint32), jnp.asarray(tokens)))
    np.testing.assert_array_equal(ours, gumbel.noise(0xFEDCBA9876543210, 77, 1000))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_choices_follow_the_softmax(temperature):
    logits = np.array([0.0, 1.0, -1.0, 2.0, 0.5]) * 4096
    stored = logits.astype(np.int32)
    count = 8000
    chosen = [gumbel.choose(stored, position, 12345, temperature) for position in range(count)]
    wanted = np.exp(logits / 4096 / temperature)
    wanted /= wanted.sum()
    found = np.bincount(chosen, minlength=5) / count
    assert np.abs(found - wanted).max() < 4 * np.sqrt(0.25 / count)


def test_twin_chooses_the_same():
    rng = np.random.default_rng(3)
    choose = jax.jit(decode.choose)
    for i in range(60):
        logits = rng.integers(-20_000, 20_000, 24).astype(np.int32)
        temperature, key = [0.0, 0.001, 0.7, 1.0, 8.0][i % 5], int(rng.integers(0, 2**63))
        sampler = decode.sampler(key, temperature, np.zeros((24, 1), np.int8))
        assert int(choose(jnp.asarray(logits), np.int32(i), sampler)) == gumbel.choose(logits, i, key, temperature)


def test_equal_logits_choose_the_lowest_token():
    logits = np.array([1, 5, 5, 3], np.int32)
    assert gumbel.choose(logits, 0, 1, 0.0) == 1
    sampler = decode.sampler(0, 0.0, np.zeros((4, 1), np.int8))
    assert int(decode.choose(jnp.asarray(logits), jnp.int32(0), sampler)) == 1


@pytest.mark.parametrize("temperature", [-0.1, 8.1, float("nan")])
def test_temperatures_outside_the_range_are_refused(temperature):
    with pytest.raises(UserError, match=r"outside 0 \.\. 8"):
        gumbel.temperature_units(temperature)
