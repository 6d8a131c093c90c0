"""The small tables of the integer model. They are part of the specification; their digest is fixed.

An entry is a real function at evenly spaced points, rounded half up. The digest guards against a mathematical
library that would round one entry otherwise, and gives the RTL something to check its memories against.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.int32]

EXP2_ONE = 1 << 13
"""1.0 in the format of softmax weights, Q1.13."""
FRACTION_ONE = 1 << 15
"""1.0 in the format of SIGMOID, RSQRT and RECIPROCAL, Q1.15."""
GUMBEL_BITS = 12
"""Fraction bits of Gumbel noise: Q6.12."""
GUMBEL_OCTAVES = 24
"""Octaves of a tail probability that are told apart; the rest, 2^-25 of each tail, is clamped."""
GUMBEL_SEGMENTS = 32
"""Segments of one octave."""


def half_up(value: float) -> int:
    """The nearest integer, halves upwards."""
    return math.floor(value + 0.5)


def table(scale: int, function: Callable[[float], float], points: Iterable[float]) -> Table:
    """`function` at `points` in units of 1 / `scale`."""
    return np.array([half_up(scale * function(point)) for point in points], np.int32)


EXP2 = table(EXP2_ONE, lambda x: 2.0**-x, (i / 256 for i in range(256)))
"""2^-x for x = i / 256 in [0, 1). 256 entries, looked up directly."""

SIGMOID = table(FRACTION_ONE, lambda x: 1.0 / (1.0 + math.exp(-x)), (i / 16 for i in range(257)))
"""1 / (1 + e^-x) for x = i / 16 in [0, 16]. 257 entries, interpolated."""

RSQRT = table(FRACTION_ONE, lambda x: 1.0 / math.sqrt(x), (1 + i / 64 for i in range(193)))
"""1 / sqrt(x) for x = 1 + i / 64 in [1, 4]. 193 entries, interpolated."""

RECIPROCAL = table(FRACTION_ONE, lambda x: 1.0 / x, (1 + i / 128 for i in range(129)))
"""1 / x for x = 1 + i / 128 in [1, 2]. 129 entries, interpolated."""


def tail_points() -> list[float]:
    """Tail probabilities from 2^-25 to 1/2: 24 octaves of 32 segments, ends included."""
    segments = GUMBEL_OCTAVES * GUMBEL_SEGMENTS
    points = []
    for i in range(segments + 1):
        octave, segment = divmod(i, GUMBEL_SEGMENTS)
        points.append(2.0 ** (octave - GUMBEL_OCTAVES - 1) * (1 + segment / GUMBEL_SEGMENTS))
    return points


GUMBEL_LOW = table(1 << GUMBEL_BITS, lambda u: -math.log(-math.log(u)), tail_points())
"""-ln(-ln u) for u in [2^-25, 1/2]. 769 entries, interpolated."""

GUMBEL_HIGH = table(1 << GUMBEL_BITS, lambda w: -math.log(-math.log1p(-w)), tail_points())
"""-ln(-ln(1 - w)) for w in [2^-25, 1/2]. 769 entries, interpolated."""

TABLES = {
    "exp2": EXP2,
    "sigmoid": SIGMOID,
    "rsqrt": RSQRT,
    "reciprocal": RECIPROCAL,
    "gumbel_low": GUMBEL_LOW,
    "gumbel_high": GUMBEL_HIGH,
}


def digest() -> str:
    """SHA-256 of all tables, in the order of TABLES, as little-endian int32."""
    return hashlib.sha256(b"".join(values.astype("<i4").tobytes() for values in TABLES.values())).hexdigest()
