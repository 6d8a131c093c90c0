"""Modelled cycles against simulated ones, on shapes and memories that the constants were not fitted to."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fpga_backend import costs, fit
from fpga_backend.boards.catalogue import SHAPES, board
from fpga_backend.cli import app
from fpga_backend.core import Core
from fpga_backend.packing import pack
from fpga_backend.program import compile_model
from fpga_backend.report import cost, report_text
from fpga_backend.simulation.simulator import Memory
from models_jax.integer.files import Shape
from models_jax.integer.random_model import random_model
from planner.errors import UserError
from planner.machine import Machine
from planner.workflow import Arithmetic

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="the RTL simulation is built with g++")
UNSEEN = (
    (fit.WIDE, Shape(300, 192, 448, 2, 6, 3, 32, 512, True), 77, Memory(60, 4, 5)),
    (fit.WIDE, Shape(90, 320, 200, 1, 5, 5, 64, 512, False), 300, Memory(150)),
    (fit.WIDE, Shape(2000, 64, 100, 1, 2, 1, 32, 128, True), 5, Memory(40, 2, 3)),
    (fit.NARROW, Shape(150, 72, 136, 2, 3, 1, 24, 256, True), 90, Memory(40)),
    (fit.NARROW, Shape(333, 112, 160, 1, 7, 7, 16, 128, True), 33, Memory(200, 1, 3)),
    (fit.WIDE, Shape(120, 448, 600, 1, 7, 1, 64, 256, True, 4), 50, Memory(80)),
    (fit.NARROW, Shape(90, 208, 304, 1, 4, 2, 24, 128, False, 4), 70, Memory(60, 3, 4)),
)


@needs_compiler
@pytest.mark.parametrize(
    "case", UNSEEN, ids=[f"d{case[1].hidden_size}-lanes{case[0].lanes}-{case[1].weight_bits} bits" for case in UNSEEN]
)
def test_cycles_are_within_three_percent_of_simulation(case):
    sample = fit.simulate(*case)
    assert abs(fit.error(sample, costs.FITTED)) < 0.03
    made = fit.modelled(sample, costs.FITTED)
    # The word with the first token is not the command list's.
    assert abs(made.beats - sample.counters["BEATS"]) <= 1
    for unit, cycles in made.by_unit.items():
        assert abs(cycles - sample.counters[f"CYCLES_{unit.upper()}"]) < 0.03 * sample.counters["CYCLES"], unit


@needs_compiler
def test_a_fit_finds_constants_that_were_wrong():
    samples = [fit.simulate(*fit.SHAPES[i], Memory(1)) for i in (0, 3, 5)]
    spoilt = dict(costs.FITTED) | {"NORM": 60.0, "SOFTMAX": 5.0, "LINEAR": 20.0}
    assert max(abs(fit.error(sample, spoilt)) for sample in samples) > 0.03
    found = fit.fitted(samples, spoilt)
    assert max(abs(fit.error(sample, found)) for sample in samples) < 0.01
    for name in ("NORM", "SOFTMAX"):
        assert found[name] == pytest.approx(costs.FITTED[name], abs=6)


@settings(max_examples=20, deadline=None)
@given(
    core=st.sampled_from([fit.WIDE, fit.NARROW, Core(lanes=32, engines=4)]),
    hidden=st.integers(3, 90),
    inner=st.integers(3, 90),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    head_dim=st.sampled_from([8, 12, 32]),
    vocabulary=st.integers(2, 90),
    tied=st.booleans(),
    bits=st.sampled_from([8, 4]),
)
def test_layout_is_that_of_packed_weights(core, hidden, inner, heads, head_dim, vocabulary, tied, bits):
    shape = Shape(vocabulary, hidden, inner, 2, *heads, head_dim, 64, tied, bits)
    model = random_model(shape, 1)
    packed, laid = pack(model, core), costs.layout(shape, core)
    assert (packed.linears, packed.rows) == (laid.linears, laid.rows)
    real = compile_model(model, packed, core, 64)
    unknown = {"multiplier": 0, "shift": 0, "value": 0}
    assert [replace(c, **unknown) for c in real] == [replace(c, **unknown) for c in costs.commands_of(shape, core)]


@pytest.mark.parametrize("position", [1, 64, 500])
def test_slower_memory_takes_longer_and_never_beats_its_bandwidth(position):
    shape = Shape(512, 256, 768, 4, 4, 2, 64, 512, True)
    commands, before = costs.commands_of(shape, fit.WIDE), 0
    for memory in (Memory(1), Memory(100), Memory(100, 1, 2), Memory(100, 1, 5), Memory(500, 1, 5)):
        made = costs.estimate(commands, fit.WIDE, memory, position, costs.FITTED)
        assert made.cycles >= before
        assert made.cycles >= made.beats * memory.cycles / memory.beats
        assert abs(sum(made.by_unit.values()) - made.cycles) <= len(made.by_unit)
        before = made.cycles


def test_constants_print_as_they_stand_in_the_source():
    text = costs.constants_text(costs.FITTED)
    assert eval("{" + text + "}") == costs.FITTED
    assert text in Path(costs.__file__).read_text("utf-8")


def test_report_of_a_half_billion_weights_is_labelled_and_adds_up():
    text = report_text("qwen2.5-0.5b", "kv260", 100)
    assert "modelled" in text and "(assumption)" in text
    found = cost(SHAPES["qwen2.5-0.5b"], board("kv260"), 100)
    assert f"{found.token.cycles} cycles" in text
    # 494 million weights of a byte: 24 layers and the vocabulary head.
    assert 494e6 < found.token.bytes < 1.05 * 494e6
    assert 0.9 < found.products <= 1
    assert found.bandwidth < found.board.bandwidth


def test_four_bits_take_little_more_than_half_of_the_cycles_and_bytes():
    """Of 494 million weights 136 million are those of the head, which keep 8 bits; a group of 32 has a scale."""
    eight, four = (cost(SHAPES[f"qwen2.5-0.5b{kind}"], board("kv260"), 100).token for kind in ("", "-w4"))
    wanted = (136 + 358 * 4.25 / 8) / 494
    assert four.bytes / eight.bytes == pytest.approx(wanted, rel=0.03)
    assert four.cycles / eight.cycles == pytest.approx(wanted, rel=0.06)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zoo/draft", "v80", 1), "no board 'v80'; use one of kv260, zcu104, u280"),
        (("qwen2.5-0.5b", "u280", 4096), "position 4096 is outside the context of 2048 tokens"),
        (("qwen2.5-0.5b", "u280", 1, -1.0), "clock -1 MHz"),
    ],
)
def test_reports_that_cannot_be(arguments, message):
    with pytest.raises(UserError, match=message):
        report_text(*arguments)


def test_command_prints_the_report():
    done = CliRunner().invoke(app, ["report", "qwen2.5-0.5b", "--board", "u280", "--clock-mhz", "300"])
    assert done.exit_code == 0
    assert done.output.startswith("qwen2.5-0.5b on u280: 8 engines of 64 lanes, 300 MHz (assumption)")


@pytest.mark.parametrize("name", ["kv260", "zcu104", "u280"])
def test_machines_with_the_core_say_what_the_report_says(name):
    device = Machine.load(f"{name}-core-l4").device("fpga0")
    on = board(name)
    assert device.bandwidth_bytes_per_s == pytest.approx(on.core.lanes * on.core.engines * on.clock_hz)
    assert device.ops_per_s[Arithmetic.INT8] == pytest.approx(2 * device.bandwidth_bytes_per_s)
    assert device.transport == "emulate"
    shape = SHAPES["qwen2.5-0.5b"]
    found = cost(shape, on, 200)
    planned = 1e6 * found.token.bytes / (device.bandwidth_bytes_per_s * device.memory_efficiency)
    assert planned + device.per_token_overhead_us == pytest.approx(found.us, rel=0.05)
