"""The weights of an integer model as they lie in the memory of an FPGA.

Everything begins at a beat, LANES bytes. Engine 0 has all that is loaded into the parameter memory (rows of the
embedding, cosine and sine, gains); each engine has its part of every linear layer, all at the same place:

    for every LANES / 4 of its rows:  one header beat: {multiplier: 16 bits, shift + headroom - 16: 16 bits} a row
                                      the rows, each padded with zeros to whole beats

A beat holds LANES weights of 8 bits or 2 * LANES of 4 bits: byte i has the weight of input i in its lower half, that
of input LANES + i in its upper half. With 4 bits a beat of scales stands before every 16 beats of weights, behind a
header at the same place: LANES / 16 bytes for each of these beats, a byte for each group of 32 inputs.

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
SCALED_BEATS = 16
"""Beats of weights of 4 bits that share a beat of scales."""
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
    bits: int
    """Of a weight."""
    headroom: int


def place(address: int, rows: int, width: int, bits: int, core: Core) -> Linear:
    """Where a layer of so many rows of `width` weights of `bits` bits lies if it begins at `address`."""
    row_beats = core.beats(-(-width * bits // 8))
    weights, headers = core.rows(rows) * row_beats, -(-core.rows(rows) // core.group)
    scales = -(-weights // SCALED_BEATS) if bits == 4 else 0
    return Linear(address, weights + headers + scales, rows, row_beats, bits, headroom(width, bits))


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

    def add_linear(
        self, weight: NDArray[Any], multiplier: NDArray[Any], shift: NDArray[Any], scale: NDArray[Any] | None = None
    ) -> Linear:
        """Append a linear layer: weight (out, in), a requantiser for each row; with 4 bits scale (out, groups)."""
        rows, width = weight.shape
        found = place(self.at, rows, width, 8 if scale is None else 4, self.core)
        header = requantisers(multiplier, shift, found.headroom)
        self.add(linear_stream(weight, header, self.core, scale))
        return found

    def image(self) -> Bytes:
        """All parts, padded to whole pages."""
        rest = -self.at * self.core.lanes % PAGE
        return np.concatenate([*self.parts, np.zeros((self.core.engines, rest), np.uint8)], axis=1)


def requantisers(multiplier: NDArray[Any], shift: NDArray[Any], free: int) -> Bytes:
    """(rows, 4) bytes: the multiplier and the shift that is left once a sum has been scaled up by its headroom."""
    words = multiplier.astype(np.uint32) | (shift.astype(np.int64) + free - 16).astype(np.uint32) << 16
    return words.astype("<u4").view(np.uint8).reshape(-1, REQUANTISER_BYTES)


def padded(values: NDArray[Any], rows: int, width: int) -> Bytes:
    """Values (n, size) of a byte each among zeros (rows, width)."""
    made = np.zeros((rows, width), np.uint8)
    made[: len(values), : values.shape[1]] = values.astype(np.uint8)
    return made


def linear_stream(weight: NDArray[Any], header: Bytes, core: Core, scale: NDArray[Any] | None = None) -> Bytes:
    """The streams (engines, bytes) of a layer: weight (out, in), header (out, 4) bytes, scale (out, groups)."""
    rows = core.rows(len(weight)) * core.engines
    if scale is None:
        whole = padded(weight, rows, core.beats(weight.shape[1]) * core.lanes)
        scales = np.zeros((rows, 0), np.uint8)
    else:
        whole = nibbles(padded(weight & 15, rows, core.beats(-(-weight.shape[1] // 2)) * 2 * core.lanes), core)
        scales = padded(scale, rows, whole.shape[1] // SCALED_BEATS)
    headers = padded(header, rows, REQUANTISER_BYTES)
    ours = [slice(e, None, core.engines) for e in range(core.engines)]
    return np.stack([engine_stream(whole[mine], headers[mine], scales[mine], core) for mine in ours])


def nibbles(weight: Bytes, core: Core) -> Bytes:
    """Whole rows (n, 2 * size) of 4-bit weights, a byte each, to (n, size) bytes as they lie in a beat."""
    lower, upper = np.moveaxis(weight.reshape(len(weight), -1, 2, core.lanes), 2, 0)
    return (lower + 16 * upper).astype(np.uint8).reshape(len(weight), -1)


def engine_stream(weight: Bytes, header: Bytes, scale: Bytes, core: Core) -> Bytes:
    """The stream of one engine: beats of headers, of scales and of weights, each where it is needed."""

    def beats(values: Bytes) -> Bytes:
        return np.pad(values.reshape(-1), (0, -values.size % core.lanes)).reshape(-1, core.lanes)

    parts = [beats(header), beats(scale), beats(weight)]
    apart = (core.group * weight.shape[1] // core.lanes, SCALED_BEATS, 1)
    before = [np.arange(len(part)) * each for part, each in zip(parts, apart, strict=True)]
    order = np.argsort(np.concatenate(before), kind="stable")
    return np.concatenate(parts)[order].reshape(-1)


def halves(values: NDArray[Any]) -> Bytes:
    """int16 as bytes, in the last axis."""
    return np.ascontiguousarray(values.astype("<i2")).view(np.uint8)


def pack(model: IntegerModel, core: Core) -> Image:
    """The memory image of a model for a core."""
    s, t, made, kinds = model.shape, model.tensors, Builder(core), KINDS[model.shape.weight_bits]
    rows: dict[str, Rows] = {}
    layers: dict[str, Linear] = {}

    def linear(name: str, *parts: str) -> Linear:
        return made.add_linear(*[np.concatenate([t[f"{name}.{part}.{kind}"] for part in parts]) for kind in kinds])

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
        both = [np.stack([t[f"{name}.{part}.{kind}"] for part in ("gate", "up")], axis=1) for kind in kinds]
        inner = linears(s)["gate"][0]
        layers[f"{name}.gate_up"] = made.add_linear(*[part.reshape(2 * inner, *part.shape[2:]) for part in both])
        layers[f"{name}.down"] = linear(name, "down")
    rows["norm"] = made.add_rows(gains(model, core, "norm"))
    head = t["embed.weight" if s.tied else "head.weight"]
    layers["head"] = made.add_linear(head, t["head.multiplier"], t["head.shift"])
    return Image(made.image(), layers, rows)


KINDS = {8: ("weight", "multiplier", "shift"), 4: ("weight", "multiplier", "shift", "scale")}
"""Tensors of a linear layer, by the bits of its weights."""


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
