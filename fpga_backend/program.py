"""From the shape of a model to the command list of the core. A layer more is some commands more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fpga_backend.commands import Command, Index, Opcode, Sink
from fpga_backend.core import Core, demand
from fpga_backend.packing import Image
from models_jax.integer.files import IntegerModel, Shape, headroom
from planner.errors import UserError

MIN_HEAD_DIM = 8
"""Sums of values are read back and written in the cycles between two uses of a channel."""


@dataclass(frozen=True)
class CachePlan:
    """The cache of one sequence: for each layer the keys of all key heads, then the values, all in beats.

    Keys, a head: [slot / engines][beats of a key]; slot j lies with engine j mod ENGINES. Values, a head:
    [slot / LANES][channel / engines][slot mod LANES]; channel c lies with engine c mod ENGINES.
    """

    key_beats: int
    """Beats of one key."""
    key_head: int
    """Beats from one head's keys to the next head's."""
    value_unit: int
    """Channels of one engine: beats of a block of LANES slots."""
    value_head: int
    value_start: int
    """From the keys of a layer to its values."""
    layer: int
    """From layer to layer."""
    total: int
    """Beats of each engine."""


def cache_plan(shape: Shape, core: Core, context: int) -> CachePlan:
    """The plan of a cache for `context` tokens."""
    key_beats, unit = core.beats(shape.head_dim), core.rows(shape.head_dim)
    key_head = core.rows(context) * key_beats
    value_head = core.beats(context) * unit
    start = shape.num_key_value_heads * key_head
    layer = start + shape.num_key_value_heads * value_head
    return CachePlan(key_beats, key_head, unit, value_head, start, layer, layer * shape.num_hidden_layers)


@dataclass(frozen=True)
class Places:
    """Where vectors lie in the memories on the chip."""

    residual: int
    """Element of vector memory; queries, keys and the gated product come behind it."""
    work: int
    inputs: int
    """Word of input memory for the input of linear layers."""
    queries: int
    weights: int
    """Word of input memory for softmax weights."""
    rope: int
    """Beats of parameter memory; the row of the embedding is at 0."""
    gains: int


def places(shape: Shape, core: Core, image: Image, context: int) -> Places:
    """Lay the vectors out. Raises UserError if the core's memories are too small."""
    s = shape
    demand(
        s.hidden_size + max(s.query_size + s.key_size, s.intermediate_size), core.vector, "elements of vector memory"
    )
    widest = max(s.hidden_size, s.query_size, s.intermediate_size)
    queries = core.beats(widest)
    weights = queries + s.num_attention_heads * core.beats(s.head_dim)
    demand(weights + core.beats(context), core.inputs, "words of input memory")
    rope = image.rows["embed"].beats
    gains = rope + image.rows["rope"].beats
    demand(gains + max(image.rows[name].beats for name in gain_rows(s)), core.parameters, "beats of parameter memory")
    demand(context, core.context, "tokens of context")
    return Places(0, s.hidden_size, 0, queries, weights, rope, gains)


def gain_rows(shape: Shape) -> list[str]:
    """Names of the rows of gains."""
    return ["norm", *(f"layers.{i}" for i in range(shape.num_hidden_layers))]


def compile_model(model: IntegerModel, image: Image, core: Core, context: int) -> tuple[Command, ...]:
    """The command list of one token: read it, and choose the next one if that is wanted.

    `context`: tokens that the cache has room for. Raises UserError for a model that does not fit the core.
    """
    shape = model.shape
    check_shape(shape, core)
    made = Compiler(model, image, core, places(shape, core, image, context), cache_plan(shape, core, context))
    commands = tuple(made.token())
    demand(len(commands), core.commands, "commands")
    return commands


def check_shape(shape: Shape, core: Core) -> None:
    """Raise UserError for a head_dim that the core's cache cannot be laid out for."""
    if shape.head_dim < MIN_HEAD_DIM or shape.head_dim % core.engines:
        raise UserError(
            f"head_dim {shape.head_dim} does not fit the FPGA core",
            mend=f"use a model whose head_dim is at least {MIN_HEAD_DIM} and a multiple of {core.engines} engines",
        )


