"""Model cards: what a model is, how it was trained, how good it is and how that was measured."""

from __future__ import annotations

import numpy as np

from models_jax.training.evaluate import Accuracy, Scored
from models_jax.training.recipes import RECIPES, Recipe
from models_jax.training.self_score import HeadRecipe
from models_jax.training.traces import SETS

_PURPOSE = {
    "draft": "Writes steps cheaply. It is meant to be wrong now and then.",
    "target": "Rewrites the steps that the draft gets wrong. Many of its training texts end with the self-score "
    "prompt: `?` after some steps, answered by one digit, 9 for right so far and 0 for wrong; how well it "
    "answers is in the figures below.",
    "prm": "Process reward model. At the delimiter of each step, class 1 of its head is the probability that the "
    "problem is still on its way to a right answer: all lines so far are right and, for `countdown`, the target can "
    "still be reached.",
}

_FORM = """## What it reads and writes

One token a character, 32 tokens, no token is added by the tokenizer. A prompt opens with the mark of its problem
set and ends, like every step, with a newline. Numbers have a fixed width, least significant digit first.

| set | prompt | steps |
|---|---|---|
| `sums`: `4123-871+90` | `S+32140-17800+09000` | `+25230+09000`, `+24330` |
| `countdown`: `3 7 25 4 -> 50` | `C 30 40 70 52>05` | `70*30=12 40 52 12>05`, `52+12=64 40 64>05`, `64+40=05` |

Made for sums of 3 to 6 terms of 1 to 4 digits, and for countdown with 3 or 4 numbers of 1 to 9, every result within
0 to 99 and all numbers used. A text is one problem, from position 0 on, at most 144 tokens long. Beyond that expect
little.
"""


def accuracy_table(figures: dict[str, Accuracy]) -> str:
    """Greedy accuracy by set."""
    lines = ["| set | problems | steps right | problems solved |", "|---|---|---|---|"]
    for name, found in figures.items():
        lines.append(f"| {name} | {found.problems} | {found.step:.1%} | {found.final:.1%} |")
    text = "\n".join(lines)
    return (
        f"{text}\n\nGreedy, alone, on held-out problems. A step counts if all steps before it are right; a problem "
        "is solved if its last line is the answer and, for `countdown`, every step is legal.\n"
    )


def score_table(scored: Scored) -> str:
    """Area under the ROC curve and calibration, overall, by set and by place of the step."""
    lines = ["| steps | number | right | AUC | mean score |", "|---|---|---|---|---|"]

    def row(name: str, where: np.ndarray) -> None:
        if where.any():
            right, mean = scored.right[where].mean(), scored.score[where].mean()
            lines.append(f"| {name} | {where.sum()} | {right:.1%} | {scored.auc(where):.4f} | {mean:.3f} |")

    row("all", np.ones(len(scored.score), bool))
    for name in SETS:
        row(name, scored.sets == name)
        for index in range(int(scored.index.max()) + 1):
            row(f"{name}, step {index + 1}", (scored.sets == name) & (scored.index == index))
    gap = scored.calibration_error()
    return "\n".join(lines) + f"\n\nExpected calibration error over ten bins: {gap:.4f}.\n"


_COLUMNS = {
    "steps": lambda r: f"{r.stop} of {r.steps}" if r.stop else f"{r.steps}",
    "rows": lambda r: f"{r.rows}",
    "rate": lambda r: f"{r.rate:g}",
    "decay over the last": lambda r: f"{r.decay_share:.0%}",
    "seed": lambda r: f"{r.seed}",
    "share of `sums`": lambda r: f"{r.sums_share:.0%}",
    "terms": lambda r: f"{r.sums.fewest_terms} to {r.sums.most_terms}",
    "countdown numbers": lambda r: f"1 to {r.countdown.highest_number}",
    "three of them": lambda r: f"{r.countdown.three_share:.0%}",
    "right first steps, at least": lambda r: f"{r.countdown.least_right_share:.0%}",
}


