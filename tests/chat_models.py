"""Small models that are spoken to by chat: a byte-level tokenizer with special tokens, and a chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SEPARATOR = "<extra_0>"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
Merges = Sequence[tuple[str, str]]
MERGES: Merges = [("Ċ", "Ċ"), (".", "Ċ"), ("1", "2"), ("Ġ", "t")]
TEMPLATE = (
    "{%- if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)


def vocabulary(merges: Merges = MERGES) -> list[str]:
    """Bytes and merges, without the special tokens."""
    return [*BYTES, *("".join(pair) for pair in merges)]


def tokenizer(*extra: str, merges: Merges = MERGES) -> Tokenizer:
    """A blank line is one token of it, if it is among the merges; `extra` are further special tokens."""
    vocab = {token: i for i, token in enumerate(vocabulary(merges))}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[*merges]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in (*SPECIAL, *extra)])
    return made


def write_tokenizer(
    folder: Path, *extra: str, template: str | None = TEMPLATE, bos: str | None = None, merges: Merges = MERGES
) -> Tokenizer:
    """Write the tokenizer's files to `folder`."""
    made = tokenizer(*extra, merges=merges)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": bos}
    settings |= {"chat_template": template} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": made.token_to_id("<|im_end|>")}))
    return made
