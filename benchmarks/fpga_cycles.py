"""Cycles of the FPGA core in simulation: single GEMVs, a token of two drafts, and where the time goes.

PYTHONPATH=. python benchmarks/fpga_cycles.py

All figures are simulated cycles of the RTL with one engine of 64 lanes, memory that answers after 100 cycles and gives
a beat of 64 bytes a cycle. The bound is the time in which memory gives the bytes that a token needs.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

from fpga_backend.core import Core
from fpga_backend.driver import Driver, Run
from fpga_backend.packing import place
from fpga_backend.program import cache_plan
from fpga_backend.simulation.device import SimulatedDevice
from fpga_backend.simulation.simulator import Memory, Simulator
from models_jax.integer.files import FILE_NAME, IntegerModel, Shape, groups, linears, read
from models_jax.integer.random_model import random_model
from models_jax.zoo import folder

CORE = Core()
CLOCK_HZ = 225e6
"""Assumption."""
SQUARE = (256, 512, 1024)


def shape(hidden: int, inner: int, layers: int, heads: int, vocabulary: int, bits: int = 8) -> Shape:
    """A shape whose query and value size is `hidden`, with a context of 512 tokens and weights of `bits` bits."""
    return Shape(vocabulary, hidden, inner, layers, heads, heads, hidden // heads, 512, True, bits)


def prepared(model: IntegerModel, memory: Memory) -> tuple[Driver, SimulatedDevice]:
    """A simulated core with a model."""
    device = SimulatedDevice(Simulator(CORE, 1 << 26))
    device.simulator.behave(memory)
    return Driver(device, model, np.zeros(model.shape.vocab_size, bool), model.shape.context_tokens), device


def token(model: IntegerModel, position: int, memory: Memory) -> Run:
    """The counters of one generated token at `position`: the difference between two runs of one and two tokens."""
    driver, device = prepared(model, memory)
    sequence = driver.sequence()
    tokens = np.arange(position, dtype=np.int32) % model.shape.vocab_size
    driver.run(sequence, tokens, 0, position)
    one = driver.run(sequence, tokens, position - 1, position + 1)
    two = driver.run(sequence, tokens, position - 1, position + 2)
    device.simulator.close()
    return Run(
        two.tokens, two.computed, False, {name: two.counters[name] - one.counters[name] for name in two.counters}
    )


@dataclass(frozen=True)
class Bytes:
    """What a token needs from memory."""

    weights: int
    """With a requantiser of four bytes a row, and with 4 bits a scale for 32 inputs."""
    cache: int
    other: int


def needed(s: Shape, position: int) -> Bytes:
    """Without any padding of the layout."""
    sizes = linears(s).values()
    each = [outer * (inner + 4 if s.weight_bits == 8 else inner // 2 + groups(inner) + 4) for outer, inner in sizes]
    weights = s.num_hidden_layers * sum(each) + s.vocab_size * (s.hidden_size + 4)
    cache = 2 * s.num_hidden_layers * s.num_attention_heads * s.head_dim * (position + 1)
    gains = s.num_hidden_layers * 2 * (2 * s.hidden_size + s.query_size) + 2 * s.hidden_size
    return Bytes(weights, cache, gains + s.hidden_size + 2 * s.head_dim)


def print_token(name: str, model: IntegerModel, position: int, memory: Memory) -> None:
    """One draft."""
    s, counters = model.shape, token(model, position, memory).counters
    cycles, want = counters["CYCLES"], needed(s, position)
    bound = (want.weights + want.cache + want.other) / CORE.lanes * memory.cycles / memory.beats
    plan = cache_plan(s, CORE, s.context_tokens)
    print(f"\n{name}: d {s.hidden_size}, {s.num_hidden_layers} layers, vocabulary {s.vocab_size}", end=", ")
    print(f"{s.weight_bits}-bit weights, position {position}")
    print(f"  {cycles} cycles a token; bound of {bound:.0f} by bandwidth: {bound / cycles:.1%}")
    print(
        f"  {counters['BEATS']} beats read: {bound / counters['BEATS']:.1%} of them needed, the rest pads whole beats"
    )
    print(f"  {CLOCK_HZ / cycles:.0f} tokens/s at an assumed {CLOCK_HZ / 1e6:.0f} MHz; cache of {plan.total} beats")
    for unit, spent in counters.items():
        if unit.startswith("CYCLES_"):
            print(f"    {unit[7:].lower():8} {spent:7} {spent / cycles:6.1%}")
    print(f"    of these {counters['STARVED']} cycles an engine or a LOAD waited for memory")


def gemv_cycles(size: int, bits: int, memory: Memory) -> tuple[float, float]:
    """Cycles of the LINEAR commands of a layer, and their ideal: the beats of their streams."""
    few, many = (shape(size, size, layers, size // 64, 64, bits) for layers in (1, 2))
    found = [token(random_model(s, 1), 2, memory).counters["CYCLES_LINEAR"] for s in (few, many)]
    # A layer more: v, qk, o, gate with up, and down, in units of size by size.
    ideal = sum(place(0, units * size, size, bits, CORE).beats for units in (1, 2, 1, 2, 1))
    return found[1] - found[0], ideal


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=int, default=100)
    parser.add_argument("--position", type=int, default=100)
    given = parser.parse_args()
    memory = Memory(given.latency)
    print(f"simulated: {CORE.lanes} lanes, {CORE.engines} engine, memory latency {memory.latency} cycles")
    print("\nLINEAR commands of a layer (v, qk, o, gate and up, down), all inputs and outputs d")
    for bits in (8, 4):
        for size in SQUARE:
            cycles, ideal = gemv_cycles(size, bits, memory)
            print(f"  d {size:5}, {bits} bits: {cycles:.0f} cycles, ideal {ideal:.0f}: {ideal / cycles:.1%}")
    for bits in (8, 4):
        print_token("draft of d 256", random_model(shape(256, 768, 4, 4, 512, bits), 1), given.position, memory)
    print_token("zoo draft", read(folder() / "draft" / FILE_NAME), given.position, memory)


if __name__ == "__main__":
    main()
