"""Quantise the draft that ships, and measure it beside its float model.

python -m models_jax.integer.zoo
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from models_jax.integer import decode, twin
from models_jax.integer.checkpoint import Checkpoint
from models_jax.integer.files import IntegerModel, read
from models_jax.integer.quantise import agreement, quantise_folder
from models_jax.training.data import ROW_TOKENS, right_examples
from models_jax.training.evaluate import EVALUATION_SEED
from models_jax.training.export import load
from models_jax.training.sample import sample
from models_jax.training.traces import SETS
from models_jax.zoo import folder
from planner.problems.base import Problem
from planner.problems.vocabulary import DELIMITER, EOS, ID, encode
from planner.problems.vocabulary import decode as text_of

CALIBRATION_SEED = 77


def right_sequences(count: int) -> list[NDArray[np.integer]]:
    """Right derivations of training problems, half of each set."""
    examples = right_examples(CALIBRATION_SEED, 0.5)
    return [np.array(next(examples).tokens) for _ in range(count)]


def steps_of(name: str, written: str) -> list[str]:
    """The whole steps of a text, up to the first answer."""
    steps: list[str] = []
    for line in written.split(DELIMITER)[1:-1]:
        steps.append(line)
        if SETS[name].answer(line) is not None:
            break
    return steps


def solve(model: IntegerModel, name: str, problems: list[Problem]) -> list[list[str]]:
    """What the integer model writes greedily."""
    slots = ROW_TOKENS + decode.FEED_ROWS
    parameters, stops = twin.parameters(model), np.zeros((model.shape.vocab_size, 1), np.int8)
    stops[ID[EOS]] = 1
    greedy, found = decode.sampler(0, 0.0, stops), []
    for problem in problems:
        tokens = encode(SETS[name].prompt(problem))
        padded = np.zeros(slots, np.int32)
        padded[: len(tokens)] = tokens
        numbers = [jnp.int32(n) for n in (0, len(tokens), ROW_TOKENS)]
        cache = twin.empty_cache(model.shape, slots)
        done = decode.advance(parameters, cache, jnp.asarray(padded), *numbers, greedy, shape=model.shape)
        found.append(steps_of(name, text_of(np.asarray(done.tokens)[: int(done.length)].tolist())))
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m models_jax.integer.zoo", description="Quantise the zoo's draft.")
    parser.add_argument("--folder", type=Path, default=folder() / "draft")
    parser.add_argument("--problems", type=int, default=300, help="held-out problems a set")
    given = parser.parse_args()
    sequences = right_sequences(260)
    integer = read(quantise_folder(given.folder, sequences[:200]))
    print("held out:", agreement(Checkpoint.read(given.folder), integer, sequences[200:]), flush=True)
    floats = load(given.folder)
    for name in SETS:
        problems = SETS[name].generate(given.problems, EVALUATION_SEED)
        of_float = [list(run.steps) for run in sample(floats, problems, seed=0)]
        of_integer = solve(integer, name, problems)
        graded = [
            np.mean([SETS[name].grade(problem, steps) for problem, steps in zip(problems, runs, strict=True)])
            for runs in (of_float, of_integer)
        ]
        same = np.mean([a == b for a, b in zip(of_float, of_integer, strict=True)])
        print(f"{name}: solved float {graded[0]:.1%}, integer {graded[1]:.1%}; same text {same:.1%}", flush=True)


if __name__ == "__main__":
    main()
