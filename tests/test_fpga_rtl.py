"""The RTL against the specification, bit for bit: random models, runs and memories; errors; cycles."""

import shutil

import numpy as np
import pytest
import rtl_cases
from rtl_cases import NARROW, WIDE, Case, even_case, exercise, random_case, random_memory

from fpga_backend.commands import Command, Opcode, image
from fpga_backend.driver import CoreError, core_of
from fpga_backend.registers import ID, OFFSETS, REGISTERS, STATUS, Access
from fpga_backend.simulation.simulator import Memory
from models_jax.integer.files import FILE_NAME, Shape, read
from models_jax.integer.random_model import random_model
from models_jax.zoo import folder
from planner.errors import UserError

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the RTL simulation is built with g++")

CORES = {"64 lanes": WIDE, "2 engines of 16 lanes": NARROW}
ZOO = folder() / "draft" / FILE_NAME


@pytest.fixture(params=CORES)
def core(request):
    return CORES[request.param]


@pytest.mark.parametrize("seed", range(3))
def test_blocks_appends_and_rewinds_are_those_of_the_specification(core, seed):
    case = random_case(core, seed)
    assert exercise(case, seed, 40) >= 40
    case.close()


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(100, 140))
def test_many_random_tokens_are_those_of_the_specification(core, seed):
    """130 token vectors through whole models each, 10,400 in all; every element of the cache is compared."""
    case = random_case(core, seed, context=int(np.random.default_rng(seed).integers(20, 250)))
    assert exercise(case, seed, 130) >= 130
    case.close()


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(6))
def test_larger_models_are_those_of_the_specification(seed):
    rng = np.random.default_rng(seed)
    heads, head_dim = [(2, 64), (2, 128), (3, 72), (4, 34), (6, 64), (5, 100)][seed]
    hidden, inner, bits = int(rng.integers(200, 400)), int(rng.integers(300, 900)), (8, 8, 4, 4, 8, 4)[seed]
    shape = Shape(300 + seed, hidden, inner, 2, heads, 1, head_dim, 200, True, bits)
    case = Case(WIDE, random_model(shape, seed, wild=seed % 2 == 1), np.zeros(shape.vocab_size, bool), seed)
    case.device.simulator.behave(random_memory(rng))
    assert exercise(case, seed, 150) >= 150
    case.close()


@pytest.mark.skipif(not ZOO.is_file(), reason="the models that ship are not trained yet: run `make zoo`")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_zoo_draft_writes_what_the_specification_says(temperature):
    model = read(ZOO)
    stops = np.zeros(model.shape.vocab_size, bool)
    stops[[1, 2]] = True
    case = Case(WIDE, model, stops)
    prompt = np.random.default_rng(1).integers(3, model.shape.vocab_size, 24).tolist()
    tokens, computed, ends = list(prompt), 0, 0
    for key in range(4):
        found = case.run(tokens, min(computed, len(tokens) - 1), len(tokens) + 16, key, temperature)
        tokens += found.tokens
        computed, ends = found.computed, ends + found.stopped
    assert len(tokens) > len(prompt) + 4
    case.close()


def test_a_sequence_may_fill_the_whole_context(core):
    model = random_model(Shape(20, 16, 16, 1, 2, 1, 8, 70, True), 3)
    case = Case(core, model, np.zeros(20, bool))
    found = case.run(list(range(20)) * 3, 0, 70, 1, 1.0)
    assert len(found.tokens) == 10 and found.computed == 69
    case.close()


def test_the_lowest_of_equal_logits_is_chosen(core):
    case = even_case(core)
    assert case.run([3, 1, 4], 0, 9).tokens == (0,) * 6
    case.close()


def test_sequences_are_apart(core):
    model = random_model(Shape(20, 16, 24, 2, 2, 1, 8, 40, True), 4)
    case, other = Case(core, model, np.zeros(20, bool)), rtl_cases.Specification(model)
    second = case.driver.sequence()
    tokens = [3, 1, 4, 1, 5]
    case.run(tokens, 0, 9)
    got = case.driver.run(second, np.array(tokens[::-1], np.int32), 0, 12, 7, 1.0)
    assert got.tokens == other.run(tokens[::-1], 0, 12, 7, 1.0, case.stops)
    case.run(tokens, 4, 20)
    case.close()


def test_stop_tokens_end_a_block(core):
    model = random_model(Shape(90, 16, 24, 1, 2, 1, 8, 60, True), 5)
    free = Case(core, model, np.zeros(90, bool))
    written = free.run([1, 2], 0, 40, 3, 8.0).tokens
    free.close()
    for at in (0, 1, 17):
        stops = np.zeros(90, bool)
        stops[written[at]] = True
        case = Case(core, model, stops)
        found = case.run([1, 2], 0, 40, 3, 8.0)
        assert found.stopped and found.tokens == written[: written.index(written[at]) + 1]
        case.close()


@pytest.fixture
def small():
    model = random_model(Shape(20, 16, 24, 2, 2, 1, 8, 40, True), 6)
    case = Case(NARROW, model, np.zeros(20, bool))
    yield case
    case.close()


def test_registers_keep_what_was_written_and_show_what_was_built(small):
    device = small.device
    assert core_of(device) == NARROW
    for i, register in enumerate(r for r in REGISTERS if r.access is Access.WRITE):
        device.write(register.offset, 0x01234567 * (i + 1))
    for i, register in enumerate(r for r in REGISTERS if r.access is Access.WRITE):
        assert device.read(register.offset) == 0x01234567 * (i + 1) & 0xFFFFFFFF
    device.write(OFFSETS["ID"], 5)
    assert device.read(OFFSETS["ID"]) == ID and device.read(0xFC) == 0


