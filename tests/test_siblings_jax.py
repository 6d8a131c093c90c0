"""Several drafts of a step in one pass: each as it would be written alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny_models

from models_jax.backend import JaxBackend
from models_jax.siblings import Siblings
from planner.errors import UserError
from planner.runtime.backend import Output, Sibling, Work, one_by_one
from planner.workflow import Arithmetic, Numerics, Role, Speculate, WeightKind

CLASSES = (
    ("float32", 8, "same"),
    ("float32", 2, "same"),
    ("float32", 1, "same"),
    ("bfloat16", 8, "same"),
    ("bfloat16", 1, "same"),
    ("float32", 8, "int8"),
)
PROMPT = tuple(4 + i * 5 % 12 for i in range(11))
CONTEXT = 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("model")
    tiny_models.write(made, tiny_models.config("qwen3"))
    return made


def load(folder, arithmetic="float32", row_block=8, weights="same", **more):
    numerics = Numerics(Arithmetic(arithmetic), row_block, CONTEXT)
    if weights == "int8":
        numerics = replace(numerics, weights=WeightKind.INT8)
    backend = JaxBackend()
    info = backend.load("draft", Role(str(folder), numerics, **more), "\n")
    assert info.batches == (row_block > 1 and "speculate" not in more)
    return backend._runners["draft"]


@pytest.fixture(scope="module", params=CLASSES, ids=repr)
def runner(request, folder):
    made = load(folder, *request.param)
    yield made
    made.close()


@pytest.fixture(scope="module")
def plain(folder):
    made = load(folder)
    yield made
    made.close()


def alone(runner, work):
    return one_by_one(work, runner.run, runner.fork, runner.rewind)


def work(begun=((), (), ()), max_new=(16, 16, 16), keys=(1, 2, 3), prompt=PROMPT, temperature=0.7):
    first, *others = zip(keys, begun, max_new, strict=True)
    beside = tuple(Sibling(*other) for other in others)
    feed = prompt + first[1]
    return Work("draft", "a", 0, feed, first[2], key=first[0], begun=first[1], temperature=temperature, beside=beside)


def both(runner, asked):
    """What one pass gives, if it is the same as one by one, and so is what is written after it."""
    found = []
    for write in (runner.run, lambda asked: alone(runner, asked)):
        output = write(asked)
        length = len(asked.feed) + len(output.tokens)
        after = runner.run(Work("draft", "a", length, (), 9, key=9, temperature=1.0))
        held = runner.hand_over("a")
        assert "a.beside.0" not in runner._sequences
        runner.rewind("a", 0)
        found.append((output, after, held))
    assert found[0] == found[1]
    return found[0][0]


WORKS = {
    "new": work(),
    "greedy": work(temperature=0.0),
    "hot": work(temperature=3.0),
    "begun": work(begun=((5, 6), (7, 8), (9, 10)), temperature=2.0),
    "begun by other lengths": work(begun=((5, 6, 7), (), (9,) * 10)),
    "limits": work(max_new=(2, 9, 1), temperature=1.5),
    "top": replace(work(temperature=2.0), top_k=5, top_p=0.9, min_p=0.01),
    "one token": work(prompt=PROMPT[:1]),
    "a full context": work(prompt=(PROMPT * 9)[: CONTEXT - 4], temperature=0.9),
    "nothing new for one": work(max_new=(5, 0, 5)),
    "more than a block has": work(begun=((),) * 10, max_new=(4,) * 10, keys=range(10)),
    "two": work(begun=((),) * 2, max_new=(8,) * 2, keys=(1 << 63, 7)),
}


@pytest.mark.parametrize("asked", WORKS.values(), ids=WORKS)
def test_each_is_written_as_alone(runner, asked):
    found = both(runner, asked)
    assert len(found.beside) == len(asked.beside)


def test_drafts_end_at_different_tokens(plain):
    sizes = set()
    for key in range(0, 30, 3):
        found = both(plain, work(keys=(key, key + 1, key + 2), temperature=2.0))
        sizes |= {tuple(len(each.tokens) for each in (found, *found.beside))}
        assert any(each.complete for each in (found, *found.beside)) or len(found.tokens) == 16
    assert any(len(set(lengths)) == 3 for lengths in sizes)


def test_a_step_goes_on_in_chunks(plain):
    """Each chunk says again how the drafts begin; the main one stays in its sequence."""
    keys, chunk = (4, 5, 6), 3
    whole = plain.run(work(keys=keys, temperature=1.5))
    drafts = [Output(), Output(), Output()]
    while not drafts[0].complete and len(drafts[0].tokens) < 12:
        main, *others = (draft.tokens for draft in drafts)
        beside = tuple(
            Sibling(key, begun, 0 if draft.complete else chunk)
            for key, begun, draft in zip(keys[1:], others, drafts[1:], strict=True)
            if not draft.complete
        )
        at = len(PROMPT) + len(main)
        asked = Work("draft", "c", at if main else 0, () if main else PROMPT, chunk, key=keys[0], begun=main)
        found = plain.run(replace(asked, temperature=1.5, beside=beside))
        parts = iter((found, *found.beside))
        for i, draft in enumerate(drafts):
            if not draft.complete:
                part = next(parts)
                drafts[i] = Output(draft.tokens + part.tokens, part.complete, part.ended)
    for draft, expected in zip(drafts, (whole, *whole.beside), strict=True):
        assert draft.tokens == expected.tokens[: len(draft.tokens)] and draft.tokens
    plain.rewind("c", 0)
    plain.rewind("a", 0)


def passes(runner, monkeypatch):
    """How many sequences each pass writes from now on."""
    found = []
    real = type(runner).together
    monkeypatch.setattr(type(runner), "together", lambda self, works: found.append(len(works)) or real(self, works))
    return found


@pytest.mark.parametrize("weights", ["same", "int8"])
def test_one_pass_is_proven_here_and_used(folder, monkeypatch, weights):
    runner = load(folder, weights=weights)
    assert runner._siblings._proven == {}
    found = passes(runner, monkeypatch)
    both(runner, work())
    both(runner, work(keys=(7, 8, 9)))
    # The first is the proof.
    assert found == [3, 3, 3]
    assert runner._siblings._proven == {3: True}


def test_what_is_not_proven_is_written_one_by_one(folder, plain, monkeypatch):
    runner = load(folder)
    real, calls = Siblings._bits, iter(range(1000))
    monkeypatch.setattr(Siblings, "_bits", lambda *of: [*real(*of), str(next(calls)).encode()])
    found = passes(runner, monkeypatch)
    for asked in (work(), work(temperature=2.0)):
        assert both(runner, asked) == both(plain, asked)
    assert runner._siblings._proven == {3: False}
    assert found.count(3) <= 3


def test_a_role_with_a_draft_of_tokens_writes_one_by_one(folder, plain, monkeypatch):
    runner = load(folder, speculate=Speculate(str(folder), 2))
    found = passes(runner, monkeypatch)
    output = runner.run(work())
    assert found == []
    assert output == plain.run(work())
    plain.rewind("a", 0)


def test_reward_models_do_not_batch(tmp_path):
    tiny_models.write(tmp_path, tiny_models.config("qwen2", reward=True))
    backend = JaxBackend()
    assert not backend.load("prm", Role(str(tmp_path), Numerics(row_block=8, cache_tokens=CONTEXT)), "\n").batches
    with pytest.raises(UserError, match="reward"):
        backend.run(replace(work(), role="prm"))


def test_siblings_are_checked_before_anything_changes(plain):
    plain.run(Work("draft", "a", 0, PROMPT))
    bad = {
        "context length": work(begun=((), (5,) * (CONTEXT - len(PROMPT)), ())),
        "token": work(begun=((), (99,), ())),
        "max_new": work(max_new=(3, -1, 3)),
    }
    for message, asked in bad.items():
        with pytest.raises((UserError, ValueError), match=message):
            plain.run(replace(asked, feed=(4, *asked.feed)))
        assert plain._sequences["a"].length == len(PROMPT)
    plain.rewind("a", 0)


def test_too_little_memory_is_the_users_to_mend(plain, monkeypatch):
    import jax

    from models_jax import float_runner

    both(plain, work())

    def full(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(float_runner, "advance_together", full)
        with pytest.raises(UserError, match="not enough memory"):
            plain.run(work())
    assert "a.beside.0" not in plain._sequences
    both(plain, work())
