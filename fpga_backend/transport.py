"""What stands behind the `fpga` backend: an emulator, simulated RTL or a board. Always chosen by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from planner.checkpoint import model_folder
from planner.errors import UserError
from planner.runtime.backend import ModelInfo, Output, Work
from planner.workflow import Role

TRANSPORTS = ("emulate", "rtl", "board")
NOT_YET = {"board": "a board"}


class Transport(Protocol):
    """One role's model on the device."""

    info: ModelInfo

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of `text`."""
        ...

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Token ids of the prompt `text`."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`."""
        ...

    def run(self, work: Work) -> Output:
        """Do one chunk."""
        ...

    def rewind(self, sequence: str, tokens: int) -> None:
        """Forget all but the first `tokens` tokens of the sequence."""
        ...

    def fork(self, sequence: str, new_sequence: str) -> None:
        """Make `new_sequence` a copy of a known sequence, in place of what it was."""
        ...

    def close(self) -> None:
        """Free what is held; calling it twice is harmless."""
        ...


def check_options(options: Mapping[str, str]) -> str:
    """The name of the transport. Raises UserError if it is missing, unknown or not there yet."""
    unknown = sorted(options.keys() - {"transport"})
    if unknown:
        raise UserError(f"unknown option {unknown[0]!r} of an fpga device", mend="the only one is transport")
    name = options.get("transport")
    if name is None:
        raise UserError(
            "an fpga device has no transport, and none is chosen in silence",
            mend="set transport to emulate or rtl to run its integer model on this computer",
        )
    if name in NOT_YET:
        raise UserError(f"transport {name!r}, {NOT_YET[name]}, is not there yet", mend="use transport: emulate or rtl")
    if name not in TRANSPORTS:
        raise UserError(f"unknown transport {name!r}", mend=f"use one of {', '.join(TRANSPORTS)}")
    return name


def transport_named(name: str) -> Callable[[str, Role, str], Transport]:
    """What makes a role's model from its name, itself and its delimiter."""
    return {"emulate": emulate, "rtl": rtl}[name]


def emulate(name: str, role: Role, delimiter: str) -> Transport:
    """The same integer model on this computer's processor: the same bits as on the FPGA."""
    import jax

    from models_jax.integer.runner import IntegerRunner

    return IntegerRunner(name, role, model_folder(role.model), delimiter, jax.devices("cpu")[0])


def rtl(name: str, role: Role, delimiter: str) -> Transport:
    """The core's RTL, simulated cycle by cycle on this computer. It is built when it is used for the first time."""
    from fpga_backend.runner import CoreRunner
    from fpga_backend.simulation.device import simulated_device

    return CoreRunner(name, role, model_folder(role.model), delimiter, simulated_device)
