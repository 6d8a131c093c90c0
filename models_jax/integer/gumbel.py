"""Choosing the next token in integers: greedy, or with Gumbel noise from a counter-based generator.

argmax(logits + temperature * Gumbel(key, position, token)) is a sample of softmax(logits / temperature). Noise
depends on nothing but key, position and token, so the order of execution cannot change a choice.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from models_jax.integer.ops import interpolate, shift_round
from models_jax.integer.tables import GUMBEL_HIGH, GUMBEL_LOW, half_up
from planner.errors import UserError

Words = NDArray[np.uint32]

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
"""Rotations of Threefry-2x32, four rounds each, in turn."""
PARITY = 0x1BD11BDA
"""Constant of the key schedule."""
TEMPERATURE_BITS = 10
"""Fraction bits of the temperature, UQ3.10."""
MAX_TEMPERATURE = 8


def temperature_units(temperature: float) -> int:
    """The temperature in units of 2^-10, halves upwards. Raises UserError outside 0 .. 8.

    Below 2^-11 it becomes 0, which is greedy.
    """
    if not 0 <= temperature <= MAX_TEMPERATURE:
        raise UserError(
            f"temperature {temperature} is outside 0 .. {MAX_TEMPERATURE}", mend="choose one in this range; 0 is greedy"
        )
    return half_up(temperature * (1 << TEMPERATURE_BITS))


def key_words(key: int) -> tuple[int, int]:
    """A 64-bit key as the upper and the lower word."""
    return (key >> 32) & 0xFFFFFFFF, key & 0xFFFFFFFF


def threefry(key: tuple[int, int], x0: Words, x1: Words) -> tuple[Words, Words]:
    """Threefry-2x32 with 20 rounds (Salmon et al., 2011): two counter words to two random words.

    Additions are modulo 2^32. A round: x0 += x1; x1 = rotate_left(x1, r) ^ x0. Before the first round and after
    every fourth the key schedule is added.
    """
    schedule = np.array([key[0], key[1], key[0] ^ key[1] ^ PARITY], np.uint32)
    x0, x1 = x0 + schedule[0], x1 + schedule[1]
    for block in range(5):
        for r in ROTATIONS[block % 2]:
            x0 = x0 + x1
            x1 = ((x1 << np.uint32(r)) | (x1 >> np.uint32(32 - r))) ^ x0
        x0 = x0 + schedule[(block + 1) % 3]
        x1 = x1 + schedule[(block + 2) % 3] + np.uint32(block + 1)
    return x0, x1


def gumbel(bits: Words) -> NDArray[np.int64]:
    """Gumbel noise Q6.12 of uniform 32-bit words: -ln(-ln u) with u = (bits + 1/2) / 2^32.

    1. tail = min(bits, ~bits); low if bits < 2^31. w = max(2 * tail + 1, 2^8) in [2^8, 2^32), units of 2^-33.
    2. octave = floor(log2 w) - 8, 0 .. 23; normal = w * 2^(23 - octave), its upper bit set.
    3. position = octave * 2^13 + (bits 30 .. 18 of normal): segment 5 bits, place in it 8 bits.
    4. interpolate GUMBEL_LOW or GUMBEL_HIGH.
    """
    wide = bits.astype(np.int64)
    low = wide < 1 << 31
    tail = np.where(low, wide, 0xFFFFFFFF - wide)
    w = np.maximum(2 * tail + 1, 1 << 8)
    octave = np.frexp(w.astype(np.float64))[1].astype(np.int64) - 9
    normal = w << (23 - octave)
    position = (octave << 13) + ((normal >> 18) & 0x1FFF)
    return np.where(low, interpolate(GUMBEL_LOW, position, 8), interpolate(GUMBEL_HIGH, position, 8))


def noise(key: int, position: int, vocabulary: int) -> NDArray[np.int64]:
    """Gumbel noise of every token at `position`: the first word of Threefry at counter (position, token)."""
    tokens = np.arange(vocabulary, dtype=np.uint32)
    first, _ = threefry(key_words(key), np.full(vocabulary, position, np.uint32), tokens)
    return gumbel(first)


def choose(logits: NDArray[np.int32], position: int, key: int, temperature: float) -> int:
    """The token for `position`; the lowest id of equals.

    value = logits + (noise * temperature + 2^9 >> 10), all Q.12; noise * temperature stays below 2^31.
    """
    units = temperature_units(temperature)
    if units == 0:
        return int(np.argmax(logits))
    return int(np.argmax(logits + shift_round(noise(key, position, logits.size) * units, TEMPERATURE_BITS)))
