"""The integer model in numpy, one token at a time: the specification that every other implementation equals.

It is written to be read, not to be fast. Formats and roundings are in `models_jax.integer.ops`, tables in
`models_jax.integer.tables`, the file in `models_jax.integer.files`, sampling in `models_jax.integer.gumbel`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models_jax.integer import ops
from models_jax.integer.files import IntegerModel, Shape, bits_of, read
from models_jax.integer.ops import INT8_MAX, INT16_MAX, Ints

LOGIT_BITS = 12
"""Fraction bits of logits, Q10.12."""
LOGIT_MAX = (1 << 22) - 1
"""Logits are symmetric, 23 bits with their sign."""


@dataclass
class Cache:
    """Keys and values, int8 (layers, slots, key heads, head_dim). The token at position p lives in slot p.

    It has no length of its own: a rewind is a smaller position of the next token.
    """

    keys: NDArray[np.int8]
    values: NDArray[np.int8]

    @classmethod
    def empty(cls, shape: Shape) -> Cache:
        """A cache for the whole context."""
        dims = (shape.num_hidden_layers, shape.context_tokens, shape.num_key_value_heads, shape.head_dim)
        return cls(np.zeros(dims, np.int8), np.zeros(dims, np.int8))


class Reference:
    """The model of one quantised file."""

    def __init__(self, model: IntegerModel) -> None:
        """Widen every tensor to int64, so that numpy computes without overflow."""
        self.shape = model.shape
        self.tensors: dict[str, Ints] = {name: value.astype(np.int64) for name, value in model.tensors.items()}

    @classmethod
    def load(cls, path: Path) -> Reference:
        """Read a quantised file. Raises UserError if it is not one."""
        return cls(read(path))

    def step(self, token: int, position: int, cache: Cache) -> NDArray[np.int32]:
        """Read `token` at `position`: logits (vocabulary), Q10.12, and its keys and values into the cache.

        The slots before `position` must hold the tokens before it.
        """
        x = self.embed(token)
        for i in range(self.shape.num_hidden_layers):
            x = self.add(x, self.attention(f"layers.{i}", x, position, cache.keys[i], cache.values[i]))
            x = self.add(x, self.mlp(f"layers.{i}", x))
        return self.logits(x)

    def embed(self, token: int) -> Ints:
        """The residual stream begins as the token's int8 row, requantised by the row's own multiplier to int16.

        The stream has one scale for the whole model.
        """
        row = self.tensors["embed.weight"][token]
        multiplier, shift = self.tensors["embed.multiplier"][token], self.tensors["embed.shift"][token]
        return ops.requantise(row, multiplier, shift, INT16_MAX)

    def add(self, x: Ints, change: Ints) -> Ints:
        """Add to the residual stream; int16, saturated."""
        return ops.saturate(x + change, INT16_MAX)

    def norm(self, name: str, x: Ints) -> Ints:
        """See `ops.rms_norm`."""
        t = self.tensors
        return ops.rms_norm(x, int(t[f"{name}.epsilon"]), t[f"{name}.gain"], int(t[f"{name}.shift"]))

    def linear(self, name: str, x: Ints, limit: int, exponent: int = 0) -> Ints:
        """int8 vector to int32 sums under weights of 8 or 4 bits.

        They are requantised for each output channel and saturated to -limit .. limit.

        The vector stands for x * 2^exponent: the requantiser shifts by so much less.
        """
        t = self.tensors
        weight = t[f"{name}.weight"]
        grouped = bits_of(self.shape, name) == 4
        sums = ops.grouped_matvec(weight, t[f"{name}.scale"], x) if grouped else ops.matvec(weight, x)
        return ops.requantise(sums, t[f"{name}.multiplier"], t[f"{name}.shift"] - exponent, limit)

    def attention(self, name: str, x: Ints, position: int, keys: NDArray[np.int8], values: NDArray[np.int8]) -> Ints:
        """Change of the residual stream by grouped-query attention; writes slot `position` of the cache.

        q and k: int16 Q10.6 before and int8 after the rotation. v: int8.
        """
        s, t = self.shape, self.tensors
        h = self.norm(f"{name}.attention_norm", x)
        q = self.linear(f"{name}.q", h, INT16_MAX).reshape(s.num_attention_heads, s.head_dim)
        k = self.linear(f"{name}.k", h, INT16_MAX).reshape(s.num_key_value_heads, s.head_dim)
        v = self.linear(f"{name}.v", h, INT8_MAX).reshape(s.num_key_value_heads, s.head_dim)
        turn = t["rope.cosine"][position], t["rope.sine"][position]
        q, keys[position], values[position] = ops.rotate(q, *turn), ops.rotate(k, *turn), v
        group = s.num_attention_heads // s.num_key_value_heads
        gain, mean_shift = t[f"{name}.mean.gain"].reshape(q.shape), int(t[f"{name}.mean.shift"])
        heads = []
        for i in range(s.num_attention_heads):
            seen_keys = keys[: position + 1, i // group].astype(np.int64)
            seen_values = values[: position + 1, i // group].astype(np.int64)
            scores = ops.matvec(seen_keys, q[i])
            weights = ops.softmax_weights(scores, int(t[f"{name}.softmax.multiplier"]), int(t[f"{name}.softmax.shift"]))
            heads.append(ops.weighted_mean(weights, seen_values, gain[i], mean_shift))
        return self.linear(f"{name}.o", np.concatenate(heads), INT16_MAX)

    def mlp(self, name: str, x: Ints) -> Ints:
        """Change of the residual stream by SwiGLU. gate: Q8.8; up: int16; their product int8 with an exponent."""
        h = self.norm(f"{name}.mlp_norm", x)
        gate = self.linear(f"{name}.gate", h, INT16_MAX)
        up = self.linear(f"{name}.up", h, INT16_MAX)
        product, exponent = ops.gated(gate, up, int(self.tensors[f"{name}.gated.shift"]))
        return self.linear(f"{name}.down", product, INT16_MAX, exponent)

    def logits(self, x: Ints) -> NDArray[np.int32]:
        """Last norm and vocabulary head: Q10.12, saturated to 23 bits."""
        t = self.tensors
        weight = t["embed.weight" if self.shape.tied else "head.weight"]
        sums = ops.matvec(weight, self.norm("norm", x))
        return ops.requantise(sums, t["head.multiplier"], t["head.shift"], LOGIT_MAX).astype(np.int32)
