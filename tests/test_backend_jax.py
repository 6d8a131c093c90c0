"""The `jax` backend against the contract, and what is its own."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise

import backend_contract
import jax
import numpy as np
import pytest
import tiny_models
from hypothesis import given
from hypothesis import strategies as st

from models_jax import float_runner
from models_jax.backend import JaxBackend
from planner.errors import UserError
from planner.runtime.backend import Output, Work
from planner.workflow import Arithmetic, Numerics, Role, Speculate

SHAPE = tiny_models.config("qwen3")
TEXT = "12 + 30 = 42\n4 2 = 6"


def test_a_profile_names_each_unit_of_work(tmp_path, monkeypatch):
    monkeypatch.setenv("HETEROREASON_JAX_PROFILE", str(tmp_path / "profile"))
    folder = tmp_path / "model"
    folder.mkdir()
    tiny_models.write(folder, SHAPE)
    s = subject(folder)
    assert not (tmp_path / "profile").exists()
    for place in ("aaaa", "bbbb"):
        s.run("a", 0, s.prompt, 3, label=f"DRAFT:draft:{place}:0")
    s.backend.close()
    s.backend.close()
    (found,) = (tmp_path / "profile").rglob("*.xplane.pb")
    data = found.read_bytes()
    assert f"process-{os.getpid()}" in str(found)
    assert all(f"DRAFT:draft:{place}:0".encode() in data for place in ("aaaa", "bbbb"))


def subject(folder, name="draft", arithmetic=Arithmetic.FLOAT32, row_block=8, delimiter=tiny_models.DELIMITER):
    role = Role(str(folder), Numerics(arithmetic, row_block, 96))
    return backend_contract.Subject(JaxBackend, name, role, delimiter, TEXT, "x 1")


@pytest.fixture(scope="module", params=[("float32", "\n"), ("bfloat16", "\n"), ("float32", "4 ")], ids=repr)
def writer(request, tmp_path_factory):
    arithmetic, delimiter = request.param
    folder = tmp_path_factory.mktemp("writer")
    tiny_models.write(folder, SHAPE)
    made = subject(folder, arithmetic=Arithmetic(arithmetic), delimiter=delimiter)
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


COMPILED = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: COMPILED.append(event) if "backend_compile" in event else None
)


def test_nothing_compiles_in_a_steady_state(long):
    """Whatever is asked of loaded models, for sequences old and new."""
    writer, scorer = long
    speculating = replace(writer.role, speculate=Speculate(writer.role.model, 2))
    helped = backend_contract.Subject(JaxBackend, "target", speculating, "\n", TEXT, "x 1")
    writer.run("a", 0, writer.prompt, score=(1,), ask=writer.prompt[:1])  # compiled when it is first asked for
    assert COMPILED, "the listener heard nothing"
    before = len(COMPILED)
    for sequence in ("a", "b", "c", "d"):
        for length in (1, 2, 8, 9, 31, 32, 33, 70, 129):
            feed = (writer.prompt * 20)[:length]
            writer.run(sequence, 0, feed, 7)
            writer.run(sequence, length, (), 3, key=3, temperature=0.7, top_k=3, top_p=0.8, begun=(1,))
            scorer.run(sequence, 0, feed, score=(length - 1,))
            writer.run(sequence, 0, feed, score=(length - 1,), ask=writer.prompt[:1])
            helped.run(sequence, 0, feed, 5, key=3, temperature=0.7 * (length % 2))
        writer.backend.fork("draft", sequence, "copy")
        writer.run("copy", 100, feed[:3], 5)
    for sequence in ("a", "b", "copy"):
        writer.backend.rewind("draft", sequence, 0)
    writer.run("new", 0, writer.prompt, 5)
    assert len(COMPILED) == before, COMPILED[before:]
    helped.backend.close()


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A writer and a scorer of 256 tokens, which have long blocks."""
    made = []
    for name, reward in (("draft", False), ("prm", True)):
        folder = tmp_path_factory.mktemp(name)
        tiny_models.write(folder, tiny_models.config("qwen2", reward=reward, max_position_embeddings=256))
        role = Role(str(folder), Numerics(row_block=4, cache_tokens=256))
        made.append(backend_contract.Subject(JaxBackend, name, role, "\n", TEXT, "x 1"))
    yield made
    for each in made:
        each.backend.close()


