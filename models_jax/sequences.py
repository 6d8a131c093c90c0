"""What a host knows of the sequences of a role: their tokens, how far the cache goes, rewards. Imports no jax."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.errors import UserError
from planner.runtime.backend import Handed, Work


@dataclass
class Held:
    """One sequence. Rewinding it makes numbers smaller and moves nothing."""

    tokens: np.ndarray
    """(slots,) int32; the first `length` count."""
    rewards: np.ndarray
    """(slots,) float32; the first `computed` count, and only for a model with a reward head."""
    length: int = 0
    """Tokens in the sequence."""
    computed: int = 0
    """Tokens in the cache; the rest have still to be fed."""

    def cut(self, keep: int) -> None:
        """Forget all but the first `keep` tokens."""
        self.length, self.computed = keep, min(self.computed, keep)

    def append(self, tokens: tuple[int, ...] | np.ndarray) -> None:
        """Add tokens that the cache does not cover yet."""
        self.tokens[self.length : self.length + len(tokens)] = tokens
        self.length += len(tokens)


def apart(work: Work) -> list[Work]:
    """The drafts beside `work`, each as a work that goes on from the same sequence."""
    before, alone = work.keep + len(work.feed) - len(work.begun), replace(work, beside=())
    return [
        replace(alone, keep=before, feed=own.begun, begun=own.begun, key=own.key, max_new=own.max_new)
        for own in work.beside
    ]


class Sequences:
    """The sequences of one role by name. All checks come before the first change."""

    def __init__(self, role: str, context_tokens: int, slots: int, vocab_size: int) -> None:
        """`context_tokens` is the most that a sequence may hold; `slots` the length of its arrays."""
        self._role, self._context_tokens, self._slots, self._vocab_size = role, context_tokens, slots, vocab_size
        self._held: dict[str, Held] = {}

    def open(self, work: Work) -> Held:
        """Rewind to `keep` and append `feed`. A sequence that is not known begins empty."""
        held = self._held.get(work.sequence) or self._empty()
        self._check(work, held)
        held.cut(work.keep)
        held.append(work.feed)
        self._held[work.sequence] = held
        return held

    def check_beside(self, work: Work) -> None:
        """Check a work and the drafts beside it."""
        held = self._held.get(work.sequence) or self._empty()
        self._check(work, held)
        for own in apart(work):
            self._check(own, replace(held, length=own.keep))

    def limit(self, work: Work, held: Held) -> int:
        """Length up to which `work` may generate: a full context cuts the last chunk short."""
        return min(held.length + work.max_new, self._context_tokens)

    def rewind(self, name: str, tokens: int) -> None:
        """Forget all but the first `tokens` tokens; with 0 the sequence is no longer known."""
        held = self._held.get(name)
        self._check_keep(name, tokens, held.length if held else 0)
        if held is not None and tokens:
            held.cut(tokens)
        else:
            self._held.pop(name, None)

    def fork(self, name: str, new_name: str) -> None:
        """Make `new_name` a copy of the sequence `name`, in place of what it was."""
        held = self._held.get(name)
        if held is None or name == new_name:
            raise ValueError(f"role {self._role!r} cannot make {new_name!r} a copy of sequence {name!r}")
        self._held[new_name] = replace(held, tokens=held.tokens.copy(), rewards=held.rewards.copy())

    def hand_over(self, name: str, rows: np.ndarray) -> Handed:
        """Sequence `name`, all of which is in the cache, with its keys and values (layers, 2, tokens, heads, dim)."""
        held = self._held[name]
        return Handed(tuple(int(token) for token in held.tokens[: held.length]), rows.tobytes())

    def take_over(self, name: str, handed: Handed, shape: tuple[int, int, int], dtype: Any) -> np.ndarray:
        """Let sequence `name` hold what was handed over, in place of what it was. Gives the keys and values.

        They are (layers, 2, tokens, key heads, head_dim) of `dtype`; `shape` has these without 2 and the tokens.
        ValueError if the bytes are not as many.
        """
        tokens, dtype = len(handed.tokens), np.dtype(dtype)
        self._check(Work(self._role, name, 0, handed.tokens), self._empty())
        needed = 2 * tokens * math.prod(shape) * dtype.itemsize
        if len(handed.rows) != needed:
            what = f"{len(handed.rows)} bytes were handed over for the {tokens} tokens of sequence {name!r}"
            raise ValueError(f"{what} of role {self._role!r}, which need {needed}")
        self._held[name] = held = self._empty()
        held.append(handed.tokens)
        held.computed = tokens
        layers, *row = shape
        return np.frombuffer(handed.rows, dtype).reshape(layers, 2, tokens, *row)

    def known(self, name: str) -> Held:
        """The sequence `name`; ValueError if nothing is known of it."""
        if name not in self._held or not self._held[name].length:
            raise ValueError(f"sequence {name!r} of role {self._role!r} holds nothing")
        return self._held[name]

    def __contains__(self, name: str) -> bool:
        """Whether sequence `name` is known."""
        return name in self._held

    def __getitem__(self, name: str) -> Held:
        """The sequence `name`, which must be known."""
        return self._held[name]

    def _empty(self) -> Held:
        return Held(np.zeros(self._slots, np.int32), np.zeros(self._slots, np.float32))

    def _check_keep(self, name: str, keep: int, length: int) -> None:
        if not 0 <= keep <= length:
            raise ValueError(f"sequence {name!r} of role {self._role!r} holds {length} tokens, cannot keep {keep}")

    def _check(self, work: Work, held: Held) -> None:
        self._check_keep(work.sequence, work.keep, held.length)
        length = work.keep + len(work.feed)
        for token in work.feed:
            if not 0 <= token < self._vocab_size:
                raise ValueError(f"token {token} is not in the {self._vocab_size} of role {self._role!r}")
        for position in work.score:
            if not 0 <= position < length:
                raise ValueError(f"position {position} is not in the {length} tokens of {work.sequence!r}")
        if work.max_new < 0:
            raise ValueError(f"max_new is {work.max_new}")
        if len(work.begun) > length:
            raise ValueError(f"{len(work.begun)} tokens are begun of the {length} of {work.sequence!r}")
        if work.max_new and not length:
            raise ValueError(f"nothing to go on from: sequence {work.sequence!r} of role {self._role!r} is empty")
        if length + max(work.max_new > 0, len(work.ask)) > self._context_tokens:
            raise UserError(
                f"role {self._role!r} needs more than its context length of {self._context_tokens} tokens",
                mend="raise numerics.cache_tokens of the role, or lower budget.tokens",
            )
