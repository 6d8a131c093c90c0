"""The register map of the core: one source for the RTL's package, the driver and the documentation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

ID = 0x48520002
"""'HR' and the version of register map and command list."""


class Access(IntEnum):
    """What the host may do with a register."""

    READ = 0
    WRITE = 1
    """Written by the host; reads give the value back."""
    TRIGGER = 2
    """Writing a one does something; reads give zero."""


@dataclass(frozen=True)
class Register:
    """One 32-bit register of the AXI4-Lite slave."""

    name: str
    offset: int
    access: Access
    text: str


def block(start: int, access: Access, *rows: tuple[str, str]) -> tuple[Register, ...]:
    """Registers one behind the other."""
    return tuple(Register(name, start + 4 * i, access, text) for i, (name, text) in enumerate(rows))


REGISTERS = (
    *block(0x00, Access.TRIGGER, ("CONTROL", "bit 0: the doorbell. Ignored while busy")),
    *block(
        0x04,
        Access.READ,
        ("STATUS", "what the core does and waits for, see below"),
        ("ERROR", "why the last run failed, see below; 0 after a good one"),
        ("ID", "0x48520002: 'HR' and the version of this map and of the command list"),
        ("SHAPE", "bits 15..0: LANES; bits 31..16: ENGINES"),
        ("VECTOR_SIZE", "int16 elements of the vector memory"),
        ("INPUT_SIZE", "words of LANES elements of the input memory"),
        ("PARAMETER_SIZE", "beats of the parameter memory"),
        ("CONTEXT_SIZE", "most tokens of a sequence"),
        ("COMMAND_SIZE", "most commands of a list"),
    ),
    *block(
        0x40,
        Access.WRITE,
        ("COMMANDS_LOW", "byte address of the command list, lower half; all addresses are multiples of 128"),
        ("COMMANDS_HIGH", "upper half"),
        ("COMMANDS_COUNT", "commands of the list, END included"),
        ("WEIGHTS_LOW", "byte address of the weights of engine 0"),
        ("WEIGHTS_HIGH", "upper half"),
        ("WEIGHTS_STRIDE", "bytes from the weights of one engine to those of the next"),
        ("CACHE_LOW", "byte address of the key and value cache of engine 0 for this sequence"),
        ("CACHE_HIGH", "upper half"),
        ("CACHE_STRIDE", "bytes from the cache of one engine to that of the next"),
        ("TOKENS_LOW", "byte address of the tokens of this sequence, int32 each"),
        ("TOKENS_HIGH", "upper half"),
        ("STOPS_LOW", "byte address of the mask of stop tokens: token t is bit t mod 8 of byte t / 8"),
        ("STOPS_HIGH", "upper half"),
        ("START", "tokens that are in the cache already: the first one to read is at this position"),
        ("LENGTH", "tokens of the sequence that are known, more than START"),
        ("LIMIT", "tokens that the sequence may grow to; equal to LENGTH: read only"),
        ("KEY_LOW", "64-bit key of the sampler, lower word"),
        ("KEY_HIGH", "upper word"),
        ("TEMPERATURE", "in units of 2^-10, 0 .. 8192; 0 is greedy"),
    ),
    *block(
        0xA0,
        Access.READ,
        ("NEW_LENGTH", "tokens of the sequence after the run"),
        ("COMPUTED", "tokens in the cache after the run"),
        ("POSITION", "position of the token that is being read"),
        ("COMMAND", "commands that this token has executed so far"),
        ("CYCLES", "cycles since the doorbell, until done"),
        ("BEATS", "beats read from memory by engine 0 since the doorbell"),
        ("STARVED", "cycles in which engine 0 waited for its stream"),
        ("FENCED", "cycles in which the next stream waited for writes to the cache"),
        ("CYCLES_TOKEN", "cycles between commands: tokens, stop mask, command list"),
        ("CYCLES_LOAD", "cycles of LOAD commands"),
        ("CYCLES_EMBED", "cycles of EMBED commands"),
        ("CYCLES_NORM", "cycles of NORM commands"),
        ("CYCLES_LINEAR", "cycles of LINEAR commands"),
        ("CYCLES_ROTATE", "cycles of ROTATE commands"),
        ("CYCLES_SCORES", "cycles of SCORES commands"),
        ("CYCLES_SOFTMAX", "cycles of SOFTMAX commands"),
        ("CYCLES_VALUES", "cycles of VALUES commands"),
        ("CYCLES_PRODUCT", "cycles of PRODUCT commands"),
    ),
)

OFFSETS = {register.name: register.offset for register in REGISTERS}

STATUS_BITS = (
    ("BUSY", 0, "a run is going on"),
    ("DONE", 1, "the last run has ended, well or not; cleared by the doorbell"),
    ("FAILED", 2, "the last run has ended with an error, see ERROR"),
    ("STOPPED", 3, "the last run has ended with a stop token"),
    ("READS_PENDING", 8, "data of a read has not arrived yet"),
    ("WRITES_PENDING", 9, "a write has not been answered yet"),
    ("FENCE", 10, "the next stream waits for writes to the cache"),
    ("STREAM_EMPTY", 11, "an engine or a LOAD waits for its stream"),
    ("QUEUE_FULL", 12, "the queue of commands is full: commands take longer than their data"),
)
STATUS = {name: bit for name, bit, _ in STATUS_BITS}
STATE_SHIFT = 16
"""STATUS bits 19..16: state of the sequencer, 23..20: opcode in execution."""


class Error(IntEnum):
    """Contents of ERROR."""

    NONE = 0
    RANGE = 1
    """START < LENGTH <= LIMIT <= CONTEXT_SIZE does not hold."""
    COMMANDS = 2
    """COMMANDS_COUNT is 0 or above COMMAND_SIZE, or a list does not end with END."""
    OPCODE = 3
    """A command has an unknown opcode."""
    READ = 4
    """Memory answered a read with an error."""
    WRITE = 5
    """Memory answered a write with an error."""


class State(IntEnum):
    """States of the sequencer, as STATUS shows them."""

    IDLE = 0
    LIST_REQUEST = 1
    LIST = 2
    TOKEN_REQUEST = 3
    TOKEN = 4
    ISSUE_READ = 5
    ISSUE = 6
    DRAIN = 7
    CHOSEN = 8
    STOP_REQUEST = 9
    STOP = 10
    NEXT = 11
    FINISH = 12
