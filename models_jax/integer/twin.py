"""The JAX twin of the integer model: the same bits as `models_jax.integer.reference`, compiled.

Everything fits in 32 bits, so no 64-bit mode is needed:

- Dot products of int8 run as float32 products. They are exact as long as every partial sum stays within 2^24,
  which holds up to 1040 terms of 127 * 127; longer ones are cut into pieces (`exact_dot`). On a CPU this is
  several times faster than an integer product, on a GPU at least as fast.
- A requantiser multiplies 32 by 15 bits; `requantise` does it in two halves of 16 bits.
- A sum of squares has up to 43 bits; `rms_norm` keeps it in two words.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models_jax.integer import ops, tables
from models_jax.integer.files import IntegerModel, Shape, headroom
from models_jax.integer.ops import INT8_MAX, INT16_MAX
from models_jax.integer.reference import LOGIT_MAX

EXACT_TERMS = (1 << 24) // (127 * 127)
"""Products of int8 whose sum is exact in float32: 1040."""
MOST_ROWS = 32
"""Tokens that may be read together; the tables of RoPE are padded for the last block."""


class Requantiser(NamedTuple):
    """Multiplier and shift for each channel; the shift is that of a sum scaled up by the headroom."""

    multiplier: jax.Array
    shift: jax.Array


class Linear(NamedTuple):
    """int8 weights as float32 (in, out)."""

    weight: jax.Array
    requantiser: Requantiser


class GroupedLinear(NamedTuple):
    """4-bit weights times the scales of their groups, cut into halves: upper * 2^6 + lower, float32 (in, out) each."""

    upper: jax.Array
    lower: jax.Array
    requantiser: Requantiser


class Norm(NamedTuple):
    """See `ops.rms_norm`."""

    epsilon: jax.Array
    gain: jax.Array
    shift: jax.Array


class Layer(NamedTuple):
    """One layer. Layers that read the same vector are joined: q, k, v; gate, up."""

    attention_norm: Norm
    qkv: Linear | GroupedLinear
    softmax: Requantiser
    mean_gain: jax.Array
    mean_shift: jax.Array
    o: Linear | GroupedLinear
    mlp_norm: Norm
    gate_up: Linear | GroupedLinear
    gated_shift: jax.Array
    down: Linear | GroupedLinear


class Parameters(NamedTuple):
    """A whole model on the device."""

    embed: jax.Array
    """Rows of the embedding, already requantised: int16 as int32 (vocabulary, hidden)."""
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear
    cosine: jax.Array
    sine: jax.Array


class Cache(NamedTuple):
    """For each layer keys and values, int8 (slots, key heads, head_dim)."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


def empty_cache(shape: Shape, slots: int) -> Cache:
    """A cache of zeros."""
    dims = (slots, shape.num_key_value_heads, shape.head_dim)
    layers = range(shape.num_hidden_layers)
    return Cache(tuple(jnp.zeros(dims, jnp.int8) for _ in layers), tuple(jnp.zeros(dims, jnp.int8) for _ in layers))