@dataclass(frozen=True)
class Compiler:
    """Writes the commands of a token."""

    model: IntegerModel
    image: Image
    core: Core
    at: Places
    cache: CachePlan

    def token(self) -> Iterator[Command]:
        """Everything, from the embedding to the choice."""
        shape = self.model.shape
        yield self.load("rope", self.at.rope, Index.POSITION)
        yield self.load("embed", 0, Index.TOKEN)
        yield Command(Opcode.EMBED, headroom=headroom(1), rows=shape.hidden_size, destination=self.at.residual, gain=0)
        for i in range(shape.num_hidden_layers):
            yield self.load(f"layers.{i}", self.at.gains, Index.NONE)
            yield from self.attention(i)
            yield from self.mlp(i)
        yield self.load("norm", self.at.gains, Index.NONE, choosing=True)
        yield self.norm("norm", 0, choosing=True)
        yield self.linear("head", Sink.LOGIT, choosing=True)
        yield Command(Opcode.END)

    def attention(self, layer: int) -> Iterator[Command]:
        """Norm, values, queries and keys, attention head by head, output."""
        s, c, at, name = self.model.shape, self.cache, self.at, f"layers.{layer}"
        base = layer * c.layer
        yield self.norm(f"{name}.attention_norm", 0)
        store = {"stride": c.value_head, "unit": c.value_unit, "value": base + c.value_start, "head": s.head_dim}
        yield self.linear(f"{name}.v", Sink.VALUE, **store)
        yield self.linear(f"{name}.qk", Sink.VECTOR, destination=at.work)
        store = {"stride": c.key_head, "row_beats": c.key_beats, "value": base}
        yield self.rotate(at.work + s.query_size, s.key_size, Sink.KEY, **store)
        yield self.rotate(at.work, s.query_size, Sink.INPUT, destination=at.queries)
        for head in range(s.num_attention_heads):
            yield from self.head(name, base, head)
        yield self.linear(f"{name}.o", Sink.RESIDUAL, destination=at.residual)

    def head(self, name: str, base: int, head: int) -> Iterator[Command]:
        """Attention of one query head."""
        s, t, c, at = self.model.shape, self.model.tensors, self.cache, self.at
        key_head = head // (s.num_attention_heads // s.num_key_value_heads)
        query = at.queries + head * c.key_beats
        yield Command(Opcode.SCORES, address=base + key_head * c.key_head, row_beats=c.key_beats, source=query)
        free = headroom(2 * s.head_dim)
        yield Command(
            Opcode.SOFTMAX,
            headroom=free,
            multiplier=int(t[f"{name}.softmax.multiplier"]),
            shift=int(t[f"{name}.softmax.shift"]) + free - 16,
            destination=at.weights,
        )
        yield Command(
            Opcode.VALUES,
            address=base + c.value_start + key_head * c.value_head,
            unit=c.value_unit,
            rows=s.head_dim,
            source=at.weights,
            destination=at.inputs,
            gain=self.gain_at(1) + 2 * head * s.head_dim,
            shift=int(t[f"{name}.mean.shift"]),
            more=head + 1 < s.num_attention_heads,
        )

    def mlp(self, layer: int) -> Iterator[Command]:
        """Norm, gate and up, their product, down."""
        s, at, name = self.model.shape, self.at, f"layers.{layer}"
        yield self.norm(f"{name}.mlp_norm", 2)
        shift = int(self.model.tensors[f"{name}.gated.shift"])
        yield self.linear(f"{name}.gate_up", Sink.GATED, destination=at.work, shift=shift)
        yield Command(Opcode.PRODUCT, rows=s.intermediate_size, source=at.work, destination=at.inputs)
        yield self.linear(f"{name}.down", Sink.RESIDUAL, destination=at.residual, exponent=True)

    def load(self, name: str, destination: int, index: Index, choosing: bool = False) -> Command:
        """Fill parameter memory from a row."""
        rows = self.image.rows[name]
        return Command(
            Opcode.LOAD,
            choosing=choosing,
            index=index,
            stride=rows.beats if index else 0,
            address=rows.address,
            beats=rows.beats,
            destination=destination,
        )

    def gain_at(self, place: int) -> int:
        """Byte of parameter memory of the gains of a layer: 0 attention_norm, 1 mean, 2 mlp_norm."""
        s, beats = self.model.shape, self.core.beats
        before = (0, beats(2 * s.hidden_size), beats(2 * s.hidden_size) + beats(2 * s.query_size))
        return (self.at.gains + before[place]) * self.core.lanes

    def norm(self, name: str, place: int, choosing: bool = False) -> Command:
        """Norm of the residual stream to the input of linear layers."""
        t = self.model.tensors
        return Command(
            Opcode.NORM,
            choosing=choosing,
            rows=self.model.shape.hidden_size,
            source=self.at.residual,
            destination=self.at.inputs,
            gain=self.gain_at(place),
            shift=int(t[f"{name}.shift"]),
            value=int(t[f"{name}.epsilon"]),
        )

    def linear(self, name: str, sink: Sink, **more: int) -> Command:
        """A linear layer of what the last NORM, VALUES or PRODUCT left in input memory."""
        found = self.image.linears[name]
        return Command(
            Opcode.LINEAR,
            sink=sink,
            headroom=found.headroom,
            grouped=found.bits == 4,
            address=found.address,
            beats=found.beats,
            rows=found.rows,
            row_beats=found.row_beats,
            source=self.at.inputs,
            **more,  # pyright: ignore[reportArgumentType]
        )

    def rotate(self, source: int, rows: int, sink: Sink, **more: int) -> Command:
        """Rotate heads in vector memory."""
        return Command(
            Opcode.ROTATE,
            sink=sink,
            rows=rows,
            source=source,
            head=self.model.shape.head_dim,
            gain=self.at.rope * self.core.lanes,
            **more,  # pyright: ignore[reportArgumentType]
        )
