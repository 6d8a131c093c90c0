"""Quantise the draft that ships to weights of 8 and of 4 bits, and measure both beside its float model.

python -m models_jax.integer.zoo

The model with 8 bits ships; the one with 4 bits is measured and thrown away.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from models_jax.integer import decode, twin
from models_jax.integer.checkpoint import Checkpoint
from models_jax.integer.files import FILE_NAME, IntegerModel, read
from models_jax.integer.quantise import agreement, quantise_folder
from models_jax.training.data import ROW_TOKENS, right_examples
from models_jax.training.evaluate import EVALUATION_SEED, score
from models_jax.training.export import load
from models_jax.training.sample import sample
from models_jax.training.traces import SETS, Derivation
from models_jax.transformer import Decoder
from models_jax.zoo import folder
from planner.problems.base import Problem
from planner.problems.vocabulary import DELIMITER, EOS, ID, encode
from planner.problems.vocabulary import decode as text_of

CALIBRATION_SEED = 77
ACCEPT = 0.7
"""Score from which the shipped workflows accept a step."""


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


def solve(model: IntegerModel, name: str, problems: list[Problem]) -> list[Derivation]:
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
        written = text_of(np.asarray(done.tokens)[: int(done.length)].tolist())
        found.append(Derivation(problem, tuple(steps_of(name, written))))
    return found


@dataclass(frozen=True)
class Measured:
    """Greedy runs of one model on one set, and what the PRM that ships says of them."""

    steps: float
    """Share of right steps among those that follow right steps only."""
    solved: float
    """Share of problems."""
    accepted: float
    """Share of the same steps that the PRM scores ACCEPT or more."""

    def __str__(self) -> str:
        """One line."""
        return f"steps right {self.steps:.1%}, solved {self.solved:.1%}, accepted {self.accepted:.1%}"


def measure(prm: Decoder, runs: list[Derivation]) -> Measured:
    """Grade runs, and have them scored."""
    scored = score(prm, runs)
    asked = np.array([all(run.labels[:at]) for run in runs for at in range(len(run.steps))])
    graded = [SETS[run.problem.set].grade(run.problem, run.steps) for run in runs]
    accepted = scored.score[asked] >= ACCEPT
    return Measured(float(scored.right[asked].mean()), float(np.mean(graded)), float(accepted.mean()))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m models_jax.integer.zoo", description="Quantise the zoo's draft.")
    parser.add_argument("--folder", type=Path, default=folder() / "draft")
    parser.add_argument("--problems", type=int, default=300, help="held-out problems a set")
    given = parser.parse_args()
    sequences = right_sequences(260)
    integer: dict[str, IntegerModel] = {}
    with TemporaryDirectory() as scratch:
        for bits, path in ((8, given.folder / FILE_NAME), (4, Path(scratch) / FILE_NAME)):
            model = read(quantise_folder(given.folder, sequences[:200], path, bits))
            integer[f"W{bits}A8"] = model
            near = agreement(Checkpoint.read(given.folder), model, sequences[200:])
            print(f"W{bits}A8, held out: {near}", flush=True)
    floats, prm = load(given.folder), load(folder() / "prm")
    for name in SETS:
        problems = SETS[name].generate(given.problems, EVALUATION_SEED)
        of_float = sample(floats, problems, seed=0)
        print(f"{name}, float: {measure(prm, of_float)}", flush=True)
        for kind, model in integer.items():
            runs = solve(model, name, problems)
            same = np.mean([a.steps == b.steps for a, b in zip(of_float, runs, strict=True)])
            print(f"{name}, {kind}: {measure(prm, runs)}; text of the float model {same:.1%}", flush=True)


if __name__ == "__main__":
    main()
