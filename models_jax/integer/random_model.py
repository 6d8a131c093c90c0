"""Random integer models: every tensor drawn from its range, to test implementations against each other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from models_jax.integer.files import IntegerModel, Shape, expected, limits

SCALED = ("q", "k", "v", "o", "gate", "up", "down")
"""Layers whose sums hold the scales of groups where weights have 4 bits: some 4 bits more than without."""


def random_model(shape: Shape, seed: int, wild: bool = False) -> IntegerModel:
    """A model of this shape that passes the checks of a file; its logits mean nothing.

    Requantisers are drawn so that sums mostly fill their range; `wild` draws all of it, so that nearly everything
    saturates or vanishes.
    """
    rng = np.random.default_rng(seed)
    tensors: dict[str, NDArray[Any]] = {}
    for name, (dtype, dims) in expected(shape).items():
        low, high = limits(shape, name)
        kind = name.split(".")[-1]
        if kind == "multiplier":
            low = 1 << 14
        if not wild:
            low, high = usual(name, low, high, shape.weight_bits)
        tensors[name] = np.asarray(rng.integers(low, high, dims, endpoint=True)).astype(dtype)
        if kind == "multiplier" and wild:
            tensors[name] = (tensors[name] * rng.integers(0, 1, dims, endpoint=True)).astype(dtype)
    return IntegerModel(shape, tensors, f"random-{shape}-{seed}-{wild}")


def usual(name: str, low: int, high: int, weight_bits: int) -> tuple[int, int]:
    """A narrower range in which values neither vanish nor saturate as a rule."""
    owner, kind = name.split(".")[-2:]
    if kind == "shift":
        usually = {"embed": 10, "head": 16, "norm": 18, "attention_norm": 18, "mlp_norm": 18, "softmax": 20}
        others = {"mean": 19, "gated": 16, "q": 18, "k": 18, "v": 23, "o": 16, "gate": 18, "up": 16, "down": 24}
        middle = (usually | others)[owner] + (4 if owner in SCALED and weight_bits == 4 else 0)
        return max(low, middle - 1), min(high, middle + 1)
    if kind == "epsilon":
        return low, 1000
    return low, high
