"""A simulated core with its memory: registers, bytes and cycles."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fpga_backend.core import Core
from fpga_backend.simulation.build import library


@dataclass(frozen=True)
class Memory:
    """How the memory behind the ports behaves."""

    latency: int = 100
    """Cycles from an address to its first data, and from a write to its answer."""
    beats: int = 1
    cycles: int = 1
    """At most `beats` beats in `cycles` cycles, each port."""
    stall: int = 0
    """Of 1024 cycles, so many hold a handshake back, at random."""


class SimulationError(RuntimeError):
    """The core broke a rule of AXI, or did not answer."""


class Simulator:
    """One simulated core. Bytes of its memory are at `memory`, byte 0 at address 0."""

    def __init__(self, core: Core, memory_bytes: int, seed: int = 1, path: str | None = None) -> None:
        """Reset the core; registers and memories begin with random contents. `path`: a library built before."""
        self._library = load(path or str(library(core)))
        self._sim = self._library.sim_new(memory_bytes, seed)
        pointer = ctypes.cast(self._library.sim_memory(self._sim), ctypes.POINTER(ctypes.c_uint8))
        self.memory: NDArray[np.uint8] = np.ctypeslib.as_array(pointer, (memory_bytes,))
        self.core = core

    def behave(self, memory: Memory) -> None:
        """Set how memory behaves from now on."""
        self._library.sim_set(self._sim, memory.latency, memory.beats, memory.cycles, memory.stall)

    def write(self, offset: int, value: int) -> None:
        """Write a register."""
        failed = self._library.sim_write(self._open(), offset, value & 0xFFFFFFFF)
        self._check(f"register 0x{offset:02x} could not be written" if failed else "")

    def read(self, offset: int) -> int:
        """Read a register."""
        value = ctypes.c_uint32()
        failed = self._library.sim_read(self._open(), offset, ctypes.byref(value))
        self._check(f"register 0x{offset:02x} could not be read" if failed else "")
        return value.value

    def run(self, most_cycles: int) -> bool:
        """Let cycles pass until the core signals that it is done. False: it did not in `most_cycles`."""
        done = bool(self._library.sim_run(self._open(), most_cycles))
        self._check("")
        return done

    def close(self) -> None:
        """Free the simulation; `memory` must not be used any more. Calling it twice is harmless."""
        if self._sim is not None:
            self._library.sim_free(self._sim)
        self._sim = None

    def _open(self) -> int:
        if self._sim is None:
            raise RuntimeError("the simulation is closed")
        return self._sim

    def _check(self, problem: str) -> None:
        found = self._library.sim_problem(self._open()).decode() or problem
        if found:
            raise SimulationError(found)


def load(path: str) -> ctypes.CDLL:
    """The library with the types of its functions."""
    made = ctypes.CDLL(path)
    sim, u32, u64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64
    types = {
        "sim_new": (sim, [u64, u64]),
        "sim_free": (None, [sim]),
        "sim_memory": (sim, [sim]),
        "sim_problem": (ctypes.c_char_p, [sim]),
        "sim_set": (None, [sim, u32, u32, u32, u32]),
        "sim_write": (ctypes.c_int, [sim, u32, u32]),
        "sim_read": (ctypes.c_int, [sim, u32, ctypes.POINTER(u32)]),
        "sim_run": (ctypes.c_int, [sim, u64]),
    }
    for name, (result, arguments) in types.items():
        function = getattr(made, name)
        function.restype, function.argtypes = result, arguments
    return made
