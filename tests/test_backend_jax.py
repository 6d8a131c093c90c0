"""The `jax` backend against the contract, and what is its own."""

from __future__ import annotations

import backend_contract
import numpy as np
import pytest
import tiny_models

from models_jax import float_runner, generate
from models_jax.backend import JaxBackend
from planner.errors import UserError
from planner.runtime.backend import Work
from planner.workflow import Arithmetic, Numerics, Role

SHAPE = tiny_models.config("qwen3")
TEXT = "12 + 30 = 42\n4 2 = 6"


def subject(folder, name="draft", arithmetic=Arithmetic.FLOAT32, row_block=8):
    role = Role(str(folder), Numerics(arithmetic, row_block, 96))
    return backend_contract.Subject(JaxBackend, name, role, tiny_models.DELIMITER, TEXT, "x 1")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def writer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("writer")
    tiny_models.write(folder, SHAPE)
    made = subject(folder, arithmetic=Arithmetic(request.param))
    yield made
    made.backend.close()


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scorer")
    tiny_models.write(folder, tiny_models.config("qwen2", reward=True))
    made = subject(folder, "prm", row_block=4)
    yield made
    made.backend.close()


@pytest.fixture
def folder(tmp_path):
    tiny_models.write(tmp_path, SHAPE)
    return tmp_path


@pytest.mark.parametrize("check", backend_contract.WRITING, ids=backend_contract.name)
def test_contract(check, writer):
    check(writer)


@pytest.mark.parametrize("check", backend_contract.SCORING, ids=backend_contract.name)
def test_scoring_contract(check, scorer):
    check(scorer)


def test_nothing_compiles_after_loading(writer, scorer):
    before = generate.advance._cache_size(), generate.rewards._cache_size()
    writer.write("steady", 30, 7)
    writer.write("steady", 5, key=3, temperature=0.7)
    scorer.run("steady", 0, scorer.prompt, score=(1,))
    assert (generate.advance._cache_size(), generate.rewards._cache_size()) == before


def test_info_counts_bytes(folder):
    wide = subject(folder).info
    narrow = subject(folder, arithmetic=Arithmetic.BFLOAT16).info
    assert wide.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert (wide.weight_bytes, wide.kv_bytes_per_token) == (2 * narrow.weight_bytes, 2 * narrow.kv_bytes_per_token)
    assert (wide.model_hash, wide.tokenizer_hash) == (narrow.model_hash, narrow.tokenizer_hash)


def test_two_roles_keep_their_own_sequences(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    tiny_models.write(other, SHAPE, seed=1)
    made = subject(folder)
    alone = made.write("same", 12)
    made.backend.load("target", Role(str(other), Numerics(cache_tokens=96)), "\n")
    made.backend.run(Work("target", "same", 0, made.prompt, 12))
    assert made.go_on("same", len(made.prompt), 12, 12) == alone


def test_loading_again_replaces(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    tiny_models.write(other, SHAPE, seed=1)
    made = subject(folder)
    first = made.write("a", 12, **backend_contract.SAMPLED)
    made.backend.load("draft", Role(str(other), Numerics(cache_tokens=96)), "\n")
    assert made.write("a", 12, **backend_contract.SAMPLED) != first


def test_end_of_text_ends(folder):
    made = subject(folder)
    for key in range(60):
        made.run("end", 0, made.prompt)
        out = made.run("end", len(made.prompt), (), 30, key=key, temperature=3.0)
        if out.ended:
            assert out.complete and out.tokens[-1] == tiny_models.TOKENS.index(tiny_models.EOS)
            assert made.backend.decode("draft", out.tokens[-1:]) == ""
            return
    pytest.fail("no text ended")


def test_failed_chunk_does_not_spoil_the_sequence(folder, monkeypatch):
    made = subject(folder)
    expected = made.write("a", 12)
    made.run("a", 0, made.prompt)
    with monkeypatch.context() as patch:
        patch.setattr(float_runner, "advance", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made.run("a", len(made.prompt), (), 4)
    assert made.go_on("a", len(made.prompt), 12, 12) == expected


def test_rows_that_differ_are_refused(folder, monkeypatch):
    counter = iter(range(1000))
    monkeypatch.setattr(float_runner.FloatRunner, "_bits", lambda *_: next(counter))
    with pytest.raises(UserError, match="row_block"):
        subject(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"platfrom": "cpu"}, "no option 'platfrom'"),
        ({"platform": "abacus"}, "no platform 'abacus'"),
        ({"index": "99"}, "index '99'"),
        ({"index": "-1"}, "index '-1'"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(UserError, match=message):
        JaxBackend(options)


def test_options_choose_the_device():
    JaxBackend({"platform": "cpu", "index": "0"}).close()


def test_closed_model_does_not_run(folder):
    made = subject(folder)
    runner = made.backend._runner("draft")
    runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        runner.run(Work("draft", "a", 0, made.prompt))


@pytest.mark.parametrize(
    ("name", "numerics", "delimiter", "message"),
    [
        ("draft", Numerics(cache_tokens=97), "\n", "the model reads 96"),
        ("prm", Numerics(cache_tokens=96), "\n", "no reward head"),
        ("draft", Numerics(cache_tokens=96), "\n\n", "delimiter"),
    ],
)
def test_unfit_roles_are_refused(folder, name, numerics, delimiter, message):
    with pytest.raises(UserError, match=message):
        JaxBackend().load(name, Role(str(folder), numerics), delimiter)


def test_missing_folder_is_named():
    with pytest.raises(UserError, match="no-such-folder"):
        JaxBackend().load("draft", Role("no-such-folder"), "\n")


def test_tokenizer_larger_than_the_model_is_refused(tmp_path):
    tiny_models.write(tmp_path, tiny_models.config(vocab_size=len(tiny_models.TOKENS) - 1))
    with pytest.raises(UserError, match="tokenizer has 16 tokens, the model 15"):
        subject(tmp_path)


def test_padding_of_the_vocabulary_is_never_written(tmp_path):
    """At a high temperature half of the tokens would be padding."""
    known = len(tiny_models.TOKENS)
    tiny_models.write(tmp_path, tiny_models.config(vocab_size=2 * known))
    made = subject(tmp_path)
    for key in range(3):
        assert max(made.write("a", 60, key=key, temperature=5.0)) < known
    made.backend.close()


def test_rewards_are_those_of_a_plain_forward_pass(scorer):
    model = tiny_models.random_model(tiny_models.config("qwen2", reward=True))
    plain = tiny_models.full_rewards(model, np.asarray(scorer.prompt))
    found = scorer.run("plain", 0, scorer.prompt, score=tuple(range(len(scorer.prompt)))).scores
    np.testing.assert_allclose(found, plain, atol=1e-5)
