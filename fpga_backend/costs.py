"""Cycles of a token on the core, from the command list: a model of the RTL, with constants fitted to its simulation.

Every command takes a cycle for each element or beat, and a constant more, once its data is there. Data arrives in the
order of the commands, at the rate of memory, at most a FIFO ahead of what the engines have taken.
`python -m fpga_backend.fit` simulates small models and fits the constants to them. What comes out is modelled, not
measured.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fpga_backend.commands import Command, Opcode, Sink
from fpga_backend.core import Core
from fpga_backend.packing import REQUANTISER_BYTES, Image, Linear, Rows, place
from fpga_backend.program import compile_model
from fpga_backend.simulation.simulator import Memory
from models_jax.integer.files import IntegerModel, Shape

STREAM_BEATS = 512
"""FIFO of each memory port: parameter STREAM of the RTL."""
BURST_BEATS = 64
QUEUE = 13
"""Commands that wait in the queue at most."""
ISSUE_CYCLES = 11
"""From one command of the list to the next in the sequencer."""
STORES = (Sink.VALUE, Sink.KEY)


Constants = Mapping[str, float]

FITTED: Constants = {
    "LOAD": 5.6,
    "EMBED": 28.9,
    "NORM": 37.2,
    "LINEAR": 45.0,
    "LOGIT": 73.4,
    "ROTATE": 15.0,
    "SCORES": 26.9,
    "SOFTMAX": 35.5,
    "VALUES": 43.9,
    "PRODUCT": 14.4,
    "GAP": 0.9,
    "START": 1.5,
    "ANSWER": 1.5,
    "FENCE": 17.9,
    "TOKEN": 21.7,
}
"""Cycles. By opcode: what a command takes above its size; LOGIT: LINEAR into the choice. GAP: from command to command.
START: from the issue of a command to its start. And above the latency of memory: ANSWER, from a request to its data;
FENCE, from the last store to the issue of SCORES; TOKEN, from token to token."""


def constants_text(constants: Constants) -> str:
    """Constants as they stand in this file."""
    return "\n".join(f'    "{name}": {cycles:.1f},' for name, cycles in constants.items())


def constant(command: Command, constants: Constants) -> float:
    """Cycles of a command above its size."""
    return constants["LOGIT" if command.sink is Sink.LOGIT else command.opcode.name]


def stream_beats(command: Command, core: Core, position: int) -> int:
    """Beats that each engine reads for a command, or engine 0 for LOAD."""
    if command.opcode is Opcode.SCORES:
        return (position // core.engines + 1) * command.row_beats
    if command.opcode is Opcode.VALUES:
        return (position // core.lanes + 1) * command.unit
    return command.beats


def size(command: Command, core: Core, position: int) -> int:
    """What the cycles of a command grow with."""
    beats = stream_beats(command, core, position)
    match command.opcode:
        case Opcode.LINEAR:
            # One result a cycle leaves the engines, however many there are.
            return max(beats, core.rows(command.rows) * core.engines)
        case Opcode.SCORES:
            return max(beats, (position // core.engines + 1) * core.engines)
        case Opcode.VALUES:
            return beats * core.engines
        case Opcode.SOFTMAX:
            return position + 1
        case Opcode.LOAD:
            return beats
    return command.rows


@dataclass(frozen=True)
class Estimate:
    """One token, modelled."""

    cycles: int
    by_unit: dict[str, int]
    """Opcode, in lower case, to cycles; `token` is what lies between commands."""
    beats: int
    """Read by engine 0."""
    bytes: int
    """Read by all engines."""


@dataclass
class Stream:
    """The FIFO of a memory port: how far it is filled, and when it was emptied."""

    rate: float
    """Beats a cycle."""
    answer: float
    """Cycles from a request to its first beat."""
    requested: int = 0
    """Beats, since the token began."""
    granted: float = 0.0
    """When the last burst that was asked for had room."""
    arrived: float = 0.0
    """When the last beat that was asked for was there."""
    taken: list[tuple[int, float, float]] = field(default_factory=list)
    """Of each command that took beats: all beats so far, from when, until when."""

    def fetch(self, beats: int, issued: float, begin: float) -> float:
        """Ask for beats at `issued` that a command takes from `begin` on. Returns when the last of them is there."""
        before = self.requested
        self.requested += beats
        hidden = self.requested - STREAM_BEATS
        pace = max(1.0, 1 / self.rate)
        self.granted = max(issued, begin + (hidden - before) * pace if hidden > before else self.time_of(hidden))
        first = max(issued + self.answer, self.arrived)
        last_burst = self.granted + self.answer + min(beats, BURST_BEATS) / self.rate if hidden > 0 else 0.0
        self.arrived = max(first + beats / self.rate, last_burst)
        return self.arrived

    def time_of(self, beats: int) -> float:
        """When so many beats had been taken."""
        before = 0
        for until, begin, end in self.taken:
            if until >= beats > before:
                return begin + (beats - before) / (until - before) * (end - begin)
            before = until
        return 0.0


def estimate(commands: Sequence[Command], core: Core, memory: Memory, position: int, constants: Constants) -> Estimate:
    """The cycles of the token at `position`, which is read and whose successor is chosen."""
    answer = memory.latency + constants["ANSWER"]
    stream = Stream(min(memory.beats / memory.cycles, STREAM_BEATS / (answer + BURST_BEATS)), answer)
    issued = now = constants["TOKEN"] + memory.latency
    stored, read = 0.0, 0
    spent: defaultdict[str, float] = defaultdict(float, token=now)
    starts = deque([0.0] * QUEUE, maxlen=QUEUE)
    for command in commands:
        if command.opcode is Opcode.END:
            break
        beats, above = stream_beats(command, core, position), constant(command, constants)
        issued = max(issued + ISSUE_CYCLES, starts[0], stream.granted if beats else 0.0)
        if command.opcode is Opcode.SCORES:
            issued = max(issued, stored)
        begin = max(now + constants["GAP"], issued + constants["START"])
        end = begin + size(command, core, position) + above
        if beats:
            end = max(end, stream.fetch(beats, issued, begin) + above - constants["START"])
            stream.taken.append((stream.requested, begin, end - above))
            read += beats * (1 if command.opcode is Opcode.LOAD else core.engines)
        if command.sink in STORES and command.opcode in (Opcode.LINEAR, Opcode.ROTATE):
            stored = end + memory.latency + constants["FENCE"]
        starts.append(begin)
        spent["token"] += begin - now
        spent[command.opcode.name.lower()] += end - begin
        now = end
    by_unit = {name: round(value) for name, value in spent.items()}
    return Estimate(round(now), by_unit, stream.requested, read * core.lanes)


def layout(shape: Shape, core: Core) -> Image:
    """The places of a model's weights without the weights: `packing.pack` of any model of this shape."""
    at = 0
    rows: dict[str, Rows] = {}
    layers: dict[str, Linear] = {}

    def add_rows(name: str, count: int, *sizes: int) -> None:
        nonlocal at
        beats = sum(core.beats(size) for size in sizes)
        rows[name] = Rows(at, beats)
        at += count * beats

    def add_linear(name: str, outer: int, inner: int, bits: int = shape.weight_bits) -> None:
        nonlocal at
        layers[name] = place(at, outer, inner, bits, core)
        at += layers[name].beats

    s = shape
    add_rows("embed", s.vocab_size, REQUANTISER_BYTES + s.hidden_size)
    add_rows("rope", s.context_tokens, 2 * s.head_dim)
    for i in range(s.num_hidden_layers):
        name = f"layers.{i}"
        add_rows(name, 1, 2 * s.hidden_size, 2 * s.query_size, 2 * s.hidden_size)
        add_linear(f"{name}.v", s.key_size, s.hidden_size)
        add_linear(f"{name}.qk", s.query_size + s.key_size, s.hidden_size)
        add_linear(f"{name}.o", s.hidden_size, s.query_size)
        add_linear(f"{name}.gate_up", 2 * s.intermediate_size, s.hidden_size)
        add_linear(f"{name}.down", s.hidden_size, s.intermediate_size)
    add_rows("norm", 1, 2 * s.hidden_size)
    add_linear("head", s.vocab_size, s.hidden_size, 8)
    return Image(np.zeros((core.engines, 0), np.uint8), layers, rows)


class Zeros(dict):
    """Tensors of a model of which only the shape is known: what is asked of them is no matter of cycles."""

    def __missing__(self, name: str) -> int:
        """Any scalar."""
        return 0


def commands_of(shape: Shape, core: Core) -> tuple[Command, ...]:
    """The command list of any model of this shape. Raises UserError if it does not fit the core."""
    return compile_model(IntegerModel(shape, Zeros(), ""), layout(shape, core), core, shape.context_tokens)
