"""The shape of a decoder, read from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from models_jax.rope import RopeScaling, read_rope
from planner.checkpoint import model_config
from planner.errors import UserError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class RewardHead(StrEnum):
    """What turns a hidden state into the probability of "right so far"."""

    TWO_CLASS = "two_class"
    """Linear, ReLU, linear to two classes, softmax, the second class: Qwen2.5-Math-PRM and the PRM that ships."""
    SCALAR = "scalar"
    """Linear to one number, sigmoid: Skywork-o1-Open-PRM."""
    TOKENS = "tokens"
    """The vocabulary head, softmax over two tokens, the first of them: Math-Shepherd's + and -."""


ARCHITECTURES = {"ForProcessRewardModel": RewardHead.TWO_CLASS, "ForPrmModel": RewardHead.SCALAR}
"""Ends of names in `architectures` and the head that such a model has."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer with RMSNorm, RoPE, grouped-query attention and SwiGLU."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 512
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    qk_norm: bool = False
    reward_head: RewardHead | None = None
    """A process reward model has one."""
    rope_scaling: RopeScaling | None = None
    reward_tokens: tuple[int, int] | None = None
    """Ids of the tokens for "right" and "wrong", for `RewardHead.TOKENS`."""
    step_separator: str | None = None
    """Text that a reward model reads after each step; None: what is usual for its head."""
    known_tokens: int | None = None
    """Ids from here on are padding of the vocabulary and never chosen; None: there is none. From the tokenizer."""
    int8_weights: bool = False
    """Matrices are held as int8 with a scale for each output channel. A choice of who loads."""
    sharded: bool = False
    """Weights and cache are spread over devices. A choice of who loads."""

    class_rows: int | None = None
    """Rows of a block of the numerics class, for longer blocks to have its bits; None: all blocks are as they come. A
    choice of who loads."""

    @property
    def output_bias(self) -> bool:
        """Whether the projection out of attention has a bias too; that of Qwen2 has none."""
        return self.attention_bias and self.model_type != "qwen2"

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str) -> ModelConfig:
        """From the keys that transformers writes; `where` names the file in errors."""
        kind = raw.get("model_type")
        if kind not in FAMILIES:
            raise UserError(
                f"model_type {kind!r} is not supported", where=where, mend=f"use one of {', '.join(FAMILIES)}"
            )
        _refuse_variants(raw, where)
        try:
            heads = int(raw["num_attention_heads"])
            hidden = int(raw["hidden_size"])
            theta, scaling = read_rope(raw, where)
            tokens = raw.get("reward_tokens")
            return cls(
                model_type=kind,
                vocab_size=int(raw["vocab_size"]),
                hidden_size=hidden,
                intermediate_size=int(raw["intermediate_size"]),
                num_hidden_layers=int(raw["num_hidden_layers"]),
                num_attention_heads=heads,
                num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
                head_dim=int(raw.get("head_dim") or hidden // heads),
                rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
                rope_theta=theta,
                max_position_embeddings=_context(raw),
                tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
                attention_bias=kind == "qwen2" or bool(raw.get("attention_bias", False)),
                qk_norm=kind == "qwen3",
                reward_head=_reward_head(raw, where),
                rope_scaling=scaling,
                reward_tokens=None if tokens is None else (int(tokens[0]), int(tokens[1])),
                step_separator=raw.get("step_separator"),
            )
        except KeyError as missing:
            raise UserError(f"key {missing} is missing", where=where, mend="copy config.json from the model") from None
        except (TypeError, ValueError, IndexError) as bad:
            raise UserError(f"a value has the wrong type ({bad})", where=where, mend="correct config.json") from None

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read `folder/config.json`."""
        return cls.from_dict(model_config(folder), str(folder / "config.json"))

    def to_dict(self) -> dict[str, Any]:
        """The keys of `config.json`, the inverse of `from_dict`."""
        own = ("qk_norm", "reward_head", "rope_theta", "rope_scaling", "known_tokens", "int8_weights")
        own += ("sharded", "class_rows")
        raw = {key: value for key, value in asdict(self).items() if key not in own and value is not None}
        scaling = self.rope_scaling.to_dict() if self.rope_scaling else {"rope_type": "default"}
        end = next((end for end, head in ARCHITECTURES.items() if head is self.reward_head), "ForCausalLM")
        return raw | {
            "architectures": [f"{self.model_type.capitalize()}{end}"],
            "rope_parameters": {"rope_theta": self.rope_theta} | scaling,
            "hidden_act": "silu",
            "dtype": "float32",
        }


def _context(raw: Mapping[str, Any]) -> int:
    """Most tokens that are read as the model reads them: Mistral's window is the whole context or its limit."""
    most = int(raw.get("max_position_embeddings", 512))
    window = raw.get("sliding_window") if raw.get("model_type") == "mistral" else None
    return most if window is None else min(most, int(window))


def _reward_head(raw: Mapping[str, Any], where: str) -> RewardHead | None:
    """By the architecture's name, or by `reward_tokens`, a key of ours for models whose name does not tell."""
    for name in raw.get("architectures") or ():
        for end, head in ARCHITECTURES.items():
            if str(name).endswith(end):
                return head
        if "Reward" in str(name):
            raise UserError(
                f"architectures names {name!r}, a reward head that is not supported",
                where=where,
                mend=f"use a model whose name ends in {' or '.join(ARCHITECTURES)}",
            )
    return RewardHead.TOKENS if raw.get("reward_tokens") is not None else None


def _refuse_variants(raw: Mapping[str, Any], where: str) -> None:
    """Refuse what would be read without an error and computed wrongly."""
    wanted = {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False}
    for key, value in wanted.items():
        if raw.get(key, value) != value:
            raise UserError(f"{key} {raw[key]!r} is not supported", where=where, mend=f"use a model with {value!r}")
    layers = {"full_attention"} | ({"sliding_attention"} if raw.get("model_type") == "mistral" else set())
    for kind in raw.get("layer_types") or ():
        if kind not in layers:
            raise UserError(
                f"layer_types has {kind!r}, which is not supported", where=where, mend="use a model with full attention"
            )
