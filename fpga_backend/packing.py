"""The weights of an integer model as they lie in the memory of an FPGA.

Everything begins at a beat, LANES bytes. Engine 0 has all that is loaded into the parameter memory (rows of the
embedding, cosine and sine, gains); each engine has its part of every linear layer, all at the same place:

    for every LANES / 4 of its rows:  one header beat: {multiplier: 16 bits, shift + headroom - 16: 16 bits} a row
                                      the rows, each padded with zeros to whole beats

Row r belongs to engine r mod ENGINES. Where rows do not divide evenly the last engines get rows of zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fpga_backend.core import Core
from models_jax.integer.files import IntegerModel, headroom, linears

Bytes = NDArray[np.uint8]
REQUANTISER_BYTES = 4
PAGE = 4096


@dataclass(frozen=True)
class Linear:
    """A linear layer in memory."""

    address: int
    """Beats from the weights of each engine."""
    beats: int
    """Beats of the stream of one engine."""
    rows: int
    """Rows of all engines together, without padding."""
    row_beats: int
    headroom: int


@dataclass(frozen=True)
class Rows:
    """Rows for the parameter memory, one of which is loaded at a time."""

    address: int
    """Beats from the weights of engine 0."""
    beats: int
    """Beats of one row."""


@dataclass(frozen=True)
class Image:
    """All weights of a model."""

    weights: Bytes
    """(engines, bytes), whole pages."""
    linears: dict[str, Linear]
    """head, and layers.I. with v, qk (query rows, then key rows), o, gate_up (in turn), down."""
    rows: dict[str, Rows]
    """embed, rope, norm, and layers.I (gains of attention_norm, mean, mlp_norm)."""


@dataclass
class Builder:
    """Collects streams, engine by engine."""

    core: Core
    parts: list[Bytes] = field(default_factory=list)
    """(engines, bytes) each."""
    at: int = 0
    """Beats so far."""

    def add(self, part: Bytes) -> int:
        """Append (engines, bytes) of whole beats. Returns where it begins, in beats."""
        at = self.at
        self.parts.append(part)
        self.at += part.shape[1] // self.core.lanes
        return at

    def add_rows(self, rows: Bytes) -> Rows:
        """Append rows (n, bytes) for the parameter memory to engine 0, each padded to whole beats."""
        beats = self.core.beats(rows.shape[1])
        part = np.zeros((self.core.engines, len(rows), beats * self.core.lanes), np.uint8)
        part[0, :, : rows.shape[1]] = rows
        return Rows(self.add(part.reshape(self.core.engines, -1)), beats)

    def add_linear(self, weight: NDArray[Any], multiplier: NDArray[Any], shift: NDArray[Any]) -> Linear:
        """Append a linear layer: weight int8 (out, in), a requantiser for each row."""
        rows, width = weight.shape
        part = linear_stream(weight, requantisers(multiplier, shift, headroom(width)), self.core)
        address = self.add(part)
        return Linear(address, self.at - address, rows, self.core.beats(width), headroom(width))

    def image(self) -> Bytes:
        """All parts, padded to whole pages."""
        rest = -self.at * self.core.lanes % PAGE
        return np.concatenate([*self.parts, np.zeros((self.core.engines, rest), np.uint8)], axis=1)


def requantisers(multiplier: NDArray[Any], shift: NDArray[Any], free: int) -> Bytes:
    """(rows, 4) bytes: the multiplier and the shift that is left once a sum has been scaled up by its headroom."""
    words = multiplier.astype(np.uint32) | (shift.astype(np.int64) + free - 16).astype(np.uint32) << 16
    return words.astype("<u4").view(np.uint8).reshape(-1, REQUANTISER_BYTES)


def linear_stream(weight: NDArray[Any], header: Bytes, core: Core) -> Bytes:
    """The streams (engines, bytes) of a layer: weight int8 (out, in), header (out, 4) bytes."""
    rows = core.rows(len(weight))
    padded = np.zeros((rows * core.engines, core.beats(weight.shape[1]) * core.lanes), np.uint8)
    padded[: len(weight), : weight.shape[1]] = weight.astype(np.int8).view(np.uint8)
    headers = np.zeros((rows * core.engines, REQUANTISER_BYTES), np.uint8)
    headers[: len(header)] = header
    return np.stack(
        [engine_stream(padded[e :: core.engines], headers[e :: core.engines], core) for e in range(core.engines)]
    )


def engine_stream(weight: Bytes, header: Bytes, core: Core) -> Bytes:
    """The stream of one engine: header beats among whole rows."""
    parts = []
    for first in range(0, len(weight), core.group):
        group = np.zeros(core.lanes, np.uint8)
        some = header[first : first + core.group].reshape(-1)
        group[: some.size] = some
        parts += [group, weight[first : first + core.group].reshape(-1)]
    return np.concatenate(parts)


def halves(values: NDArray[Any]) -> Bytes:
    """int16 as bytes, in the last axis."""
    return np.ascontiguousarray(values.astype("<i2")).view(np.uint8)


def pack(model: IntegerModel, core: Core) -> Image:
    """The memory image of a model for a core."""
    s, t, made = model.shape, model.tensors, Builder(core)
    rows: dict[str, Rows] = {}
    layers: dict[str, Linear] = {}

    def linear(name: str, *parts: str) -> Linear:
        found = [np.concatenate([t[f"{name}.{part}.{kind}"] for part in parts]) for kind in KINDS]
        return made.add_linear(*found)

    embed = requantisers(t["embed.multiplier"], t["embed.shift"], headroom(1))
    rows["embed"] = made.add_rows(np.concatenate([embed, t["embed.weight"].view(np.uint8)], axis=1))
    turn = np.stack([t["rope.cosine"], t["rope.sine"]], axis=-1).reshape(s.context_tokens, -1)
    rows["rope"] = made.add_rows(halves(turn))
    for i in range(s.num_hidden_layers):
        name = f"layers.{i}"
        rows[name] = made.add_rows(gains(model, core, f"{name}.attention_norm", f"{name}.mean", f"{name}.mlp_norm"))
        layers[f"{name}.v"] = linear(name, "v")
        layers[f"{name}.qk"] = linear(name, "q", "k")
        layers[f"{name}.o"] = linear(name, "o")
        both = [np.stack([t[f"{name}.{part}.{kind}"] for part in ("gate", "up")], axis=1) for kind in KINDS]
        inner = linears(s)["gate"][0]
        layers[f"{name}.gate_up"] = made.add_linear(*[part.reshape(2 * inner, *part.shape[2:]) for part in both])
        layers[f"{name}.down"] = linear(name, "down")
    rows["norm"] = made.add_rows(gains(model, core, "norm"))
    head = t["embed.weight" if s.tied else "head.weight"]
    layers["head"] = made.add_linear(head, t["head.multiplier"], t["head.shift"])
    return Image(made.image(), layers, rows)


KINDS = ("weight", "multiplier", "shift")


def gains(model: IntegerModel, core: Core, *names: str) -> Bytes:
    """Gains one behind the other as one row, each padded to whole beats."""
    padded = []
    for name in names:
        gain = halves(model.tensors[f"{name}.gain"])
        padded.append(np.pad(gain, (0, -gain.size % core.lanes)))
    return np.concatenate(padded)[None]


def stop_mask(stops: NDArray[np.bool_]) -> Bytes:
    """The mask of stop tokens (vocabulary) as the core reads it: bits, whole beats of any core."""
    packed = np.packbits(stops, bitorder="little")
    return np.pad(packed, (0, -packed.size % 128))
