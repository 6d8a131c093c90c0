"""The target's verdict on a step: by its digits and by a head, whatever the cache went through before."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from models_jax.float_runner import FloatRunner
from models_jax.placement import Placement
from models_jax.self_score import FILE_NAME, Head, log_odds, shapes
from models_jax.training.self_score import chances, step_log_chances
from planner.checkpoint import model_folder, model_hash
from planner.errors import UserError
from planner.problems import problem_set
from planner.runtime.backend import Output, Work
from planner.workflow import Numerics, Role

DIGIT_IDS = [tiny_models.TOKENS.index(d) for d in "0123456789"]
END = tiny_models.TOKENS.index(tiny_models.DELIMITER)
ASK = tuple(tiny_models.TOKENS.index(t) for t in "+ =")
TEXT = (7, 8, END, 9, 4, 10, END, 11, 12, 13, 4, 6, END)
ENDS = (6, 12)
"""Where the two steps end; the prompt ends at 2."""


def random_head(hidden: int, width: int = 5, seed: int = 1) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed).standard_normal
    config = tiny_models.config(hidden_size=hidden)
    return {name: np.asarray(draw(shape) * 0.3, np.float32) for name, shape in shapes(config, width).items()}


def read_head(folder: Path) -> Head:
    return Head(**{name: jnp.asarray(value) for name, value in load_file(folder / FILE_NAME).items()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    tiny_models.write(folder)
    return folder


@pytest.fixture(scope="module")
def headed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("head")
    tiny_models.write(folder)
    save_file(random_head(32), folder / FILE_NAME)
    return folder


def runner(folder: Path, row_block: int = 4, cache_tokens: int = 40) -> FloatRunner:
    role = Role(str(folder), Numerics(row_block=row_block, cache_tokens=cache_tokens))
    return FloatRunner("target", role, folder, tiny_models.DELIMITER, Placement((None,)))


@pytest.fixture(scope="module")
def by_digits(folder: Path) -> FloatRunner:
    return runner(folder)


@pytest.fixture(scope="module")
def by_head(headed: Path) -> FloatRunner:
    return runner(headed)


def scored(made: FloatRunner, sequence: str, *ends: int, keep: int = 0, length: int = len(TEXT), **more) -> Output:
    return made.run(Work("target", sequence, keep, TEXT[keep:length], score=ends, ask=ASK, **more))


@pytest.mark.parametrize("end", ENDS)
def test_the_digits_are_those_of_a_plain_forward_pass(folder: Path, by_digits: FloatRunner, end: int) -> None:
    model = tiny_models.random_model(tiny_models.config())
    asked = jnp.asarray([*TEXT[: end + 1], *ASK])
    logits = np.asarray(model.logits(tiny_models.full_hidden(model, asked))[-1], np.float64)[DIGIT_IDS]
    chance = np.exp(logits) / np.exp(logits).sum()
    (mean,) = scored(by_digits, f"mean{end}", end).scores
    (likeliest,) = scored(by_digits, f"digit{end}", end, expectation=False).scores
    assert mean == pytest.approx(chance @ np.arange(10) / 9, abs=1e-5)
    assert likeliest == pytest.approx(logits.argmax() / 9)


def test_the_head_takes_the_product_over_the_tokens_of_the_step(headed: Path, by_head: FloatRunner) -> None:
    model, head = tiny_models.random_model(tiny_models.config()), read_head(headed)
    hidden = tiny_models.full_hidden(model, jnp.asarray(TEXT))
    odds = np.asarray(log_odds(head, model, hidden[:-1], hidden[1:], jnp.asarray(TEXT[1:])), np.float64)
    chance = 1 / (1 + np.exp(-odds))
    wanted = chance[2:6].prod(), chance[6:12].prod()
    assert scored(by_head, "product", *ENDS).scores == pytest.approx(wanted, rel=1e-4)
    assert scored(by_head, "digit", *ENDS, expectation=False).scores == tuple(float(w >= 0.5) for w in wanted)


@pytest.mark.parametrize("name", ["by_digits", "by_head"])
def test_a_score_does_not_depend_on_what_the_cache_went_through(name: str, request: pytest.FixtureRequest) -> None:
    made: FloatRunner = request.getfixturevalue(name)
    whole = scored(made, "whole", *ENDS).scores
    assert scored(made, "whole", *reversed(ENDS), keep=len(TEXT)).scores == whole[::-1]
    assert scored(made, "single", ENDS[0], length=ENDS[0] + 1).scores == whole[:1]
    assert scored(made, "single", ENDS[1], keep=ENDS[0] + 1).scores == whole[1:]

    @given(st.lists(st.tuples(st.integers(1, len(TEXT)), st.integers(0, 4)), max_size=4))
    @settings(max_examples=15, deadline=None)
    def cut_anywhere(chunks: list[tuple[int, int]]) -> None:
        right = 0
        for cut, extra in chunks:
            keep = min(right, cut)
            made.run(Work("target", "cut", keep, TEXT[keep:cut], max_new=extra, key=cut, temperature=1.0))
            right = cut
        assert scored(made, "cut", *ENDS, keep=right).scores == whole
        made.rewind("cut", 0)

    cut_anywhere()


@pytest.mark.parametrize("name", ["by_digits", "by_head"])
def test_scoring_leaves_nothing_behind(name: str, request: pytest.FixtureRequest) -> None:
    made: FloatRunner = request.getfixturevalue(name)
    plain = made.run(Work("target", "plain", 0, TEXT, max_new=9, key=3, temperature=1.0))
    scored(made, "scored", *ENDS)
    again = made.run(Work("target", "scored", len(TEXT), (), max_new=9, key=3, temperature=1.0))
    assert again == plain
    # Also where a step is judged that lies behind others.
    scored(made, "scored", ENDS[0], keep=len(TEXT))
    assert made.run(Work("target", "scored", len(TEXT), (), max_new=9, key=3, temperature=1.0)) == plain


def test_the_prompt_must_fit_behind_the_text(folder: Path) -> None:
    small = runner(folder, cache_tokens=16)
    assert len(small.run(Work("target", "0", 0, TEXT, score=(12,), ask=ASK)).scores) == 1
    with pytest.raises(UserError, match="context length of 16"):
        small.run(Work("target", "0", len(TEXT), (5,), score=(12,), ask=ASK))


def test_a_writer_that_is_not_asked_has_no_score(by_digits: FloatRunner) -> None:
    with pytest.raises(UserError, match="no reward head"):
        by_digits.run(Work("target", "none", 0, TEXT, score=(6,)))


def test_a_head_of_another_model_is_refused(folder: Path, headed: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json", "generation_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    path = tmp_path / FILE_NAME
    save_file(random_head(64), path)
    with pytest.raises(UserError, match="does not fit"):
        runner(tmp_path)
    path.write_bytes((headed / FILE_NAME).read_bytes()[:40])
    with pytest.raises(UserError, match="damaged"):
        runner(tmp_path)
    assert model_hash(folder) != model_hash(headed), "an answer depends on the head"


# training


def test_step_chances_start_anew_after_each_delimiter() -> None:
    from planner.problems.vocabulary import encode

    tokens = jnp.asarray([encode("S+1\n12\n3\n")])
    odds = jnp.arange(9.0)[None]
    one = -np.logaddexp(0, -np.arange(9.0))
    found = np.asarray(step_log_chances(odds, tokens))[0]
    assert found[[3, 6, 8]] == pytest.approx([one[:4].sum(), one[4:7].sum(), one[7:].sum()], abs=1e-6)


def test_the_head_is_trained_and_the_target_is_not() -> None:
    from dataclasses import replace

    from flax import nnx

    from models_jax.training import data, export
    from models_jax.training.recipes import RECIPES
    from models_jax.training.self_score import HEAD, train_head
    from models_jax.transformer import Decoder

    shape = replace(RECIPES["draft"].config, hidden_size=32, num_hidden_layers=1, intermediate_size=32)
    model = Decoder(shape, nnx.Rngs(0))
    before = export.tensors(model)
    recipe = replace(HEAD, width=8, steps=60, rows=2, rate=0.05)

    def run() -> tuple[Head, list[float]]:
        examples = data.mixed_examples(0, 0.5, [], 0.0, 0.6)
        return train_head(recipe, model, data.pack(examples, recipe.rows))

    (first, losses), (second, again) = run(), run()
    assert losses == again and np.mean(losses[-5:]) < losses[0]
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(first, second, strict=True))
    for name, value in export.tensors(model).items():
        np.testing.assert_array_equal(value, before[name])


def test_training_and_running_score_alike() -> None:
    from models_jax.training.export import load

    shelf = model_folder("zoo/target")
    if not (shelf / FILE_NAME).is_file():
        pytest.skip("the head that ships is not trained yet: run `make zoo`")
    head, model = read_head(shelf), load(shelf)
    problems = problem_set("countdown")
    problem = problems.parse("3 7 4 -> 25")
    texts = ["70*30=12 40 12>52", "70*30=22 40 22>52", "70+30=01 40 01>52"]
    role = Role("zoo/target", Numerics())
    made = FloatRunner("target", role, shelf, "\n", Placement((None,)))
    prompt = made.encode(problems.prompt(problem))
    found, row = [], np.zeros((1, 144), np.int32)
    for text in texts:
        tokens = (*prompt, *made.encode(text + "\n"))
        (score,) = made.run(Work("target", "0", 0, tokens, score=(len(tokens) - 1,), ask=made.encode("?"))).scores
        row = np.zeros((1, 144), np.int32)
        row[0, : len(tokens)] = tokens
        assert score == pytest.approx(float(chances(head, model, row)[0, len(tokens) - 1]), abs=1e-3)
        found.append(score)
    # 3*7+4 = 25: the first step is right, the second miscounts, the third leads nowhere.
    assert found[0] >= 0.7 > max(found[1:])


@pytest.mark.slow
def test_the_command_writes_the_head_and_its_part_of_the_card_once(tmp_path: Path, monkeypatch) -> None:
    from dataclasses import replace

    from flax import nnx

    from models_jax.training import __main__ as command
    from models_jax.training import export
    from models_jax.training.recipes import RECIPES
    from models_jax.transformer import Decoder

    shape = replace(RECIPES["draft"].config, hidden_size=32, num_hidden_layers=1, intermediate_size=32)
    for seed, name in enumerate(("draft", "target")):
        export.export(Decoder(shape, nnx.Rngs(seed)), tmp_path / name, f"card of the {name}\n")
    model = (tmp_path / "target" / "model.safetensors").read_bytes()
    monkeypatch.setattr(command, "HEAD", replace(command.HEAD, width=4, steps=2, rows=2, traces=24))
    # Random models end few steps; the tables are about those that they do end.
    draft = export.load(tmp_path / "draft")
    right = [(run, 0) for run in command.held_out_traces(draft, draft, 24, 1)][:4]
    monkeypatch.setattr(command, "asked_steps", lambda runs: right or pytest.skip("no step was ended"))
    for _ in range(2):
        command.build("self_score", tmp_path, 24)
    text = (tmp_path / "target" / "README.md").read_text()
    assert text.startswith("card of the target\n")
    assert text.count(command.SELF_SCORE_HEADING) == 1 and "2 steps of 2 rows" in text
    assert (tmp_path / "target" / FILE_NAME).is_file()
    assert (tmp_path / "target" / "model.safetensors").read_bytes() == model
