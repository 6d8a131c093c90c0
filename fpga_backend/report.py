"""What a model costs on a board, as text: modelled from the command list and the costs of the RTL."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fpga_backend.boards.catalogue import SHAPES, Board, board
from fpga_backend.costs import FITTED, Estimate, commands_of, estimate, layout
from models_jax.integer.files import Shape
from models_jax.integer.runner import read_beside
from planner.checkpoint import model_folder
from planner.errors import UserError


@dataclass(frozen=True)
class Cost:
    """One token of a model on a board."""

    board: Board
    shape: Shape
    position: int
    token: Estimate
    memory_bytes: int
    """Weights of all engines as they lie in memory, padding and all."""

    @property
    def us(self) -> float:
        """Microseconds a token."""
        return 1e6 * self.token.cycles / self.board.clock_hz

    @property
    def bandwidth(self) -> float:
        """Bytes a second that are read."""
        return self.token.bytes * self.board.clock_hz / self.token.cycles

    @property
    def products(self) -> float:
        """Part of the products that the lanes could have made in this time: with 4-bit weights twice as many."""
        s, core = self.shape, self.board.core
        layer = s.hidden_size * (2 * s.query_size + 2 * s.key_size + 3 * s.intermediate_size)
        attention = 2 * s.query_size * (self.position + 1)
        made = s.num_hidden_layers * (layer * s.weight_bits / 8 + attention) + s.vocab_size * s.hidden_size
        return made / (self.token.cycles * core.lanes * core.engines)


def cost(shape: Shape, on: Board, position: int) -> Cost:
    """The token at `position`. Raises UserError if the model does not fit the board's core, or its context."""
    if not 0 <= position < shape.context_tokens:
        raise UserError(
            f"position {position} is outside the context of {shape.context_tokens} tokens",
            mend=f"use 0 to {shape.context_tokens - 1}",
        )
    token = estimate(commands_of(shape, on.core), on.core, on.memory, position, FITTED)
    laid = layout(shape, on.core)
    last = laid.linears["head"]
    return Cost(on, shape, position, token, (last.address + last.beats) * on.core.lanes * on.core.engines)


def report_text(model: str, name: str, position: int, clock_mhz: float = 0.0, latency: int = 0) -> str:
    """The report of `heteroreason fpga report`. Raises UserError."""
    on = board(name)
    if clock_mhz < 0 or latency < 0:
        raise UserError(f"clock {clock_mhz:g} MHz, latency {latency} cycles", mend="use numbers above 0")
    on = replace(on, clock_hz=1e6 * clock_mhz or on.clock_hz, latency=latency or on.latency)
    shape = SHAPES[model] if model in SHAPES else read_beside(model_folder(model)).shape
    return "\n".join(lines(model, cost(shape, on, position)))


def lines(model: str, found: Cost) -> list[str]:
    """The report line by line."""
    on, core, token = found.board, found.board.core, found.token
    memory = on.memory
    made = [
        f"{model} on {on.name}: {core.engines} engines of {core.lanes} lanes, {on.clock_hz / 1e6:g} MHz (assumption)",
        f"modelled, with constants fitted to simulated RTL; no board has run it. Software: {on.software}",
        "",
        f"token at position {found.position}: {token.cycles} cycles, {found.us:.0f} us, {1e6 / found.us:.1f} tokens/s",
        f"lanes busy with products: {found.products:.1%}",
        f"read from memory: {token.bytes / 1e6:.2f} MB a token, {found.bandwidth / 1e9:.2f} GB/s, "
        f"{found.bandwidth / on.bandwidth:.1%} of the board's {on.bandwidth / 1e9:g} GB/s",
        f"memory: latency {memory.latency} cycles, {memory.beats / memory.cycles:g} beats a cycle (assumption)",
        f"weights in memory: {found.memory_bytes / 1e6:.1f} MB with padding",
        f"multipliers: {core.lanes * core.engines} for 8-bit weights and as many small ones more for 4-bit weights; "
        f"the board has {on.dsps} DSPs; for synthesis see docs/fpga.md",
        "",
        "unit       cycles   share",
    ]
    shares = sorted(token.by_unit.items(), key=lambda item: -item[1])
    return made + [f"{unit:8} {cycles:8} {cycles / token.cycles:7.1%}" for unit, cycles in shares]
