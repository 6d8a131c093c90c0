"""Ends of steps: the table against a search in the text."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_models
from hypothesis import given
from hypothesis import strategies as st

from models_jax.stops import Stops
from models_jax.tokenizer import Tokenizer
from planner.errors import UserError


class Words:
    """A tokenizer of these words; the last one ends the text."""

    folder = "words"

    def __init__(self, *words):
        self.words, self.eos_ids = [w.encode() for w in words], (len(words) - 1,)

    def token_bytes(self):
        return self.words


WORDS = Words("a", "b", "ab", "ba", "aba", "bb", "c", "é", "")


@given(
    delimiter=st.sampled_from(["a", "ab", "aa", "aba", "abab", "bba", "é", "aé"]),
    tokens=st.lists(st.integers(0, 7), max_size=30),
    cut=st.integers(0, 30),
)
def test_the_first_token_that_completes_the_delimiter_ends_the_step(delimiter, tokens, cut):
    stops = Stops(WORDS, 12, delimiter)
    texts = [b"".join(WORDS.words[t] for t in tokens[: n + 1]) for n in range(len(tokens))]
    found = next((n for n, text in enumerate(texts) if delimiter.encode() in text), None)
    state, ended = stops.state(tokens[: min(cut, len(tokens) if found is None else found)]), None
    for n, token in enumerate(tokens):
        if n < cut and (found is None or n < found):
            continue
        state = int(stops.table[token, state])
        if state == stops.complete:
            ended = n
            break
    assert ended == (found if found is not None else None)


def test_a_state_begins_anew_after_a_delimiter():
    stops = Stops(WORDS, 9, "aa")
    assert stops.state([0]) == 1
    assert stops.state([0, 0]) == 0
    assert stops.state([0, 0, 0]) == 1


def test_the_end_of_text_ends_a_step_from_every_state():
    stops = Stops(WORDS, 9, "ab")
    assert (stops.table[8] == stops.complete).all()
    assert stops.table.shape == (9, 2)


def test_rows_without_a_token_end_nothing():
    assert (Stops(WORDS, 20, "ab").table[9:] == 0).all()


@pytest.mark.parametrize("delimiter", ["x", "ax", "", "a" * 101])
def test_what_cannot_be_written_is_refused(delimiter):
    with pytest.raises(UserError, match="delimiter"):
        Stops(WORDS, 9, delimiter)


def test_a_real_tokenizer(tmp_path):
    tiny_models.write(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    stops = Stops(tokenizer, len(tiny_models.TOKENS) + 3, "\n\n")
    line = tokenizer.encode("\n")[0]
    assert stops.table[line].tolist() == [1, 2]
    assert np.flatnonzero((stops.table == 2).any(axis=1)).tolist() == sorted({line, *tokenizer.eos_ids})
