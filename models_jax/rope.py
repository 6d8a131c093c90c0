"""Rotary position embedding: its frequencies, and the scalings that long-context models use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.errors import UserError

KINDS = ("default", "linear", "llama3")
"""Values of `rope_type` that are computed here."""


@dataclass(frozen=True)
class RopeScaling:
    """How frequencies are lowered for a context longer than the model was first trained for."""

    kind: str
    """`linear`: all are divided by `factor`. `llama3`: low ones are, high ones stay, those between are blended."""
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def to_dict(self) -> dict[str, Any]:
        """The keys that transformers has for this kind, without `rope_theta`."""
        keys = {"rope_type": self.kind, "factor": self.factor}
        if self.kind == "llama3":
            keys |= {
                "low_freq_factor": self.low_freq_factor,
                "high_freq_factor": self.high_freq_factor,
                "original_max_position_embeddings": self.original_max_position_embeddings,
            }
        return keys


def read_rope(raw: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from a `config.json`: `rope_parameters`, or the older `rope_theta` and `rope_scaling`.

    Raises UserError for what is not computed here, ValueError or KeyError for a value that cannot be read.
    """
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    given = raw.get(key) or {}
    theta = float(given.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in KINDS:
        raise UserError(
            f"{key}.rope_type is {kind!r}, which is not supported",
            where=where,
            mend=f"use a model with one of {', '.join(KINDS)}",
        )
    partial = given.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise UserError(
            f"partial_rotary_factor is {partial!r}, which is not supported", where=where, mend="use a model with 1.0"
        )
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind, float(given["factor"]))
    return theta, RopeScaling(
        kind,
        float(given["factor"]),
        float(given["low_freq_factor"]),
        float(given["high_freq_factor"]),
        int(given["original_max_position_embeddings"]),
    )


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> NDArray[np.float32]:
    """Radians a position for each pair of a head, (head_dim / 2,) float32, in the arithmetic of transformers."""
    powers = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inverse = (np.float32(1) / np.power(np.float32(theta), powers)).astype(np.float32)
    if scaling is None:
        return inverse
    slow = (inverse / np.float32(scaling.factor)).astype(np.float32)
    if scaling.kind == "linear":
        return slow
    turns = np.float32(scaling.original_max_position_embeddings) * inverse / np.float32(2 * np.pi)
    low, high = np.float32(scaling.low_freq_factor), np.float32(scaling.high_freq_factor)
    share = np.clip((turns - low) / (high - low), 0, 1)
    return (share * inverse + (1 - share) * slow).astype(np.float32)
