"""Drives the core, simulated or real: weights into memory once, then one doorbell for each block of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fpga_backend.cache_rows import read_rows, write_rows
from fpga_backend.commands import image as command_image
from fpga_backend.core import Core
from fpga_backend.packing import PAGE, pack, stop_mask
from fpga_backend.program import cache_plan, compile_model
from fpga_backend.registers import ID, OFFSETS, REGISTERS, STATE_SHIFT, STATUS, STATUS_BITS, Error, State
from models_jax.integer.files import IntegerModel
from models_jax.integer.gumbel import key_words, temperature_units
from planner.errors import UserError


class Buffer(Protocol):
    """Memory that host and core share. What one wrote the other sees after a transfer."""

    address: int
    """Where the core finds it: a multiple of 4096."""
    data: NDArray[np.uint8]
    """The host's side."""

    def to_device(self) -> None:
        """What the host wrote becomes visible to the core."""
        ...

    def from_device(self) -> None:
        """What the core wrote becomes visible to the host."""
        ...

    def free(self) -> None:
        """Give the memory back."""
        ...


class Device(Protocol):
    """A core with registers, and its memory."""

    def read(self, offset: int) -> int:
        """Read a register."""
        ...

    def write(self, offset: int, value: int) -> None:
        """Write a register."""
        ...

    def wait(self, most_cycles: int) -> bool:
        """Wait until STATUS has DONE; False if it has not after so many cycles of the core."""
        ...

    def allocate(self, size: int) -> Buffer:
        """Shared memory of `size` bytes. Raises UserError if there is not that much."""
        ...

    def close(self) -> None:
        """Give the device up; calling it twice is harmless."""
        ...


class CoreError(RuntimeError):
    """A run of the core failed, or did not end."""


COUNTERS = tuple(register.name for register in REGISTERS if register.offset >= OFFSETS["CYCLES"])
"""Registers that count what a run did."""


@dataclass(frozen=True)
class Run:
    """What one doorbell did."""

    tokens: tuple[int, ...]
    """Chosen tokens."""
    computed: int
    """Tokens in the cache now."""
    stopped: bool
    """The last chosen token is a stop token."""
    counters: dict[str, int]
    """COUNTERS of the run."""


@dataclass
class Sequence:
    """The memory of one sequence."""

    tokens: Buffer
    cache: Buffer

    def free(self) -> None:
        """Give it back."""
        self.tokens.free()
        self.cache.free()


def core_of(device: Device) -> Core:
    """What the core was built with. Raises UserError for one of another version."""
    found = device.read(OFFSETS["ID"])
    if found != ID:
        raise UserError(
            f"the FPGA core answers with id 0x{found:08x}, not 0x{ID:08x}",
            mend="load a bitstream that was built from this version's RTL",
        )
    shape = device.read(OFFSETS["SHAPE"])
    names = ("VECTOR_SIZE", "INPUT_SIZE", "PARAMETER_SIZE", "CONTEXT_SIZE", "COMMAND_SIZE")
    return Core(shape & 0xFFFF, shape >> 16, *(device.read(OFFSETS[name]) for name in names))


