"""Measured costs: the fit of known times, what is refused, and a real model from the command to a plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
from hypothesis import given
from hypothesis import strategies as st

from planner import api
from planner.cli import main
from planner.cost import CostOp, CostTable, Origin
from planner.errors import UserError
from planner.machine import Machine
from planner.profile import Sample, check_device, devices_of, table
from planner.workflow import Arithmetic, Numerics, Role, RoleName, Workflow

HERE = Machine.load("this-computer")
EXAMPLES = Path(__file__).parent.parent / "examples"


def samples(base, each, far, op=CostOp.DECODE, jitter=0):
    found = []
    for tokens in (1, 3, 8, 20, 50):
        for context in (1, 60, 128):
            before = context if op == CostOp.PREFILL else tokens * context + tokens * (tokens - 1) / 2
            us = round(base + each * tokens + far * before)
            found.append(Sample(RoleName.TARGET, "cpu0", op, tokens, context, (us - jitter, us, us + jitter)))
    return found


@given(st.integers(0, 2000), st.integers(1, 900), st.integers(0, 3), st.sampled_from(list(CostOp)))
def test_linear_times_are_found_again(base, each, far, op):
    seen = samples(base + 100, each, far, op)
    made = table(seen, HERE)
    for s in seen:
        assert made.entries[0].us(s.tokens, s.context) == pytest.approx(s.median_us, rel=0.03, abs=2)
    assert made.fits[0].rows == len(seen)


def test_a_stray_is_left_out():
    seen = samples(500, 100, 0, jitter=3)
    stray = Sample(RoleName.TARGET, "cpu0", CostOp.DECODE, 10, 1, (90_000,) * 3)
    made = table([*seen, stray], HERE)
    assert made.fits[0].left_out == 1
    assert made.entries[0].us(10, 1) == pytest.approx(1500, rel=0.05)


def test_spread_is_of_the_quartiles():
    assert Sample(RoleName.TARGET, "cpu0", CostOp.DECODE, 1, 1, (80, 90, 100, 110, 120)).spread == pytest.approx(0.1)


def test_emulated_devices_are_refused_and_left_out():
    machine = Machine.load("u280-2x3090")
    emulated = next(d.name for d in machine.devices if d.transport)
    with pytest.raises(UserError, match="emulated"):
        check_device(machine, emulated)
    role = Role("x", Numerics(Arithmetic.INT8))
    assert emulated not in [device for _, _, device in devices_of(machine, {RoleName.DRAFT: role}, None)]


def test_devices_of_a_workflow():
    roles = Workflow.load(EXAMPLES / "sums.yaml").roles
    assert {(r, d) for r, _, d in devices_of(HERE, roles, None)} == {(r, f"cpu{i}") for r in RoleName for i in (0, 1)}
    assert {d for _, _, d in devices_of(HERE, roles, "cpu1")} == {"cpu1"}
    with pytest.raises(UserError, match="there is no device gpu7"):
        devices_of(HERE, roles, "gpu7")


def test_from_the_command_to_a_plan(tmp_path, capsys):
    tiny_models.write(tmp_path / "model", tiny_models.config("qwen3", max_position_embeddings=256))
    file = tmp_path / "costs.yaml"
    command = [
        "profile",
        str(tmp_path / "model"),
        "--device",
        "cpu1",
        "--repeats",
        "3",
        "--limit",
        "1",
        "-o",
        str(file),
    ]
    with pytest.raises(SystemExit) as stop:
        main(command)
    assert stop.value.code == 0, capsys.readouterr()
    made = CostTable.load(file)
    assert {(e.role, e.device, e.op, e.origin) for e in made.entries} == {
        (RoleName.TARGET, "cpu1", op, Origin.MEASURED) for op in CostOp
    }
    costs = api.costs_of(Workflow.load(EXAMPLES / "sums.yaml"), HERE, made)
    assert costs.origin(RoleName.TARGET, "cpu1", CostOp.DECODE) == Origin.MEASURED
    assert costs.origin(RoleName.TARGET, "cpu0", CostOp.DECODE) == Origin.ROOFLINE
    assert costs.decode_us(RoleName.TARGET, "cpu1", 20, 30) > costs.decode_us(RoleName.TARGET, "cpu1", 1, 30) > 0
