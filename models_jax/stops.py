"""Where a step ends: an automaton that finds a delimiter in tokens, though it may begin in one and end in another.

It is the automaton of Knuth, Morris and Pratt over the bytes of the delimiter, with whole tokens for letters. Its
state is how many bytes of the delimiter the step's text ends with. Devices look tokens up in its table; nothing of it
needs a model library.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models_jax.tokenizer import Tokenizer
from planner.errors import UserError

LONGEST = 100
"""Longest delimiter in bytes, so that a state fits in int8."""


class Stops:
    """The ends of steps and texts for one vocabulary and delimiter."""

    table: np.ndarray
    """(vocabulary, length of the delimiter) int8: the state after a token, from each state. The length of the
    delimiter itself says that the token completed it, or ended the text."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, delimiter: str) -> None:
        """Raises UserError if the vocabulary cannot write the delimiter."""
        wanted = delimiter.encode()
        if not 0 < len(wanted) <= LONGEST:
            raise UserError(f"the delimiter {delimiter!r} is no text of 1 to {LONGEST} bytes", mend="use another")
        self.table = _table([*tokenizer.token_bytes()][:vocab_size], wanted, vocab_size)
        if not _can_be_written(self.table):
            raise UserError(
                f"no tokens of the vocabulary make the delimiter {delimiter!r}",
                where=str(tokenizer.folder),
                mend="use a delimiter that the model can write",
            )
        self.table[[i for i in tokenizer.eos_ids if i < vocab_size]] = len(wanted)

    @property
    def complete(self) -> int:
        """The state that ends a step."""
        return self.table.shape[1]

    def state(self, begun: Sequence[int] | np.ndarray) -> int:
        """The state after the tokens of a step that is begun. What follows a whole delimiter begins anew."""
        state = 0
        for token in begun:
            state = int(self.table[token, 0 if state == self.complete else state])
        return 0 if state == self.complete else state

    def ends(self, tokens: Sequence[int] | np.ndarray) -> list[int]:
        """Positions of the tokens that end a step."""
        found, state = [], 0
        for at, token in enumerate(tokens):
            state = int(self.table[token, state])
            if state == self.complete:
                found.append(at)
                state = 0
        return found

    def completes(self, begun: Sequence[int] | np.ndarray, written: Sequence[int]) -> bool:
        """Whether the last of the tokens `written` after `begun` ends the step."""
        state = self.state([*begun, *written[:-1]])
        return bool(written) and int(self.table[written[-1], state]) == self.complete

    @staticmethod
    def none(vocab_size: int) -> np.ndarray:
        """A table that ends nothing."""
        return np.zeros((vocab_size, 1), np.int8)


def _table(texts: list[bytes], delimiter: bytes, vocab_size: int) -> np.ndarray:
    """The table of `Stops`, end of text left out. Rows without a text lead to state 0."""
    size = len(delimiter)
    step = _byte_steps(delimiter)
    table = np.zeros((vocab_size, size), np.int8)
    letters = set(delimiter)
    for token, text in enumerate(texts):
        if letters.isdisjoint(text):
            continue
        for state in range(size):
            at = state
            for byte in text:
                at = int(step[at, byte])
                if at == size:
                    break
            table[token, state] = at
    return table


def _byte_steps(delimiter: bytes) -> np.ndarray:
    """(length of the delimiter, 256): bytes matched after one more byte."""
    step = np.zeros((len(delimiter), 256), np.int64)
    for state in range(len(delimiter)):
        for byte in range(256):
            seen = delimiter[:state] + bytes([byte])
            step[state, byte] = next(n for n in range(state + 1, -1, -1) if seen.endswith(delimiter[:n]))
    return step


def _can_be_written(table: np.ndarray) -> bool:
    """Whether some tokens lead from nothing to the whole delimiter."""
    reached, fresh = {0}, [0]
    while fresh:
        found = set(np.unique(table[:, fresh.pop()]).tolist()) - reached
        if table.shape[1] in found:
            return True
        reached |= found
        fresh += sorted(found)
    return False
