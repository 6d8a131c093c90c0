"""Weight-only int8: matrices held as int8 with a float scale for each output channel.

Products are of the activations' dtype: the int8 numbers are exact in bfloat16 and float32, and the scale is applied to
the result. The method is plain rounding to the nearest of 255 levels, without calibration.

Matrices lie in memory by their outputs, as in the files: that is the order in which XLA for CPUs converts them on the
way through a product with one row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

LARGEST = 127


def quantise(rows: NDArray[np.floating]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """(outputs, inputs) -> int8 of the same shape and a scale for each output, (outputs,)."""
    wide = np.asarray(rows, np.float32)
    largest = np.maximum(wide.max(axis=1), -wide.min(axis=1))
    scale = np.where(largest > 0, largest, 1).astype(np.float32) / np.float32(LARGEST)
    units = wide / scale[:, None]
    return np.rint(units, out=units).astype(np.int8), scale


def product(x: jax.Array, rows: jax.Array, scale: jax.Array) -> jax.Array:
    """(..., inputs) times `rows` (outputs, inputs) int8 with their `scale` (outputs,): (..., outputs) float32.

    The barrier ties the conversion to `x`. Without it XLA converts all matrices before a loop over tokens, which then
    takes the memory of a float model besides. With several rows XLA for CPUs still has a copy of each while it runs.
    """
    x, rows = jax.lax.optimization_barrier((x, rows))
    return jnp.matmul(x, rows.T.astype(x.dtype), preferred_element_type=jnp.float32) * scale


class Int8Linear(nnx.Module):
    """A linear layer in the place of `nnx.Linear`. It begins empty: a checkpoint fills it."""

    def __init__(self, inner: int, outer: int, use_bias: bool) -> None:
        """`kernel` is (outer, inner) int8, `scale` (outer,) float32."""
        self.kernel = nnx.Param(jnp.zeros((outer, inner), jnp.int8))
        self.scale = nnx.Param(jnp.zeros((outer,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((outer,))) if use_bias else None

    def product(self, x: jax.Array) -> jax.Array:
        """(..., inner) -> (..., outer), accumulated and returned in float32, the bias left out."""
        return product(x, self.kernel[...], self.scale[...])

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., inner) -> (..., outer), same dtype."""
        found = self.product(x).astype(x.dtype)
        return found if self.bias is None else found + self.bias[...]


class Int8Embedding(nnx.Module):
    """A table of the vocabulary in the place of `nnx.Embed`, a scale for each token. It begins empty."""

    def __init__(self, tokens: int, size: int) -> None:
        """`embedding` is (tokens, size) int8, `scale` (tokens,) float32."""
        self.embedding = nnx.Param(jnp.zeros((tokens, size), jnp.int8))
        self.scale = nnx.Param(jnp.zeros((tokens,), jnp.float32))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Token ids (...) -> rows (..., size) float32."""
        return self.embedding[...][tokens].astype(jnp.float32) * self.scale[...][tokens][..., None]

    def product(self, x: jax.Array) -> jax.Array:
        """Logits of a tied head: (..., size) -> (..., tokens) float32."""
        return product(x, self.embedding[...], self.scale[...])
