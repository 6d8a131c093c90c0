"""Writes what Vivado and Vitis need around the core: a top module with AXI ports by name, and the register map in Tcl.

python -m fpga_backend.boards.wrapper --lanes 16 --engines 4 --clock-hz 200000000 --out build
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from fpga_backend.boards.identity import ADDRESS_BYTES, CLOCK, LIBRARY, NAME, VENDOR, VERSION, Described, described
from fpga_backend.core import Core

NOTE = "Written by `python -m fpga_backend.boards.wrapper`. Do not edit."
SLAVE = (
    ("input", "awvalid", 1),
    ("output", "awready", 1),
    ("input", "awaddr", 12),
    ("input", "wvalid", 1),
    ("output", "wready", 1),
    ("input", "wdata", 32),
    ("input", "wstrb", 4),
    ("output", "bvalid", 1),
    ("input", "bready", 1),
    ("output", "bresp", 2),
    ("input", "arvalid", 1),
    ("output", "arready", 1),
    ("input", "araddr", 12),
    ("output", "rvalid", 1),
    ("input", "rready", 1),
    ("output", "rdata", 32),
    ("output", "rresp", 2),
)


def reading(lanes: int) -> tuple[tuple[str, str, int], ...]:
    """The signals of a read master of one engine."""
    return (
        ("output", "arvalid", 1),
        ("input", "arready", 1),
        ("output", "araddr", 64),
        ("output", "arlen", 8),
        ("output", "arsize", 3),
        ("output", "arburst", 2),
        ("input", "rvalid", 1),
        ("output", "rready", 1),
        ("input", "rdata", 8 * lanes),
        ("input", "rresp", 2),
        ("input", "rlast", 1),
    )


def writing(lanes: int) -> tuple[tuple[str, str, int], ...]:
    """The signals of the write master: they share the name of the first read master."""
    return (
        ("output", "awvalid", 1),
        ("input", "awready", 1),
        ("output", "awaddr", 64),
        ("output", "awlen", 8),
        ("output", "awsize", 3),
        ("output", "awburst", 2),
        ("output", "wvalid", 1),
        ("input", "wready", 1),
        ("output", "wdata", 8 * lanes),
        ("output", "wstrb", lanes),
        ("output", "wlast", 1),
        ("input", "bvalid", 1),
        ("output", "bready", 1),
        ("input", "bresp", 2),
    )


def ports(core: Core) -> Iterator[tuple[str, str, int]]:
    """Direction, name and width of every AXI port of the top module."""
    yield from ((way, f"s_axi_{name}", width) for way, name, width in SLAVE)
    for engine in range(core.engines):
        yield from ((way, f"m{engine}_axi_{name}", width) for way, name, width in reading(core.lanes))
    yield from ((way, f"m0_axi_{name}", width) for way, name, width in writing(core.lanes))


def verilog(core: Core, clock_hz: int) -> str:
    """The top module: `aclk`, `aresetn`, an AXI4-Lite slave, and one AXI4 master for each engine."""
    lines = [f"// {NOTE}", f"module {NAME}_top #(", f"  parameter {CLOCK} = {clock_hz}", ") ("]
    lines += ["  input  wire aclk,", "  input  wire aresetn,"]
    listed = [f"  {way:6} wire {f'[{width - 1}:0] ' if width > 1 else ''}{name}" for way, name, width in ports(core)]
    lines += [",\n".join(listed), ");", "  wire [2:0] size;", "  wire [1:0] burst;"]
    parameters = ", ".join(f".{name.upper()}({value})" for name, value in asdict(core).items())
    lines += [f"  {NAME} #({parameters}) core (", "    .clk(aclk), .rst(!aresetn), .irq(),"]
    lines += [f"    {inner(name, width, 's_', 's_axi_')}," for _, name, width in SLAVE]
    for _, name, _ in reading(core.lanes):
        if name in ("arsize", "arburst"):
            lines.append(f"    .m_{name}({name.removeprefix('ar')}),")
        else:
            each = ", ".join(f"m{engine}_axi_{name}" for engine in reversed(range(core.engines)))
            lines.append(f"    .m_{name}({{{each}}}),")
    lines.append(",\n".join(f"    {inner(name, width, 'm_', 'm0_axi_')}" for _, name, width in writing(core.lanes)))
    lines.append("  );")
    for engine in range(core.engines):
        lines += [f"  assign m{engine}_axi_arsize = size;", f"  assign m{engine}_axi_arburst = burst;"]
    return "\n".join([*lines, "endmodule", ""])


def inner(name: str, width: int, ours: str, theirs: str) -> str:
    """A port of the core by the wire of the top module; the slave decodes the lower 8 bits of 12."""
    return f".{ours}{name}({theirs}{name}{'[7:0]' if width == 12 else ''})"


def tcl() -> str:
    """The identity of the core and its register map for `ipx`, in a block called `block`."""
    lines = [f"# {NOTE}"]
    lines += [f"set core_{key} {value}" for key, value in zip(KEYS, (VENDOR, LIBRARY, NAME, VERSION), strict=True)]
    lines += ["proc add_registers {block} {", f"  set_property range {ADDRESS_BYTES} $block"]
    for register in described():
        lines += described_tcl(register, "register", "$block", "address_offset")
        for field in register.fields:
            lines += described_tcl(field, "field", "$register", "bit_offset")
    return "\n".join([*lines, "}", ""])


KEYS = ("vendor", "library", "name", "version")


def described_tcl(what: Described, kind: str, parent: str, at: str) -> list[str]:
    """A register or a field."""
    text = what.text.replace("{", "(").replace("}", ")")
    width = "size" if kind == "register" else "bit_width"
    values = {at: what.at, width: what.bits, "access": what.access, "description": f"{{{text}}}"}
    made = f"  set {kind} [ipx::add_{kind} {what.name} {parent}]"
    return [made, *(f"  set_property {name} {value} ${kind}" for name, value in values.items())]


def main() -> None:
    """Write `draft_core_top.v` and `registers.tcl` into a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in asdict(Core()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--clock-hz", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = vars(parser.parse_args())
    clock_hz, out = given.pop("clock_hz"), given.pop("out")
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{NAME}_top.v").write_text(verilog(Core(**given), clock_hz), "utf-8")
    (out / "registers.tcl").write_text(tcl(), "utf-8")


if __name__ == "__main__":
    main()