def test_long_blocks_change_nothing(long, monkeypatch):
    monkeypatch.setattr(float_runner, "LONG_BLOCKS", ())
    for s in long:
        plain = backend_contract.Subject(JaxBackend, s.name, s.role, "\n", TEXT, "x 1")
        assert (plain.backend._runner(s.name)._blocks, s.backend._runner(s.name)._blocks) == ((4,), (32, 4))
        tokens = (s.prompt * 20)[:200]
        for cuts in ([200], [33, 200], [3, 70, 140, 199, 200]):
            found = []
            for one in (s, plain):
                outs = [one.run("x", at, tokens[at:to]) for at, to in pairwise([0, *cuts])]
                assert outs == [Output()] * len(cuts)
                score = tuple(range(200)) if s.name == "prm" else ()
                found.append((one.run("x", 200, (), score=score), cache_bits(one, "x", 200)))
            assert found[0] == found[1], cuts


def cache_bits(s, sequence, count):
    cache = s.backend._runner(s.name)._caches.peek(sequence)
    return [np.asarray(part)[:, :, :count].tobytes() for part in (*cache.k, *cache.v)]


@given(start=st.integers(0, 255), wanted=st.integers(1, 256))
def test_passes_cover_what_is_unread_and_stay_in_the_cache(start, wanted):
    runner = float_runner.FloatRunner.__new__(float_runner.FloatRunner)
    runner._blocks, runner._row_block, runner._slots = (128, 32, 4), 4, 260
    at, until, blocks = start, min(start + wanted, 256), 0
    while at < until:
        rows, end = runner._next_pass(at, until)
        assert at < end <= until
        assert at + -(-(end - at) // rows) * rows <= runner._slots
        at, blocks = end, blocks + -(-(end - at) // rows)
    assert blocks <= -(-(until - start) // 4)


def test_long_blocks_that_differ_are_not_used(tmp_path, monkeypatch):
    tiny_models.write(tmp_path, tiny_models.config("qwen2", max_position_embeddings=256))
    real = float_runner.FloatRunner._bits
    monkeypatch.setattr(float_runner.FloatRunner, "_bits", lambda self, rows, *a: [*real(self, rows, *a), rows > 4])
    role = Role(str(tmp_path), Numerics(row_block=4, cache_tokens=256))
    made = backend_contract.Subject(JaxBackend, "draft", role, "\n", TEXT, "x 1")
    assert made.backend._runner("draft")._blocks == (4,)


def test_caches_are_used_again(folder):
    made = subject(folder)
    whole = made.write("a", 20, **backend_contract.SAMPLED)
    pool = made.backend._runner("draft")._caches
    made.backend.rewind("draft", "a", 0)
    before = len(pool._spare)
    assert before >= 1
    assert made.write("b", 20, **backend_contract.SAMPLED) == whole
    assert len(pool._spare) == before - 1


def test_info_counts_bytes(folder):
    wide = subject(folder).info
    narrow = subject(folder, arithmetic=Arithmetic.BFLOAT16).info
    assert wide.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert (wide.weight_bytes, wide.kv_bytes_per_token) == (2 * narrow.weight_bytes, 2 * narrow.kv_bytes_per_token)
    assert (wide.model_hash, wide.tokenizer_hash) == (narrow.model_hash, narrow.tokenizer_hash)


def test_a_chunk_is_over_when_it_returns(folder):
    """JAX starts work and returns. Whoever times a chunk that only reads must not time the start alone."""
    made = subject(folder)
    for _ in range(20):
        made.run("x", 0, made.prompt * 3)
        cache = made.backend._runner("draft")._caches.peek("x")
        assert all(part.is_ready() for part in (*cache.k, *cache.v))


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
        ({"devices": "99"}, "index '99'"),
        ({"devices": "-1"}, "index '-1'"),
        ({"devices": "0,0"}, "devices is '0,0'"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(UserError, match=message):
        JaxBackend(options)


def test_options_choose_the_device():
    JaxBackend({"platform": "cpu", "devices": "0"}).close()


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
        ("draft", Numerics(cache_tokens=96), "\nx", "delimiter"),
        ("draft", Numerics(cache_tokens=96), "", "delimiter"),
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
