"""The size of a model, counted from its `config.json`: what the roofline and the memory check need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from planner.errors import UserError
from planner.workflow import Arithmetic, WeightKind
from planner.yaml_file import unknown

BYTES_EACH = {Arithmetic.FLOAT32: 4, Arithmetic.BFLOAT16: 2, Arithmetic.INT8: 1}
"""Bytes of a weight, and of a number in the KV cache."""
SCALE_BYTES = 4
"""Bytes of the scale of an output channel."""
FAMILIES = ["qwen2", "qwen3", "llama", "mistral"]
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
    draft: ModelShape | None = None
    """The model that proposes tokens to this one, for a role that speculates; it is held beside it."""

    def held_bytes(self, cached_tokens: int, devices: int = 1) -> int:
        """Memory of weights and caches on one of so many devices that hold the model together.

        Each has a part of the model and of its cache, rounded up, and all of the draft's.
        """
        own = self.weight_bytes + cached_tokens * self.kv_bytes_per_token
        return -(-own // devices) + (self.draft.held_bytes(cached_tokens) if self.draft else 0)

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        arithmetic: Arithmetic,
        where: str = "config.json",
        weights: WeightKind = WeightKind.SAME,
    ) -> ModelShape:
        """From a Hugging Face `config.json` of the Qwen2, Qwen3, Llama or Mistral family. Raises UserError."""
        count = _counts(_Config(config, where))
        each = BYTES_EACH[arithmetic]
        layers, hidden = (_Config(config, where).number(key) for key in ("num_hidden_layers", "hidden_size"))
        size = (count.rounded + count.others) * each
        if weights == WeightKind.INT8:
            size = count.rounded + count.channels * SCALE_BYTES + count.others * each
        return cls(size, count.cached * each, 2 * count.multiplied, layers, hidden)


class _Count(NamedTuple):
    """Numbers of a model."""

    rounded: int
    """In the matrices that `weights: int8` rounds."""
    channels: int
    """Output channels of these matrices."""
    others: int
    multiplied: int
    """With so many a token is multiplied."""
    cached: int
    """So many a token leaves in the KV cache."""


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


def _counts(config: _Config) -> _Count:
    family = str(config.raw.get("model_type"))
    if family not in FAMILIES:
        raise unknown(f"model_type is {family}", family, FAMILIES, config.where)
    hidden, layers = config.number("hidden_size"), config.number("num_hidden_layers")
    heads = config.number("num_attention_heads")
    size = config.number("head_dim", max(1, hidden // heads))
    queries, values = heads * size, config.number("num_key_value_heads", heads) * size
    inner, vocabulary = config.number("intermediate_size"), config.number("vocab_size")
    matrices = layers * (2 * hidden * queries + 2 * hidden * values + 3 * hidden * inner)
    channels = layers * (queries + 2 * values + 2 * hidden + 2 * inner) + vocabulary
    small = layers * (2 * hidden + _biases(config, family, queries, values, inner)) + hidden
    small += 2 * size * layers if family == "qwen3" else 0
    embedding, cached = vocabulary * hidden, 2 * layers * values
    reward = _reward_head(config)
    if reward:
        return _Count(matrices + embedding, channels, small + reward, matrices + reward, cached)
    if config.flag("tie_word_embeddings"):
        return _Count(matrices + embedding, channels, small, matrices + embedding, cached)
    return _Count(matrices + 2 * embedding, channels + vocabulary, small, matrices + embedding, cached)


def _biases(config: _Config, family: str, queries: int, values: int, inner: int) -> int:
    """Bias numbers a layer."""
    hidden = config.number("hidden_size")
    if family == "qwen2":
        return queries + 2 * values
    attention = queries + 2 * values + hidden if config.flag("attention_bias") else 0
    return attention + (2 * inner + hidden if config.flag("mlp_bias") else 0)


def _reward_head(config: _Config) -> int:
    """Numbers of a reward head in place of the vocabulary's: two small layers, or one; 0 if there is none."""
    hidden, names = config.number("hidden_size"), str(config.raw.get("architectures", ""))
    if "RewardModel" in names:
        return hidden * hidden + hidden + 2 * hidden + 2
    return hidden + 1 if "ForPrmModel" in names else 0
