"""A pynq device whose board is the simulated core, so that pynq as installed runs the driver without a board.

Host and device memory are apart, as on a card: what is not synchronised is not seen.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import numpy as np
from pynq.buffer import PynqBuffer
from pynq.metadata.runtime_metadata_parser import RuntimeMetadataParser
from pynq.pl_server.device import Device
from pynqmetadata.frontends import Metadata

from fpga_backend.boards.identity import ADDRESS_BYTES, CLOCK, VLNV, Described, described
from fpga_backend.simulation.device import SimulatedDevice
from fpga_backend.simulation.simulator import Simulator
from planner.errors import UserError

BASE = 0xA000_0000
CYCLES_A_READ = 2000
"""A host read takes time on the device too."""


class Card(Device):
    """One card. It is found by nobody: hand it to `open_board`, or make it `Device.active_device`."""

    _probe_priority_ = 900

    @classmethod
    def _probe_(cls) -> list[Device]:
        return []

    def __init__(self, simulator: Simulator) -> None:
        super().__init__("simulated-card")
        self.name = "simulated core"
        self.capabilities = {"REGISTER_RW": True}
        self.simulator = simulator
        self.memory = SimulatedDevice(simulator)
        self.cycles_a_read = CYCLES_A_READ

    # pynq asks for these when an overlay is loaded.
    def get_bitfile_metadata(self, name: str, partial: bool = False) -> Any:
        made = RuntimeMetadataParser(Metadata(input=str(Path(name).with_suffix(".hwh"))))
        made.clock_dict = {}  # Setting clocks writes to registers of a real processing system.
        return made

    def download(self, bitstream: Any, parser: Any = None) -> None:
        super().post_download(bitstream, parser)

    def close(self) -> None:
        pass

    # Registers.
    def read_registers(self, address: int, length: int) -> bytes:
        self.simulator.run(self.cycles_a_read)
        return b"".join(self.simulator.read(address - BASE + i).to_bytes(4, "little") for i in range(0, length, 4))

    def write_registers(self, address: int, data: Any) -> None:
        raw = bytes(data)
        for i in range(0, len(raw), 4):
            self.simulator.write(address - BASE + i, int.from_bytes(raw[i : i + 4], "little"))

    # Memory.
    @property
    def default_memory(self) -> Card:
        return self

    def allocate(self, shape: Any, dtype: Any = "u4", **_: Any) -> PynqBuffer:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        try:
            pages = self.memory.allocate(size)
        except UserError as error:
            raise RuntimeError("Failed to allocate device memory") from error
        made = PynqBuffer(shape, dtype, device=self, device_address=pages.address, bo=pages.address, coherent=False)
        made[:] = 0xA5
        made.memory, made.pointer, made.return_to = self, pages, self
        made.freed = True  # Else pynq, once the pages are returned, would unmap memory that numpy owns.
        return made

    def return_pointer(self, pages: Any) -> None:
        pages.free()

    def flush(self, bo: int, offset: int, pointer: int, size: int) -> None:
        self.simulator.memory[bo + offset : bo + offset + size] = view(pointer, size)

    def invalidate(self, bo: int, offset: int, pointer: int, size: int) -> None:
        view(pointer, size)[:] = self.simulator.memory[bo + offset : bo + offset + size]


def view(pointer: int, size: int) -> np.ndarray:
    return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint8)), (size,))


def write_bitstream(folder: Path, vlnv: str = VLNV, clock_hz: str = "100000000") -> Path:
    """A bitstream of nothing with the description that Vivado would put beside it."""
    path = folder / "draft.bit"
    path.write_bytes(bytes(64))
    path.with_suffix(".hwh").write_bytes(Xml.tostring(description(vlnv, clock_hz), "utf-8", xml_declaration=True))
    return path


def description(vlnv: str, clock_hz: str) -> Xml.Element:
    """As much of a .hwh as pynqmetadata reads: a processing system and the core at an address."""
    root = Xml.Element("EDKSYSTEM")
    Xml.SubElement(root, "SYSTEMINFO", NAME="draft", BOARD="none")
    Xml.SubElement(root, "EXTERNALPORTS")
    Xml.SubElement(root, "EXTERNALINTERFACES")
    modules = Xml.SubElement(root, "MODULES")
    zynq = module(modules, "zynq_ultra_ps_e_0", "xilinx.com:ip:zynq_ultra_ps_e:3.4", "zynq_ultra_ps_e", clocks())
    port(zynq, "M_AXI_HPM0_FPD", "MASTER")
    high = f"0x{BASE + ADDRESS_BYTES - 1:x}"
    places = {"BASENAME": "C_BASEADDR", "BASEVALUE": f"0x{BASE:x}", "HIGHNAME": "C_HIGHADDR", "HIGHVALUE": high}
    ends = {"MASTERBUSINTERFACE": "M_AXI_HPM0_FPD", "SLAVEBUSINTERFACE": "S_AXI", "INSTANCE": "draft_core_0"}
    region = {"ADDRESSBLOCK": "registers", "IS_DATA": "TRUE", "MEMTYPE": "REGISTER", **places, **ends}
    Xml.SubElement(Xml.SubElement(zynq, "MEMORYMAP"), "MEMRANGE", region)
    core = module(modules, "draft_core_0", vlnv, "draft_core", {CLOCK: clock_hz})
    port(core, "S_AXI", "SLAVE")
    blocks = Xml.SubElement(core, "ADDRESSBLOCKS")
    block = Xml.SubElement(blocks, "ADDRESSBLOCK", NAME="registers", INTERFACE="S_AXI", USAGE="register")
    registers = Xml.SubElement(block, "REGISTERS")
    for register in described():
        add_register(registers, register)
    return root


def module(modules: Xml.Element, name: str, vlnv: str, kind: str, parameters: dict[str, str]) -> Xml.Element:
    made = Xml.SubElement(modules, "MODULE", FULLNAME=f"/{name}", INSTANCE=name, MODTYPE=kind, VLNV=vlnv)
    values = Xml.SubElement(made, "PARAMETERS")
    for key, value in parameters.items():
        Xml.SubElement(values, "PARAMETER", NAME=key, VALUE=value)
    return made


def clocks() -> dict[str, str]:
    """No clock of the processing system is set: that needs a board."""
    divisors = {f"PSU__CRL_APB__PL{i}_REF_CTRL__DIVISOR{j}": "1" for i in range(4) for j in range(2)}
    sources = {f"PSU__CRL_APB__PL{i}_REF_CTRL__SRCSEL": "IOPLL" for i in range(4)}
    rates = {f"PSU__CRL_APB__PL{i}_REF_CTRL__ACT_FREQMHZ": "100" for i in range(4)}
    return divisors | sources | rates | {f"PSU__FPGA_PL{i}_ENABLE": "0" for i in range(4)}


def port(of: Xml.Element, name: str, kind: str) -> None:
    parent = Xml.SubElement(of, "BUSINTERFACES")
    Xml.SubElement(parent, "BUSINTERFACE", NAME=name, TYPE=kind, VLNV="xilinx.com:interface:aximm:1.0")


def add_register(parent: Xml.Element, register: Described) -> None:
    made = Xml.SubElement(parent, "REGISTER", NAME=register.name)
    properties(made, register, ADDRESS_OFFSET=str(register.at), SIZE=str(register.bits), IS_ENABLED="true")
    fields = Xml.SubElement(made, "FIELDS")
    for field in register.fields:
        properties(
            Xml.SubElement(fields, "FIELD", NAME=field.name), field, BIT_OFFSET=str(field.at), BIT_WIDTH=str(field.bits)
        )


def properties(of: Xml.Element, what: Described, **more: str) -> None:
    for key, value in {"DESCRIPTION": what.text, "ACCESS": what.access, **more}.items():
        Xml.SubElement(of, "PROPERTY", NAME=key, VALUE=value)
