"""The operations of the integer model in numpy: the specification of every rounding.

Everything is computed in int64, so that nothing here overflows; the docstrings say how many bits hardware
needs. A shift to the right is arithmetic: it rounds towards minus infinity. Qm.n is a number with n bits
behind the point; UQm.n has no sign.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from models_jax.integer.tables import EXP2, RECIPROCAL, RSQRT, SIGMOID, Table

Ints = NDArray[np.int64]

INT8_MAX = 127
"""int8 values are symmetric: -127 to 127."""
INT16_MAX = 32767
"""int16 values are symmetric: -32767 to 32767."""
ROPE_BITS = 14
"""Fraction bits of cosine and sine, Q2.14."""
ROTATED_BITS = 6
"""Fraction bits that a query or key has, in units of its int8 scale, before it is rotated."""
GATE_BITS = 8
"""Fraction bits of the gate, Q8.8."""
VALUE_BITS = 7
"""Fraction bits of the attention average, in units of the int8 scale of values."""
GROUP_INPUTS = 32
"""Inputs that share a scale where weights have 4 bits."""
DISTANCE_BITS = 8
"""Fraction bits of a score's distance to the largest one, in octaves."""


def saturate(x: Ints, limit: int) -> Ints:
    """Clamp to -limit .. limit."""
    return np.clip(x, -limit, limit)


def shift_round(x: Ints, shift: Ints | int) -> Ints:
    """x / 2^shift, halves upwards: (x + 2^(shift-1)) >> shift. shift >= 1."""
    return (x + (np.int64(1) << (np.asarray(shift, np.int64) - 1))) >> shift


def requantise(x: Ints, multiplier: Ints | int, shift: Ints | int, limit: int) -> Ints:
    """x * multiplier / 2^shift, halves upwards, saturated.

    x: int32 accumulator with |x| < 2^(31 - h). multiplier: 0 or 2^14 .. 2^15 - 1. shift: max(1, 17 - h) ..
    46 - h. One 32 x 15 bit product; with x * 2^h in two halves it is two of 16 x 15 bits.
    """
    return saturate(shift_round(x * multiplier, shift), limit)


def interpolate(table: Table, position: Ints, bits: int) -> Ints:
    """Linear interpolation: the upper bits of `position` choose a segment, the lower `bits` a place in it.

    base + (((next - base) * place + 2^(bits-1)) >> bits).
    """
    index, place = position >> bits, position & ((1 << bits) - 1)
    base = table[index].astype(np.int64)
    return base + shift_round((table[index + 1] - base) * place, bits)


def matvec(weight: Ints, x: Ints) -> Ints:
    """Dot products of int8 rows (out, in) with an int8 vector (in), accumulated in int32."""
    return weight @ x


def grouped_matvec(weight: Ints, scale: Ints, x: Ints) -> Ints:
    """Dot products of rows of 4-bit weights (out, in) with an int8 vector (in), accumulated in int32.

    weight: -7 .. 7. scale: 0 .. 255 (out, groups), one for each GROUP_INPUTS inputs of a row, the last group may be
    short. The sum of a group's products (16 bits) is multiplied by its scale (24 bits) and added to those before it.
    """
    outer, inner = weight.shape
    padding = -inner % GROUP_INPUTS
    parts = np.pad(weight, ((0, 0), (0, padding))) * np.pad(x, (0, padding))
    return (parts.reshape(outer, -1, GROUP_INPUTS).sum(axis=-1) * scale).sum(axis=-1)


def rms_norm(x: Ints, epsilon: int, gain: Ints, shift: int) -> Ints:
    """Root-mean-square norm of an int16 vector to int8 activations.

    1. total = sum of x^2 + epsilon: at most 2^43; epsilon >= 4.
    2. e = floor(log2(total) / 2); mantissa = floor(total * 2^14 / 4^e) in [2^14, 2^16), UQ2.14.
    3. root = 1 / sqrt(mantissa) from RSQRT, UQ1.15, in [2^14, 2^15].
    4. unit = x * root / 2^e, halves upwards, saturated to int16, Q1.15: x / sqrt(total).
    5. y = unit * gain / 2^shift, halves upwards, saturated to int8. gain: int16 for each channel. It holds the
       weight of the norm, sqrt(size) and the scale of the activations.
    """
    total = int(np.sum(x * x)) + epsilon
    exponent = (total.bit_length() - 1) // 2
    mantissa = np.asarray((total << 14) >> (2 * exponent), np.int64)
    root = interpolate(RSQRT, mantissa - (1 << 14), 8)
    unit = saturate(shift_round(x * root, exponent), INT16_MAX)
    return saturate(shift_round(unit * gain, shift), INT8_MAX)


