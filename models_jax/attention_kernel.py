"""Attention of a few queries over a long cache as one GPU kernel, in Pallas.

XLA computes all slots of the cache, masked. The kernel reads the cache in blocks, up to the last slot that any query
may see, and keeps a running softmax (Milakov and Gimelshein, Online normalizer calculation for softmax, 2018; Dao et
al., FlashAttention, 2022). A block that a query may not see leaves its sums as they are, to the bit, so a query's bits
do not depend on the others.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

BLOCK = 64
"""Slots that are read together."""
LEAST_ROWS = 16
"""Least rows of a product on a GPU's matrix units."""
MASKED = -1e30


def fits(head_dim: int, slots: int) -> bool:
    """Whether the kernel can compute this shape: a GPU's products want powers of two."""
    return head_dim >= 16 and head_dim & (head_dim - 1) == 0 and slots >= BLOCK


def _kernel(q_ref, k_ref, v_ref, last_ref, out_ref, *, slots: int, scale: float) -> None:
    """One head of keys: q (rows, dim), k and v (slots, dim), last (rows,), out (rows, dim)."""
    q, last = q_ref[...], last_ref[...]

    def body(block: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
        largest, total, mean = carry
        # The last block ends with the cache: it may overlap the one before, whose slots are masked.
        start = jnp.minimum(block * BLOCK, slots - BLOCK)
        slot = start + jnp.arange(BLOCK, dtype=jnp.int32)
        seen = (slot[None, :] <= last[:, None]) & (slot >= block * BLOCK)[None, :]
        at = pl.dslice(start, BLOCK)
        scores = jnp.dot(q, k_ref[at, :].T, preferred_element_type=jnp.float32) * scale
        scores = jnp.where(seen, scores, MASKED)
        top = jnp.maximum(largest, scores.max(axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - top[:, None]), 0.0)
        shrink = jnp.exp(largest - top)
        v = v_ref[at, :]
        added = jnp.dot(weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return top, total * shrink + weights.sum(axis=-1), mean * shrink[:, None] + added

    rows, dim = q.shape
    empty = jnp.full((rows,), MASKED), jnp.zeros((rows,)), jnp.zeros((rows, dim))
    blocks = (jnp.max(last) + BLOCK) // BLOCK
    _, total, mean = jax.lax.fori_loop(0, blocks, body, empty)
    out_ref[...] = (mean / total[:, None]).astype(out_ref.dtype)


@functools.partial(jax.jit, static_argnames=("scale", "interpret"))
def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, last: jax.Array, *, scale: float, interpret: bool = False
) -> jax.Array:
    """Queries (kv_heads, rows, dim) over keys and values (kv_heads, slots, dim): (kv_heads, rows, dim).

    Row r sees slots 0 to `last[r]`, (rows,) int32. Products are summed in float32. `interpret` computes the kernel's
    steps without a GPU.
    """
    heads, rows, dim = q.shape
    slots = k.shape[1]
    padded = max(LEAST_ROWS, pl.next_power_of_2(rows))
    q = jnp.pad(q, ((0, 0), (0, padded - rows), (0, 0)))
    last = jnp.pad(last, (0, padded - rows))
    out = pl.pallas_call(
        functools.partial(_kernel, slots=slots, scale=scale),
        grid=(heads,),
        in_specs=[
            pl.BlockSpec((None, padded, dim), lambda head: (head, 0, 0)),
            pl.BlockSpec((None, slots, dim), lambda head: (head, 0, 0)),
            pl.BlockSpec((None, slots, dim), lambda head: (head, 0, 0)),
            pl.BlockSpec((padded,), lambda head: (0,)),
        ],
        out_specs=pl.BlockSpec((None, padded, dim), lambda head: (head, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((heads, padded, dim), q.dtype),
        compiler_params=None if interpret else triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
    )(q, k, v, last)
    return out[:, :rows]


def reference(q: jax.Array, k: jax.Array, v: jax.Array, last: jax.Array, *, scale: float) -> jax.Array:
    """The same in plain JAX, over all slots."""
    scores = jnp.einsum("kqd,ksd->kqs", q, k, preferred_element_type=jnp.float32) * scale
    seen = jnp.arange(k.shape[1], dtype=jnp.int32) <= last[:, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, MASKED), axis=-1).astype(q.dtype)
    return jnp.einsum("kqs,ksd->kqd", weights, v)
