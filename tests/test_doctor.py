"""What `heteroreason doctor` finds, and what it says where something is missing."""

import importlib.metadata

import pytest

from planner import doctor


def by_name():
    return {check.name: check for check in doctor.examine()}


def test_what_the_simulated_fpga_needs_is_looked_for():
    found = by_name()
    assert {"verilator", "g++", "pynq"} <= found.keys()
    assert not any(found[name].needed for name in ("verilator", "g++", "pynq"))


@pytest.mark.parametrize(
    ("name", "mend"), [("verilator", "heteroreason[rtl]"), ("pynq", "heteroreason[fpga]"), ("g++", "apt install g++")]
)
def test_what_is_missing_comes_with_how_to_get_it(monkeypatch, name, mend):
    def version(package):
        if package == name:
            raise importlib.metadata.PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor.shutil, "which", lambda tool: None if tool == name else f"/bin/{tool}")
    check = by_name()[name]
    assert not check.ok and mend in check.mend and "for transport: " in check.mend
