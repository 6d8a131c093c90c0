"""The `fpga` backend: integer models of draft roles, on an emulator or on simulated RTL, on boards later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fpga_backend.transport import Transport, check_options, transport_named
from planner.errors import UserError
from planner.runtime.backend import Handed, ModelInfo, Output, Work
from planner.workflow import Arithmetic, Role, RoleName


class FpgaBackend:
    """One FPGA. It takes integer models of draft roles only; each role has its own sequences."""

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        """Options: `transport`, which must be given: emulate, rtl or board."""
        self._transport = transport_named(check_options(options or {}))
        self._roles: dict[str, Transport] = {}

    def load(self, name: str, role: Role, delimiter: str) -> ModelInfo:
        """Load the integer model of role `name`, in place of one loaded before."""
        check_role(name, role)
        self.unload(name)
        self._roles[name] = self._transport(name, role, delimiter)
        return self._roles[name].info

    def encode(self, name: str, text: str) -> tuple[int, ...]:
        """Token ids of `text` for role `name`."""
        return self._role(name).encode(text)

    def encode_prompt(self, name: str, text: str) -> tuple[int, ...]:
        """Token ids of the prompt `text` for role `name`."""
        return self._role(name).encode_prompt(text)

    def decode(self, name: str, tokens: Sequence[int]) -> str:
        """Text of `tokens` of role `name`."""
        return self._role(name).decode(tokens)

    def run(self, work: Work) -> Output:
        """Do one chunk."""
        return self._role(work.role).run(work)

    def rewind(self, name: str, sequence: str, tokens: int) -> None:
        """Forget all but the first `tokens` tokens of a sequence; with 0 its cache is freed."""
        self._role(name).rewind(sequence, tokens)

    def fork(self, name: str, sequence: str, new_sequence: str) -> None:
        """Make `new_sequence` a copy of a known sequence, in place of what it was."""
        self._role(name).fork(sequence, new_sequence)

    def hand_over(self, name: str, sequence: str) -> Handed:
        """What a known sequence of a role that writes holds."""
        return self._role(name).hand_over(sequence)

    def take_over(self, name: str, sequence: str, handed: Handed) -> None:
        """Make a sequence of a role that writes what another device has handed over."""
        self._role(name).take_over(sequence, handed)

    def unload(self, name: str) -> None:
        """Free a role's model and sequences, if it is loaded."""
        runner = self._roles.pop(name, None)
        if runner is not None:
            runner.close()

    def close(self) -> None:
        """Free all models; calling it twice is harmless."""
        for runner in self._roles.values():
            runner.close()
        self._roles.clear()

    def _role(self, name: str) -> Transport:
        runner = self._roles.get(name)
        if runner is None:
            raise ValueError(f"role {name!r} is not loaded here")
        return runner


def check_role(name: str, role: Role) -> None:
    """Raise UserError for a role that an FPGA cannot take."""
    if role.numerics.arithmetic is not Arithmetic.INT8:
        raise UserError(
            f"an FPGA device takes integer roles only, role {name!r} has arithmetic {role.numerics.arithmetic.value}",
            mend="set numerics.arithmetic of the role to int8, or place it on a jax device",
        )
    if name != RoleName.DRAFT:
        raise UserError(
            f"an FPGA device takes the role draft only, not {name!r}", mend="place the role on a jax device"
        )
