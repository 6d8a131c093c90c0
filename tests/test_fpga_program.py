"""Generated files are current; commands and weights lie in memory as the documentation says."""

from pathlib import Path

import numpy as np
import pytest

from fpga_backend import generate
from fpga_backend.commands import FIELDS, Command, Opcode, Sink, encode, image
from fpga_backend.core import Core
from fpga_backend.packing import linear_stream, pack, place, requantisers, stop_mask
from fpga_backend.program import cache_plan, compile_model
from models_jax.integer.files import Shape, groups
from models_jax.integer.random_model import random_model
from planner.errors import UserError

SHAPE = Shape(40, 24, 40, 3, 4, 2, 8, 64, False)


@pytest.mark.parametrize("path", generate.generated(), ids=lambda path: Path(path).name)
def test_generated_files_are_current(path):
    assert path.read_text("utf-8") == generate.generated()[path], "run `python -m fpga_backend.generate`"


def test_fields_do_not_overlap():
    taken = [32 * f.word + f.low + i for f in FIELDS for i in range(f.bits)]
    assert len(set(taken)) == len(taken) and max(taken) < 256
    assert {f.name for f in FIELDS} == set(Command.__dataclass_fields__)


def test_commands_are_encoded_field_by_field():
    words = encode(Command(Opcode.LINEAR, sink=Sink.LOGIT, rows=5, row_beats=3, address=1 << 31, choosing=True))
    assert words.tolist() == [4 | 1 << 4 | 5 << 5, 1 << 31, 0, 5 | 3 << 20, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="rows of NORM is 1048576, it has 20 bits"):
        encode(Command(Opcode.NORM, rows=1 << 20))


@pytest.mark.parametrize(("lanes", "bytes_each"), [(16, 32), (32, 32), (64, 64)])
def test_a_command_takes_up_whole_beats(lanes, bytes_each):
    listed = image([Command(Opcode.NORM, value=7), Command(Opcode.END)], Core(lanes=lanes, context=128))
    assert listed.size == 2 * bytes_each and listed[28] == 7


