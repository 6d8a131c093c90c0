"""`python -m models_jax.training`: train, measure and export the models that ship."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
from flax import nnx

from models_jax.training.cards import accuracy_table, card, score_table
from models_jax.training.compare import on_top_of
from models_jax.training.data import mixed_examples, pack, right_examples
from models_jax.training.evaluate import EVALUATION_SEED, accuracy, score, self_scores
from models_jax.training.export import export, load
from models_jax.training.prm import held_out_traces, training_traces
from models_jax.training.recipes import RECIPES, Recipe
from models_jax.training.traces import SETS
from models_jax.training.train import train
from models_jax.transformer import Decoder

ZOO = Path(__file__).parents[1] / "zoo"
say = partial(print, flush=True)


def parameters(model: Decoder) -> int:
    """Number of weights."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def measure_language(model: Decoder, problems: int) -> str:
    """The card's figures of a model that writes steps."""
    return accuracy_table({name: accuracy(model, name, problems) for name in SETS})


def measure_target(model: Decoder, out: Path, problems: int) -> str:
    """The same, and how well the target scores its own reading."""
    text = measure_language(model, problems)
    if not (out / "draft" / "config.json").exists():
        return text
    runs = held_out_traces(load(out / "draft"), model, problems, EVALUATION_SEED)
    return (
        f"{text}\nThe self-score, on one random step of each of {len(runs)} held-out traces (mean digit / 9):\n\n"
        + score_table(self_scores(model, runs))
    )


def measure_prm(model: Decoder, out: Path, problems: int) -> str:
    """AUC on traces of the draft and the target that ship, on held-out problems."""
    runs = held_out_traces(load(out / "draft"), load(out / "target"), 4 * problems, EVALUATION_SEED)
    return (
        f"On the steps of {len(runs)} traces of the draft (temperatures 0, 0.7, 1, 1.3), the target (1) and the target "
        f"going on from the draft (0.7), all on held-out problems:\n\n{score_table(score(model, runs))}"
    )


def train_language(recipe: Recipe) -> Decoder:
    """Train by the recipe, after the one that it goes on from."""
    start = train_language(RECIPES[recipe.after]) if recipe.after else None
    examples = right_examples(recipe.seed, recipe.sums_share, recipe.self_score_share, recipe.sets)
    return train(recipe, pack(examples, recipe.rows), start, log=say)[0]


def train_prm(recipe: Recipe, draft: Decoder, target: Decoder) -> Decoder:
    """Train the reward model by the recipe, after the one that it goes on from: at first a writer."""
    before = RECIPES[recipe.after]
    if before.config.reward_head:
        start = train_prm(before, draft, target)
    else:
        start = on_top_of(train_language(before), recipe.config, recipe.seed)
    traces = training_traces(draft, target, recipe.traces, recipe.seed)
    examples = mixed_examples(recipe.seed, recipe.sums_share, traces, recipe.trace_share, recipe.corrupt_share)
    return train(recipe, pack(examples, recipe.rows), start, log=say)[0]


def build(name: str, out: Path, problems: int) -> None:
    """Train, measure and export one model."""
    recipe = RECIPES[name]
    if name != "prm":
        save(train_language(recipe), recipe, out, problems)
        return
    for needed in ("draft", "target"):
        if not (out / needed / "config.json").exists():
            raise SystemExit(f"{out / needed} is missing; train it first, the reward model learns from its traces")
    save(train_prm(recipe, load(out / "draft"), load(out / "target")), recipe, out, problems)


def save(model: Decoder, recipe: Recipe, out: Path, problems: int) -> None:
    """Measure and export."""
    measures: dict[str, Callable[[], str]] = {
        "draft": lambda: measure_language(model, problems),
        "target": lambda: measure_target(model, out, problems),
        "prm": lambda: measure_prm(model, out, problems),
    }
    measured = measures[recipe.name]()
    export(model, out / recipe.name, card(recipe, parameters(model), measured))
    say(f"{recipe.name} is in {out / recipe.name}\n{measured}")


def main() -> None:
    """Parse the command line and build what it asks for."""
    parser = argparse.ArgumentParser(prog="python -m models_jax.training", description=__doc__)
    parser.add_argument("--only", choices=("draft", "target", "prm"), help="build one model; the others must be there")
    parser.add_argument("--out", type=Path, default=ZOO, help="folder to write to (default: the zoo of the package)")
    parser.add_argument("--problems", type=int, default=1000, help="held-out problems a set to measure on")
    given = parser.parse_args()
    for name in [given.only] if given.only else ["draft", "target", "prm"]:
        build(name, given.out, given.problems)


if __name__ == "__main__":
    main()
