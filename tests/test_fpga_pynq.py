"""The driver under pynq as installed, on a card whose board is the simulated core. Also run with pynq 4 by CI."""

import importlib.util
import shutil
import sys
from pathlib import Path

import backend_contract
import numpy as np
import pytest
import rtl_cases
import tiny_models

if importlib.util.find_spec("pynq") is None:
    pytest.skip("pynq is not installed: pip install 'heteroreason[fpga]'", allow_module_level=True)
if shutil.which("g++") is None:
    pytest.skip("the RTL simulation is built with g++", allow_module_level=True)

from fpga_backend import board  # isort: skip  (it imports pynq without its warnings)
import pynq
import pynq_card
from pynq.buffer import PynqBuffer

from fpga_backend.backend import FpgaBackend
from fpga_backend.boards.identity import VLNV, described
from fpga_backend.driver import CoreError, Driver
from fpga_backend.registers import ID, OFFSETS, STATUS_BITS
from fpga_backend.simulation.simulator import Memory, Simulator
from fpga_backend.transport import BITSTREAM
from models_jax.integer import files, quantise
from models_jax.integer.files import Shape
from models_jax.integer.random_model import random_model
from planner.errors import UserError
from planner.workflow import Arithmetic, Numerics, Role

SHAPE = Shape(40, 24, 32, 2, 4, 2, 8, 64, tied=True)
PROMPT = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int32)


@pytest.fixture
def card():
    made = pynq_card.Card(Simulator(rtl_cases.NARROW, rtl_cases.MEMORY_BYTES))
    yield made
    made.simulator.close()


@pytest.fixture
def core(card, tmp_path):
    return board.open_board(pynq_card.write_bitstream(tmp_path), card)


@pytest.fixture(scope="module")
def model():
    return random_model(SHAPE, seed=5)


def opened(card, folder, **more):
    return board.open_board(pynq_card.write_bitstream(folder, **more), card)


def test_overlay_binds_the_driver_and_its_register_map(core):
    assert type(core) is board.DraftCore
    assert core.overlay.is_loaded()
    assert core.register_map.ID[:] == ID
    assert {r.name: r.at for r in described()} == OFFSETS
    core.register_map.WEIGHTS_LOW = 0x1234_5000
    assert core.read(OFFSETS["WEIGHTS_LOW"]) == 0x1234_5000
    assert all(getattr(core.register_map.STATUS, name) == 0 for name, _, _ in STATUS_BITS)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_blocks_appends_and_rewinds_are_those_of_the_specification(core, card, model, temperature):
    stops = np.zeros(SHAPE.vocab_size, bool)
    stops[7] = True
    driver, specification = Driver(core, model, stops, 64), rtl_cases.Specification(model)
    card.simulator.behave(Memory(latency=60, beats=3, cycles=4, stall=100))
    sequence, known, computed = driver.sequence(), PROMPT.tolist(), 0
    for appended, limit in (((), 20), ((), 24), ((1, 2, 3), 0), ((), 33)):
        known += appended
        start, limit = min(computed, len(known) - 1), max(limit, len(known))
        run = driver.run(sequence, np.array(known, np.int32), start, limit, 99, temperature)
        assert run.tokens == specification.run(known, start, limit, 99, temperature, stops)
        known, computed = [*known, *run.tokens][: limit - 2], min(run.computed, limit - 2)


@pytest.mark.parametrize("forgotten", ["to_device", "from_device"])
def test_a_forgotten_transfer_gives_wrong_tokens(core, model, monkeypatch, forgotten):
    stops = np.zeros(SHAPE.vocab_size, bool)
    right = rtl_cases.Specification(model).run(PROMPT, 0, 40, 1, 8.0, stops)
    driver = Driver(core, model, stops, 64)
    sequence, other = driver.sequence(), driver.sequence()
    assert driver.run(sequence, PROMPT, 0, 40, 1, 8.0).tokens == right
    monkeypatch.setattr(board.BoardBuffer, forgotten, lambda _: None)
    assert driver.run(other, PROMPT, 0, 40, 1, 8.0).tokens != right


def test_memory_is_given_back(core, card, model):
    holes = list(card.memory._holes)
    driver = Driver(core, model, np.zeros(SHAPE.vocab_size, bool), 64)
    sequence = driver.sequence()
    assert card.memory._holes != holes
    sequence.free()
    driver.close()
    driver.close()
    assert card.memory._holes == holes


