"""Decoders from checkpoints in Hugging Face layout, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from models_jax.config import ModelConfig
from models_jax.device import Device
from models_jax.names import Tensor, tensors, unused
from models_jax.transformer import Decoder
from models_jax.weight_files import weight_files
from planner.errors import UserError


def load_checkpoint(folder: Path, dtype: Any = jnp.float32, device: Device = None) -> tuple[ModelConfig, Decoder]:
    """The decoder in `folder`, its weights cast to `dtype` and put on `device`, one tensor at a time."""
    config = ModelConfig.from_folder(folder)
    expected = {tensor.name: tensor for tensor in tensors(config)}
    loaded: dict[tuple[str | int, ...], jax.Array] = {}
    for path in weight_files(folder):
        try:
            _read_file(path, expected, config, loaded, dtype, device)
        except SafetensorError as bad:
            raise UserError(f"the file is damaged ({bad})", where=str(path), mend="download the file again") from None
    missing = [tensor.name for tensor in expected.values() if tensor.path not in loaded]
    if missing:
        raise UserError(
            f"tensor {missing[0]} is missing ({len(missing)} in all)",
            where=str(folder),
            mend="check that config.json and the weights belong together",
        )
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


def _read_file(
    path: Path,
    expected: dict[str, Tensor],
    config: ModelConfig,
    loaded: dict[tuple[str | int, ...], jax.Array],
    dtype: Any,
    device: Device,
) -> None:
    """Add the tensors of one safetensors file to `loaded`, keyed by their path in the decoder."""
    with safe_open(path, "np") as file:
        for name in file.keys():  # noqa: SIM118 (it is no mapping)
            tensor = expected.get(name)
            if tensor is not None:
                value = _checked(file.get_tensor(name), tensor, path)
                value = value.T if tensor.transposed else value
                loaded[tensor.path] = jax.device_put(value.astype(dtype), device)
            elif not unused(name, config):
                raise UserError(
                    f"tensor {name} has no place in a {config.model_type} model of this config.json",
                    where=str(path),
                    mend="check that config.json and the weights belong together",
                )


def _checked(value: np.ndarray, tensor: Tensor, path: Path) -> np.ndarray:
    if value.shape != tensor.shape:
        raise UserError(
            f"tensor {tensor.name} has shape {value.shape}, config.json asks for {tensor.shape}",
            where=str(path),
            mend="check that config.json and the weights belong together",
        )
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise UserError(
            f"tensor {tensor.name} is {value.dtype}, not floating point",
            where=str(path),
            mend="use a checkpoint that is not quantised",
        )
    return value