def parameters(model: IntegerModel) -> Parameters:
    """The tensors of a file in the form that the twin computes with."""
    t = model.tensors

    def array(name: str) -> jax.Array:
        return jnp.asarray(t[name].astype(np.int32))

    def requantiser(names: tuple[str, ...], free: int) -> Requantiser:
        multiplier = np.concatenate([t[f"{name}.multiplier"] for name in names])
        shift = np.concatenate([t[f"{name}.shift"] for name in names]).astype(np.int32) + free
        return Requantiser(jnp.asarray(multiplier.astype(np.int32)), jnp.asarray(shift))

    def of_8_bits(*names: str, weight: str = "") -> Linear:
        weights = np.concatenate([t[weight or f"{name}.weight"] for name in names])
        return Linear(jnp.asarray(weights.T.astype(np.float32)), requantiser(names, headroom(weights.shape[1])))

    def linear(*names: str) -> Linear | GroupedLinear:
        if model.shape.weight_bits == 8:
            return of_8_bits(*names)
        weights = np.concatenate([scaled_weights(t[f"{name}.weight"], t[f"{name}.scale"]) for name in names])
        upper, lower = (jnp.asarray(half.T.astype(np.float32)) for half in (weights >> 6, weights & 63))
        return GroupedLinear(upper, lower, requantiser(names, headroom(weights.shape[1], 4)))

    def norm(name: str) -> Norm:
        return Norm(array(f"{name}.epsilon"), array(f"{name}.gain"), array(f"{name}.shift"))

    def layer(name: str) -> Layer:
        distance = headroom(2 * model.shape.head_dim)
        return Layer(
            attention_norm=norm(f"{name}.attention_norm"),
            qkv=linear(f"{name}.q", f"{name}.k", f"{name}.v"),
            softmax=Requantiser(array(f"{name}.softmax.multiplier"), array(f"{name}.softmax.shift") + distance),
            mean_gain=array(f"{name}.mean.gain"),
            mean_shift=array(f"{name}.mean.shift"),
            o=linear(f"{name}.o"),
            mlp_norm=norm(f"{name}.mlp_norm"),
            gate_up=linear(f"{name}.gate", f"{name}.up"),
            gated_shift=array(f"{name}.gated.shift"),
            down=linear(f"{name}.down"),
        )

    rows = t["embed.weight"].astype(np.int64)
    multiplier, shift = (t[f"embed.{kind}"].astype(np.int64)[:, None] for kind in ("multiplier", "shift"))
    embed = ops.requantise(rows, multiplier, shift, INT16_MAX)
    return Parameters(
        embed=jnp.asarray(embed.astype(np.int32)),
        layers=tuple(layer(f"layers.{i}") for i in range(model.shape.num_hidden_layers)),
        norm=norm("norm"),
        head=of_8_bits("head", weight="embed.weight" if model.shape.tied else ""),
        cosine=jnp.pad(array("rope.cosine"), ((0, MOST_ROWS), (0, 0))),
        sine=jnp.pad(array("rope.sine"), ((0, MOST_ROWS), (0, 0))),
    )


