"""A float checkpoint in Hugging Face layout, read and run with numpy, to calibrate from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from models_jax.config import ModelConfig
from models_jax.weight_files import weight_files
from planner.errors import UserError

Floats = NDArray[np.float64]
Record = Callable[[str, Floats], None]
"""Called with the name and the values (tokens, size) of an intermediate result."""

PARTS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
"""Our names of the parts of a layer and those of transformers."""


UNSUPPORTED = {
    "attention_bias": "biases",
    "qk_norm": "q/k norms",
    "reward_head": "a reward head",
    "rope_scaling": "scaled RoPE",
}
"""Fields of a configuration that must be empty, and what they stand for."""


def check_config(config: ModelConfig, where: str) -> None:
    """Raise UserError for a model that the integer model has no operations for."""
    for name, what in UNSUPPORTED.items():
        if getattr(config, name):
            raise UserError(
                f"the model has {what}, which integer models do not have yet",
                where=where,
                mend="use a Llama model as the draft",
            )


@dataclass(frozen=True)
class Checkpoint:
    """The shape and the weights, linear layers (out, in)."""

    config: ModelConfig
    weights: dict[str, Floats]
    """Under our names: embed, head (if not tied), norm, layers.0.q and so on."""

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Read the configuration and the weights in `folder`, one file or many."""
        config = ModelConfig.from_folder(folder)
        check_config(config, str(folder))
        raw: dict[str, NDArray[Any]] = {}
        for path in weight_files(folder):
            try:
                with safe_open(path, "np") as file:
                    raw |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            except (SafetensorError, TypeError) as bad:
                raise UserError(f"cannot be read ({bad})", where=str(path), mend="download the file again") from None
        return cls(config, rename(raw, config, str(folder)))

    def __call__(self, tokens: NDArray[np.integer], record: Record | None = None) -> Floats:
        """Logits (tokens, vocabulary) of one sequence."""
        return forward(self, tokens, record or (lambda name, value: None))


def rename(raw: dict[str, NDArray[Any]], config: ModelConfig, where: str) -> dict[str, Floats]:
    """From the names of transformers to ours, shapes checked."""
    found = {}
    for ours, (theirs, dims) in wanted(config).items():
        value = raw.get(f"{theirs}.weight")
        if value is None or value.shape != dims:
            what = "is missing" if value is None else f"has shape {value.shape}, not {dims}"
            raise UserError(
                f"tensor {theirs}.weight {what}",
                where=where,
                mend="check that config.json and the weights belong together",
            )
        found[ours] = value.astype(np.float64)
    return found


def wanted(config: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Our names to theirs and the shape."""
    c = config
    hidden, inner, ends = c.hidden_size, c.intermediate_size, (c.vocab_size, c.hidden_size)
    wide, narrow = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    sizes = {"q": (wide, hidden), "k": (narrow, hidden), "v": (narrow, hidden), "o": (hidden, wide)}
    sizes |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    names: dict[str, tuple[str, tuple[int, ...]]] = {
        "embed": ("model.embed_tokens", ends),
        "norm": ("model.norm", (hidden,)),
    }
    if not c.tie_word_embeddings:
        names["head"] = ("lm_head", ends)
    for i in range(c.num_hidden_layers):
        for ours, theirs in PARTS.items():
            names[f"layers.{i}.{ours}"] = (f"model.layers.{i}.{theirs}", sizes.get(ours, (hidden,)))
    return names


def angles(config: ModelConfig, tokens: int) -> Floats:
    """RoPE angles (tokens, head_dim / 2)."""
    half = config.head_dim // 2
    inverse = config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    return np.arange(tokens, dtype=np.float64)[:, None] * inverse


def normed(x: Floats, weight: Floats, epsilon: float) -> Floats:
    """RMSNorm."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight


def turned(x: Floats, angle: Floats) -> Floats:
    """RoPE on (tokens, heads, head_dim)."""
    a, b = np.split(x, 2, axis=-1)
    cosine, sine = np.cos(angle)[:, None], np.sin(angle)[:, None]
    return np.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)


def forward(model: Checkpoint, tokens: NDArray[np.integer], record: Record) -> Floats:
    """See `Checkpoint.__call__`."""
    c, w = model.config, model.weights
    angle = angles(c, len(tokens))
    x = w["embed"][tokens]
    record("stream", x)
    for i in range(c.num_hidden_layers):
        x = x + attention(model, f"layers.{i}", x, angle, record)
        record("stream", x)
        x = x + mlp(model, f"layers.{i}", x, record)
        record("stream", x)
    h = normed(x, w["norm"], c.rms_norm_eps)
    record("norm", h)
    return h @ w["embed" if c.tie_word_embeddings else "head"].T


def attention(model: Checkpoint, name: str, x: Floats, angle: Floats, record: Record) -> Floats:
    """Causal grouped-query attention."""
    c, w = model.config, model.weights
    tokens = len(x)
    h = normed(x, w[f"{name}.attention_norm"], c.rms_norm_eps)
    q = turned((h @ w[f"{name}.q"].T).reshape(tokens, -1, c.head_dim), angle)
    k = turned((h @ w[f"{name}.k"].T).reshape(tokens, -1, c.head_dim), angle)
    v = (h @ w[f"{name}.v"].T).reshape(tokens, -1, c.head_dim)
    group = c.num_attention_heads // c.num_key_value_heads
    scores = np.einsum("thd,shd->hts", q, np.repeat(k, group, axis=1)) / np.sqrt(c.head_dim)
    scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mean = np.einsum("hts,shd->thd", weights, np.repeat(v, group, axis=1)).reshape(tokens, -1)
    for part, value in (("attention_norm", h), ("q", q), ("k", k), ("v", v), ("mean", mean)):
        record(f"{name}.{part}", value.reshape(tokens, -1))
    return mean @ w[f"{name}.o"].T


def mlp(model: Checkpoint, name: str, x: Floats, record: Record) -> Floats:
    """SwiGLU."""
    w = model.weights
    h = normed(x, w[f"{name}.mlp_norm"], model.config.rms_norm_eps)
    gate, up = h @ w[f"{name}.gate"].T, h @ w[f"{name}.up"].T
    product = gate / (1 + np.exp(-gate)) * up
    for part, value in (("mlp_norm", h), ("gate", gate), ("up", up), ("product", product)):
        record(f"{name}.{part}", value)
    return product @ w[f"{name}.down"].T
