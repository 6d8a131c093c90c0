"""The shape of a decoder, read from a Hugging Face `config.json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from planner.checkpoint import model_config
from planner.errors import UserError

FAMILIES = ("llama", "qwen2", "qwen3")


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
    reward_head: bool = False
    """A two-layer, two-class head in place of the vocabulary head: a process reward model."""

    @classmethod
    def from_dict(cls, raw: dict[str, Any], where: str) -> ModelConfig:
        """From the keys that transformers writes; `where` names the file in errors."""
        kind = raw.get("model_type")
        if kind not in FAMILIES:
            raise UserError(
                f"model_type {kind!r} is not supported", where=where, mend=f"use one of {', '.join(FAMILIES)}"
            )
        rope = raw.get("rope_parameters") or {}
        scaling = raw.get("rope_scaling") or {}
        rope_type = rope.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
        if rope_type != "default":
            raise UserError(
                f"RoPE scaling {rope_type!r} is not supported yet", where=where, mend="use a model with default RoPE"
            )
        _refuse_variants(raw, where)
        try:
            heads = int(raw["num_attention_heads"])
            hidden = int(raw["hidden_size"])
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
                rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
                max_position_embeddings=int(raw.get("max_position_embeddings", 512)),
                tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
                attention_bias=kind == "qwen2" or bool(raw.get("attention_bias", False)),
                qk_norm=kind == "qwen3",
                reward_head="RewardModel" in str(raw.get("architectures", "")),
            )
        except KeyError as missing:
            raise UserError(f"key {missing} is missing", where=where, mend="copy config.json from the model") from None
        except (TypeError, ValueError) as bad:
            raise UserError(f"a value has the wrong type ({bad})", where=where, mend="correct config.json") from None

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read `folder/config.json`."""
        return cls.from_dict(model_config(folder), str(folder / "config.json"))

    def to_dict(self) -> dict[str, Any]:
        """The keys of `config.json`, the inverse of `from_dict`."""
        own = ("qk_norm", "reward_head")
        raw = {key: value for key, value in asdict(self).items() if key not in own}
        kind = "ForProcessRewardModel" if self.reward_head else "ForCausalLM"
        architecture = f"{self.model_type.capitalize()}{kind}"
        return raw | {"architectures": [architecture], "hidden_act": "silu", "torch_dtype": "float32"}


def _refuse_variants(raw: dict[str, Any], where: str) -> None:
    """Refuse what would be read without an error and computed wrongly."""
    wanted = {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False}
    for key, value in wanted.items():
        if raw.get(key, value) != value:
            raise UserError(f"{key} {raw[key]!r} is not supported", where=where, mend=f"use a model with {value!r}")
