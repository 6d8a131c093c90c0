"""How far `weights: int8` moves a model's logits, as a table in Markdown.

    python benchmarks/int8_weights.py zoo/target models/some.gguf --text docs/concepts.md

Models of the zoo read right solutions of their problem sets, others the text file. Both precisions compute in float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models_jax.loading import load_checkpoint
from models_jax.tokenizer import Tokenizer
from models_jax.transformer import Decoder
from planner.checkpoint import model_folder
from planner.problems.countdown import Countdown
from planner.problems.sums import Sums

LENGTH = 128
"""Tokens of a sequence of text."""


@nnx.jit
def logits(model: Decoder, tokens: jax.Array) -> jax.Array:
    """(tokens, vocabulary) of one sequence."""
    count = tokens.size
    mask = jnp.tril(jnp.ones((1, count, count), bool))
    with jax.default_matmul_precision("highest"):
        hidden, _ = model.hidden(tokens[None], jnp.arange(count)[None], mask)
        return model.logits(hidden[0])


def solutions(count: int) -> Iterator[str]:
    """Problems of the zoo with all their steps."""
    for problems in (Sums(), Countdown()):
        for problem in problems.generate(count, seed=1):
            steps: list[str] = []
            while right := problems.right_steps(problem, steps):
                steps.append(right[0])
            yield problems.prompt(problem) + "".join(step + problems.delimiter for step in steps)


def sequences(model: str, tokenizer: Tokenizer, text: Path, count: int) -> list[np.ndarray]:
    """Token ids to compare on, all of one length, the last ones repeated."""
    if model.startswith("zoo/"):
        whole = [token for solution in solutions(count * 4) for token in tokenizer.encode(solution)]
    else:
        whole = list(tokenizer.encode(text.read_text(encoding="utf-8")))
    return [np.array(whole[i : i + LENGTH]) for i in range(0, len(whole) - LENGTH, LENGTH)][:count]


def row(model: str, text: Path, count: int) -> str:
    """Compare one model with itself."""
    folder = model_folder(model)
    _, exact = load_checkpoint(folder)
    _, rounded = load_checkpoint(folder, int8_weights=True)
    largest, total, spread, same, tokens, worse = 0.0, 0.0, 0.0, 0, 0, 0.0
    for sequence in sequences(model, Tokenizer(folder), text, count):
        ids = jnp.asarray(sequence)
        wide, near = np.asarray(logits(exact, ids)), np.asarray(logits(rounded, ids))
        error = np.abs(near - wide)
        largest, total = max(largest, float(error.max())), total + float(error.mean()) * len(ids)
        spread += float(wide.std()) * len(ids)
        same += int((near.argmax(-1) == wide.argmax(-1)).sum())
        worse += float(loss(near, sequence) - loss(wide, sequence)) * len(ids)
        tokens += len(ids)
    mean, spread, worse = total / tokens, spread / tokens, worse / tokens
    cells = f"{largest:.3f} | {mean:.4f} | {spread:.2f} | {same / tokens:.2%} | {worse:+.4f}"
    return f"| {Path(model).name} | {tokens} | {cells} |"


def loss(found: np.ndarray, sequence: np.ndarray) -> float:
    """Mean of -log p of the tokens that follow."""
    log_p = np.asarray(jax.nn.log_softmax(found[:-1]))
    return float(-log_p[np.arange(len(log_p)), sequence[1:]].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["zoo/target", "zoo/draft"])
    parser.add_argument("--text", type=Path, default=Path(__file__).parent.parent / "docs" / "concepts.md")
    parser.add_argument("--sequences", type=int, default=8)
    options = parser.parse_args()
    print("| model | tokens | largest error of a logit | mean | spread of logits | same best token | loss |")
    print("|---|---|---|---|---|---|---|")
    for model in options.models:
        print(row(model, options.text, options.sequences), flush=True)


if __name__ == "__main__":
    main()
