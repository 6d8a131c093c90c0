"""Random models, memories and runs for the simulated core, and what the specification says to them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fpga_backend.core import Core
from fpga_backend.driver import Driver, Run
from fpga_backend.program import cache_plan
from fpga_backend.simulation.device import SimulatedDevice
from fpga_backend.simulation.simulator import Memory, Simulator
from models_jax.integer import gumbel
from models_jax.integer.files import IntegerModel, Shape
from models_jax.integer.random_model import random_model
from models_jax.integer.reference import Cache, Reference

WIDE = Core()
"""What transport rtl simulates."""
NARROW = Core(lanes=16, engines=2, vector=1024, inputs=256, parameters=128, context=256, commands=256)
MEMORY_BYTES = 1 << 24


def random_shape(rng: np.random.Generator, layers: int = 3, context: int = 96) -> Shape:
    """A small shape that no size of the core divides evenly, as a rule."""
    head_dim = 2 * int(rng.integers(4, 13))
    key_heads = int(rng.integers(1, 3))
    heads = key_heads * int(rng.integers(1, 4))
    hidden, inner, vocabulary = (int(rng.integers(low, high)) for low, high in ((3, 80), (3, 90), (2, 120)))
    bits = int(rng.choice([8, 4]))
    return Shape(vocabulary, hidden, inner, layers, heads, key_heads, head_dim, context, bool(rng.integers(2)), bits)


def random_memory(rng: np.random.Generator) -> Memory:
    """Fast or slow, steady or full of stalls."""
    beats, cycles = ((1, 1), (1, 2), (3, 4), (1, 5))[rng.integers(4)]
    return Memory(int(rng.choice([1, 3, 17, 100, 300])), beats, cycles, int(rng.choice([0, 0, 100, 500])))


class Specification:
    """The numpy reference with its cache, as a sequence that can be rewound."""

    def __init__(self, model: IntegerModel) -> None:
        self.reference, self.cache = Reference(model), Cache.empty(model.shape)

    def run(self, tokens, start: int, limit: int, key: int, temperature: float, stops) -> tuple[int, ...]:
        """What the core must choose when it does the same."""
        tokens, logits = [int(t) for t in tokens], np.zeros(0, np.int32)
        known = len(tokens)
        for position in range(start, known):
            logits = self.reference.step(tokens[position], position, self.cache)
        while len(tokens) < limit:
            tokens.append(gumbel.choose(logits, len(tokens), key, temperature))
            if stops[tokens[-1]] or len(tokens) == limit:
                break
            logits = self.reference.step(tokens[-1], len(tokens) - 1, self.cache)
        return tuple(tokens[known:])


@dataclass
class Case:
    """One model in the simulated core and in the specification."""

    core: Core
    model: IntegerModel
    stops: np.ndarray
    seed: int = 1
    path: str | None = None

    def __post_init__(self) -> None:
        self.device = SimulatedDevice(Simulator(self.core, MEMORY_BYTES, self.seed, self.path))
        self.context = self.model.shape.context_tokens
        self.driver = Driver(self.device, self.model, self.stops, self.context)
        self.sequence = self.driver.sequence()
        # What lies in a fresh cache must not matter.
        rng = np.random.default_rng(self.seed)
        self.sequence.cache.data[:] = rng.integers(0, 256, self.sequence.cache.data.size)
        self.sequence.cache.to_device()
        self.specification = Specification(self.model)

    def run(self, tokens, start: int, limit: int, key: int = 0, temperature: float = 0.0) -> Run:
        """Do the same on both and compare: chosen tokens, and the whole cache up to where it is filled."""
        found = self.driver.run(self.sequence, np.array(tokens, np.int32), start, limit, key, temperature)
        wanted = self.specification.run(tokens, start, limit, key, temperature, self.stops)
        assert found.tokens == wanted
        assert found.computed == max(len(tokens), len(tokens) + len(wanted) - 1)
        assert found.stopped == bool(wanted and self.stops[wanted[-1]])
        keys, values = self.cache()
        assert np.array_equal(keys[:, : found.computed], self.specification.cache.keys[:, : found.computed])
        assert np.array_equal(values[:, : found.computed], self.specification.cache.values[:, : found.computed])
        return found

    def cache(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values (layers, slots, key heads, head_dim) as they lie in the memory of the core."""
        self.sequence.cache.from_device()
        s, core = self.model.shape, self.core
        plan, slots = cache_plan(s, core, self.context), np.arange(self.context)
        beats = self.sequence.cache.data.view(np.int8).reshape(core.engines, -1, core.lanes)
        keys = np.zeros((s.num_hidden_layers, self.context, s.num_key_value_heads, s.head_dim), np.int8)
        values = np.zeros_like(keys)
        for layer in range(s.num_hidden_layers):
            for head in range(s.num_key_value_heads):
                base = layer * plan.layer
                for c in range(s.head_dim):
                    at = base + head * plan.key_head + slots // core.engines * plan.key_beats + c // core.lanes
                    keys[layer, :, head, c] = beats[slots % core.engines, at, c % core.lanes]
                    at = base + plan.value_start + head * plan.value_head + slots // core.lanes * plan.value_unit
                    values[layer, :, head, c] = beats[c % core.engines, at + c // core.engines, slots % core.lanes]
        return keys, values

    def close(self) -> None:
        self.driver.close()
        self.device.simulator.close()


def random_case(core: Core, seed: int, path: str | None = None, **shape: int) -> Case:
    """A case from a seed: half of the models wild, where nearly everything saturates or vanishes."""
    rng = np.random.default_rng(seed)
    model = random_model(random_shape(rng, **shape), seed, wild=bool(rng.integers(2)))
    stops = rng.random(model.shape.vocab_size) < 0.05
    made = Case(core, model, stops, seed, path)
    made.device.simulator.behave(random_memory(rng))
    return made


def even_case(core: Core, path: str | None = None, stop: bool = False) -> Case:
    """A model whose logits are all the same: the lowest token must be chosen. `stop`: any token ends a block."""
    model = random_model(Shape(20, 16, 24, 1, 2, 1, 8, 64, True), 7)
    tensors = dict(model.tensors) | {"head.multiplier": np.zeros(20, np.int16)}
    return Case(core, IntegerModel(model.shape, tensors, "even"), np.full(20, stop), path=path)


def exercise(case: Case, seed: int, tokens: int) -> int:
    """Blocks, appends and rewinds at random until so many tokens were read. Returns how many were."""
    rng = np.random.default_rng([seed, 1])
    known: list[int] = []
    computed = read = 0
    while read < tokens:
        case.device.simulator.behave(random_memory(rng))
        if computed and rng.random() < 0.3:
            computed = int(rng.integers(0, computed + 1))
            known = known[: max(computed, int(rng.integers(computed, len(known) + 1)))]
        room = case.context - len(known)
        known += rng.integers(0, case.model.shape.vocab_size, min(room, int(rng.integers(0, 12)))).tolist()
        if not known or (len(known) == case.context and computed == len(known)):
            known, computed = known[: case.context // 2], 0
            continue
        generate = rng.random() < 0.7
        limit = min(case.context, len(known) + int(rng.integers(1, 16))) if generate else len(known)
        start = min(computed, len(known) - 1)
        temperature = float(rng.choice([0.0, 0.5, 1.0, 3.0, 8.0]))
        found = case.run(known, start, limit, int(rng.integers(0, 1 << 63)) * 2 + 1, temperature)
        read += found.computed - start
        known += found.tokens
        computed = found.computed
    return read
