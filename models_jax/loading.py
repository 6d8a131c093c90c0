"""Decoders from checkpoints: safetensors in Hugging Face layout or a GGUF file, and back to safetensors.

Weights are read through memory maps, in blocks of rows that are cast as they come, the largest tensor first. So the
host never holds much more than the weights themselves.
"""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from models_jax.config import ModelConfig
from models_jax.device import Device
from models_jax.int8_weights import quantise
from models_jax.names import Tensor, tensors, unused
from models_jax.transformer import Decoder
from models_jax.weight_files import Weights, open_weights
from planner.errors import UserError

BLOCK_BYTES = 2 << 20
"""Rows are read in blocks of at most this size, counted in float32; at least one row."""

MISMATCH = "check that config.json and the weights belong together"

Flat = dict[tuple[str | int, ...], jax.Array]
"""Parameters by their path in the decoder."""


def load_checkpoint(
    folder: Path, dtype: Any = jnp.float32, device: Device = None, *, int8_weights: bool = False
) -> tuple[ModelConfig, Decoder]:
    """The decoder in `folder`, its weights cast to `dtype`, or its matrices rounded to int8, and put on `device`.

    Raises UserError that names a tensor that is missing, misshapen or has no place.
    """
    config = replace(ModelConfig.from_folder(folder), int8_weights=int8_weights)
    weights = open_weights(folder, config)
    table = tensors(config)
    _check(weights, table, config, folder)
    loaded: Flat = {}
    for tensor in sorted(table, key=lambda t: prod(t.shape), reverse=True):
        if int8_weights and tensor.matrix:
            _add_rounded(weights, tensor, loaded, device)
        else:
            _add_cast(weights, tensor, dtype, loaded, device)
    graph, _ = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
    return config, nnx.merge(graph, nnx.from_flat_state([(path, nnx.Param(value)) for path, value in loaded.items()]))


def save_checkpoint(folder: Path, config: ModelConfig, model: Decoder) -> None:
    """Write config.json and model.safetensors; the tokenizer is the caller's."""
    folder.mkdir(parents=True, exist_ok=True)
    state = dict(nnx.to_flat_state(nnx.state(model)))
    values = {}
    for tensor in tensors(config):
        value = np.asarray(state[tensor.path][...])
        values[tensor.name] = np.ascontiguousarray(value.T if tensor.transposed else value)
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n")


def _check(weights: Weights, table: list[Tensor], config: ModelConfig, folder: Path) -> None:
    """Compare the files' tensors with the table before any of them is read."""
    expected = {tensor.name: tensor for tensor in table}
    for name in weights:
        if name not in expected and not unused(name, config):
            raise UserError(
                f"tensor {name} has no place in a {config.model_type} model of this config.json",
                where=str(weights.path(name)),
                mend=MISMATCH,
            )
    missing = [name for name in expected if name not in weights]
    if missing:
        raise UserError(
            f"tensor {missing[0]} is missing ({len(missing)} in all)",
            where=str(folder),
            mend=MISMATCH,
        )
    for tensor in table:
        shape = weights.shape(tensor.name)
        if shape != tensor.shape:
            raise UserError(
                f"tensor {tensor.name} has shape {shape}, config.json asks for {tensor.shape}",
                where=str(weights.path(tensor.name)),
                mend=MISMATCH,
            )


def _blocks(tensor: Tensor) -> list[slice]:
    """Slices of rows."""
    rows, size = tensor.shape[0], 4 * prod(tensor.shape[1:])
    step = max(1, BLOCK_BYTES // size)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _add_cast(weights: Weights, tensor: Tensor, dtype: Any, loaded: Flat, device: Device) -> None:
    value = np.empty(tensor.shape[::-1] if tensor.transposed else tensor.shape, dtype)
    for rows, block in weights.read(tensor.name, _blocks(tensor)):
        value[(..., rows) if tensor.transposed else rows] = block.T if tensor.transposed else block
    loaded[tensor.path] = _put(value, device)


def _add_rounded(weights: Weights, tensor: Tensor, loaded: Flat, device: Device) -> None:
    value, scale = np.empty(tensor.shape, np.int8), np.empty(tensor.shape[0], np.float32)
    for rows, block in weights.read(tensor.name, _blocks(tensor)):
        value[rows], scale[rows] = quantise(block)
    loaded[tensor.path] = _put(value, device)
    loaded[tensor.scale_path] = _put(scale, device)


def _put(value: np.ndarray, device: Device) -> jax.Array:
    # Waiting for the copy keeps the number of host buffers at one.
    return jax.block_until_ready(jax.device_put(value, device))
