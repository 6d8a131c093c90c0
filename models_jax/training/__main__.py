"""`python -m models_jax.training`: train, measure and export the models that ship."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
from flax import nnx

from models_jax.self_score import FILE_NAME
from models_jax.training.cards import SELF_SCORE_HEADING, accuracy_table, card, score_table, self_score_section
from models_jax.training.compare import on_top_of
from models_jax.training.data import mixed_examples, pack, right_examples
from models_jax.training.evaluate import (
    EVALUATION_SEED,
    accuracy,
    asked_steps,
    digit_scores,
    head_scores,
    score,
    self_scores,
)
from models_jax.training.export import export, load
from models_jax.training.prm import held_out_traces, training_traces
from models_jax.training.recipes import RECIPES, Recipe
from models_jax.training.self_score import HEAD, save_head, train_head
from models_jax.training.traces import SETS
from models_jax.training.train import train
from models_jax.transformer import Decoder

PARTS = ("draft", "target", "prm", "self_score")
"""In the order in which they are built; the last is the target's head for the score prompt."""
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
    """Train, measure and export one model, or the target's self-score head."""
    if name in ("draft", "target"):
        # A head that was trained above another target says nothing about this one.
        (out / name / FILE_NAME).unlink(missing_ok=True)
        save(train_language(RECIPES[name]), RECIPES[name], out, problems)
        return
    for needed in ("draft", "target"):
        if not (out / needed / "config.json").exists():
            raise SystemExit(f"{out / needed} is missing; train it first, {name} learns from its traces")
    draft, target = load(out / "draft"), load(out / "target")
    if name == "prm":
        save(train_prm(RECIPES[name], draft, target), RECIPES[name], out, problems)
    else:
        build_self_score(draft, target, out / "target", problems)


def build_self_score(draft: Decoder, target: Decoder, folder: Path, problems: int) -> None:
    """Train the head above the target in `folder`, measure it, and write it and its part of the card there."""
    texts = training_traces(draft, target, HEAD.traces, HEAD.seed)
    examples = mixed_examples(HEAD.seed, HEAD.sums_share, texts, HEAD.trace_share, HEAD.corrupt_share)
    head, _ = train_head(HEAD, target, pack(examples, HEAD.rows), log=say)
    steps = asked_steps(held_out_traces(draft, target, problems, EVALUATION_SEED))
    measured = [score_table(s) for s in (head_scores(target, head, steps), digit_scores(target, steps))]
    save_head(head, folder)
    size = sum(part.size for part in head)
    section = self_score_section(HEAD, size, len(steps), *measured)
    before, _, _ = (folder / "README.md").read_text().partition(SELF_SCORE_HEADING)
    (folder / "README.md").write_text(f"{before.rstrip()}\n\n{section}")
    say(f"the self-score head is in {folder}\n{section}")


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
    parser.add_argument("--only", choices=PARTS, help="build one part; those before it must be there")
    parser.add_argument("--out", type=Path, default=ZOO, help="folder to write to (default: the zoo of the package)")
    parser.add_argument("--problems", type=int, default=1000, help="held-out problems a set to measure on")
    given = parser.parse_args()
    for name in [given.only] if given.only else PARTS:
        build(name, given.out, given.problems)


if __name__ == "__main__":
    main()
