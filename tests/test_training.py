from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from models_jax.config import ModelConfig, RewardHead
from models_jax.training import data, evaluate, export, traces
from models_jax.training.recipes import RECIPES
from models_jax.training.sample import sample
from models_jax.training.train import train
from models_jax.transformer import Decoder
from planner.problems.vocabulary import ID, decode, encode, held_out

SETS = traces.SETS
BOTH = pytest.mark.parametrize("name", ["sums", "countdown"])


def tiny(**changes):
    shape = replace(RECIPES["draft"].config, hidden_size=32, num_hidden_layers=1, intermediate_size=32)
    return replace(RECIPES["draft"], config=replace(shape, **changes), steps=12, stop=0, rows=4, warm_up=2)


def run_tiny(seed=1):
    recipe = replace(tiny(), seed=seed)
    return train(recipe, data.pack(data.right_examples(recipe.seed, 0.5, 0.2), recipe.rows))


def first_batch(seed):
    return next(data.pack(data.right_examples(seed, 0.5, 0.2), 2))


# data


@BOTH
def test_training_problems_are_not_held_out(name):
    rng = np.random.default_rng(0)
    problems = [traces.draw_problem(name, rng) for _ in range(200)]
    assert not any(held_out(SETS[name].prompt(problem)) for problem in problems)


@BOTH
def test_corrupted_derivations_go_on_after_the_wrong_step(name):
    rng = np.random.default_rng(0)
    made = [traces.corrupt(traces.draw_problem(name, rng), rng) for _ in range(300)]
    labels = [derivation.labels for derivation in made]
    assert sum(not all(found) for found in labels) > 250
    # A last line that claims the target is the end; all other mistakes are gone on from.
    ends = traces.FORCED_SHARE if name == "countdown" else 0.0
    assert sum(found.count(False) > 1 for found in labels) > 100 * (1 - ends)
    assert all(encode("".join(derivation.steps)) for derivation in made)


@BOTH
def test_targets_of_a_right_derivation(name):
    rng = np.random.default_rng(1)
    derivation = traces.derive(traces.draw_problem(name, rng), rng)
    made = data.example(derivation)
    begin = len(SETS[name].prompt(derivation.problem)) - 1
    assert decode(made.tokens) == SETS[name].prompt(derivation.problem) + "".join(s + "\n" for s in derivation.steps)
    np.testing.assert_allclose(made.targets[begin:-1].sum(-1), 1.0, rtol=1e-5)
    for at in range(begin, len(made.tokens) - 1):
        assert made.targets[at, made.tokens[at + 1]] > 0
    assert made.right.all()
    assert not made.weights[:begin].any()


def test_labels_turn_at_the_first_wrong_token():
    problem = SETS["sums"].parse("10+20+30")
    made = data.example(traces.Derivation(problem, ("+13000+03000", "+16000")))
    begin = len(SETS["sums"].prompt(problem))
    assert made.right[: begin + 1].all()
    assert not made.right[begin + 1 :].any()
    assert made.weights[begin] > 0
    assert not made.weights[begin + 1 :].any()
    assert made.right_weights[begin + 12] > made.right_weights[begin + 11]


def test_self_score_rows_end_with_the_verdict():
    problem = SETS["sums"].parse("10+20+30")
    good = data.self_score(traces.Derivation(problem, ("+03000+03000",)))
    bad = data.self_score(traces.Derivation(problem, ("+13000+03000",)))
    assert decode(good.tokens).endswith("\n?")
    assert good.targets[-1].argmax() == ID["9"]
    assert bad.targets[-1].argmax() == ID["0"]


def test_packing_keeps_every_token():
    examples = list(itertools.islice(data.right_examples(3, 0.5), 60))
    batches = list(itertools.islice(data.pack(iter(examples + examples), 4), 3))
    wanted = {tuple(example.tokens) for example in examples}
    for batch in batches:
        for tokens, segments, positions in zip(batch.tokens, batch.segments, batch.positions, strict=True):
            for number in range(1, segments.max() + 1):
                where = segments == number
                assert tuple(tokens[where]) in wanted
                assert positions[where].tolist() == list(range(where.sum()))


def test_batches_are_seeded():
    np.testing.assert_array_equal(first_batch(1).tokens, first_batch(1).tokens)
    assert (first_batch(1).tokens != first_batch(2).tokens).any()


# training


