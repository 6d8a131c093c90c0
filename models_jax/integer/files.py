"""The file of an integer model: a safetensors file with its shape in the metadata, and the checks on it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from models_jax.integer.ops import GROUP_INPUTS
from planner.errors import UserError

SPEC_VERSION = 2
"""Version of the specification that this package implements. Version 2 adds weights of 4 bits to version 1."""
VERSIONS = {8: 1, 4: 2}
"""Bits of the weights to the first version that has them, which a file carries."""
METADATA_KEY = "heteroreason_integer_model"
FILE_NAME = "integer.safetensors"
"""The file of the integer model beside the float weights."""
MAX_CONTEXT = 2048
"""Tokens of a sequence: sums of 13-bit weights times int8 values stay in int32."""
MAX_WIDTH = 8192
"""Longest dot product."""
MAX_HEAD_DIM = 256
MAX_VOCABULARY = 1 << 20
MAX_EXPONENT = 8
"""Largest exponent of the gated product, see `ops.gated`."""
MAX_SCALE = 255
"""Largest scale of a group of weights of 4 bits, see `ops.grouped_matvec`."""
LARGEST_PRODUCT = {8: 127 * 127, 4: 7 * MAX_SCALE * 127}
"""By bits of the weights: the largest product of a weight, with its scale, and an int8 activation."""
MEND = "quantise the model again with `python -m models_jax.integer.quantise`"

Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Shape:
    """The shape of an integer model, as in the float checkpoint that it was made from."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    context_tokens: int
    tied: bool
    """The vocabulary head has the int8 weights of the embedding."""
    weight_bits: int = 8
    """Bits of the linear layers' weights, 8 or 4; embedding and vocabulary head always have 8."""

    @property
    def query_size(self) -> int:
        """All query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """All key heads together."""
        return self.num_key_value_heads * self.head_dim

    def check(self, where: str) -> None:
        """Raise UserError for a shape that integer models cannot have."""
        limits = {
            "context_tokens": MAX_CONTEXT,
            "head_dim": MAX_HEAD_DIM,
            "hidden_size": MAX_WIDTH,
            "intermediate_size": MAX_WIDTH,
            "query_size": MAX_WIDTH,
            "vocab_size": MAX_VOCABULARY,
        }
        for name, most in limits.items():
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise UserError(
                    f"{name} {value} is outside 1 .. {most}, the range of integer models",
                    where=where,
                    mend="use a smaller model",
                )
        if self.head_dim % 2 or self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"head_dim {self.head_dim} must be even, and {self.num_attention_heads} heads a multiple of "
                f"{self.num_key_value_heads} key heads",
                where=where,
                mend="use another model",
            )
        if self.weight_bits not in VERSIONS:
            raise UserError(f"weight_bits {self.weight_bits} is neither 8 nor 4", where=where, mend=MEND)


@dataclass(frozen=True)
class IntegerModel:
    """What a quantised file holds. `tensors` are as stored; see docs/integer-model.md for their names."""

    shape: Shape
    tensors: Tensors
    file_hash: str
    """SHA-256 of the file."""

    @property
    def packed_bytes(self) -> int:
        """Bytes of all tensors where two weights of 4 bits share a byte."""
        halved = [
            name
            for name in self.tensors
            if name.endswith(".weight") and bits_of(self.shape, name.removesuffix(".weight")) == 4
        ]
        return sum(value.nbytes for value in self.tensors.values()) - sum(self.tensors[n].nbytes // 2 for n in halved)


def headroom(width: int, bits: int = 8) -> int:
    """Bits that a sum of `width` products of weights and int8 leaves free in an int32: sum * 2^headroom < 2^31."""
    return 31 - (width * LARGEST_PRODUCT[bits]).bit_length()


def groups(width: int) -> int:
    """Groups of a row of `width` weights of 4 bits."""
    return -(-width // GROUP_INPUTS)


def linears(shape: Shape) -> dict[str, tuple[int, int]]:
    """The linear layers of one layer, name to (out, in)."""
    s = shape
    return {
        "q": (s.query_size, s.hidden_size),
        "k": (s.key_size, s.hidden_size),
        "v": (s.key_size, s.hidden_size),
        "o": (s.hidden_size, s.query_size),
        "gate": (s.intermediate_size, s.hidden_size),
        "up": (s.intermediate_size, s.hidden_size),
        "down": (s.hidden_size, s.intermediate_size),
    }


def expected(shape: Shape) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every tensor of a file of this shape: name to (dtype, shape). Scalars have shape ()."""
    s, half = shape, shape.head_dim // 2
    found: dict[str, tuple[str, tuple[int, ...]]] = {}

    def norm(name: str) -> None:
        found[f"{name}.gain"] = ("int16", (s.hidden_size,))
        found[f"{name}.shift"] = ("int32", ())
        found[f"{name}.epsilon"] = ("int32", ())

    def linear(name: str, outer: int, inner: int) -> None:
        found[f"{name}.weight"] = ("int8", (outer, inner))
        if bits_of(s, name) == 4:
            found[f"{name}.scale"] = ("uint8", (outer, groups(inner)))
        requantiser(name, outer)

    def requantiser(name: str, outer: int) -> None:
        found[f"{name}.multiplier"] = ("int16", (outer,))
        found[f"{name}.shift"] = ("int8", (outer,))

    linear("embed", s.vocab_size, s.hidden_size)
    if s.tied:
        requantiser("head", s.vocab_size)
    else:
        linear("head", s.vocab_size, s.hidden_size)
    norm("norm")
    found["rope.cosine"] = found["rope.sine"] = ("int16", (s.context_tokens, half))
    for i in range(s.num_hidden_layers):
        norm(f"layers.{i}.attention_norm")
        norm(f"layers.{i}.mlp_norm")
        for name, (outer, inner) in linears(s).items():
            linear(f"layers.{i}.{name}", outer, inner)
        found[f"layers.{i}.softmax.multiplier"] = ("int16", ())
        found[f"layers.{i}.softmax.shift"] = ("int8", ())
        found[f"layers.{i}.mean.gain"] = ("int16", (s.query_size,))
        found[f"layers.{i}.mean.shift"] = ("int32", ())
        found[f"layers.{i}.gated.shift"] = ("int32", ())
    return found