@pytest.mark.parametrize(
    ("start", "known", "limit"), [(3, 3, 5), (4, 3, 5), (0, 3, 2), (0, 3, NARROW.context + 1), (1 << 20, 3, 5)]
)
def test_a_bad_range_is_refused(small, start, known, limit):
    with pytest.raises(CoreError, match="RANGE"):
        small.driver.run(small.sequence, np.arange(known, dtype=np.int32), start, limit)
    small.run([1, 2, 3], 0, 8)


@pytest.mark.parametrize(
    ("commands", "error"),
    [
        ([], "COMMANDS"),
        ([Command(Opcode.END)] * 300, "COMMANDS"),
        ([Command(Opcode.SOFTMAX)], "COMMANDS"),
        ([12], "OPCODE"),
    ],
)
def test_a_bad_list_is_refused_and_the_core_goes_on(small, commands, error):
    buffer = small.driver._buffers["COMMANDS"]
    kept, fixed = buffer.data.copy(), dict(small.driver._fixed)
    raw = [c if isinstance(c, Command) else Command(Opcode.END) for c in commands][:4]
    buffer.data[: 32 * len(raw)] = image(raw, NARROW)
    if commands == [12]:
        buffer.data[0] = 12
    buffer.to_device()
    small.driver._fixed["COMMANDS_COUNT"] = len(commands)
    with pytest.raises(CoreError, match=error):
        small.driver.run(small.sequence, np.arange(3, dtype=np.int32), 0, 5)
    buffer.data[:] = kept
    buffer.to_device()
    small.driver._fixed = fixed
    small.run([1, 2, 3], 0, 8)


@pytest.mark.parametrize(("register", "error"), [("WEIGHTS_HIGH", "READ"), ("CACHE_HIGH", "READ|WRITE")])
def test_addresses_outside_memory_are_an_error_not_a_hang(small, register, error):
    def break_address(name, buffer):
        set_address(name, buffer)
        small.device.write(OFFSETS[register], 1)

    set_address = small.driver._set_address
    small.driver._set_address = break_address
    with pytest.raises(CoreError, match=error):
        small.driver.run(small.sequence, np.arange(3, dtype=np.int32), 0, 5)
    small.driver._set_address = set_address
    small.device.write(OFFSETS["WEIGHTS_HIGH"], 0)
    small.run([1, 2, 3], 0, 8)


def test_a_wait_without_end_shows_in_status(small):
    small.device.simulator.behave(Memory(latency=1 << 30))
    small.driver._most_cycles = 500
    with pytest.raises(CoreError, match=r"did not end its run: LIST, .* BUSY READS_PENDING$"):
        small.driver.run(small.sequence, np.arange(3, dtype=np.int32), 0, 5)
    status = small.device.read(OFFSETS["STATUS"])
    assert status >> STATUS["BUSY"] & 1 and not status >> STATUS["DONE"] & 1


def test_doorbells_are_ignored_while_busy(small):
    ring = small.device.wait

    def wait(most):
        for _ in range(3):
            small.device.write(OFFSETS["CONTROL"], 1)
            ring(300)
        return ring(most)

    small.device.wait = wait
    small.run([1, 2, 3], 0, 8)


def test_counters_add_up(small):
    counters = small.run([1, 2, 3], 0, 8).counters
    units = sum(value for name, value in counters.items() if name.startswith("CYCLES_"))
    assert abs(units - counters["CYCLES"]) <= 2
    assert 0 < counters["BEATS"] <= counters["CYCLES"] and counters["STARVED"] < counters["CYCLES"]


def test_memory_that_is_too_small_is_said(small):
    with pytest.raises(UserError, match="no 33554432 bytes left"):
        small.device.allocate(1 << 25)
    before = list(small.device._holes)
    parts = [small.device.allocate(5000) for _ in range(3)]
    for i in (1, 0, 2):
        parts[i].free()
    assert small.device._holes == before


def linear_cycles(hidden, layers):
    model = random_model(Shape(64, hidden, hidden, layers, hidden // 64, hidden // 64, 64, 64, True), 1)
    case = Case(WIDE, model, np.zeros(64, bool))
    case.device.simulator.behave(Memory(100))
    case.driver.run(case.sequence, np.array([1, 2], np.int32), 0, 2)
    counters = case.driver.run(case.sequence, np.array([1, 2, 3], np.int32), 2, 3).counters
    case.close()
    return counters["CYCLES_LINEAR"]


def test_a_gemv_takes_95_percent_of_its_ideal_cycles():
    """Five commands of a layer: v, qk, o, gate and up, down; ideal is a beat a cycle, headers included."""
    ideal = sum(rows * 4 + rows // 16 for rows in (256, 512, 256, 512, 256))
    assert linear_cycles(256, 2) - linear_cycles(256, 1) <= ideal / 0.95


def test_a_token_takes_75_percent_of_the_bandwidth():
    model = random_model(Shape(512, 256, 768, 4, 4, 4, 64, 128, True), 1)
    case = Case(WIDE, model, np.zeros(512, bool))
    case.device.simulator.behave(Memory(100))
    first = case.driver.run(case.sequence, np.arange(8, dtype=np.int32), 0, 9).counters
    both = case.driver.run(case.sequence, np.arange(8, dtype=np.int32), 7, 10).counters
    one = case.driver.run(case.sequence, np.arange(8, dtype=np.int32), 7, 9).counters
    assert first["CYCLES"] > one["CYCLES"]
    needed = 4 * (4 * 256 * 260 + 2 * 768 * 260 + 256 * 772) + 512 * 260
    assert needed / 64 >= 0.75 * (both["CYCLES"] - one["CYCLES"])
    case.close()
