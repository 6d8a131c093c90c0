"""Simulates tokens of small models and fits the constants of `fpga_backend.costs` to their cycles.

python -m fpga_backend.fit
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from fpga_backend.commands import Opcode
from fpga_backend.core import Core
from fpga_backend.costs import FITTED, Constants, Estimate, commands_of, constants_text, estimate
from fpga_backend.driver import Driver
from fpga_backend.simulation.device import SimulatedDevice
from fpga_backend.simulation.simulator import Memory, Simulator
from models_jax.integer.files import Shape
from models_jax.integer.random_model import random_model

WIDE = Core()
NARROW = Core(lanes=16, engines=2, vector=1024, inputs=256, parameters=128, context=256, commands=256)
MEMORIES = (Memory(1), Memory(100), Memory(100, 1, 2), Memory(300, 3, 4))
SHAPES = (
    (WIDE, Shape(64, 64, 64, 1, 1, 1, 64, 256, True), 20),
    (WIDE, Shape(64, 256, 512, 1, 4, 2, 64, 256, True), 20),
    (WIDE, Shape(512, 128, 384, 2, 4, 4, 32, 512, True), 200),
    (WIDE, Shape(100, 96, 160, 1, 3, 1, 32, 256, True), 130),
    (WIDE, Shape(256, 512, 256, 1, 8, 2, 64, 1024, True), 600),
    (NARROW, Shape(64, 64, 96, 1, 2, 1, 32, 128, True), 20),
    (NARROW, Shape(100, 48, 80, 2, 4, 2, 16, 256, True), 150),
    (NARROW, Shape(200, 128, 200, 1, 4, 2, 32, 256, True), 60),
    (WIDE, Shape(40, 40, 56, 2, 2, 2, 20, 256, True), 100),
)
"""Core, shape and position of each simulated token."""


@dataclass(frozen=True)
class Sample:
    """One token in simulation."""

    core: Core
    shape: Shape
    position: int
    memory: Memory
    counters: dict[str, int]


def simulate(core: Core, shape: Shape, position: int, memory: Memory) -> Sample:
    """The counters of one generated token: the difference between runs of two tokens and of one.

    The cache before it holds what memory held: cycles do not depend on it.
    """
    device = SimulatedDevice(Simulator(core, 1 << 28))
    device.simulator.behave(memory)
    driver = Driver(device, random_model(shape, 1), np.zeros(shape.vocab_size, bool), shape.context_tokens)
    sequence = driver.sequence()
    tokens = np.arange(position, dtype=np.int32) % shape.vocab_size
    one, two = (driver.run(sequence, tokens, position - 1, position + n).counters for n in (1, 2))
    driver.close()
    return Sample(core, shape, position, memory, {name: two[name] - one[name] for name in two})


def modelled(sample: Sample, constants: Constants) -> Estimate:
    """What the model says to a sample."""
    commands = commands_of(sample.shape, sample.core)
    return estimate(commands, sample.core, sample.memory, sample.position, constants)


def error(sample: Sample, constants: Constants) -> float:
    """Modelled over simulated cycles, minus 1."""
    return modelled(sample, constants).cycles / sample.counters["CYCLES"] - 1


def fitted(samples: Sequence[Sample], start: Constants) -> dict[str, float]:
    """Constants that fit the cycles of every unit, and of the whole token, best: both relative to the whole token."""
    names = list(start)
    lists = [commands_of(sample.shape, sample.core) for sample in samples]

    def wrong(values: np.ndarray) -> list[float]:
        constants, found = dict(zip(names, values.tolist(), strict=True)), []
        for sample, commands in zip(samples, lists, strict=True):
            made = estimate(commands, sample.core, sample.memory, sample.position, constants)
            whole = sample.counters["CYCLES"]
            found.append(made.cycles / whole - 1)
            units = [f"CYCLES_{opcode.name}" for opcode in Opcode if opcode is not Opcode.END]
            found += [(made.by_unit.get(unit[7:].lower(), 0) - sample.counters[unit]) / whole for unit in units]
        return found

    # Cycles are rounded: steps below one would find no slope.
    first = np.array(list(start.values()))
    return dict(zip(names, least_squares(wrong, first, diff_step=0.2).x.tolist(), strict=True))


def main() -> None:
    """Print the constants, and how well they fit."""
    samples = [simulate(*case, memory) for case in SHAPES for memory in MEMORIES]
    constants = fitted(samples, FITTED)
    print(constants_text(constants))
    wrong = [abs(error(sample, constants)) for sample in samples]
    print(json.dumps({"samples": len(samples), "mean error": np.mean(wrong), "largest error": max(wrong)}))


if __name__ == "__main__":
    main()
