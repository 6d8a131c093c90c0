"""Tensor parallelism on devices that the host is cut into, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models

from models_jax.backend import JaxBackend
from planner.errors import UserError
from planner.machine import Machine
from planner.runtime.worker import make_backend
from planner.workflow import Numerics, Role, Workflow

HERE = Path(__file__).parent


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_devices_compute_one_model(count, tmp_path):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    paths = os.pathsep.join([str(HERE.parent), str(HERE)])
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    command = [sys.executable, str(HERE / "tensor_parallel.py"), str(count), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.stdout.endswith("all is well\n"), done.stderr[-3000:]


def test_more_devices_than_there_are(tmp_path):
    tiny_models.write(tmp_path)
    role = Role(str(tmp_path), Numerics(cache_tokens=96, tensor_parallel=2))
    with pytest.raises(UserError, match=r"spread over 2 devices and this one has 1.*processors"):
        JaxBackend({"platform": "cpu"}).load("target", role, "\n")


def machine(processors=(), **changes):
    raw = Machine.load("this-computer").to_mapping()
    raw["devices"][0] |= {"processors": list(processors)} | changes
    return Machine.from_mapping(raw, "m.yaml")


def test_a_device_of_two_takes_roles_for_one_or_two():
    two = machine([2, 3])
    for count in (1, 2):
        assert two.provides("cpu0", Numerics(tensor_parallel=count))
    assert not two.provides("cpu0", Numerics(tensor_parallel=3))
    assert not two.provides("cpu1", Numerics(tensor_parallel=2))
    assert [d.name for d in two.candidates(Numerics(tensor_parallel=2))] == ["cpu0", "cpu0+cpu1"]
    assert Machine.from_mapping(two.to_mapping(), "again") == two


def test_the_backend_is_told_which_processors():
    with pytest.raises(UserError, match="none of index '4000'"):
        make_backend(machine([4000]).device("cpu0"))


@pytest.mark.parametrize("processors", [[1, 1], [-1], [5000]])
def test_wrong_processors_are_refused(processors):
    with pytest.raises(UserError, match=r"devices\[0\].processors"):
        machine(processors)


@pytest.mark.parametrize("numerics", [{"tensor_parallel": 0}, {"tensor_parallel": 2, "arithmetic": "int8"}])
def test_wrong_numbers_are_refused(numerics):
    raw = {"name": "x", "problems": "sums", "policy": {"kind": "draft_only"}}
    with pytest.raises(UserError, match=r"roles.draft.numerics.tensor_parallel"):
        Workflow.from_mapping(raw | {"roles": {"draft": {"model": "x", "numerics": numerics}}}, "wf.yaml")
