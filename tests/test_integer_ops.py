"""The operations of the specification against real arithmetic, and the twin's against them at the extremes."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models_jax.integer import ops, tables, twin
from models_jax.integer.files import LARGEST_PRODUCT, groups, headroom
from models_jax.integer.scales import gains, requantisers

rng = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("x", "shift", "wanted"), [(3, 1, 2), (-3, 1, -1), (-1, 1, 0), (5, 2, 1), (6, 2, 2), (-6, 2, -1)]
)
def test_halves_round_upwards(x, shift, wanted):
    assert int(ops.shift_round(np.int64(x), shift)) == wanted


@given(st.integers(1, 8192), st.sampled_from([8, 4]), st.data())
@settings(max_examples=300, deadline=None)
def test_twin_requantises_in_two_halves(width, bits, data):
    free = headroom(width, bits)
    top = width * LARGEST_PRODUCT[bits]
    x = data.draw(st.one_of(st.sampled_from([-top, -1, 0, 1, top]), st.integers(-top, top)))
    multiplier = data.draw(st.one_of(st.just(0), st.integers(1 << 14, (1 << 15) - 1)))
    shift = data.draw(st.integers(max(1, 17 - free), 46 - free))
    wanted = ops.requantise(np.int64(x), multiplier, shift, (1 << 22) - 1)
    parts = twin.Requantiser(jnp.int32(multiplier), jnp.int32(shift + free))
    assert int(twin.requantise(jnp.int32(x), parts, free, (1 << 22) - 1)) == int(wanted)


@pytest.mark.parametrize("width", [1, 31, 32, 33, 100, 2000, 8192])
def test_groups_of_4_bit_weights_are_scaled_each(width):
    weight = rng.integers(-7, 7, (5, width), endpoint=True)
    scale = rng.integers(0, 255, (5, groups(width)), endpoint=True)
    x = rng.integers(-127, 127, width, endpoint=True)
    weight[0], scale[0], x[:] = 7, 255, np.where(rng.random(width) < 0.5, x, 127)
    found = ops.grouped_matvec(weight, scale, x)
    assert found.tolist() == [
        sum(int(weight[r, i]) * int(scale[r, i // 32]) * int(x[i]) for i in range(width)) for r in range(5)
    ]
    halves = twin.scaled_weights(weight.astype(np.int8), scale.astype(np.uint8))
    upper, lower = (jnp.asarray(half.T.astype(np.float32)) for half in (halves >> 6, halves & 63))
    even = twin.Requantiser(jnp.full(5, 1 << 14), jnp.full(5, 14 + 16))
    layer = twin.GroupedLinear(upper, lower, even._replace(shift=jnp.full(5, 30 + headroom(width, 4))))
    wanted = ops.requantise(found, 1 << 14, 30, 32767)
    np.testing.assert_array_equal(twin.linear(jnp.asarray(x[None]), layer, 32767)[0], wanted)


@given(st.floats(1e-7, 30.0), st.integers(1, 1024))
def test_requantisers_are_within_half_a_unit_of_15_bits(ratio, width):
    multiplier, shift = requantisers(np.array([ratio]), headroom(width), "x")
    if multiplier[0]:
        assert abs(float(multiplier[0]) / 2.0 ** int(shift[0]) / ratio - 1) <= 2.0**-15


@pytest.mark.parametrize("size", [1, 16, 64, 1024])
@pytest.mark.parametrize("scale", [0, 1, 3, 100, 5000, 32767])
def test_rms_norm(size, scale):
    x = rng.integers(-scale, scale, (50, size), endpoint=True)
    weight = rng.uniform(-2, 2, size)
    epsilon = 100
    gain, shift = gains(np.sqrt(size) * weight * 20 / (1 << 15), 30)
    found = np.stack([ops.rms_norm(row, epsilon, gain.astype(np.int64), int(shift)) for row in x])
    mean = (np.sum(x.astype(np.float64) ** 2, -1, keepdims=True) + epsilon) / size
    real = np.clip(x / np.sqrt(mean) * weight * 20, -127, 127)
    assert np.abs(found - real).max() < 0.53 + np.abs(gain).max() / 2.0 ** float(shift)
    norm = twin.Norm(jnp.int32(epsilon), jnp.asarray(gain.astype(np.int32)), jnp.asarray(shift))
    np.testing.assert_array_equal(twin.rms_norm(jnp.asarray(x.astype(np.int32)), norm), found)


def test_twin_rms_norm_over_every_size_of_sum():
    gain = rng.integers(-32767, 32767, 7)
    norm = twin.Norm(jnp.int32(4), jnp.asarray(gain.astype(np.int32)), jnp.int32(16))
    rows = []
    for bits in range(16):
        rows.append(rng.integers(-(1 << bits), 1 << bits, (40, 7)))
    rows.append(np.full((1, 7), 32767))
    x = np.clip(np.concatenate(rows), -32767, 32767)
    wanted = np.stack([ops.rms_norm(row, 4, gain, 16) for row in x])
    np.testing.assert_array_equal(twin.rms_norm(jnp.asarray(x.astype(np.int32)), norm), wanted)
    for epsilon in (2**31 - 1, 65535, 65536):
        wanted = np.stack([ops.rms_norm(row, epsilon, gain, 16) for row in x])
        found = twin.rms_norm(jnp.asarray(x.astype(np.int32)), norm._replace(epsilon=jnp.int32(epsilon)))
        np.testing.assert_array_equal(found, wanted)


def test_rotation():
    angle = rng.uniform(0, 6, 8)
    cosine, sine = (np.floor(f(angle) * (1 << 14) + 0.5).astype(np.int64) for f in (np.cos, np.sin))
    x = rng.integers(-127 * 64, 127 * 64, (500, 16))
    a, b = x[:, :8] / 64, x[:, 8:] / 64
    real = np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)
    assert np.abs(ops.rotate(x, cosine, sine) - np.clip(real, -127, 127)).max() < 0.52
    extremes = np.array([[32767] * 16, [-32767] * 16, [32767] * 8 + [-32767] * 8])
    for values in (x, extremes):
        turn = [jnp.asarray(t.astype(np.int32)) for t in (cosine, sine)]
        np.testing.assert_array_equal(
            twin.rotate(jnp.asarray(values.astype(np.int32)), *turn), ops.rotate(values, cosine, sine)
        )


def test_softmax_and_mean():
    scores = rng.integers(-60_000, 60_000, (40, 100))
    ratio = 6.0 / 60_000 * np.log2(np.e) * 256
    multiplier, shift = (int(part[0]) for part in requantisers(np.array([ratio]), headroom(32), "x"))
    weights = ops.softmax_weights(scores, multiplier, shift)
    real = np.exp(6.0 / 60_000 * (scores - scores.max(-1, keepdims=True)))
    assert np.abs(weights / tables.EXP2_ONE - real).max() < 1.6e-3
    values = rng.integers(-127, 127, (100, 16), endpoint=True)
    gain, mean_shift = np.full(16, 1 << 14), 21  # 7 bits behind the point taken off
    found = np.stack([ops.weighted_mean(row, values, gain, mean_shift) for row in weights])
    assert np.abs(found - weights @ values / weights.sum(-1, keepdims=True)).max() < 0.51
    softmax = twin.Requantiser(jnp.int32(multiplier), jnp.int32(shift + headroom(32)))
    seen = jnp.ones(scores.shape, bool)
    ours = twin.softmax_weights(jnp.asarray(scores.astype(np.int32)), seen, softmax, 16)
    np.testing.assert_array_equal(ours, weights)
    ours = twin.weighted_mean(
        ours[None], jnp.asarray(values[None].astype(np.float32)), jnp.asarray(gain), jnp.int32(21)
    )
    np.testing.assert_array_equal(ours[0], found)


@pytest.mark.parametrize("tokens", [1, 2, 1040, 1041, 2048])
@pytest.mark.parametrize("value", [-127, 127])
def test_mean_at_the_extremes(tokens, value):
    weights, values = np.full(tokens, tables.EXP2_ONE), np.full((tokens, 4), value)
    assert np.abs(weights @ values).max() < 2**31
    gain = np.array([0, 1, 1 << 14, 32767])
    wanted = ops.weighted_mean(weights, values, gain, 21)
    assert wanted[2] == value
    ours = twin.weighted_mean(
        jnp.asarray(weights.astype(np.int32))[None, None],
        jnp.asarray(values.astype(np.float32))[None],
        jnp.asarray(gain),
        jnp.int32(21),
    )
    np.testing.assert_array_equal(ours[0, 0], wanted)


def test_gated():
    gate = np.concatenate([np.arange(-32767, 32768, 7), [-4096, -4095, -1, 0, 1, 4095, 4096]])
    up = rng.integers(-32767, 32767, gate.size)
    real = gate / 256 / (1 + np.exp(-gate / 256))
    for shift in (1, 10, 16, 22, 30):
        found, exponent = ops.gated(gate, up, shift)
        wanted = np.clip(real * 256 * up / 2.0**shift, -32767, 32767) / 2.0**exponent
        # Two roundings, and that of the SiLU to Q8.8 (with its sigmoid within 2^-13) times the other factor.
        allowed = 0.76 + (0.5 + np.abs(gate) / 2**13) * np.abs(up) / 2.0 ** (shift + exponent)
        assert (np.abs(found - np.clip(wanted, -127, 127)) <= allowed).all()
        assert exponent == 0 or np.abs(found).max() >= 64
        ours, twins = twin.gated(*(jnp.asarray(v.astype(np.int32))[None] for v in (gate, up)), jnp.int32(shift))
        np.testing.assert_array_equal(ours[0], found)
        assert int(twins[0, 0]) == exponent


def test_exact_dot_beyond_one_piece():
    a, b = np.full((1, 8192), 127), np.full((8192, 2), -127)
    found = twin.exact_dot(jnp.asarray(a.astype(np.float32)), jnp.asarray(b.astype(np.float32)))
    np.testing.assert_array_equal(found, a @ b)
