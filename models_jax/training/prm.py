"""What the reward model learns from: traces of the draft and the target that go on after their mistakes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models_jax.training.sample import sample
from models_jax.training.traces import SETS, Derivation, draw_problem
from models_jax.transformer import Decoder
from planner.problems.base import Problem

TEMPERATURES = (0.0, 0.7, 1.0, 1.3)


def training_traces(draft: Decoder, target: Decoder, count: int, seed: int) -> list[Derivation]:
    """About `count` traces on training problems of both sets."""
    rng = np.random.default_rng(seed)
    problems = [draw_problem(name, rng) for name in SETS for _ in range(count // 12)]
    return traces(draft, target, problems, seed)


def held_out_traces(draft: Decoder, target: Decoder, count: int, seed: int) -> list[Derivation]:
    """About `count` traces on held-out problems of both sets."""
    problems = [problem for name in SETS for problem in SETS[name].generate(count // 12, seed)]
    return traces(draft, target, problems, seed)


def traces(draft: Decoder, target: Decoder, problems: Sequence[Problem], seed: int) -> list[Derivation]:
    """Six runs a problem: draft and target at rising temperatures, and the target going on from the draft."""
    made: list[Derivation] = []
    for number, temperature in enumerate(TEMPERATURES[1:]):
        made += sample(draft, problems, seed + number, temperature)
    opened = made[: len(problems)]
    made += sample(draft, problems, seed, 0.0)
    made += sample(target, problems, seed + 10, 1.0)
    rng = np.random.default_rng(seed)
    opening = [run.steps[: int(rng.integers(0, max(1, len(run.steps))))] for run in opened]
    made += sample(target, problems, seed + 11, 0.7, opening)
    return [run for run in made if run.steps]
