"""Random checkpoints that transformers makes, and what torch computes with them: the reference for ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.modeling_utils import PreTrainedModel

CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
"""With 32 original positions some frequencies of a head of 16 are high, some low, one between."""
VOCABULARY = 67


def config(kind: str, scaling: str = "default", group: int = 2, **changes: Any) -> Any:
    """Two layers, eight heads of 16, so that their width is not the hidden one."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8 // group,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": scaling, "rope_theta": 10_000.0} | SCALINGS[scaling],
        "eos_token_id": None,
        "bos_token_id": None,
    }
    return CONFIGS[kind](**(shape | changes))


def randomise(model: torch.nn.Module, seed: int) -> None:
    """All parameters random, norms and biases too, at a size that gives logits some units wide."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            draw = torch.randn(value.shape, generator=generator)
            if value.dim() == 1:
                value.copy_(0.1 * draw + ("norm" in name))
            else:
                value.copy_(draw * (1.0 if "embed" in name else value.shape[1] ** -0.5))


def write(folder: Path, made: Any, seed: int = 0) -> PreTrainedModel:
    """A random causal model of configuration `made`, saved as transformers saves it."""
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager", dtype=torch.float32).eval()
    randomise(model, seed)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def logits(model: Any, tokens: list[int]) -> np.ndarray:
    """(tokens, vocabulary) float32 of a plain forward pass."""
    return model(torch.tensor([tokens])).logits[0].float().numpy()


@torch.no_grad()
def hidden(model: Any, tokens: list[int]) -> torch.Tensor:
    """(tokens, hidden) after the last norm."""
    return model.model(torch.tensor([tokens])).last_hidden_state[0]


def greedy(model: Any, prompt: list[int], count: int, unsure: float = 1e-3) -> list[int]:
    """Up to `count` greedy tokens, up to where the two best logits are closer than `unsure`."""
    tokens = list(prompt)
    for _ in range(count):
        last = logits(model, tokens)[-1]
        second, first = np.sort(last)[-2:]
        if first - second < unsure:
            break
        tokens.append(int(last.argmax()))
    return tokens[len(prompt) :]