def test_a_core_that_hangs_is_left_after_its_time(core, card, model, monkeypatch):
    monkeypatch.setattr(board, "MEASURED_S", 1000.0)
    driver = Driver(core, model, np.zeros(SHAPE.vocab_size, bool), 64)
    monkeypatch.setattr(core, "grace_s", 0.01)
    monkeypatch.setattr(driver, "_most_cycles", 0)
    card.simulator.behave(Memory(latency=1 << 30))
    with pytest.raises(CoreError, match=r"did not end its run: LIST.*BUSY READS_PENDING"):
        driver.run(driver.sequence(), PROMPT, 0, 20)


def test_a_core_that_is_too_fast_or_too_slow_is_refused(card, model, tmp_path, monkeypatch):
    monkeypatch.setattr(board, "MEASURED_S", 0.0)
    driver = Driver(opened(card, tmp_path, clock_hz="10"), model, np.zeros(SHAPE.vocab_size, bool), 64)
    with pytest.raises(UserError, match=r"built for 0.0 MHz; set pynq.Clocks.fclk0_mhz = 1e-05"):
        driver.run(driver.sequence(), PROMPT, 0, 20)
    slow = opened(card, tmp_path, clock_hz="900000000")
    driver = Driver(slow, model, np.zeros(SHAPE.vocab_size, bool), 64)
    monkeypatch.setattr(slow, "grace_s", 0.01)
    monkeypatch.setattr(driver, "_most_cycles", 0)
    card.simulator.behave(Memory(latency=1 << 30))
    with pytest.raises(UserError, match=r"runs at .* MHz, its bitstream was built for 900.0 MHz"):
        driver.run(driver.sequence(), PROMPT, 0, 20)


def test_too_little_memory_is_refused_before_it_is_asked_for(core, card, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="no contiguous memory of 67108864 bytes: pynq says: Failed to"):
        core.allocate(1 << 26)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemFree: 9 kB\nCmaTotal:  131072 kB\nCmaFree:   4 kB\n")
    monkeypatch.setattr(board, "MEMINFO", meminfo)
    monkeypatch.setitem(card.capabilities, "MEMORY_MAPPED", True)
    monkeypatch.setattr(card, "allocate", lambda *_: pytest.fail("it was asked for"))
    with pytest.raises(UserError, match=r"of 8192 bytes: 4096 bytes are free; raise cma="):
        core.allocate(4097)


def test_kernels_without_contiguous_memory_say_nothing(tmp_path):
    assert board.contiguous_free(tmp_path / "none") is None
    (tmp_path / "meminfo").write_text("CmaTotal: 0 kB\nCmaFree: 0 kB\n")
    assert board.contiguous_free(tmp_path / "meminfo") is None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"vlnv": VLNV.rpartition(":")[0] + ":0.9"}, r"must have one draft_core 2.0, it has .*draft_core:0.9"),
        ({"vlnv": "else:where:other:1.0"}, "it has none"),
        ({"clock_hz": ""}, "CLOCK_HZ ''"),
        ({"clock_hz": "fast"}, "CLOCK_HZ 'fast'"),
    ],
)
def test_wrong_bitstreams_are_refused(card, tmp_path, more, message):
    with pytest.raises(UserError, match=message):
        opened(card, tmp_path, **more)


def test_missing_files_are_named(card, tmp_path):
    with pytest.raises(UserError, match=r"draft.bit: there is no such file"):
        board.open_board(tmp_path / "draft.bit", card)
    path = pynq_card.write_bitstream(tmp_path)
    path.with_suffix(".hwh").unlink()
    with pytest.raises(UserError, match=r"draft.hwh: there is no such file"):
        board.open_board(path, card)


def test_a_description_that_is_none_is_refused(card, tmp_path):
    path = pynq_card.write_bitstream(tmp_path)
    path.with_suffix(".hwh").write_text("<EDKSYSTEM>")
    with pytest.raises(UserError, match="pynq cannot load the bitstream"):
        board.open_board(path, card)


def test_core_of_another_version_is_refused(core, card, model, monkeypatch):
    monkeypatch.setattr(card.simulator, "read", lambda _: 0x4852_0000)
    with pytest.raises(UserError, match="answers with id 0x48520000"):
        Driver(core, model, np.zeros(SHAPE.vocab_size, bool), 64)