def check_tensors(shape: Shape, tensors: Tensors, where: str) -> None:
    """Raise UserError unless every tensor has its dtype, shape and range."""
    wanted = expected(shape)
    for name in sorted(wanted.keys() ^ tensors.keys()):
        what = "is missing" if name in wanted else "is unknown"
        raise UserError(f"tensor {name} {what}", where=where, mend=MEND)
    for name, (dtype, dims) in wanted.items():
        found = tensors[name]
        if (str(found.dtype), found.shape) != (dtype, dims):
            raise UserError(
                f"tensor {name} is {found.dtype}{list(found.shape)}, not {dtype}{list(dims)}", where=where, mend=MEND
            )
        low, high = limits(shape, name)
        if found.size and not low <= int(found.min()) <= int(found.max()) <= high:
            raise UserError(
                f"tensor {name} spans {int(found.min())} .. {int(found.max())}, outside {low} .. {high}",
                where=where,
                mend=MEND,
            )
    for name in wanted:
        if name.endswith("multiplier") and np.any((tensors[name] != 0) & (tensors[name] < 1 << 14)):
            raise UserError(f"tensor {name} has a multiplier in 1 .. 2^14 - 1", where=where, mend=MEND)


def limits(shape: Shape, name: str) -> tuple[int, int]:
    """The lowest and highest value that a tensor may hold."""
    *owner, kind = name.split(".")
    if kind == "weight":
        return (-7, 7) if bits_of(shape, ".".join(owner)) == 4 else (-127, 127)
    if kind == "scale":
        return 0, MAX_SCALE
    if kind in ("cosine", "sine"):
        return -(1 << 14), 1 << 14
    if kind == "epsilon":
        return 4, 2**31 - 1
    if kind == "multiplier":
        return 0, 2**15 - 1
    if kind == "gain":
        return (0 if owner[-1] == "mean" else -32767), 32767
    if owner[-1] in ("gated", "mean", "attention_norm", "mlp_norm", "norm"):
        return 1, 30
    free = headroom(width(shape, owner[-1]), bits_of(shape, ".".join(owner)))
    spare = MAX_EXPONENT if owner[-1] == "down" else 0
    return max(1, 17 - free) + spare, 46 - free


def bits_of(shape: Shape, name: str) -> int:
    """Bits of the weights called `name`: those of the model for the linear layers, 8 for everything else."""
    return shape.weight_bits if name.split(".")[-1] in linears(shape) else 8


def width(shape: Shape, name: str) -> int:
    """The length of the dot product that feeds the requantiser called `name`."""
    if name == "embed":
        return 1
    if name == "softmax":
        return 2 * shape.head_dim
    if name == "head":
        return shape.hidden_size
    return linears(shape)[name][1]


def read(path: Path) -> IntegerModel:
    """Read and check a quantised file. Raises UserError that names what is wrong with it."""
    where = str(path)
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            shape = read_shape(metadata, where)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise UserError("no such file", where=where, mend=MEND) from None
    except (SafetensorError, OSError) as bad:
        raise UserError(f"not a safetensors file ({bad})", where=where, mend=MEND) from None
    check_tensors(shape, tensors, where)
    return IntegerModel(shape, tensors, hashlib.sha256(path.read_bytes()).hexdigest())


def read_shape(metadata: Mapping[str, str], where: str) -> Shape:
    """The shape from the metadata of a file of the right format and version."""
    try:
        header = json.loads(metadata[METADATA_KEY])
        version, raw = header["spec_version"], header["shape"]
    except (KeyError, TypeError, ValueError):
        raise UserError(f"not an integer model: its metadata has no {METADATA_KEY}", where=where, mend=MEND) from None
    if version not in VERSIONS.values():
        raise UserError(
            f"version {version!r} of the integer model is not known here, versions 1 to {SPEC_VERSION} are",
            where=where,
            mend=f"update heteroreason, or {MEND}",
        )
    try:
        known = {"weight_bits": 8} | raw
        sizes = {field.name: int(known[field.name]) for field in fields(Shape) if field.name != "tied"}
        shape = Shape(**sizes, tied=bool(raw["tied"]))
    except (KeyError, TypeError, ValueError) as bad:
        raise UserError(f"the shape in its metadata cannot be read ({bad})", where=where, mend=MEND) from None
    shape.check(where)
    return shape


def write(path: Path, shape: Shape, tensors: Tensors) -> None:
    """Write a file that `read` accepts; checks it first."""
    shape.check(str(path))
    check_tensors(shape, tensors, str(path))
    # One entry alone: the library writes several in random order, and the same model is to give the same bytes.
    header = {"spec_version": VERSIONS[shape.weight_bits], "shape": asdict(shape)}
    if shape.weight_bits == 8:
        del header["shape"]["weight_bits"]  # as version 1 was written
    metadata = {METADATA_KEY: json.dumps(header, sort_keys=True)}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: np.array(value, order="C") for name, value in tensors.items()}, path, metadata)
