"""The GPU's attention kernel, step by step on the CPU, against plain attention. No GPU is needed, and none is tried."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models

from models_jax.attention_kernel import BLOCK, attend, fits, reference
from models_jax.generate import feed, weights_of
from models_jax.transformer import Cache


def arrays(heads, rows, slots, dim, dtype="float32", seed=0):
    draw = np.random.default_rng(seed).standard_normal
    shapes = ((heads, rows, dim), (heads, slots, dim), (heads, slots, dim))
    return tuple(jnp.asarray(draw(shape), dtype) for shape in shapes)


@pytest.mark.parametrize(
    ("heads", "rows", "slots", "dim", "dtype", "far"),
    [
        (2, 8, 200, 64, "float32", 2e-6),
        (1, 24, 64, 16, "float32", 2e-6),
        (3, 1, 129, 32, "float32", 2e-6),
        (2, 16, 136, 128, "bfloat16", 2e-2),
    ],
)
def test_kernel_is_attention(heads, rows, slots, dim, dtype, far):
    q, k, v = arrays(heads, rows, slots, dim, dtype)
    for first in (0, 1, 62, 63, slots - rows):
        last = first + jnp.arange(rows, dtype=jnp.int32)
        last = jnp.minimum(last, slots - 1)
        found = attend(q, k, v, last, scale=dim**-0.5, interpret=True)
        wanted = reference(q, k, v, last, scale=dim**-0.5)
        np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(wanted, np.float32), atol=far)
        assert found.dtype == q.dtype


def test_what_lies_behind_is_never_read():
    q, k, v = arrays(2, 8, 256, 32)
    last = jnp.full(8, 70, jnp.int32)
    spoilt = [x.at[:, 2 * BLOCK :].set(jnp.nan) for x in (k, v)]
    found = attend(q, k, v, last, scale=0.2, interpret=True)
    assert (attend(q, *spoilt, last, scale=0.2, interpret=True) == found).all()


def test_a_row_does_not_depend_on_the_others():
    q, k, v = arrays(2, 8, 200, 32)
    last = jnp.asarray([3, 199, 64, 0, 63, 100, 127, 150], jnp.int32)
    together = attend(q, k, v, last, scale=0.2, interpret=True)
    for row in range(8):
        moved = jnp.roll(q, -row, axis=1), jnp.zeros(8, jnp.int32).at[0].set(last[row])
        alone = attend(moved[0], k, v, moved[1], scale=0.2, interpret=True)
        assert (alone[:, 0] == together[:, row]).all()


def test_shapes_that_do_not_fit():
    assert fits(64, 64) and fits(128, 1000)
    assert not any((fits(96, 256), fits(8, 256), fits(64, BLOCK - 1)))


def test_the_model_lowers_to_the_kernel_for_a_gpu_and_to_plain_attention_here():
    """Lowering for another platform needs none of it; nothing is run there."""
    config = tiny_models.config("llama", head_dim=16)
    weights = weights_of(tiny_models.random_model(config))
    args = (weights, Cache.empty(config, 104), np.zeros(104, np.int32), np.int32(0), np.int32(9))
    traced = jax.jit(lambda *a: feed(*a, config=config, row_block=8)).trace(*args)
    texts = {p: traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda")}
    assert "triton" in texts["cuda"] and "triton" not in texts["cpu"]