def rotate(x: Ints, cosine: Ints, sine: Ints) -> Ints:
    """RoPE on heads (heads, head_dim), first half paired with second; int16 to int8.

    x: Q10.6 in units of the int8 scale. cosine, sine: Q2.14 (head_dim / 2). The sum of the two products stays
    below 2^31; it is rounded once, by 20 bits.
    """
    a, b = np.split(x, 2, axis=-1)
    turned = np.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)
    return saturate(shift_round(turned, ROPE_BITS + ROTATED_BITS), INT8_MAX)


def softmax_weights(scores: Ints, multiplier: int, shift: int) -> Ints:
    """Unnormalised softmax weights UQ1.13 of int32 scores (..., tokens).

    1. distance = largest score - score: at most 2 * 127^2 * head_dim.
    2. octaves = distance * multiplier / 2^shift, halves upwards, UQ5.8, at most 31 + 255/256. The multiplier
       holds the scales of query and key, log2(e) and 1 / sqrt(head_dim).
    3. weight = EXP2[lower 8 bits] >> upper 5 bits. The largest score has weight 2^13.
    """
    distance = scores.max(axis=-1, keepdims=True) - scores
    octaves = np.minimum(shift_round(distance * multiplier, shift), (32 << DISTANCE_BITS) - 1)
    return EXP2[octaves & 255].astype(np.int64) >> (octaves >> DISTANCE_BITS)


def weighted_mean(weights: Ints, values: Ints, gain: Ints, shift: int) -> Ints:
    """Mean of int8 values (tokens, head_dim) under weights (tokens), to int8 activations (head_dim).

    1. sum = sum of weight * value: int32, since there are at most 2048 tokens.
    2. total = sum of weights in [2^13, 2^24]; e = floor(log2 total); mantissa = total * 2^15 / 2^e, floor, in
       [2^15, 2^16), UQ1.15.
    3. inverse = 1 / mantissa from RECIPROCAL, UQ1.15, in [2^14, 2^15].
    4. scaled = sum / 2^(e-7), halves upwards, saturated to int16; mean = scaled * inverse / 2^15, halves upwards:
       Q8.7 in units of the int8 scale of values.
    5. y = mean * gain / 2^shift, halves upwards, saturated to int8. gain: uint15 for each channel.
    """
    summed, total = weights @ values, int(weights.sum())
    exponent = total.bit_length() - 1
    mantissa = np.asarray((total << 15) >> exponent, np.int64)
    inverse = interpolate(RECIPROCAL, mantissa - (1 << 15), 8)
    scaled = saturate(shift_round(summed, exponent - VALUE_BITS), INT16_MAX)
    mean = shift_round(scaled * inverse, 15)
    return saturate(shift_round(mean * gain, shift), INT8_MAX)


def gated(gate: Ints, up: Ints, shift: int) -> tuple[Ints, int]:
    """SiLU(gate) * up to int8 activations with one exponent for the whole vector.

    1. sigmoid from SIGMOID at min(|gate|, 16 - 1/256), UQ1.15; for a negative gate 1 - sigmoid. gate: Q8.8.
    2. silu = gate * sigmoid / 2^15, halves upwards, Q8.8.
    3. product = silu * up / 2^shift, halves upwards, saturated to int16. up: int16; its requantiser holds the
       rest of the scale, so one shift a layer is enough.
    4. exponent = max(0, bits of the largest |product| - 7), 0 .. 8.
    5. y = product / 2^exponent, halves upwards, saturated to int8. The product is y * 2^exponent.

    The product has the longest tails of all activations, and a token's largest differs much from another's; the
    exponent keeps seven bits for each token.
    """
    positive = interpolate(SIGMOID, np.minimum(np.abs(gate), (16 << GATE_BITS) - 1), 4)
    sigmoid = np.where(gate < 0, (1 << 15) - positive, positive)
    silu = shift_round(gate * sigmoid, 15)
    product = saturate(shift_round(silu * up, shift), INT16_MAX)
    exponent = max(0, int(np.abs(product).max()).bit_length() - 7)
    return saturate((product + (1 << exponent >> 1)) >> exponent, INT8_MAX), exponent