def scaled_weights(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """4-bit weights (out, in) times the scale of their group (out, groups): int32 (out, in), 12 bits."""
    return weight.astype(np.int32) * np.repeat(scale, ops.GROUP_INPUTS, axis=1)[:, : weight.shape[1]]


def exact_dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """int8-valued float32 (..., rows, n) times (..., n, columns) to int32, exact."""
    terms = a.shape[-1]
    pieces = [
        jnp.matmul(a[..., i : i + EXACT_TERMS], b[..., i : i + EXACT_TERMS, :], precision="highest").astype(jnp.int32)
        for i in range(0, terms, EXACT_TERMS)
    ]
    return sum(pieces[1:], pieces[0])


def shift_round(x: jax.Array, shift: jax.Array | int) -> jax.Array:
    """See `ops.shift_round`."""
    return (x + (1 << (shift - 1))) >> shift


def saturate(x: jax.Array, limit: int | jax.Array) -> jax.Array:
    """See `ops.saturate`."""
    return jnp.clip(x, -limit, limit)


def requantise(x: jax.Array, requantiser: Requantiser, free: int, limit: int | jax.Array) -> jax.Array:
    """See `ops.requantise`. |x| < 2^(31 - free).

    With scaled = x * 2^free = upper * 2^16 + lower, the product is (upper * m + lower * m / 2^16) * 2^16, and the
    bits lost by the floor of the second term lie below the half that is added, since its shift is at least 17.
    """
    multiplier, shift = requantiser
    scaled = x << free
    upper, lower = scaled >> 16, scaled & 0xFFFF
    product = upper * multiplier + ((lower * multiplier) >> 16)
    return saturate((product + (1 << (shift - 17))) >> (shift - 16), limit)


def interpolate(table: np.ndarray, position: jax.Array, bits: int) -> jax.Array:
    """See `ops.interpolate`."""
    index, place = position >> bits, position & ((1 << bits) - 1)
    base, step = jnp.asarray(table[:-1]), jnp.asarray(np.diff(table))
    return base[index] + shift_round(step[index] * place, bits)


def linear(
    x: jax.Array, layer: Linear | GroupedLinear, limit: int | jax.Array, exponent: jax.Array | int = 0
) -> jax.Array:
    """int8 values (rows, in), times 2^exponent (rows, 1), to requantised sums (rows, out).

    Scaled 4-bit weights have 12 bits: like softmax weights they are cut in two, so that both products are exact.
    """
    values, width = x.astype(jnp.float32), x.shape[-1]
    if isinstance(layer, GroupedLinear):
        sums = (exact_dot(values, layer.upper) << 6) + exact_dot(values, layer.lower)
        free = headroom(width, 4)
    else:
        sums, free = exact_dot(values, layer.weight), headroom(width)
    requantiser = layer.requantiser._replace(shift=layer.requantiser.shift - exponent)
    return requantise(sums, requantiser, free, limit)


def rms_norm(x: jax.Array, norm: Norm) -> jax.Array:
    """See `ops.rms_norm`; x (rows, size). The total is upper * 2^16 + lower, lower < 2^16."""
    squares = (x * x).astype(jnp.uint32)
    epsilon = norm.epsilon.astype(jnp.uint32)
    lower = jnp.sum(squares & 0xFFFF, -1, keepdims=True, dtype=jnp.uint32) + (epsilon & 0xFFFF)
    upper = jnp.sum(squares >> 16, -1, keepdims=True, dtype=jnp.uint32) + (epsilon >> 16) + (lower >> 16)
    lower = lower & 0xFFFF
    bits = jnp.where(upper > 0, 48 - jax.lax.clz(upper), 32 - jax.lax.clz(lower)).astype(jnp.int32)
    exponent = (bits - 1) >> 1
    down = (2 * exponent - 14).astype(jnp.int32)

    def by(amount: jax.Array) -> jax.Array:
        return jnp.clip(amount, 0, 31).astype(jnp.uint32)

    small = jnp.where(down > 0, lower >> by(down), lower << by(-down))
    large = jnp.where(down <= 16, (upper << by(16 - down)) | (lower >> by(down)), upper >> by(down - 16))
    mantissa = jnp.where(upper > 0, large, small).astype(jnp.int32)
    root = interpolate(tables.RSQRT, mantissa - (1 << 14), 8)
    unit = saturate(shift_round(x * root, exponent), INT16_MAX)
    return saturate(shift_round(unit * norm.gain, norm.shift), INT8_MAX)


def rotate(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """See `ops.rotate`; x (rows, heads, head_dim), cosine and sine (rows, 1, head_dim / 2)."""
    a, b = jnp.split(x, 2, axis=-1)
    turned = jnp.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)
    return saturate(shift_round(turned, ops.ROPE_BITS + ops.ROTATED_BITS), INT8_MAX)


def softmax_weights(scores: jax.Array, seen: jax.Array, softmax: Requantiser, head_dim: int) -> jax.Array:
    """See `ops.softmax_weights`; scores (..., slots), weight 0 where not `seen`."""
    largest = jnp.max(jnp.where(seen, scores, -(1 << 30)), -1, keepdims=True)
    distance = jnp.where(seen, largest - scores, 0)
    octaves = requantise(distance, softmax, headroom(2 * head_dim), (32 << ops.DISTANCE_BITS) - 1)
    weights = jnp.asarray(tables.EXP2)[octaves & 255] >> (octaves >> ops.DISTANCE_BITS)
    return jnp.where(seen, weights, 0)


def weighted_mean(weights: jax.Array, values: jax.Array, gain: jax.Array, shift: jax.Array) -> jax.Array:
    """See `ops.weighted_mean`; weights (key heads, rows, slots), values (key heads, slots, head_dim).

    Weights have 14 bits: they are cut into two of 7, so that both products are exact in float32.
    """
    rows = weights.shape[1]
    halves = jnp.concatenate([weights >> 7, weights & 127], axis=1).astype(jnp.float32)
    both = exact_dot(halves, values)
    summed = (both[:, :rows] << 7) + both[:, rows:]
    total = jnp.sum(weights, -1, keepdims=True)
    exponent = 31 - jax.lax.clz(total)
    mantissa = ((total.astype(jnp.uint32) << 7) >> (exponent - 8).astype(jnp.uint32)).astype(jnp.int32)
    inverse = interpolate(tables.RECIPROCAL, mantissa - (1 << 15), 8)
    scaled = saturate(shift_round(summed, exponent - ops.VALUE_BITS), INT16_MAX)
    mean = shift_round(scaled * inverse, 15)
    return saturate(shift_round(mean * gain, shift), INT8_MAX)


def gated(gate: jax.Array, up: jax.Array, shift: jax.Array) -> tuple[jax.Array, jax.Array]:
    """See `ops.gated`; gate and up (rows, size), exponent (rows, 1)."""
    positive = interpolate(tables.SIGMOID, jnp.minimum(jnp.abs(gate), (16 << ops.GATE_BITS) - 1), 4)
    sigmoid = jnp.where(gate < 0, (1 << 15) - positive, positive)
    silu = shift_round(gate * sigmoid, 15)
    product = saturate(shift_round(silu * up, shift), INT16_MAX)
    largest = jnp.max(jnp.abs(product), -1, keepdims=True)
    exponent = jnp.maximum(32 - jax.lax.clz(largest) - 7, 0)
    return saturate((product + ((1 << exponent) >> 1)) >> exponent, INT8_MAX), exponent


def attention(
    x: jax.Array,
    layer: Layer,
    turn: tuple[jax.Array, jax.Array],
    start: jax.Array,
    kv: tuple[jax.Array, jax.Array],
    s: Shape,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Change of the residual stream x (rows, hidden) for tokens from position `start` on, and the cache written to."""
    rows, kv_heads, dim = x.shape[0], s.num_key_value_heads, s.head_dim
    group = s.num_attention_heads // kv_heads
    limit = np.repeat([INT16_MAX, INT8_MAX], [s.query_size + s.key_size, s.key_size]).astype(np.int32)
    joined = linear(rms_norm(x, layer.attention_norm), layer.qkv, jnp.asarray(limit))
    joined = joined.reshape(rows, -1, dim)
    turned = rotate(joined[:, :-kv_heads], *turn)
    q, k, v = turned[:, :-kv_heads], turned[:, -kv_heads:], joined[:, -kv_heads:]
    keys = jax.lax.dynamic_update_slice(kv[0], k.astype(jnp.int8), (start, 0, 0))
    values = jax.lax.dynamic_update_slice(kv[1], v.astype(jnp.int8), (start, 0, 0))
    q = q.reshape(rows, kv_heads, group, dim).transpose(1, 2, 0, 3).reshape(kv_heads, group * rows, dim)
    scores = exact_dot(q.astype(jnp.float32), keys.astype(jnp.float32).transpose(1, 2, 0))
    seen = jnp.arange(keys.shape[0]) <= start + jnp.tile(jnp.arange(rows), group)[:, None]
    weights = softmax_weights(scores, seen, layer.softmax, dim)
    gain = jnp.repeat(layer.mean_gain.reshape(kv_heads, group, dim), rows, axis=1)
    mean = weighted_mean(weights, values.astype(jnp.float32).transpose(1, 0, 2), gain, layer.mean_shift)
    mean = mean.reshape(kv_heads * group, rows, dim).transpose(1, 0, 2).reshape(rows, -1)
    return linear(mean, layer.o, INT16_MAX), (keys, values)


def mlp(x: jax.Array, layer: Layer) -> jax.Array:
    """Change of the residual stream by SwiGLU."""
    gate, up = jnp.split(linear(rms_norm(x, layer.mlp_norm), layer.gate_up, INT16_MAX), 2, axis=-1)
    product, exponent = gated(gate, up, layer.gated_shift)
    return linear(product, layer.down, INT16_MAX, exponent)


def read_rows(p: Parameters, tokens: jax.Array, start: jax.Array, cache: Cache, s: Shape) -> tuple[jax.Array, Cache]:
    """Read `tokens` (rows) from position `start` on: residual stream (rows, hidden) and the cache.

    The cache must have slots for all of them.
    """
    rows = tokens.shape[0]
    x = p.embed[tokens]
    cosine, sine = (jax.lax.dynamic_slice(t, (start, 0), (rows, t.shape[1]))[:, None] for t in (p.cosine, p.sine))
    keys, values = [], []
    for layer, *kv in zip(p.layers, cache.keys, cache.values, strict=True):
        change, (k, v) = attention(x, layer, (cosine, sine), start, (kv[0], kv[1]), s)
        x = saturate(x + change, INT16_MAX)
        x = saturate(x + mlp(x, layer), INT16_MAX)
        keys.append(k)
        values.append(v)
    return x, Cache(tuple(keys), tuple(values))


def logits(p: Parameters, x: jax.Array) -> jax.Array:
    """Residual stream (rows, hidden) to logits (rows, vocabulary)."""
    return linear(rms_norm(x, p.norm), p.head, LOGIT_MAX)
