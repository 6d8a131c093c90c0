"""Writing a trained model as a folder in Hugging Face layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from models_jax.config import ModelConfig
from models_jax.transformer import Decoder
from planner.problems.vocabulary import EOS, ID, PAD, RESERVED

HEAD_NAMES = {"score.inner": "score.0", "score.outer": "score.2"}


def tensors(model: Decoder) -> dict[str, np.ndarray]:
    """All weights under their Hugging Face names, linear kernels as (out, in)."""
    named: dict[str, np.ndarray] = {}
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name, value = _name(path), np.asarray(leaf[...], np.float32)
        named[name] = np.ascontiguousarray(value.T) if path[-1] == "kernel" else value
    return named


def _name(path: tuple[object, ...]) -> str:
    *modules, last = (str(part) for part in path)
    module = ".".join(modules)
    if module in HEAD_NAMES or module == "lm_head":
        module = HEAD_NAMES.get(module, module)
    else:
        module = "model." + module
    return f"{module}.{'bias' if last == 'bias' else 'weight'}"


def assign(model: Decoder, named: dict[str, np.ndarray]) -> None:
    """Put weights under their Hugging Face names into `model`: the inverse of `tensors`."""
    state = nnx.state(model, nnx.Param)
    for path, leaf in nnx.to_flat_state(state):
        value = named[_name(path)]
        leaf[...] = value.T if path[-1] == "kernel" else value
    nnx.update(model, state)


def load(folder: Path) -> Decoder:
    """The model that `export` wrote."""
    model = Decoder(ModelConfig.from_folder(folder), nnx.Rngs(0))
    assign(model, load_file(folder / "model.safetensors"))
    return model


def tokenizer() -> Tokenizer:
    """One token a character, no normalisation, nothing added; round-trips every text in its alphabet."""
    made = Tokenizer(models.WordLevel(vocab=dict(ID), unk_token=None))
    made.pre_tokenizer = pre_tokenizers.Split(pattern="", behavior="isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in (PAD, EOS, *RESERVED)])
    return made


def configuration(config: ModelConfig) -> dict[str, object]:
    """`config.json` as transformers writes it for Llama."""
    architecture = "LlamaForProcessRewardModel" if config.reward_head else "LlamaForCausalLM"
    return {
        "architectures": [architecture],
        "model_type": config.model_type,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": ID[EOS],
        "pad_token_id": ID[PAD],
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "mlp_bias": False,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": "float32",
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def export(model: Decoder, folder: Path, card: str) -> None:
    """Write config, weights, tokenizer, generation settings and the model card to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "model.safetensors"
    save_file(tensors(model), weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    tokenizer().save(str(folder / "tokenizer.json"))
    _write(folder / "config.json", configuration(model.config))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": PAD,
            "eos_token": EOS,
            "clean_up_tokenization_spaces": False,
            "model_max_length": model.config.max_position_embeddings,
        },
    )
    _write(
        folder / "generation_config.json",
        {"do_sample": False, "eos_token_id": ID[EOS], "pad_token_id": ID[PAD], "max_new_tokens": 200},
    )
    (folder / "README.md").write_text(card)


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
