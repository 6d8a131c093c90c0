"""The command list of the core: one source for the RTL's package, the compiler of programs and the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from fpga_backend.core import COMMAND_BYTES, Core


class Opcode(IntEnum):
    """What a command does. Every list ends with END."""

    END = 0
    LOAD = 1
    """`beats` beats at weights + `address` + index * `stride` into the parameter memory from beat `destination`."""
    EMBED = 2
    """The embedding row at byte `gain` of the parameter memory, `rows` elements; to vector memory at `destination`."""
    NORM = 3
    """`rows` elements of vector memory at `source`, gains at `gain`, `shift`, `value` = epsilon; to input memory."""
    LINEAR = 4
    """`rows` dot products of `row_beats` beats with input memory at `source`; requantised into `sink`."""
    ROTATE = 5
    """`rows` elements in heads of `head` at `source` with cosine and sine at `gain`, into `sink`."""
    SCORES = 6
    """Dot products of the query at input word `source` with all keys at cache + `address`."""
    SOFTMAX = 7
    """Weights of the scores to input memory at `destination`; `multiplier`, `shift` and `headroom` requantise."""
    VALUES = 8
    """Means of `rows` channels of values at cache + `address` under the weights at `source`, to input memory."""
    PRODUCT = 9
    """`rows` elements at `source`, divided by 2^exponent, to input memory at `destination`."""


class Sink(IntEnum):
    """Where the results of LINEAR and ROTATE go."""

    VECTOR = 0
    """int16 to vector memory at `destination`."""
    RESIDUAL = 1
    """int16, added to vector memory at `destination`."""
    GATED = 2
    """Rows are gate and up in turn; their product, int16, to vector memory at `destination`; `shift`."""
    VALUE = 3
    """int8 into the cache, as a value."""
    KEY = 4
    """int8 into the cache, as a key."""
    LOGIT = 5
    """23 bits; the largest is the next token."""
    INPUT = 6
    """int8 to input memory at word `destination`; every head begins a word."""


class Index(IntEnum):
    """What the address of LOAD is counted by."""

    NONE = 0
    TOKEN = 1
    POSITION = 2


@dataclass(frozen=True)
class Field:
    """A field of a command: `bits` bits of 32-bit word `word` from bit `low`."""

    name: str
    word: int
    low: int
    bits: int
    text: str


FIELDS = (
    Field("opcode", 0, 0, 4, "see the table of opcodes"),
    Field("choosing", 0, 4, 1, "1: skipped unless a token is to be chosen after this one"),
    Field("sink", 0, 5, 3, "see the table of sinks"),
    Field("index", 0, 8, 2, "LOAD: 0 nothing, 1 the token, 2 its position is multiplied by `stride`"),
    Field("exponent", 0, 10, 1, "LINEAR: the input has the exponent of the last PRODUCT"),
    Field("headroom", 0, 11, 5, "requantiser: free bits of the sums, see docs/integer-model.md"),
    Field("stride", 0, 16, 16, "LOAD: beats of one index; sinks KEY and VALUE: beats from head to head"),
    Field("address", 1, 0, 32, "beats from the weights or the cache of each engine to the stream of this command"),
    Field("beats", 2, 0, 32, "LOAD, LINEAR: beats of the stream of each engine"),
    Field("rows", 3, 0, 20, "results, or elements of a vector"),
    Field("row_beats", 3, 20, 10, "beats of one dot product; sink KEY: beats of one key"),
    Field("more", 3, 30, 1, "VALUES: the next VALUES goes on with the same vector"),
    Field("grouped", 3, 31, 1, "LINEAR: weights have 4 bits, in groups"),
    Field("source", 4, 0, 16, "where the input begins: element of vector memory or word of input memory"),
    Field("destination", 4, 16, 16, "where the output begins: element, word, or beat of parameter memory"),
    Field("gain", 5, 0, 16, "byte of parameter memory: gains, embedding row, cosine and sine"),
    Field("shift", 5, 16, 6, "shift of the last rounding; SOFTMAX: shift + headroom - 16"),
    Field("head", 5, 22, 10, "elements of a head"),
    Field("multiplier", 6, 0, 16, "SOFTMAX: multiplier of distances"),
    Field("unit", 6, 16, 16, "VALUES, sink VALUE: rows of one engine in a block of LANES slots"),
    Field("value", 7, 0, 32, "NORM: epsilon; sinks KEY and VALUE: beats from the cache to that of this layer"),
)


@dataclass(frozen=True)
class Command:
    """One command. Fields that an opcode does not use are zero. See FIELDS for what each means."""

    opcode: Opcode
    choosing: bool = False
    sink: Sink = Sink.VECTOR
    index: Index = Index.NONE
    exponent: bool = False
    headroom: int = 0
    stride: int = 0
    address: int = 0
    beats: int = 0
    rows: int = 0
    row_beats: int = 0
    more: bool = False
    grouped: bool = False
    source: int = 0
    destination: int = 0
    gain: int = 0
    shift: int = 0
    head: int = 0
    multiplier: int = 0
    unit: int = 0
    value: int = 0

    def __str__(self) -> str:
        """The opcode and the fields that are not zero."""
        shown = [f"{f.name}={getattr(self, f.name):d}" for f in fields(self)[1:] if getattr(self, f.name)]
        return " ".join([self.opcode.name, *shown])


def encode(command: Command) -> NDArray[np.uint32]:
    """The eight words of a command. Raises ValueError for a field that does not fit."""
    words = np.zeros(COMMAND_BYTES // 4, np.uint32)
    for field in FIELDS:
        value = int(getattr(command, field.name))
        if not 0 <= value < 1 << field.bits:
            raise ValueError(f"{field.name} of {command.opcode.name} is {value}, it has {field.bits} bits")
        words[field.word] |= np.uint32(value << field.low)
    return words


def image(commands: Sequence[Command], core: Core) -> NDArray[np.uint8]:
    """The list as it lies in memory: 32 bytes each, or one beat each if that is more."""
    beats = np.zeros((len(commands), core.command_beats * core.lanes), np.uint8)
    for row, command in zip(beats, commands, strict=True):
        row[:COMMAND_BYTES] = encode(command).view(np.uint8)
    return beats.reshape(-1)
