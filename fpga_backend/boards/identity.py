"""How the core is known to block designs and to pynq: its name, its register map, its clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fpga_backend.registers import ID, REGISTERS, STATUS_BITS, Access

VENDOR, LIBRARY, NAME = "heteroreason.org", "draft", "draft_core"
VERSION = f"{ID & 0xFFFF}.0"
"""The version of register map and command list, as the core itself answers it."""
VLNV = f"{VENDOR}:{LIBRARY}:{NAME}:{VERSION}"
"""Vendor, library, name and version: what pynq binds the driver to."""
CLOCK = "CLOCK_HZ"
"""Parameter of the core on a board: the clock that it was built and closed timing for, in Hz."""
ADDRESS_BYTES = 0x1000
"""Address range of the AXI4-Lite slave: a page, of which the first 256 bytes are used."""
ACCESS = {Access.READ: "read-only", Access.WRITE: "read-write", Access.TRIGGER: "write-only"}


@dataclass(frozen=True)
class Described:
    """A register or a field of one, as IP-XACT and a .hwh file describe it."""

    name: str
    at: int
    """Byte offset of a register, lowest bit of a field."""
    bits: int
    access: str
    text: str
    fields: tuple[Described, ...] = ()


def described() -> Iterator[Described]:
    """All registers, STATUS and CONTROL with their fields."""
    status = tuple(Described(name, bit, 1, "read-only", text) for name, bit, text in STATUS_BITS)
    doorbell = (Described("START", 0, 1, "write-only", "the doorbell"),)
    fields = {"STATUS": status, "CONTROL": doorbell}
    for register in REGISTERS:
        access = ACCESS[register.access]
        yield Described(register.name, register.offset, 32, access, register.text, fields.get(register.name, ()))