@pytest.mark.parametrize(("lanes", "engines"), [(16, 1), (16, 2), (64, 1), (32, 4)])
def test_weights_can_be_read_back_from_the_streams(lanes, engines):
    core, rng = Core(lanes=lanes, engines=engines), np.random.default_rng(lanes)
    weight = rng.integers(-127, 128, (37, 45)).astype(np.int8)
    multiplier, shift = rng.integers(1 << 14, 1 << 15, 37), rng.integers(8, 30, 37)
    streams = linear_stream(weight, requantisers(multiplier, shift, 10), core)
    rows, row_beats = core.rows(37), core.beats(45)
    assert streams.shape == (engines, (rows * row_beats + -(-rows // core.group)) * lanes)
    for r in range(37):
        stream, at = streams[r % engines].reshape(-1, lanes), r // engines
        first = at // core.group * (1 + core.group * row_beats)
        place = at % core.group
        begin = first + 1 + place * row_beats
        read = stream[begin : begin + row_beats].reshape(-1).view(np.int8)
        assert np.array_equal(read[:45], weight[r]) and not read[45:].any()
        header = stream[first].view("<u4")[place]
        assert (header & 0xFFFF, header >> 16) == (multiplier[r], shift[r] + 10 - 16)


@pytest.mark.parametrize(("lanes", "engines"), [(16, 1), (16, 2), (64, 1), (32, 4)])
@pytest.mark.parametrize("width", [45, 300])
def test_weights_of_4_bits_can_be_read_back_from_the_streams(lanes, engines, width):
    """As the engine walks: a header every LANES / 4 rows, then scales every 16 beats, then weights."""
    core, rng = Core(lanes=lanes, engines=engines), np.random.default_rng(width)
    weight = rng.integers(-7, 8, (37, width)).astype(np.int8)
    scale = rng.integers(1, 256, (37, groups(width))).astype(np.uint8)
    multiplier, shift = rng.integers(1 << 14, 1 << 15, 37), rng.integers(8, 30, 37)
    streams = linear_stream(weight, requantisers(multiplier, shift, 10), core, scale)
    found = place(0, 37, width, 4, core)
    assert streams.shape == (engines, found.beats * lanes)
    for e in range(engines):
        stream, seen = iter(streams[e].reshape(-1, lanes)), 0
        for at, r in enumerate(range(e, core.rows(37) * engines, engines)):
            if at % core.group == 0:
                header = next(stream).view("<u4")
            weights, scales = [], []
            for _ in range(found.row_beats):
                if seen % 16 == 0:
                    of_beats = next(stream).reshape(16, -1)
                beat = next(stream)
                halves = np.concatenate([beat << 4, beat & 0xF0]).view(np.int8) >> 4
                weights += halves.tolist()
                scales += of_beats[seen % 16].tolist()
                seen += 1
            wanted = weight[r].tolist() if r < 37 else [0] * width
            assert weights[:width] == wanted and not any(weights[width:])
            if r < 37:
                assert scales[: groups(width)] == scale[r].tolist()
                word = int(header[at % core.group])
                assert (word & 0xFFFF, word >> 16) == (multiplier[r], shift[r] + 10 - 16)
        assert next(stream, None) is None


def test_a_layer_more_is_commands_more():
    core, counts = Core(lanes=16, context=64), []
    for layers in (1, 2, 3):
        model = random_model(Shape(40, 24, 40, layers, 4, 2, 8, 64, False), 0)
        counts.append(len(compile_model(model, pack(model, core), core, 64)))
    assert counts[1] - counts[0] == counts[2] - counts[1] == 11 + 3 * 4


def test_a_list_ends_and_reads_its_image_from_begin_to_end():
    core, model = Core(lanes=16, context=64), random_model(SHAPE, 1)
    made = pack(model, core)
    commands = compile_model(model, made, core, 64)
    assert [c.opcode for c in commands].index(Opcode.END) == len(commands) - 1
    linears = [c for c in commands if c.opcode is Opcode.LINEAR]
    assert sum(c.beats for c in linears) == sum(layer.beats for layer in made.linears.values())
    last = max(c.address + c.beats for c in linears)
    assert last * core.lanes <= made.weights.shape[1] < last * core.lanes + 4096


def test_heads_and_layers_of_the_cache_do_not_overlap():
    core = Core(lanes=16, engines=2, context=64)
    plan = cache_plan(SHAPE, core, 50)
    assert plan.key_head == 25 and plan.value_unit == 4 and plan.value_head == 4 * 4
    assert plan.value_start == 2 * 25 and plan.layer == 2 * 25 + 2 * 16 and plan.total == 3 * plan.layer


@pytest.mark.parametrize("small", [{"vector": 64}, {"inputs": 4}, {"parameters": 4}, {"commands": 16}])
def test_a_model_that_is_too_large_is_refused(small):
    core, model = Core(**({"lanes": 16, "context": 64} | small)), random_model(SHAPE, 1)
    with pytest.raises(UserError, match="the model needs"):
        compile_model(model, pack(model, core), core, 64)


def test_heads_that_the_cache_cannot_hold_are_refused():
    core, model = Core(lanes=16, context=64), random_model(Shape(40, 24, 40, 1, 4, 2, 6, 64, False), 1)
    with pytest.raises(UserError, match="head_dim 6"):
        compile_model(model, pack(model, core), core, 64)


def test_a_core_that_cannot_be_built_is_refused():
    for wrong in ({"lanes": 24}, {"engines": 3}, {"context": 1000}):
        with pytest.raises(UserError, match="power of two"):
            Core(**wrong)


def test_stop_mask_is_one_bit_a_token():
    mask = np.zeros(200, bool)
    mask[[0, 9, 199]] = True
    packed = stop_mask(mask)
    assert packed.size == 128 and (packed[0], packed[1], packed[24]) == (1, 2, 128)
