"""What every backend must do. A test file hands in a `Subject` and runs all of `WRITING` or `SCORING` on it.

    @pytest.mark.parametrize("check", backend_contract.WRITING, ids=backend_contract.name)
    def test_contract(check, subject):
        check(subject)

The checks share one loaded backend; each uses sequences of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from planner.errors import UserError
from planner.runtime.backend import Backend, Handed, ModelInfo, Output, Work
from planner.workflow import Role


@dataclass
class Subject:
    """A backend with one role loaded, and what its model can read."""

    factory: Callable[[], Backend]
    """Makes another backend of the same kind."""
    name: str
    """Name of the role."""
    role: Role
    delimiter: str
    text: str
    """Readable, at least 8 tokens and at most a quarter of the context."""
    unreadable: str
    """A text with a character that the vocabulary does not have, and that character first."""

    def __post_init__(self) -> None:
        self.backend = self.factory()
        self.info: ModelInfo = self.backend.load(self.name, self.role, self.delimiter)
        self.prompt = self.backend.encode(self.name, self.text)

    def run(self, sequence: str, keep: int, feed: tuple[int, ...] = (), max_new: int = 0, **more) -> Output:
        return self.backend.run(Work(self.name, sequence, keep, tuple(feed), max_new, **more))

    def write(self, sequence: str, tokens: int, chunk: int = 0, **more) -> tuple[int, ...]:
        """Feed the prompt and generate `tokens` tokens over all stops, at most `chunk` at a time."""
        self.run(sequence, 0, self.prompt)
        return self.go_on(sequence, len(self.prompt), tokens, chunk or tokens, **more)

    def go_on(self, sequence: str, length: int, tokens: int, chunk: int, **more) -> tuple[int, ...]:
        found: tuple[int, ...] = ()
        while len(found) < tokens:
            wanted = min(chunk, tokens - len(found))
            found += self.run(sequence, length + len(found), (), wanted, **more).tokens
        return found


SAMPLED = {"key": 0x0123_4567_89AB_CDEF, "temperature": 1.5}
LENGTH = 20


def info_is_filled(s: Subject) -> None:
    assert s.info.model_hash and s.info.tokenizer_hash
    assert s.info.weight_bytes > 0 and s.info.kv_bytes_per_token > 0
    assert 4 * len(s.prompt) <= s.info.context_tokens <= s.role.numerics.cache_tokens


def text_round_trips(s: Subject) -> None:
    assert len(s.prompt) >= 8
    assert s.backend.decode(s.name, s.prompt) == s.text
    assert s.backend.encode(s.name, "") == ()
    assert s.backend.decode(s.name, ()) == ""


def unreadable_text_is_refused(s: Subject) -> None:
    for encode in (s.backend.encode, s.backend.encode_prompt):
        with pytest.raises(UserError) as caught:
            encode(s.name, s.unreadable)
        assert repr(s.unreadable[0]) in str(caught.value)


def prompts_hold_their_text(s: Subject) -> None:
    prompt = s.backend.encode_prompt(s.name, s.text)
    assert s.text.removesuffix(s.delimiter) in s.backend.decode(s.name, prompt)


def empty_feed_gives_nothing(s: Subject) -> None:
    assert s.run("empty", 0) == Output()
    s.run("empty", 0, s.prompt)
    assert s.run("empty", len(s.prompt)) == Output()


def unknown_sequence_begins_empty(s: Subject) -> None:
    with pytest.raises(ValueError, match="holds 0 tokens"):
        s.run("unknown", 1)
    s.backend.rewind(s.name, "unknown", 0)
    with pytest.raises(ValueError, match="holds 0 tokens"):
        s.backend.rewind(s.name, "unknown", 1)


def unknown_role_is_an_error(s: Subject) -> None:
    with pytest.raises(ValueError, match="nobody"):
        s.backend.run(Work("nobody", "a", 0, s.prompt))


def keep_too_large_is_an_error_and_changes_nothing(s: Subject) -> None:
    expected = s.write("keep", LENGTH)
    s.run("keep", 0, s.prompt)
    with pytest.raises(ValueError, match=f"holds {len(s.prompt)} tokens"):
        s.run("keep", len(s.prompt) + 1, s.prompt)
    with pytest.raises(ValueError, match=f"holds {len(s.prompt)} tokens"):
        s.backend.rewind(s.name, "keep", len(s.prompt) + 1)
    assert s.go_on("keep", len(s.prompt), LENGTH, LENGTH) == expected


def foreign_token_is_an_error(s: Subject) -> None:
    for token in (-1, 1 << 30):
        with pytest.raises(ValueError, match="token"):
            s.run("foreign", 0, (*s.prompt, token))
    s.backend.rewind(s.name, "foreign", 0)


def work_repeats(s: Subject) -> None:
    for more in ({}, SAMPLED):
        assert s.write("once", LENGTH, **more) == s.write("twice", LENGTH, **more) == s.write("once", LENGTH, **more)


def chunks_do_not_matter(s: Subject) -> None:
    for more in ({}, SAMPLED):
        whole = s.write("whole", LENGTH, **more)
        for chunk in (1, 2, 3, 7):
            assert s.write("chunks", LENGTH, chunk, **more) == whole, chunk


def pieces_of_the_feed_do_not_matter(s: Subject) -> None:
    whole = s.write("at once", LENGTH)
    for piece in (1, 3, 5):
        for at in range(0, len(s.prompt), piece):
            s.run("pieces", at, s.prompt[at : at + piece])
        assert s.go_on("pieces", len(s.prompt), LENGTH, LENGTH) == whole, piece
        s.backend.rewind(s.name, "pieces", 0)


def fed_tokens_count_as_generated_ones(s: Subject) -> None:
    for more in ({}, SAMPLED):
        whole = s.write("generated", LENGTH, **more)
        for cut in (1, 6, 13):
            s.run("fed", 0, s.prompt + whole[:cut])
            assert s.go_on("fed", len(s.prompt) + cut, LENGTH - cut, LENGTH, **more) == whole[cut:], cut


def rewound_sequence_goes_on_as_before(s: Subject) -> None:
    whole = s.write("rewound", LENGTH, **SAMPLED)
    for cut in (11, 4, 0):
        at = len(s.prompt) + cut
        s.run("rewound", at, s.prompt[:3])
        s.backend.rewind(s.name, "rewound", at)
        assert s.go_on("rewound", at, LENGTH - cut, LENGTH, **SAMPLED) == whole[cut:], cut
    half = len(s.prompt) // 2
    s.run("rewound", half, s.prompt[half:])
    assert s.go_on("rewound", len(s.prompt), LENGTH, 5, **SAMPLED) == whole


def sequences_do_not_mix(s: Subject) -> None:
    alone = s.write("alone", LENGTH, **SAMPLED)
    other = s.prompt[::-1]
    s.run("left", 0, s.prompt)
    s.run("right", 0, other)
    found: tuple[int, ...] = ()
    while len(found) < LENGTH:
        found += s.run("left", len(s.prompt) + len(found), (), min(3, LENGTH - len(found)), **SAMPLED).tokens
        s.run("right", len(other), (), 2)
    assert found == alone


def key_counts_only_when_sampled(s: Subject) -> None:
    hot = {"temperature": 4.0}
    written = {s.write("key", LENGTH, key=key, **hot) for key in (0, 1, 1 << 32, (1 << 64) - 1)}
    assert len(written) == 4
    assert s.write("key", LENGTH, key=1) == s.write("key", LENGTH, key=2)


def steps_end_at_the_delimiter(s: Subject) -> None:
    ended = 0
    for key in range(60):
        s.run("steps", 0, s.prompt)
        out = s.run("steps", len(s.prompt), (), 2 * LENGTH, key=key, temperature=3.0)
        assert s.delimiter not in s.backend.decode(s.name, out.tokens[:-1])
        assert out.complete == (s.delimiter in s.backend.decode(s.name, out.tokens) or out.ended)
        assert out.complete or len(out.tokens) == 2 * LENGTH
        ended += out.complete and not out.ended
    assert ended, "no step ended: the check saw nothing"


def steps_end_alike_in_chunks(s: Subject) -> None:
    ended = 0
    for key in range(100):
        more = {"key": key, "temperature": 3.0}
        s.run("step", 0, s.prompt)
        whole = s.run("step", len(s.prompt), (), 2 * LENGTH, **more)
        for chunk in (1, 2, 5):
            s.run("step", len(s.prompt))
            found = Output()
            while not found.complete and len(found.tokens) < 2 * LENGTH:
                begun = found.tokens
                asked = min(chunk, 2 * LENGTH - len(begun))
                part = s.run("step", len(s.prompt) + len(begun), (), asked, begun=begun, **more)
                found = Output(found.tokens + part.tokens, part.complete, part.ended)
            assert found == whole, (key, chunk)
        ended += whole.complete and not whole.ended
        if key > 8 and ended > 2:
            break
    assert ended, "no step ended: the check saw nothing"
    with pytest.raises(ValueError, match="begun"):
        s.run("step", 1, (), 1, begun=(1, 1))
    s.backend.rewind(s.name, "step", 0)


def fork_is_a_copy(s: Subject) -> None:
    whole = s.write("stem", LENGTH, **SAMPLED)
    at = len(s.prompt) + 7
    s.run("stem", at)
    s.backend.fork(s.name, "stem", "branch")
    assert s.go_on("branch", at, LENGTH - 7, LENGTH, **SAMPLED) == whole[7:]
    s.run("stem", len(s.prompt), s.prompt)
    s.backend.fork(s.name, "branch", "stem")
    assert s.go_on("stem", at, LENGTH - 7, 3, **SAMPLED) == whole[7:]
    s.backend.rewind(s.name, "stem", 0)
    assert s.go_on("branch", at + 1, LENGTH - 8, LENGTH, **SAMPLED) == whole[8:]
    for pair in (("stem", "other"), ("branch", "branch")):
        with pytest.raises(ValueError, match="copy of sequence"):
            s.backend.fork(s.name, *pair)


def what_is_handed_over_goes_on_elsewhere(s: Subject) -> None:
    whole = s.write("giver", LENGTH, **SAMPLED)
    at = len(s.prompt) + 7
    s.run("giver", at)
    handed = s.backend.hand_over(s.name, "giver")
    assert handed.tokens == s.prompt + whole[:7]
    assert len(handed.rows) == at * s.info.kv_bytes_per_token
    assert s.go_on("giver", at, LENGTH - 7, LENGTH, **SAMPLED) == whole[7:]
    other = s.factory()
    other.load(s.name, s.role, s.delimiter)
    other.run(Work(s.name, "taker", 0, s.prompt[::-1]))
    other.take_over(s.name, "taker", handed)
    assert other.hand_over(s.name, "taker") == handed
    found = other.run(Work(s.name, "taker", at, (), 1, **SAMPLED)).tokens
    other.fork(s.name, "taker", "branch")
    for name in ("taker", "branch"):
        later: tuple[int, ...] = ()
        while len(found + later) < LENGTH - 7:
            left = LENGTH - 7 - len(found + later)
            later += other.run(Work(s.name, name, at + len(found + later), (), min(5, left), **SAMPLED)).tokens
        assert found + later == whole[7:]
    # A rewind reaches into what was handed over, and all of it was the bits that reading gives.
    half = at // 2
    other.run(Work(s.name, "taker", half, handed.tokens[half:]))
    assert other.hand_over(s.name, "taker") == handed
    other.close()


def what_cannot_be_handed_over_is_an_error(s: Subject) -> None:
    for name in ("nobody", "nothing"):
        s.run("nothing", 0)
        with pytest.raises(ValueError, match=f"'{name}'.* holds nothing"):
            s.backend.hand_over(s.name, name)
    before = s.write("sized", LENGTH)
    s.run("sized", 0, s.prompt)
    handed = s.backend.hand_over(s.name, "sized")
    for rows in (b"", handed.rows[:-1], handed.rows * 2):
        with pytest.raises(ValueError, match=f"{len(rows)} bytes were handed over for the {len(s.prompt)} tokens"):
            s.backend.take_over(s.name, "sized", Handed(handed.tokens, rows))
    with pytest.raises(ValueError, match="token"):
        s.backend.take_over(s.name, "sized", Handed((-1, *handed.tokens[1:]), handed.rows))
    assert s.go_on("sized", len(s.prompt), LENGTH, LENGTH) == before


def an_unloaded_role_is_gone(s: Subject) -> None:
    backend = s.factory()
    backend.load(s.name, s.role, s.delimiter)
    backend.unload(s.name)
    backend.unload(s.name)
    with pytest.raises(ValueError, match="not loaded"):
        backend.run(Work(s.name, "a", 0, s.prompt))
    backend.load(s.name, s.role, s.delimiter)
    assert backend.run(Work(s.name, "a", 0, s.prompt)) == Output()
    backend.close()


def next_step_starts_behind_the_delimiter(s: Subject) -> None:
    stop = s.backend.encode(s.name, s.delimiter)
    s.run("next", 0, s.prompt + stop)
    assert len(s.run("next", len(s.prompt + stop), (), 1).tokens) == 1


def nothing_cannot_be_gone_on_from(s: Subject) -> None:
    with pytest.raises(ValueError, match="empty"):
        s.run("nothing", 0, (), 1)


def context_is_a_limit(s: Subject) -> None:
    most = s.info.context_tokens
    full = (s.prompt * most)[:most]
    s.run("full", 0, full[:-3])
    found = s.go_on("full", most - 3, 3, 1)
    assert len(found) == 3
    for work in (lambda: s.run("full", most, (), 1), lambda: s.run("full", most, s.prompt[:1])):
        with pytest.raises(UserError, match=f"context length of {most} tokens"):
            work()
    s.run("full", 0, full[:-3])
    cut = s.run("full", most - 3, (), LENGTH)
    assert cut.tokens == found[: len(cut.tokens)]
    assert cut.complete or len(cut.tokens) == 3
    s.backend.rewind(s.name, "full", 0)


def scoring_needs_a_reward_head(s: Subject) -> None:
    with pytest.raises(UserError, match="reward"):
        s.run("score", 0, s.prompt, score=(0,))


def closing_twice_is_harmless(s: Subject) -> None:
    backend = s.factory()
    backend.close()
    backend.close()
    backend = s.factory()
    backend.load(s.name, s.role, s.delimiter)
    backend.close()
    backend.close()


def scores_are_probabilities(s: Subject) -> None:
    out = s.run("range", 0, s.prompt, score=tuple(range(len(s.prompt))))
    assert out.tokens == () and not out.complete and not out.ended
    assert len(set(out.scores)) > 1
    assert all(0.0 <= score <= 1.0 for score in out.scores)


def scores_come_in_the_order_asked(s: Subject) -> None:
    up = s.run("order", 0, s.prompt, score=tuple(range(len(s.prompt)))).scores
    down = s.run("order", len(s.prompt), (), score=tuple(reversed(range(len(s.prompt))))).scores
    assert down == up[::-1]
    assert s.run("order", len(s.prompt), (), score=(2, 2)).scores == (up[2], up[2])


def scores_do_not_depend_on_the_cut(s: Subject) -> None:
    every = tuple(range(len(s.prompt)))
    whole = s.run("one", 0, s.prompt, score=every).scores
    for piece in (1, 3, 5):
        for at in range(0, len(s.prompt), piece):
            s.run("many", at, s.prompt[at : at + piece])
        assert s.run("many", len(s.prompt), (), score=every).scores == whole, piece
        s.backend.rewind(s.name, "many", 0)


def scores_follow_a_rewind(s: Subject) -> None:
    every, half = tuple(range(len(s.prompt))), len(s.prompt) // 2
    whole = s.run("back", 0, s.prompt, score=every).scores
    other = s.run("back", half, s.prompt[:1] * (len(s.prompt) - half), score=every).scores
    assert other[:half] == whole[:half] and other != whole
    assert s.run("back", half, s.prompt[half:], score=every).scores == whole
    with pytest.raises(ValueError, match="position"):
        s.run("back", half, (), score=(half,))


def scores_of_a_fork_are_a_copy(s: Subject) -> None:
    every, half = tuple(range(len(s.prompt))), len(s.prompt) // 2
    whole = s.run("stem", 0, s.prompt, score=every).scores
    s.backend.fork(s.name, "stem", "branch")
    s.run("stem", 0, s.prompt[::-1])
    assert s.run("branch", len(s.prompt), (), score=every).scores == whole
    assert s.run("branch", half, s.prompt[half:], score=every).scores == whole


def reward_model_does_not_write(s: Subject) -> None:
    with pytest.raises(UserError, match="reward"):
        s.run("write", 0, s.prompt, 1)


COMMON = (
    info_is_filled,
    text_round_trips,
    unreadable_text_is_refused,
    prompts_hold_their_text,
    empty_feed_gives_nothing,
    unknown_sequence_begins_empty,
    unknown_role_is_an_error,
    foreign_token_is_an_error,
    closing_twice_is_harmless,
    an_unloaded_role_is_gone,
)
WRITING = (
    *COMMON,
    keep_too_large_is_an_error_and_changes_nothing,
    work_repeats,
    chunks_do_not_matter,
    pieces_of_the_feed_do_not_matter,
    fed_tokens_count_as_generated_ones,
    rewound_sequence_goes_on_as_before,
    sequences_do_not_mix,
    key_counts_only_when_sampled,
    steps_end_at_the_delimiter,
    steps_end_alike_in_chunks,
    fork_is_a_copy,
    what_is_handed_over_goes_on_elsewhere,
    what_cannot_be_handed_over_is_an_error,
    next_step_starts_behind_the_delimiter,
    nothing_cannot_be_gone_on_from,
    context_is_a_limit,
    scoring_needs_a_reward_head,
)
"""Checks of a model that writes."""
SCORING = (
    *COMMON,
    scores_are_probabilities,
    scores_come_in_the_order_asked,
    scores_do_not_depend_on_the_cut,
    scores_follow_a_rewind,
    scores_of_a_fork_are_a_copy,
    reward_model_does_not_write,
)
"""Checks of a process reward model."""


def name(check: Callable[[Subject], None]) -> str:
    """For pytest's ids."""
    return check.__name__
