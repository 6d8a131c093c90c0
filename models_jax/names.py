"""Which tensor of a Hugging Face checkpoint is which parameter of the decoder. The one table of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from models_jax.config import ModelConfig, RewardHead


class Tensor(NamedTuple):
    """One tensor of a checkpoint and its place in the decoder."""

    name: str
    """As in the safetensors file."""
    path: tuple[str | int, ...]
    """In the state of `models_jax.transformer.Decoder`."""
    shape: tuple[int, ...]
    """As in the file."""
    transposed: bool = False
    """The file keeps (out, in), the decoder (in, out), unless it is rounded to int8."""
    matrix: bool = False
    """Rows of it are output channels that `ModelConfig.int8_weights` rounds; `scale_path` has their scales."""

    @property
    def scale_path(self) -> tuple[str | int, ...]:
        """Place of the scales of a rounded matrix in the decoder."""
        return (*self.path[:-1], "scale")


def tensors(config: ModelConfig) -> list[Tensor]:
    """All tensors of a checkpoint of this shape."""
    c = config
    shape = (c.vocab_size, c.hidden_size)
    table = [Tensor("model.embed_tokens.weight", ("embed_tokens", "embedding"), shape, matrix=True)]
    for i in range(c.num_hidden_layers):
        table += _layer(c, i)
    table.append(Tensor("model.norm.weight", ("norm", "weight"), (c.hidden_size,)))
    if c.reward_head is RewardHead.TWO_CLASS:
        table += _linear("score.0", ("score", "inner"), c.hidden_size, c.hidden_size, bias=True, matrix=False)
        table += _linear("score.2", ("score", "outer"), c.hidden_size, 2, bias=True, matrix=False)
    elif c.reward_head is RewardHead.SCALAR:
        table += _linear("v_head.summary", ("score", "summary"), c.hidden_size, 1, bias=True, matrix=False)
    elif not c.tie_word_embeddings:
        table += _linear("lm_head", ("lm_head",), c.hidden_size, c.vocab_size)
    return table


def unused(name: str, config: ModelConfig) -> bool:
    """Whether `name` may stand in a checkpoint of this shape although nothing reads it."""
    own_head = config.reward_head in (RewardHead.TWO_CLASS, RewardHead.SCALAR)
    headless = config.tie_word_embeddings or own_head
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and headless)


def _layer(c: ModelConfig, i: int) -> Iterator[Tensor]:
    wide, narrow = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    name, path = f"model.layers.{i}", ("layers", i)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield Tensor(f"{name}.{norm}.weight", (*path, norm, "weight"), (c.hidden_size,))
    for kind, outer in (("q_proj", wide), ("k_proj", narrow), ("v_proj", narrow)):
        at = (*path, "self_attn", kind)
        yield from _linear(f"{name}.self_attn.{kind}", at, c.hidden_size, outer, bias=c.attention_bias)
    at = (*path, "self_attn", "o_proj")
    yield from _linear(f"{name}.self_attn.o_proj", at, wide, c.hidden_size, bias=c.output_bias)
    if c.qk_norm:
        for norm in ("q_norm", "k_norm"):
            yield Tensor(f"{name}.self_attn.{norm}.weight", (*path, "self_attn", norm, "weight"), (c.head_dim,))
    for kind in ("gate_proj", "up_proj"):
        yield from _linear(f"{name}.mlp.{kind}", (*path, "mlp", kind), c.hidden_size, c.intermediate_size)
    yield from _linear(f"{name}.mlp.down_proj", (*path, "mlp", "down_proj"), c.intermediate_size, c.hidden_size)


def _linear(
    name: str, path: tuple[str | int, ...], inner: int, outer: int, *, bias: bool = False, matrix: bool = True
) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (*path, "kernel"), (outer, inner), transposed=True, matrix=matrix)
    if bias:
        yield Tensor(f"{name}.bias", (*path, "bias"), (outer,))
