"""Cores for boards: what each could be built with, and the clock that is assumed. None of them has been built."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fpga_backend.core import Core
from fpga_backend.simulation.simulator import Memory
from models_jax.integer.files import MAX_CONTEXT, Shape
from planner.checkpoint import model_config, model_folder
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


def published(name: str) -> Shape:
    """The shape of the published model `shapes/NAME` as an integer model; biases are left out."""
    raw = model_config(model_folder(f"shapes/{name}"))
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    return Shape(
        raw["vocab_size"], hidden, raw["intermediate_size"], raw["num_hidden_layers"], heads,
        raw["num_key_value_heads"], hidden // heads, MAX_CONTEXT, raw["tie_word_embeddings"],
    )  # fmt: skip


SHAPES = {
    "qwen2.5-0.5b": published("qwen2.5-0.5b"),
    "qwen2.5-0.5b-w4": replace(published("qwen2.5-0.5b"), weight_bits=4),
}
"""Published models, for estimates without their weights."""


def board(name: str) -> Board:
    """The board called `name`. Raises UserError."""
    for found in BOARDS:
        if found.name == name:
            return found
    raise UserError(f"there is no board {name!r}", mend=f"use one of {', '.join(b.name for b in BOARDS)}")
