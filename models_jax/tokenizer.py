"""Text to token ids and back, from a folder's `tokenizer.json`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers

from models_jax.weight_files import read_json
from planner.errors import UserError


class Tokenizer:
    """The vocabulary of one model. Refuses text that it cannot write, where others would drop it in silence."""

    def __init__(self, folder: Path) -> None:
        """Read `tokenizer.json`, and the end-of-text ids from `generation_config.json` or `config.json`."""
        self._folder = folder
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UserError("no tokenizer.json", where=str(folder), mend="copy it from the model")
        try:
            self._fast = tokenizers.Tokenizer.from_file(str(path))
        except Exception as bad:  # the library raises nothing narrower
            raise UserError(f"cannot be read ({bad})", where=str(path), mend="download the file again") from None
        self.hash: str = hashlib.sha256(path.read_bytes()).hexdigest()
        """Models with equal hashes exchange token ids."""
        self.size: int = max(self._fast.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """One more than the highest id. A model may have more rows, which are padding."""
        self.eos_ids: tuple[int, ...] = _eos_ids(folder)
        """Tokens that end the whole text."""

    def encode(self, text: str, *, opening: bool = False) -> tuple[int, ...]:
        """Token ids of `text`. UserError if it cannot be written in tokens.

        Special tokens are added for an `opening` only: what the tokenizer puts where a text begins.
        """
        ids = self._written(text)
        if ids is None:
            raise UserError(f"the model's vocabulary has no {self._unwritable(text)}", mend="take it out of the text")
        return tuple(self._fast.encode(text, add_special_tokens=True).ids if opening else ids)

    def id_of(self, text: str) -> int | None:
        """The one token that is `text`, or None if there is none."""
        found = self._fast.token_to_id(text)
        if found is not None:
            return found
        ids = self._written(text) or []
        return ids[0] if len(ids) == 1 else None

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`; end-of-text and other special tokens are left out."""
        return self._fast.decode([t for t in tokens if t not in self.eos_ids], skip_special_tokens=True)

    def stop_ids(self, delimiter: str) -> tuple[int, ...]:
        """Ids of all tokens whose text contains `delimiter`: a step ends with the token that completes it."""
        texts = self._fast.decode_batch([[i] for i in range(self.size)], skip_special_tokens=False)
        return tuple(i for i, text in enumerate(texts) if delimiter in text)

    def check_size(self, vocab_size: int) -> None:
        """Raise UserError if the vocabulary has tokens that a model with `vocab_size` rows has not."""
        if self.size > vocab_size:
            raise UserError(
                f"the tokenizer has {self.size} tokens, the model {vocab_size}",
                where=str(self._folder),
                mend="use the tokenizer.json that belongs to the model",
            )

    def stop_mask(self, vocab_size: int, delimiter: str) -> np.ndarray:
        """(vocab_size,) bool: tokens that end a step or the text. Raises UserError if none ends a step."""
        stops = self.stop_ids(delimiter)
        if not stops:
            raise UserError(
                f"no token of the vocabulary contains the delimiter {delimiter!r}",
                where=str(self._folder),
                mend="use a delimiter that the model writes as one token",
            )
        mask = np.zeros(vocab_size, np.bool_)
        mask[[i for i in (*stops, *self.eos_ids) if i < vocab_size]] = True
        return mask

    def _normal(self, text: str) -> str:
        normaliser = self._fast.normalizer
        return text if normaliser is None else normaliser.normalize_str(text)

    def _written(self, text: str) -> list[int] | None:
        """Ids that say `text`, up to what the tokenizer itself normalises; None if there are none."""
        try:
            ids = self._fast.encode(text, add_special_tokens=False).ids
        except Exception:  # a vocabulary without a token for the unknown; the library raises nothing narrower
            return None
        back = self._fast.decode(ids, skip_special_tokens=False)
        return ids if back == text or self._normal(back) == self._normal(text) else None

    def _unwritable(self, text: str) -> str:
        """Name the first character that cannot be written."""
        for at, character in enumerate(text):
            if self._written(character) is None:
                return f"character {character!r} (at position {at} of {text[:40]!r})"
        return f"way to write {text[:40]!r} unchanged"


def _eos_ids(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        found = read_json(path).get("eos_token_id") if path.is_file() else None
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if not all(isinstance(i, int) for i in ids):
            raise UserError(f"eos_token_id {found!r} is no token id", where=str(path), mend="use a number or a list")
        if ids:
            return tuple(ids)
    return ()