def runs_table(recipe: Recipe) -> str:
    """The runs that lead to the model, in order."""
    chain = [recipe]
    while chain[0].after:
        chain.insert(0, RECIPES[chain[0].after])
    lines = ["| run | " + " | ".join(_COLUMNS) + " |", "|---" * (1 + len(_COLUMNS)) + "|"]
    for number, run in enumerate(chain, start=1):
        lines.append(f"| {number} | " + " | ".join(write(run) for write in _COLUMNS.values()) + " |")
    return "\n".join(lines) + "\n"


def training(recipe: Recipe) -> str:
    """How the model was trained."""
    text = (
        f"{runs_table(recipe)}\nA row packs derivations into 144 tokens. AdamW (0.9, 0.98, weight decay 0.01), "
        f"gradients clipped to 1, {recipe.warm_up} steps of warm-up, linear decay at the end. The loss is on the "
        "steps, three times as much on the tokens that are worked out, and its targets are spread over all right "
        "next steps.\n"
    )
    if recipe.self_score_share:
        text += f"\n{recipe.self_score_share:.0%} of the texts end with the self-score prompt.\n"
    if recipe.reward_weight:
        text += "\n" + _REWARD.format(
            share=recipe.trace_share, traces=recipe.traces, corrupt=recipe.corrupt_share, weight=recipe.reward_weight
        )
    return text


_REWARD = """The first run trains a writer of the draft's shape. The second begins with its weights and, above them, a
comparison of what came with what the writer expects (`models_jax/training/compare.py`). In the last run {share:.0%} of
the texts are traces of the draft and the target ({traces} in all), {corrupt:.0%} hold a made-up mistake, the others are
right; all go on after a mistake. The reward is trained at every token of a step, four times as much at its end and
eight times as much at the token where the text goes wrong, with {weight:g} times the weight of the next token, which
is trained beside it. For the weights that ship, the second run took its traces from the writer and from the target
after its own second run, the third and fourth from the draft and from the target after its own third run; the command
takes them all from the finished draft and target, so it gives a model like this one and not the same bits.
"""


SELF_SCORE_HEADING = "## Self-score head"


def self_score_section(recipe: HeadRecipe, parameters: int, steps: int, head: str, digits: str) -> str:
    """What the target's card says of the head that lies beside it, and of the digits that it stands in for."""
    return f"""{SELF_SCORE_HEADING}

`self_score.safetensors`, {parameters:,} parameters, answers the score prompt in the place of the vocabulary's head:
for each token of the last step it compares what the target expected with what came, in two layers of width
{recipe.width}, and the step's score is the product over its tokens. It was trained above the finished target, whose
weights and text are as they were: {recipe.steps} steps of {recipe.rows} rows, rate {recipe.rate:g} with cosine decay,
seed {recipe.seed}, {recipe.sums_share:.0%} `sums`, {recipe.trace_share:.0%} of the texts traces of the draft and the
target ({recipe.traces} in all), {recipe.corrupt_share:.0%} with a made-up mistake. Made by
`python -m models_jax.training --only self_score`.

On the {steps} steps of held-out traces that follow right steps alone, as a run would ask about them:

{head}
The same steps by the target's own digits after `?`, which are what remains without the file:

{digits}"""


def card(recipe: Recipe, parameters: int, measured: str) -> str:
    """The whole card of one model."""
    shape = recipe.config
    return f"""---
license: apache-2.0
library_name: transformers
tags: [speculative-reasoning, arithmetic]
---

# heteroreason {recipe.name}

{_PURPOSE[recipe.name]}

Llama architecture: {shape.num_hidden_layers} layers, width {shape.hidden_size}, {shape.num_attention_heads} heads of
{shape.head_dim}, inner width {shape.intermediate_size}, {parameters:,} parameters in float32.

{_FORM}
## Training

{training(recipe)}
No problem that the package generates was trained on: one problem in 16, by a hash of its prompt, is held out, and
`generate` gives held-out ones alone. Three numbers left over from a training problem of four can still coincide with
a held-out problem of three numbers.

Made by `python -m models_jax.training --only {recipe.name}`, seed {recipe.seed}.

## Measured

{measured}"""
