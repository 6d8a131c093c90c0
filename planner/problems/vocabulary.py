"""The symbols that the shipped models read and write, shared by `sums` and `countdown`."""

from __future__ import annotations

import hashlib

PAD, EOS = "<pad>", "<eos>"
DELIMITER = "\n"
"""Ends a prompt and every step."""
SELF_SCORE = "?"
"""After prompt and steps it asks the target for one digit: 9 is "right so far", 0 is "wrong"."""
SUMS, COUNTDOWN = "S", "C"
"""Open the prompt of each set, so that every text begins with a token of its own."""

CHARACTERS = (DELIMITER, " ", SELF_SCORE, "+", "-", "*", "=", ">", SUMS, COUNTDOWN, *"0123456789")
RESERVED = tuple(f"<reserved_{i}>" for i in range(10))
"""Unused rows: they bring the vocabulary to 32, a size that hardware tiles evenly."""

TOKENS = (PAD, EOS, *CHARACTERS, *RESERVED)
"""Token of each id."""
ID = {token: i for i, token in enumerate(TOKENS)}


def encode(text: str) -> list[int]:
    """Token ids of `text`, one a character."""
    return [ID[character] for character in text]


def decode(ids: list[int]) -> str:
    """Text of `ids`; special and reserved tokens are left out."""
    return "".join(TOKENS[i] for i in ids if len(TOKENS[i]) == 1)


HELD_OUT_SHARE = 16


def held_out(prompt: str) -> bool:
    """Whether the problem with this prompt is kept for evaluation: one in 16, by a hash of the prompt.

    `generate` gives such problems alone, training takes the others alone, so no generated problem was trained on.
    """
    return hashlib.sha256(prompt.encode()).digest()[0] % HELD_OUT_SHARE == 0
