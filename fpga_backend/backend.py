"""The `fpga` backend: integer models of draft roles, on an emulator or on simulated RTL, on boards later."""

from __future__ import annotations

from collections.abc import Mapping

from fpga_backend.transport import check_options, transport_named
from models_jax.runner_backend import RunnerBackend
from planner.errors import UserError
from planner.runtime.backend import ModelInfo
from planner.workflow import Arithmetic, Role, RoleName


class FpgaBackend(RunnerBackend):
    """One FPGA. It takes integer models of draft roles only; each role has its own sequences."""

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        """Options: `transport`, which must be given: emulate, rtl or board."""
        super().__init__()
        self._transport = transport_named(check_options(options or {}))

    def load(self, name: str, role: Role, delimiter: str) -> ModelInfo:
        """Load the integer model of role `name`, in place of one loaded before."""
        check_role(name, role)
        self.unload(name)
        self._runners[name] = self._transport(name, role, delimiter)
        return self._runners[name].info


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
