"""Writes what follows from the Python sources: the RTL's package and ROMs, and tables in docs/fpga.md.

python -m fpga_backend.generate
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import IntEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fpga_backend import commands, registers
from models_jax.integer import tables

RTL = Path(__file__).parent / "rtl"
PAGE = Path(__file__).parents[1] / "docs" / "fpga.md"
NOTE = "// Written by `python -m fpga_backend.generate`. Do not edit.\n"
BASE_BITS, DELTA_BITS = 19, 13
"""Widths of the entries of every ROM that is interpolated."""


def package() -> str:
    """Numbers that the RTL shares with the driver."""
    lines = [NOTE + "package draft_pkg;"]

    def constant(name: str, value: int, width: int) -> None:
        lines.append(f"  localparam logic [{width - 1}:0] {name} = {width}'d{value};")

    constant("ID", registers.ID, 32)
    for prefix, members, width in (
        ("OP", commands.Opcode, 4),
        ("SINK", commands.Sink, 3),
        ("INDEX", commands.Index, 2),
        ("ERROR", registers.Error, 4),
        ("STATE", registers.State, 4),
    ):
        for name, member in members.__members__.items():
            constant(f"{prefix}_{name}", member, width)
    for register in registers.REGISTERS:
        constant(f"REG_{register.name}", register.offset >> 2, 6)
    lines.append("  // Fields of a command of 256 bits: lowest bit and width.")
    for field in commands.FIELDS:
        lines.append(f"  localparam int {field.name.upper()}_AT = {32 * field.word + field.low};")
        lines.append(f"  localparam int {field.name.upper()}_BITS = {field.bits};")
    return "\n".join([*lines, "endpackage", ""])


def lookup(name: str, outputs: dict[str, int], rows: Iterable[tuple[int, dict[str, int]]], bits: int) -> str:
    """A ROM with a latency of two cycles. `rows`: address and values by output."""
    wires = ", ".join(f"output reg signed [{width - 1}:0] {out}" for out, width in outputs.items())
    held = " ".join(f"reg signed [{width - 1}:0] {out}_read;" for out, width in outputs.items())
    joined = "{" + ", ".join(f"{out}_read" for out in outputs) + "}"
    lines = [f"module {name} (input wire clk, input wire [{bits - 1}:0] address, {wires});", f"  {held}"]
    lines += ["  always_ff @(posedge clk) begin", "    case (address)"]
    for address, values in rows:
        entry = ", ".join(literal(values[out], width) for out, width in outputs.items())
        lines.append(f"      {bits}'d{address}: {joined} <= {{{entry}}};")
    lines += [f"      default: {joined} <= '0;", "    endcase"]
    lines += [f"    {out} <= {out}_read;" for out in outputs]
    return NOTE + "\n".join([*lines, "  end", "endmodule", ""])


def literal(value: int, width: int) -> str:
    """A number of `width` bits with sign. Raises ValueError if it does not fit."""
    if not -(1 << (width - 1)) <= value < 1 << (width - 1):
        raise ValueError(f"{value} has more than {width} bits")
    return f"{width}'h{value & ((1 << width) - 1):x}"


def segments(table: NDArray[np.int32], start: int = 0) -> Iterator[tuple[int, dict[str, int]]]:
    """An interpolated table: each entry and the difference to the next."""
    for i in range(len(table) - 1):
        yield start + i, {"base": int(table[i]), "delta": int(table[i + 1]) - int(table[i])}


def roms() -> dict[str, str]:
    """File name to text of every ROM."""
    both = {"base": BASE_BITS, "delta": DELTA_BITS}
    entries = ((i, {"value": int(value)}) for i, value in enumerate(tables.EXP2))
    gumbel = [*segments(tables.GUMBEL_LOW), *segments(tables.GUMBEL_HIGH, 1 << 10)]
    return {
        "rom_exp2.sv": lookup("rom_exp2", {"value": 15}, entries, 8),
        "rom_sigmoid.sv": lookup("rom_sigmoid", both, segments(tables.SIGMOID), 8),
        "rom_rsqrt.sv": lookup("rom_rsqrt", both, segments(tables.RSQRT), 8),
        "rom_reciprocal.sv": lookup("rom_reciprocal", both, segments(tables.RECIPROCAL), 7),
        "rom_gumbel.sv": lookup("rom_gumbel", both, gumbel, 11),
    }


def enum_rows(members: type[IntEnum]) -> Iterator[tuple[str, str, str]]:
    """Number, name and the sentence below each member of an enumeration in its source."""
    source = Path(registers.__file__ if members.__module__ == registers.__name__ else commands.__file__).read_text(
        "utf-8"
    )
    body = source.split(f"class {members.__name__}(IntEnum)")[1].split("\n\n\n")[0]
    texts = dict(re.findall(r'^    ([A-Z]+) = \d+\n    """(.*?)"""', body, re.MULTILINE | re.DOTALL))
    for name, member in members.__members__.items():
        yield str(int(member)), name, texts.get(name, "")


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def page_tables() -> dict[str, str]:
    """Every generated table of the page by name."""
    ways = {registers.Access.READ: "read", registers.Access.WRITE: "read, write", registers.Access.TRIGGER: "write"}
    return {
        "registers": table(
            ("offset", "name", "access", "contents"),
            ((f"0x{r.offset:02x}", r.name, ways[r.access], r.text) for r in registers.REGISTERS),
        ),
        "status": table(("bit", "name", "meaning"), ((str(b), n, text) for n, b, text in registers.STATUS_BITS)),
        "errors": table(("number", "name", "why"), enum_rows(registers.Error)),
        "opcodes": table(("number", "name", "what it does"), enum_rows(commands.Opcode)),
        "sinks": table(("number", "name", "where results go"), enum_rows(commands.Sink)),
        "fields": table(
            ("field", "word", "bits", "meaning"),
            ((f.name, str(f.word), f"{f.low + f.bits - 1}..{f.low}", f.text) for f in commands.FIELDS),
        ),
    }


def page(text: str) -> str:
    """The page with its generated tables renewed."""
    for name, made in page_tables().items():
        pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        text = pattern.sub(lambda found, made=made: found[1] + made + found[2], text)
    return text


def generated() -> dict[Path, str]:
    """Every generated file and what must be in it."""
    files = {RTL / "draft_pkg.sv": package(), **{RTL / name: text for name, text in roms().items()}}
    return files | {PAGE: page(PAGE.read_text("utf-8"))}


def main() -> None:
    """Write all files."""
    for path, text in generated().items():
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
