"""The size of a model, counted from its `config.json`: what the roofline and the memory check need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.errors import UserError
from planner.workflow import Arithmetic
from planner.yaml_file import unknown

BYTES_EACH = {Arithmetic.FLOAT32: 4, Arithmetic.BFLOAT16: 2, Arithmetic.INT8: 1}
"""Bytes of a weight, and of a number in the KV cache."""
FAMILIES = ["qwen2", "qwen3", "llama"]
"""Values of `model_type` whose parameters are counted here."""


@dataclass(frozen=True)
class ModelShape:
    """What the roofline needs to know of a model. Easily built by hand from published figures."""

    weight_bytes: int
    """All are read in each forward pass."""
    kv_bytes_per_token: int
    flops_per_token: int
    """Operations of one token's forward pass, attention left out; a multiply-add is two."""
    layers: int = 0
    """Of the transformer; a set of devices adds up its parts twice in each. 0 if it is not known."""
    hidden: int = 0
    """Numbers that a layer hands on for each token."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], arithmetic: Arithmetic, where: str = "config.json") -> ModelShape:
        """From a Hugging Face `config.json` of the Qwen2, Qwen3 or Llama family. Raises UserError."""
        weights, multiplied, kv_numbers = _counts(_Config(config, where))
        each = BYTES_EACH[arithmetic]
        layers, hidden = (_Config(config, where).number(key) for key in ("num_hidden_layers", "hidden_size"))
        return cls(weights * each, kv_numbers * each, 2 * multiplied, layers, hidden)


@dataclass(frozen=True)
class _Config:
    """A config.json whose keys are read one by one, with an error that names the key."""

    raw: Mapping[str, Any]
    where: str

    def number(self, key: str, otherwise: int | None = None) -> int:
        """A whole number above 0; `otherwise` stands in for a key that is absent or null."""
        value = self.raw.get(key)
        if value is None:
            value = otherwise
        if value is None:
            raise UserError(f"{key} is missing", where=self.where, mend="copy config.json from the model again")
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise UserError(f"{key} is {value!r}", where=self.where, mend="use a whole number above 0")
        return value

    def flag(self, key: str) -> bool:
        """A flag; absent is false."""
        return bool(self.raw.get(key, False))


def _counts(config: _Config) -> tuple[int, int, int]:
    """(parameters, parameters that a token is multiplied with, numbers that it leaves in the KV cache)."""
    family = str(config.raw.get("model_type"))
    if family not in FAMILIES:
        raise unknown(f"model_type is {family}", family, FAMILIES, config.where)
    hidden, layers = config.number("hidden_size"), config.number("num_hidden_layers")
    heads = config.number("num_attention_heads")
    size = config.number("head_dim", max(1, hidden // heads))
    queries, values = heads * size, config.number("num_key_value_heads", heads) * size
    inner = config.number("intermediate_size")
    matrices = layers * (2 * hidden * queries + 2 * hidden * values + 3 * hidden * inner)
    small = layers * (2 * hidden + _biases(config, family, queries, values, inner)) + hidden
    small += 2 * size * layers if family == "qwen3" else 0
    embedding = config.number("vocab_size") * hidden
    head, extra = _head(config, embedding)
    return matrices + small + embedding + extra, matrices + head, 2 * layers * values


def _biases(config: _Config, family: str, queries: int, values: int, inner: int) -> int:
    """Bias numbers a layer."""
    hidden = config.number("hidden_size")
    if family == "qwen2":
        return queries + 2 * values
    attention = queries + 2 * values + hidden if config.flag("attention_bias") else 0
    return attention + (2 * inner + hidden if config.flag("mlp_bias") else 0)


def _head(config: _Config, embedding: int) -> tuple[int, int]:
    """(parameters of the head, those of them that are not the embedding's). A reward model's has two small layers."""
    hidden = config.number("hidden_size")
    if "RewardModel" in str(config.raw.get("architectures", "")):
        reward = hidden * hidden + hidden + 2 * hidden + 2
        return reward, reward
    return embedding, 0 if config.flag("tie_word_embeddings") else embedding
