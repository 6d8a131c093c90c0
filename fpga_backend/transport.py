"""What stands behind the `fpga` backend: an emulator, simulated RTL or a board. Always chosen by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from models_jax.runner import ModelRunner
from planner.checkpoint import model_folder
from planner.errors import UserError
from planner.workflow import Role

TRANSPORTS = ("emulate", "rtl", "board")
BITSTREAM = "HETEROREASON_BITSTREAM"
"""Environment variable with the path of the bitstream that the transport `board` loads."""


def check_options(options: Mapping[str, str]) -> str:
    """The name of the transport. Raises UserError if it is missing or unknown."""
    unknown = sorted(options.keys() - {"transport"})
    if unknown:
        raise UserError(f"unknown option {unknown[0]!r} of an fpga device", mend="the only one is transport")
    name = options.get("transport")
    if name is None:
        raise UserError(
            "an fpga device has no transport, and none is chosen in silence",
            mend="set transport to emulate or rtl to run its integer model on this computer",
        )
    if name not in TRANSPORTS:
        raise UserError(f"unknown transport {name!r}", mend=f"use one of {', '.join(TRANSPORTS)}")
    return name


def transport_named(name: str) -> Callable[[str, Role, str], ModelRunner]:
    """What makes a role's model from its name, itself and its delimiter."""
    return {"emulate": emulate, "rtl": rtl, "board": board}[name]


def emulate(name: str, role: Role, delimiter: str) -> ModelRunner:
    """The same integer model on this computer's processor: the same bits as on the FPGA."""
    import jax

    from models_jax.integer.runner import IntegerRunner

    return IntegerRunner(name, role, model_folder(role.model), delimiter, jax.devices("cpu")[0])


def rtl(name: str, role: Role, delimiter: str) -> ModelRunner:
    """The core's RTL, simulated cycle by cycle on this computer. It is built when it is used for the first time."""
    from fpga_backend.runner import CoreRunner
    from fpga_backend.simulation.device import simulated_device

    return CoreRunner(name, role, model_folder(role.model), delimiter, simulated_device)


def board(name: str, role: Role, delimiter: str) -> ModelRunner:
    """The core on a board, through pynq, with the bitstream that HETEROREASON_BITSTREAM names."""
    from fpga_backend.runner import CoreRunner

    bitstream = os.environ.get(BITSTREAM)
    if not bitstream:
        raise UserError(
            f"transport 'board' needs a bitstream, and {BITSTREAM} is not set",
            mend=f"set {BITSTREAM} to the .bit or .xclbin file, or use transport: rtl to simulate the core",
        )
    try:
        from fpga_backend.board import open_board
    except ModuleNotFoundError as error:
        raise UserError(
            f"transport 'board' needs pynq: {error}",
            mend="run `pip install 'heteroreason[fpga]'` on the board, or use transport: rtl to simulate the core",
        ) from error
    return CoreRunner(name, role, model_folder(role.model), delimiter, lambda: open_board(Path(bitstream)))