class Driver:
    """One model on one core."""

    def __init__(self, device: Device, model: IntegerModel, stops: NDArray[np.bool_], context: int) -> None:
        """Pack the weights for the core and transfer them. `context`: tokens of a sequence at most.

        Raises UserError if the model does not fit the core or its memory.
        """
        self._device, self._core = device, core_of(device)
        self._context, self._vocab_size = context, model.shape.vocab_size
        packed = pack(model, self._core)
        commands = compile_model(model, packed, self._core, context)
        self._shape, self._plan = model.shape, cache_plan(model.shape, self._core, context)
        plan = self._plan
        self._stride = -(-plan.total * self._core.lanes // PAGE) * PAGE
        self._most_cycles = 64 * (packed.weights.size // self._core.lanes + plan.total + 4096 * len(commands))
        parts = {
            "WEIGHTS": packed.weights.reshape(-1),
            "COMMANDS": command_image(commands, self._core),
            "STOPS": stop_mask(stops),
        }
        self._buffers = {name: self._transferred(part) for name, part in parts.items()}
        self._fixed = {
            "COMMANDS_COUNT": len(commands),
            "WEIGHTS_STRIDE": packed.weights.shape[1],
            "CACHE_STRIDE": self._stride,
        }

    def sequence(self) -> Sequence:
        """Memory for a new sequence."""
        size = -(-4 * self._context // PAGE) * PAGE
        return Sequence(self._device.allocate(size), self._device.allocate(self._stride * self._core.engines))

    def cache_rows(self, sequence: Sequence, tokens: int) -> NDArray[np.int8]:
        """Keys and values of the first tokens: int8 (layers, 2, tokens, key heads, head_dim)."""
        sequence.cache.from_device()
        return read_rows(self._memory(sequence), self._plan, self._core, self._shape, tokens)

    def fill_cache(self, sequence: Sequence, rows: NDArray[np.int8]) -> None:
        """Put keys and values, as `cache_rows` gives them, into the first slots."""
        write_rows(self._memory(sequence), self._plan, self._core, self._shape, rows)
        sequence.cache.to_device()

    def copy_cache(self, sequence: Sequence, to: Sequence) -> None:
        """Copy the whole cache of a sequence, by way of the host."""
        sequence.cache.from_device()
        to.cache.data[:] = sequence.cache.data
        to.cache.to_device()

    def run(
        self,
        sequence: Sequence,
        tokens: NDArray[np.int32],
        start: int,
        limit: int,
        key: int = 0,
        temperature: float = 0.0,
    ) -> Run:
        """Read `tokens` from position `start`, then generate until the sequence has `limit` tokens or a stop token.

        The cache must hold the first `start` tokens. Raises CoreError if the core fails or does not end.
        """
        words = sequence.tokens.data.view("<i4")
        words[: len(tokens)] = tokens
        sequence.tokens.to_device()
        # All of them each time: another driver may have used the core since.
        for name, buffer in (self._buffers | {"TOKENS": sequence.tokens, "CACHE": sequence.cache}).items():
            self._set_address(name, buffer)
        upper, lower = key_words(key)
        settings = {"START": start, "LENGTH": len(tokens), "LIMIT": limit, "KEY_LOW": lower, "KEY_HIGH": upper}
        for name, value in (self._fixed | settings | {"TEMPERATURE": temperature_units(temperature)}).items():
            self._set(name, value)
        self._set("CONTROL", 1)
        if not self._device.wait(self._most_cycles * (limit - start + 1)):
            raise CoreError(f"the FPGA core did not end its run: {self.state()}")
        status = self._get("STATUS")
        if status >> STATUS["FAILED"] & 1:
            raise CoreError(f"the FPGA core failed: {Error(self._get('ERROR')).name}; {self.state()}")
        length = self._get("NEW_LENGTH")
        sequence.tokens.from_device()
        chosen = tuple(int(token) for token in words[len(tokens) : length])
        counters = {name: self._get(name) for name in COUNTERS}
        return Run(chosen, self._get("COMPUTED"), bool(status >> STATUS["STOPPED"] & 1), counters)

    def state(self) -> str:
        """What the core does and waits for, in words."""
        status = self._get("STATUS")
        bits = [name for name, bit, _ in STATUS_BITS if status >> bit & 1]
        state = State(status >> STATE_SHIFT & 15).name
        where = f"position {self._get('POSITION')}, command {self._get('COMMAND')}, opcode {status >> 20 & 15}"
        return f"{state}, {where}, {' '.join(bits) or 'no status bits'}"

    def close(self) -> None:
        """Give the memory of weights and commands back, and the device; calling it twice is harmless."""
        for buffer in self._buffers.values():
            buffer.free()
        self._buffers.clear()
        self._device.close()

    def _transferred(self, part: NDArray[np.uint8]) -> Buffer:
        buffer = self._device.allocate(part.size)
        buffer.data[: part.size] = part
        buffer.to_device()
        return buffer

    def _memory(self, sequence: Sequence) -> NDArray[np.uint8]:
        """The host's side of a cache, (engines, beats, lanes)."""
        whole = sequence.cache.data[: self._stride * self._core.engines]
        return whole.reshape(self._core.engines, -1, self._core.lanes)

    def _set(self, name: str, value: int) -> None:
        self._device.write(OFFSETS[name], value)

    def _get(self, name: str) -> int:
        return self._device.read(OFFSETS[name])

    def _set_address(self, name: str, buffer: Buffer) -> None:
        self._set(f"{name}_LOW", buffer.address & 0xFFFFFFFF)
        self._set(f"{name}_HIGH", buffer.address >> 32)
