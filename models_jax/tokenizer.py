"""Text to token ids and back, from a folder's `tokenizer.json`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from models_jax.weight_files import read_json
from planner.errors import UserError

PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
"""Bytes that byte-level vocabularies write as themselves; the others follow from code point 256 on."""
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {
    chr(256 + i): byte for i, byte in enumerate(b for b in range(256) if b not in PRINTABLE)
}


class Tokenizer:
    """The vocabulary of one model. Refuses text that it cannot write, where others would drop it in silence."""

    def __init__(self, folder: Path) -> None:
        """Read `tokenizer.json`, and the end-of-text ids from `generation_config.json` or `config.json`."""
        self.folder = folder
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

    def token_bytes(self) -> list[bytes]:
        """What each token adds to a text, by id. A token may hold a part of a character only."""
        ids = range(self.size)
        if isinstance(self._fast.decoder, tokenizers.decoders.ByteLevel):
            return [self._byte_level(self._fast.id_to_token(i) or "") for i in ids]
        # Some decoders take the space off a text's first token: so each is read behind another.
        alone, *both = self._fast.decode_batch([[0], *([0, i] for i in ids)], skip_special_tokens=False)
        return [text.removeprefix(alone).encode() for text in both]

    def check_size(self, vocab_size: int) -> None:
        """Raise UserError if the vocabulary has tokens that a model with `vocab_size` rows has not."""
        if self.size > vocab_size:
            raise UserError(
                f"the tokenizer has {self.size} tokens, the model {vocab_size}",
                where=str(self.folder),
                mend="use the tokenizer.json that belongs to the model",
            )

    @staticmethod
    def _byte_level(token: str) -> bytes:
        """The bytes of a token of a byte-level vocabulary; added tokens stand for themselves."""
        found = [BYTE_OF.get(letter) for letter in token]
        return token.encode() if None in found else bytes(b for b in found if b is not None)

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
