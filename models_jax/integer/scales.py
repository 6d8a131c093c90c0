"""Choosing scales: of int8 weights and activations by a small search, of requantisers by a defined rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models_jax.integer.checkpoint import Floats
from models_jax.integer.files import MAX_EXPONENT, MAX_SCALE
from models_jax.integer.ops import GROUP_INPUTS
from planner.errors import UserError

ROW_CLIPS = (1.0, 0.9, 0.8)
"""Parts of the largest weight of a row that its scale is tried with."""
CLIPS = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
"""Parts of the largest value that a scale of activations is tried with."""
BALANCES = (None, 0.25, 0.5, 0.75)
"""How much of the difference between channels moves from activations into weights; None: nothing."""
TINY = 1e-9


@dataclass(frozen=True)
class QuantisedLinear:
    """An input's scale for each channel, weights for inputs of that scale, a scale for each output channel.

    output = (round(input / input_scale) @ weight.T) * output_scale; with 4 bits each group of weights is first
    multiplied by its `group_scale`.
    """

    input_scale: Floats
    weight: NDArray[np.int8]
    output_scale: Floats
    group_scale: NDArray[np.uint8] | None = None
    """(out, groups)"""


@dataclass(frozen=True)
class Steps:
    """How far apart the values of weights are: for each row, and with 4 bits for each group of it."""

    limit: int
    """Largest weight, 127 or 7."""
    row: Floats
    """(out)"""
    group: NDArray[np.uint8] | None
    """(out, groups), in units of `row`."""

    def each(self, width: int) -> Floats:
        """The step of every weight (out, in), or (out, 1) if a row has one."""
        if self.group is None:
            return self.row[:, None]
        return np.repeat(self.group * self.row[:, None], GROUP_INPUTS, axis=1)[:, :width]


def steps_of(weight: Floats, clip: float, bits: int) -> Steps:
    """Steps that give the largest weight of a row, or of a group, the largest value, times `clip`."""
    if bits == 8:
        return Steps(127, np.maximum(np.abs(weight).max(axis=1), TINY) * clip / 127, None)
    padded = np.pad(np.abs(weight), ((0, 0), (0, -weight.shape[1] % GROUP_INPUTS)))
    wanted = padded.reshape(len(weight), -1, GROUP_INPUTS).max(axis=-1) * clip / 7
    row = np.maximum(wanted.max(axis=1), TINY) / MAX_SCALE
    return Steps(7, row, np.clip(np.floor(wanted / row[:, None] + 0.5), 1, MAX_SCALE).astype(np.uint8))


def rounded(x: Floats, limit: int) -> Floats:
    """Nearest integer, saturated to -limit .. limit."""
    return np.asarray(np.clip(np.floor(x + 0.5), -limit, limit), np.float64)


def int8(x: Floats) -> Floats:
    """Nearest integer, saturated to int8."""
    return rounded(x, 127)


def shared_exponent(x: Floats) -> Floats:
    """As `ops.gated` rounds: int8 times a power of two for each row, at most 2^8, in units of `x`."""
    largest = np.maximum(np.floor(np.abs(x).max(axis=1, keepdims=True) + 0.5), 1)
    unit = 2.0 ** np.clip(np.floor(np.log2(largest)) + 1 - 7, 0, MAX_EXPONENT)
    return int8(x / unit) * unit


def quantise_rows(weight: Floats, moments: Floats, bits: int) -> tuple[Floats, Steps]:
    """Integer rows and their steps, with a small squared error of outputs for inputs of these second moments."""
    best = np.full(len(weight), np.inf)
    rows, steps = np.zeros_like(weight), steps_of(weight, 1.0, bits)
    factor = inverse_factor(moments)
    for clip in ROW_CLIPS:
        tried = steps_of(weight, clip, bits)
        each = tried.each(weight.shape[1])
        integers = compensated(weight, each, tried.limit, factor)
        error = weight - integers * each
        loss = np.einsum("oi,oi->o", error @ moments, error)
        better = loss < best
        best[better], rows[better], steps.row[better] = loss[better], integers[better], tried.row[better]
        if steps.group is not None and tried.group is not None:
            steps.group[better] = tried.group[better]
    return rows, steps


def inverse_factor(moments: Floats) -> Floats:
    """Upper triangular factor of the inverse of the second moments, slightly damped."""
    damped = moments + np.eye(len(moments)) * (0.01 * np.mean(np.diag(moments)) + TINY)
    return np.asarray(np.linalg.cholesky(np.linalg.inv(damped)).T, np.float64)


def compensated(weight: Floats, steps: Floats, limit: int, factor: Floats) -> Floats:
    """Round column by column; what a column loses is made up for by those after it (GPTQ, Frantar et al., 2022)."""
    rest, rows, steps = weight.copy(), np.zeros_like(weight), np.broadcast_to(steps, weight.shape)
    for i in range(weight.shape[1]):
        rows[:, i] = rounded(rest[:, i] / steps[:, i], limit)
        error = (rest[:, i] - rows[:, i] * steps[:, i]) / factor[i, i]
        rest[:, i:] -= np.outer(error, factor[i, i:])
    return rows


def quantise_linear(weight: Floats, x: Floats, bits: int = 8, exponent: bool = False) -> QuantisedLinear:
    """Quantise a linear layer (out, in) to weights of so many bits, and its input.

    It is judged by its outputs for the inputs `x` (tokens, in).

    Channels of the input may have different scales: what an input channel loses, its weights gain. With
    `exponent` the input is rounded by `shared_exponent`; the largest seen then fills half of its 16 bits.
    """
    wanted = x @ weight.T
    best, channel, exact = np.inf, np.ones(x.shape[1]), x
    for part in BALANCES:
        relative = channel_scales(weight, x, part)
        largest = max(float(np.abs(x / relative).max()), TINY)
        for scale in [largest / 16383] if exponent else [largest * clip / 127 for clip in CLIPS]:
            tried = relative * scale
            taken = shared_exponent(x / tried) if exponent else int8(x / tried)
            loss = float(np.mean((taken @ rounded_rows(weight * tried, bits).T - wanted) ** 2))
            if loss < best:
                best, channel, exact = loss, tried, taken
    rows, steps = quantise_rows(weight * channel, exact.T @ exact / len(x), bits)
    return QuantisedLinear(channel, rows.astype(np.int8), steps.row, steps.group)


def rounded_rows(weight: Floats, bits: int) -> Floats:
    """Weights after plain rounding."""
    steps = steps_of(weight, 1.0, bits)
    each = steps.each(weight.shape[1])
    return rounded(weight / each, steps.limit) * each


def channel_scales(weight: Floats, x: Floats, part: float | None) -> Floats:
    """Relative scales of the input channels: (largest input)^part / (largest weight)^(1 - part)."""
    if part is None:
        return np.ones(x.shape[1])
    inputs = np.maximum(np.abs(x).max(axis=0), TINY)
    weights = np.maximum(np.abs(weight).max(axis=0), TINY)
    raw = inputs**part / weights ** (1 - part)
    return np.clip(raw / np.exp(np.mean(np.log(raw))), 1 / 32, 32)


def requantisers(ratio: Floats, free: int, what: str, spare: int = 0) -> tuple[NDArray[np.int16], NDArray[np.int8]]:
    """Multipliers and shifts of `ops.requantise` for sums below 2^(31 - free): ratio = multiplier / 2^shift.

    Rounded to the nearest multiplier of 15 bits. A ratio too small to give 1 becomes 0. `spare` is how much less
    the shift may become.
    """
    part, exponent = np.frexp(np.asarray(ratio, np.float64))
    multiplier = np.floor(part * (1 << 15) + 0.5).astype(np.int64)
    shift = 15 - exponent.astype(np.int64)
    full = multiplier == 1 << 15
    multiplier, shift = np.where(full, 1 << 14, multiplier), np.where(full, shift - 1, shift)
    low, high = max(1, 17 - free) + spare, 46 - free
    if np.any((shift < low) & (multiplier > 0)):
        raise UserError(
            f"{what} would be scaled up by {float(np.max(ratio)):.3g}, which integer models cannot do",
            mend="use calibration data that resembles the model's real inputs",
        )
    small = (shift > high) | (multiplier == 0)
    return np.where(small, 0, multiplier).astype(np.int16), np.where(small, high, shift).astype(np.int8)


def gains(gain: Floats, most: int) -> tuple[NDArray[np.int16], NDArray[np.int32]]:
    """int16 gains with one shift of 1 .. `most` for all: gain = stored / 2^shift."""
    largest = max(float(np.abs(gain).max()), TINY)
    shift = int(np.clip(np.floor(np.log2(32767 / largest)), 1, most))
    stored = np.clip(np.floor(gain * 2.0**shift + 0.5), -32767, 32767)
    return stored.astype(np.int16), scalar(shift)


def scalar(value: int) -> NDArray[np.int32]:
    """A tensor without dimensions."""
    return np.asarray(value, np.int32)


def pair_scales(q: Floats, k: Floats, clip: float = 1.0) -> tuple[Floats, Floats, float]:
    """Scales of rotated queries and keys for each rotated pair, and the product of both, the same everywhere.

    q (tokens, key heads, group, 2, half), k (tokens, key heads, 2, half) -> (key heads, half) each.
    """
    largest_q = np.maximum(np.abs(q).max(axis=(0, 2, 3)), TINY)
    largest_k = np.maximum(np.abs(k).max(axis=(0, 2)), TINY)
    product = float((largest_q * largest_k).max()) * clip / 127**2
    lean = np.clip(np.sqrt(largest_q / largest_k), 1e-3, 1e3)
    return np.sqrt(product) * lean, np.sqrt(product) / lean, product


Tensors = dict[str, NDArray[Any]]
