"""Faults put into the RTL on purpose: the comparison with the specification must find each of them."""

import shutil

import pytest
from rtl_cases import NARROW, even_case, exercise, random_case

from fpga_backend.driver import CoreError
from fpga_backend.generate import RTL
from fpga_backend.simulation.build import library
from fpga_backend.simulation.simulator import SimulationError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("g++") is None, reason="the RTL simulation is built with g++"),
]

MUTANTS = {
    "requantiser without rounding": ("requantise", "half <= 32'sd1 <<< (shift_2 - 5'd1);", "half <= 32'sd0;"),
    "rounding of half downwards": ("scale", "rounded <= product_late + half;", "rounded <= product_late + half - 1;"),
    "interpolation without rounding": ("interpolate", "product + (22'sd1 <<< (BITS - 1))", "product"),
    "residual stream wraps": ("residual", "sum > 17'sd32767 ? 16'sd32767", "sum > 17'sd65535 ? 16'sd32767"),
    "int8 down to -128": ("requantise", "? least[22:0] : whole", "? least[22:0] - 23'sd1 : whole"),
    "a lane too few in a packed word": ("pack", "lane == LANE_BITS'(LANES - 1)", "lane == LANE_BITS'(LANES - 2)"),
    "attention without the last slot": ("draft_core", "'(position) + 1'b1)", "'(position))"),
    "values of the first block only": ("mean", "(first_late ? 32'sd0 : held)", "32'sd0"),
    "rotation the wrong way": ("rotate", "sum <= second_late ?", "sum <= !second_late ?"),
    "sigmoid of a negative gate": ("gate", "g_6[15] ? 17'sd32768 - positive[16:0]", "g_6[15] ? positive[16:0]"),
    "cache read before it is written": ("sequencer", "(!is_scores || fence_open)", "1'b1"),
    "key of an odd slot in the other engine": ("store", "? slot[TURN_BITS-1:0]", "? ~slot[TURN_BITS-1:0]"),
    "stop tokens are passed": ("sequencer", "stopped <= word[token[4:0]];", "stopped <= 1'b0;"),
    "a block one token too long": ("sequencer", "length == limit[15:0])", "length == limit[15:0] + 16'd1)"),
    "a wrong rotation in Threefry": ("threefry", "2: rotation = 26;", "2: rotation = 25;"),
    "noise of the position before": ("draft_core", "32'(position) + 32'd1)", "32'(position))"),
    "the last of equal logits": ("choose", "score > best", "score >= best"),
    "exponent of the product too small": ("gate", "exponent <= 4'(i - 6)", "exponent <= 4'(i - 7)"),
    "down ignores the exponent": ("draft_core", "exponent_on ? 5'(exponent) : 5'd0", "5'd0"),
    "norm of the wrong octave": ("norm", "exponent <= 5'd21;", "exponent <= 5'd20;"),
    "weights of 4 bits without a sign": ("engine", "{{4{weights[8*g+3]}}, weights", "{4'd0, weights"),
    "scale of the beat before": ("engine", ".CYCLES(10)) wait_sums", ".CYCLES(11)) wait_sums"),
    "groups unscaled": ("engine", "out <= grouped ? BITS'(product) : sum_late;", "out <= sum_late;"),
    "scales only once": ("engine", "in_scales <= grouped && scaled == 4'd15 && !header_next;", "in_scales <= 1'b0;"),
    "ARVALID falls too early": ("fetch", "SEND: if (arready)", "SEND: if (1'b1)"),
    "bursts over 4096 bytes": ("fetch", "(BURST) - {1'b0, at[BURST_BITS-1:0]}", "(BURST)"),
    "WDATA changes while it waits": ("writer", "if (close) begin", "if (open) begin"),
}  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of its own: nobody wants these again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def broken(folder, name):
    """A copy of the RTL with one fault."""
    module, right, wrong = MUTANTS[name]
    text = (RTL / f"{module}.sv").read_text("utf-8")
    assert text.count(right) == 1, f"{right!r} is not once in {module}.sv"
    shutil.copytree(RTL, folder / "rtl")
    (folder / "rtl" / f"{module}.sv").write_text(text.replace(right, wrong), "utf-8")
    return folder / "rtl"


def survives(path):
    """Whether a core passes what the fast tests check."""
    for seed in range(8):
        case = random_case(NARROW, seed, path) if seed < 6 else even_case(NARROW, path, stop=seed == 7)
        case.driver._most_cycles = 200_000
        try:
            exercise(case, seed, 40)
        except (AssertionError, CoreError, SimulationError):
            return False
        finally:
            case.close()
    return True


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_found(name, tmp_path, cache):
    assert not survives(str(library(NARROW, broken(tmp_path, name), "-O0")))
