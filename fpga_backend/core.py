"""What a core is built with: the parameters of the RTL, and what a model needs of them."""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import UserError


@dataclass(frozen=True)
class Core:
    """Parameters of the RTL's top module. A driver reads them back from the core's registers."""

    lanes: int = 64
    """Products a cycle of one engine, and bytes of one beat of its memory port: a power of two, 16 to 128."""
    engines: int = 1
    """Engines, each with a read port of its own; output rows are dealt out among them. A power of two."""
    vector: int = 4096
    """int16 elements of the vector memory: residual stream, queries and keys, gated product."""
    inputs: int = 256
    """Words of LANES elements of the input memory: what engines multiply weights with."""
    parameters: int = 256
    """Beats of the parameter memory: gains, a row of the embedding, cosine and sine."""
    context: int = 2048
    """Tokens that attention reaches back at most."""
    commands: int = 1024
    """Commands of the longest list."""

    def __post_init__(self) -> None:
        """Refuse what the RTL cannot be built with."""
        for name, low, high in (("lanes", 16, 128), ("engines", 1, 8), ("context", self.lanes, 2048)):
            value = getattr(self, name)
            if not low <= value <= high or value & (value - 1):
                raise UserError(f"{name} of an FPGA core is {value}", mend=f"use a power of two, {low} to {high}")

    @property
    def command_beats(self) -> int:
        """Beats that one command takes up in memory: 32 bytes, or one beat if that is more."""
        return max(1, COMMAND_BYTES // self.lanes)

    @property
    def group(self) -> int:
        """Rows that share a header beat: four bytes of requantiser each."""
        return self.lanes // 4

    def beats(self, size: int) -> int:
        """Beats of `size` bytes."""
        return -(-size // self.lanes)

    def rows(self, rows: int) -> int:
        """Rows of the engine that has most of `rows`."""
        return -(-rows // self.engines)


COMMAND_BYTES = 32


def demand(need: int, have: int, what: str) -> None:
    """Raise UserError if a model needs more than the core was built with."""
    if need > have:
        raise UserError(
            f"the model needs {need} {what}, the FPGA core has {have}", mend="build the core with larger memories"
        )