def test_no_board_names_its_causes(tmp_path, monkeypatch):
    monkeypatch.delenv("XILINX_XRT", raising=False)
    with pytest.raises(UserError, match=r"No Devices Found.*XILINX_XRT is not set.*source"):
        board.open_board(pynq_card.write_bitstream(tmp_path))
    monkeypatch.setenv("XILINX_XRT", "/usr")
    with pytest.raises(UserError, match=r"No Devices Found.*run as root"):
        board.open_board(pynq_card.write_bitstream(tmp_path))


def test_the_repair_is_needed_and_changes_nothing_else(monkeypatch):
    if int(np.__version__.split(".")[0]) < 2:
        pytest.skip("numpy 1 needs no repair")
    monkeypatch.delattr(PynqBuffer, "device")
    with pytest.raises(AttributeError, match="device"):
        PynqBuffer((4,), "u1", device=None)
    board.repair_buffers()
    assert PynqBuffer((4,), "u1", device=7).device == 7
    monkeypatch.delattr(PynqBuffer, "device")
    monkeypatch.setattr(pynq, "__version__", "99.0")
    board.repair_buffers()
    assert "device" not in vars(PynqBuffer)
    monkeypatch.setattr(PynqBuffer, "device", None, raising=False)


@pytest.fixture(scope="module")
def on_a_board(tmp_path_factory):
    """The backend with transport `board`, on the simulated card."""
    folder = tmp_path_factory.mktemp("board")
    tiny_models.write(folder, tiny_models.config(tied=False))
    quantise.quantise_folder(folder, [np.random.default_rng(0).integers(0, len(tiny_models.TOKENS), 40)])
    card = pynq_card.Card(Simulator(rtl_cases.NARROW, rtl_cases.MEMORY_BYTES))
    role = Role(str(folder), Numerics(Arithmetic.INT8, cache_tokens=96))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(BITSTREAM, str(pynq_card.write_bitstream(folder)))
        patch.setattr(pynq.pl_server.device.DeviceMeta, "_active_device", card, raising=False)

        def factory():
            return FpgaBackend({"transport": "board"})

        subject = backend_contract.Subject(
            factory, "draft", role, tiny_models.DELIMITER, "12 + 30 = 42\n4 2 = 6", "x 1"
        )
        yield subject
        subject.backend.close()
    card.simulator.close()


@pytest.mark.parametrize("check", backend_contract.WRITING, ids=backend_contract.name)
def test_contract_of_transport_board(check, on_a_board):
    check(on_a_board)


def test_two_users_of_one_card_do_not_disturb_each_other(on_a_board):
    folder, more = Path(on_a_board.role.model), {"key": 12345, "temperature": 2.0}
    stops = np.zeros(len(tiny_models.TOKENS), bool)
    stops[[tiny_models.TOKENS.index(tiny_models.DELIMITER), tiny_models.TOKENS.index(tiny_models.EOS)]] = True
    specification = rtl_cases.Specification(files.read(folder / files.FILE_NAME))
    other = backend_contract.Subject(
        on_a_board.factory, "draft", on_a_board.role, on_a_board.delimiter, on_a_board.text, on_a_board.unreadable
    )
    other.write("other", 5)
    written = on_a_board.write("same", 30, 7, **more)
    other.backend.close()
    known = list(on_a_board.prompt)
    while len(known) < len(on_a_board.prompt) + 30:
        known += specification.run(known, 0, len(on_a_board.prompt) + 30, 12345, 2.0, stops)
    assert written == tuple(known[len(on_a_board.prompt) :])


def test_transport_board_asks_for_a_bitstream_and_for_pynq(on_a_board, monkeypatch):
    backend = FpgaBackend({"transport": "board"})
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "fpga_backend.board", None)
        with pytest.raises(UserError, match=r"needs pynq.*pip install 'heteroreason\[fpga\]'"):
            backend.load("draft", on_a_board.role, on_a_board.delimiter)
    monkeypatch.delenv(BITSTREAM)
    with pytest.raises(UserError, match=f"{BITSTREAM} is not set"):
        backend.load("draft", on_a_board.role, on_a_board.delimiter)
