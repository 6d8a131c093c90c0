"""How the texts of a run are written in one model's tokens: its chat template, its beginning, its step separator."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from models_jax.config import ModelConfig, RewardHead
from models_jax.tokenizer import Tokenizer
from models_jax.weight_files import read_json
from planner.errors import UserError

SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
"""The system message that Qwen2.5-Math-PRM was trained with."""
DATE = "26 Jul 2024"
"""Today, for templates that name the day, such as Llama 3's, whose own default this is: answers depend on no clock."""
SEPARATORS = {RewardHead.TWO_CLASS: "<extra_0>", RewardHead.SCALAR: "\n", RewardHead.TOKENS: "ки"}
"""What the published models of each reward head read after a step, and score there."""


class TextFormat:
    """Writes prompts and steps for one model.

    A prompt goes through the model's chat template, if it has one: the problem as the user's turn, up to where the
    answer begins. A step is written as it is, but for a reward model with a separator, which replaces the delimiter.
    """

    def __init__(self, tokenizer: Tokenizer, folder: Path, delimiter: str, config: ModelConfig | None = None) -> None:
        """`config` is needed for a reward model alone. Raises UserError if its separator is not one token."""
        self._tokenizer, self._folder, self._delimiter = tokenizer, folder, delimiter
        self._head = config.reward_head if config else None
        self._separator = self._separator_id(config) if config and config.reward_head else None
        self._chat = _chat(folder) if self._head in (None, RewardHead.TWO_CLASS) else None

    @property
    def hash(self) -> str:
        """Models with equal hashes exchange token ids. One that reads a separator takes text from all others."""
        if self._separator is None:
            return self._tokenizer.hash
        return hashlib.sha256(f"{self._tokenizer.hash} {self._separator} {self._delimiter}".encode()).hexdigest()

    def prompt(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt, up to where the first step begins."""
        question = text.removesuffix(self._delimiter)
        if self._chat is not None:
            return self._tokenizer.encode(chat_prompt(self._chat, question, self._system(), str(self._folder)))
        if self._head is RewardHead.SCALAR:
            return self._tokenizer.encode(_beginning(self._folder) + question + "\n")
        if self._head is RewardHead.TOKENS:
            return self._tokenizer.encode(question + " ", opening=True)
        return self._tokenizer.encode(text, opening=True)

    def step(self, text: str) -> tuple[int, ...]:
        """Token ids of a step; the last of them is where a reward model scores it."""
        if self._separator is None:
            return self._tokenizer.encode(text)
        return (*self._tokenizer.encode(text.removesuffix(self._delimiter)), self._separator)

    def _system(self) -> str | None:
        return SYSTEM if self._head is RewardHead.TWO_CLASS else None

    def _separator_id(self, config: ModelConfig) -> int | None:
        """The token, or None for a two-class model without that of Qwen: it reads the delimiter, as the zoo's does."""
        assert config.reward_head is not None
        text = config.step_separator or SEPARATORS[config.reward_head]
        found = self._tokenizer.id_of(text)
        usual = config.step_separator is None and config.reward_head is RewardHead.TWO_CLASS
        if found is None and not usual:
            raise UserError(
                f"the step separator {text!r} is not one token of the model's vocabulary",
                where=str(self._folder),
                mend="set step_separator in its config.json to the token that the model was trained with",
            )
        return found


def chat_prompt(template: Any, question: str, system: str | None = None, where: str = "") -> str:
    """`question` as the user's turn, up to where the model's turn begins.

    `template` is a transformers tokenizer that has a chat template. Raises UserError if the template does.
    """
    messages = [{"role": "user", "content": question}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    try:
        written = template.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, date_string=DATE)
        return str(written)
    except Exception as bad:  # templates are programs of others
        raise UserError(f"the chat template fails ({bad})", where=where, mend="correct or remove it") from None


def _chat(folder: Path) -> Any:
    """The folder's tokenizer as transformers has it, or None if it has no chat template."""
    settings = folder / "tokenizer_config.json"
    within = settings.is_file() and read_json(settings).get("chat_template")
    if not within and not (folder / "chat_template.jinja").is_file():
        return None
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(str(folder))
    except Exception as bad:  # the library raises many kinds
        raise UserError(
            f"transformers cannot read the tokenizer ({bad})", where=str(folder), mend="download its files again"
        ) from None


def _beginning(folder: Path) -> str:
    """The text of the token that begins a sequence, if tokenizer_config.json names one."""
    settings = folder / "tokenizer_config.json"
    token = read_json(settings).get("bos_token") if settings.is_file() else None
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