def test_training_lowers_the_loss_and_is_seeded():
    first, losses = run_tiny()
    second, again = run_tiny()
    assert losses == again
    assert np.mean(losses[-3:]) < losses[0]
    for name, value in export.tensors(first).items():
        np.testing.assert_array_equal(value, export.tensors(second)[name])


def test_reward_training_lowers_the_loss():
    recipe = replace(tiny(reward_head=RewardHead.TWO_CLASS), reward_weight=1.0, steps=20)
    examples = data.mixed_examples(0, 0.5, [], 0.0, 0.6)
    _, losses = train(recipe, data.pack(examples, recipe.rows))
    assert np.mean(losses[-3:]) < losses[0]


# sampling and measuring


def test_greedy_sampling_does_not_depend_on_the_seed():
    model = Decoder(tiny().config, nnx.Rngs(0))
    run = sample(model, SETS["countdown"].generate(2, 0), seed=0, rows=2)
    again = sample(model, SETS["countdown"].generate(2, 0), seed=5, rows=2)
    assert [r.steps for r in run] == [r.steps for r in again]


def test_sampler_goes_on_from_an_opening():
    model = Decoder(tiny().config, nnx.Rngs(0))
    problem = SETS["sums"].generate(1, 0)[0]
    opening = SETS["sums"].right_steps(problem, [])
    (run,) = sample(model, [problem], 0, 1.0, [opening], rows=1)
    assert list(run.steps[:1]) == opening


def test_area_under_curve_against_all_pairs():
    rng = np.random.default_rng(0)
    score, right = rng.integers(0, 10, 200) / 10, rng.random(200) < 0.4
    pairs = score[right][:, None] - score[~right]
    expected = (pairs > 0).mean() + (pairs == 0).mean() / 2
    assert evaluate.area_under_curve(score, right) == pytest.approx(expected)


def test_scores_are_read_at_the_delimiters():
    model = Decoder(tiny(reward_head=RewardHead.TWO_CLASS).config, nnx.Rngs(0))
    rng = np.random.default_rng(0)
    runs = [traces.corrupt(traces.draw_problem(name, rng), rng) for name in SETS]
    scored = evaluate.score(model, runs)
    assert len(scored.score) == sum(len(run.steps) for run in runs)
    assert 0.0 <= scored.calibration_error() <= 1.0


# export


@pytest.mark.parametrize("reward", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_export_round_trips(tmp_path, reward, tied):
    model = Decoder(
        tiny(reward_head=RewardHead.TWO_CLASS if reward else None, tie_word_embeddings=tied).config, nnx.Rngs(0)
    )
    export.export(model, tmp_path / "model", "card")
    again = export.load(tmp_path / "model")
    assert again.config == model.config == ModelConfig.from_folder(tmp_path / "model")
    for name, value in export.tensors(model).items():
        np.testing.assert_array_equal(value, export.tensors(again)[name])
    named = load_file(tmp_path / "model" / "model.safetensors")
    assert named["model.layers.0.mlp.gate_proj.weight"].shape == (32, 32)
    assert ("lm_head.weight" in named) == (not tied and not reward)
    assert ("score.2.bias" in named) == reward
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "llama"


def test_tokenizer_writes_the_ids_of_the_vocabulary():
    made = export.tokenizer()
    text = "S+32140-17800\nC 30 70>64\n52-40=12 30*7?9\n"
    assert made.encode(text).ids == encode(text)
    assert made.decode(encode(text)) == text
    assert made.get_vocab() == ID


def test_the_reward_model_begins_with_what_the_writer_knows():
    from models_jax.training.compare import Plan, on_top_of

    writer = Decoder(replace(RECIPES["draft"].config, num_hidden_layers=1), nnx.Rngs(0))
    model = on_top_of(writer, RECIPES["prm"].config, 0)
    text = "C 30 70>64\n"
    tokens = np.array([encode(text)])
    order = np.arange(len(text))
    mask = (order[:, None] >= order)[None]
    narrow, wide = writer.embed_tokens(tokens), model.embed_tokens(tokens)
    for before, after in zip(writer.layers, model.layers, strict=False):
        narrow, _ = before(narrow, order[None], mask, None)
        wide, _ = after(wide, order[None], mask, None)
    plan = Plan(writer.config)
    assert np.corrcoef(narrow.ravel(), wide[..., : plan.width].ravel())[0, 1] > 0.98
    fetched, _ = model.layers[1](wide, order[None], mask, None)
    assert fetched.shape == (1, len(text), RECIPES["prm"].config.hidden_size)
