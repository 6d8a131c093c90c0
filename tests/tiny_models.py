"""Random models of a few thousand weights with a tokenizer of one token a character, as folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from models_jax.config import ModelConfig, RewardHead
from models_jax.loading import save_checkpoint
from models_jax.transformer import Decoder

PAD, EOS = "<pad>", "<eos>"
DELIMITER = "\n"
TOKENS = (PAD, EOS, DELIMITER, " ", "+", "=", *"0123456789")
KINDS = ("llama", "qwen2", "qwen3")


def config(kind: str = "llama", *, tied: bool = False, reward: bool = False, **changes: Any) -> ModelConfig:
    """Two layers, grouped heads, a context of 96 tokens."""
    shape = {
        "vocab_size": len(TOKENS),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 96,
    }
    return ModelConfig(
        model_type=kind,
        tie_word_embeddings=tied,
        attention_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        reward_head=RewardHead.TWO_CLASS if reward else None,
        **(shape | changes),
    )


def tokenizer() -> Tokenizer:
    """Refuses no text itself: what it does not know it drops."""
    made = Tokenizer(models.WordLevel(vocab={token: i for i, token in enumerate(TOKENS)}))
    made.pre_tokenizer = pre_tokenizers.Split(pattern="", behavior="isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in (PAD, EOS)])
    return made


def random_model(shape: ModelConfig, seed: int = 0) -> Decoder:
    """All parameters random, norms and biases too; its logits are about 1 wide unless they are tied."""
    draw = np.random.default_rng(seed).standard_normal
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(shape, nnx.Rngs(0))))
    filled = []
    for path, leaf in nnx.to_flat_state(state):
        scale = {"kernel": leaf.shape[0] ** -0.5, "embedding": 1.0}.get(str(path[-1]), 0.1)
        value = draw(leaf.shape) * scale + (path[-1] == "weight")
        filled.append((path, nnx.Param(jnp.asarray(value, jnp.float32))))
    return nnx.merge(graph, nnx.from_flat_state(filled))


def write(folder: Path, shape: ModelConfig | None = None, seed: int = 0) -> Decoder:
    """Write a random model with its tokenizer to `folder`, and return it."""
    shape = shape or config()
    model = random_model(shape, seed)
    save_checkpoint(folder, shape, model)
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": TOKENS.index(EOS)}))
    return model


@nnx.jit
def full_hidden(model: Decoder, tokens: jax.Array) -> jax.Array:
    """Hidden states of a plain forward pass over `tokens` without a cache."""
    count = tokens.size
    mask = jnp.tril(jnp.ones((1, count, count), bool))
    return model.hidden(tokens[None], jnp.arange(count)[None], mask)[0][0]


@nnx.jit
def full_rewards(model: Decoder, tokens: jax.Array) -> jax.Array:
    """Rewards of a plain forward pass over `tokens` without a cache."""
    return model.reward(full_hidden(model, tokens))
