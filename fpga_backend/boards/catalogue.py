"""Cores for boards: what each could be built with, and the clock that is assumed. None of them has been built."""

from __future__ import annotations

from dataclasses import dataclass

from fpga_backend.core import Core
from fpga_backend.simulation.simulator import Memory
from models_jax.integer.files import Shape
from planner.errors import UserError

MEMORY_CYCLES = 1000


@dataclass(frozen=True)
class Board:
    """A board with a core."""

    name: str
    core: Core
    clock_hz: float
    """Assumption."""
    bandwidth: float
    """Bytes a second of the memory, from the data sheet."""
    efficiency: float
    """Part of it that streams get. Assumption."""
    latency: int
    """Cycles from a request to its data. Assumption."""
    luts: int
    dsps: int
    software: str

    @property
    def memory(self) -> Memory:
        """The memory behind each port: a beat a cycle, or its part of the bandwidth if that is less."""
        asked = self.core.engines * self.core.lanes * self.clock_hz
        rate = min(1.0, self.bandwidth * self.efficiency / asked)
        return Memory(self.latency, round(rate * MEMORY_CYCLES), MEMORY_CYCLES)


ZYNQ = Core(lanes=16, engines=4, vector=8192, inputs=1024, parameters=1024, commands=2048)
"""Four engines of 16 lanes, one for each 128-bit HP port."""
ALVEO = Core(lanes=64, engines=8, vector=8192, inputs=512, parameters=512, commands=2048)
"""Eight engines of 64 lanes, the most that the RTL has, each on an HBM pseudo-channel."""
BOARDS = (
    Board("kv260", ZYNQ, 200e6, 19.2e9, 0.8, 80, 117_120, 1248, "pynq, on the board's own processor"),
    Board("zcu104", ZYNQ, 200e6, 19.2e9, 0.8, 80, 230_400, 1728, "pynq, on the board's own processor"),
    Board("u280", ALVEO, 225e6, 460e9, 0.9, 120, 1_303_680, 9024, "XRT: pynq 3.0.1 up to XRT 2.16, pyxrt after that"),
)
SHAPES = {"qwen2.5-0.5b": Shape(151_936, 896, 4864, 24, 14, 2, 64, 2048, True)}
"""Shapes of published models, for estimates without their weights. From their config.json; biases are left out."""


def board(name: str) -> Board:
    """The board called `name`. Raises UserError."""
    for found in BOARDS:
        if found.name == name:
            return found
    raise UserError(f"there is no board {name!r}", mend=f"use one of {', '.join(b.name for b in BOARDS)}")
