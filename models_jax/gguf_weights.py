"""The tensors of a GGUF file under their Hugging Face names. Imports no jax; needs the package gguf."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from models_jax.config import ModelConfig
from planner.errors import UserError

if TYPE_CHECKING:
    from gguf import GGUFReader

TURNED = ("llama", "mistral")
"""Families whose q and k rows llama.cpp reorders, so that RoPE pairs neighbours where transformers pairs halves."""
EXTRA = ("rope_freqs.weight",)
"""Tensors that hold no weights; see `models_jax.gguf_folder` for what is read from them."""


class _Place(NamedTuple):
    kind: Any
    """`gguf.GGMLQuantizationType`."""
    shape: tuple[int, ...]
    offset: int
    size: int


class GgufWeights:
    """Tensors of one GGUF file, dequantised block by block."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        """Read the header of the file, which must hold a model of this configuration."""
        self._file = path
        self._places: dict[str, _Place] = {}
        names = hugging_face_names(config)
        for tensor in open_gguf(path).tensors:
            if tensor.name not in EXTRA:
                shape = tuple(int(n) for n in reversed(tensor.shape))
                name = names.get(tensor.name, tensor.name)
                self._places[name] = _Place(tensor.tensor_type, shape, int(tensor.data_offset), int(tensor.n_bytes))
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        self._heads = heads if config.model_type in TURNED else {}

    def __iter__(self) -> Iterator[str]:
        """See `models_jax.weight_files.Weights`."""
        return iter(self._places)

    def __contains__(self, name: str) -> bool:
        """See `models_jax.weight_files.Weights`."""
        return name in self._places

    def path(self, name: str) -> Path:
        """See `models_jax.weight_files.Weights`."""
        return self._file

    def shape(self, name: str) -> tuple[int, ...]:
        """See `models_jax.weight_files.Weights`."""
        return self._places[name].shape

    def read(self, name: str, blocks: Sequence[slice]) -> Iterator[tuple[slice, np.ndarray]]:
        """See `models_jax.weight_files.Weights`. A map of the file lasts as long as a block is read."""
        from gguf import dequantize

        place = self._places[name]
        rows = place.shape[0]
        order = self._order(name, rows)
        for block in blocks:
            raw = np.memmap(self._file, np.uint8, "r", place.offset, (rows, place.size // rows))
            packed = np.asarray(raw[order[block]])
            del raw
            try:
                numbers = dequantize(packed, place.kind)
            except NotImplementedError:
                raise UserError(
                    f"tensor {name} is of type {place.kind.name}, which is not supported",
                    where=str(self._file),
                    mend="use a file of a common quantisation such as Q8_0 or Q4_K_M",
                ) from None
            yield block, numbers.reshape((-1, *place.shape[1:]))

    def _order(self, name: str, rows: int) -> np.ndarray:
        """Row of the file for each row that transformers has."""
        heads = self._heads.get(name.split(".")[-2])
        if heads is None:
            return np.arange(rows)
        return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).ravel()


def hugging_face_names(config: ModelConfig) -> dict[str, str]:
    """Name in Hugging Face layout of each tensor that a GGUF file of this configuration may hold."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    from models_jax.names import tensors

    kind = {"qwen2": MODEL_ARCH.QWEN2, "qwen3": MODEL_ARCH.QWEN3}.get(config.model_type, MODEL_ARCH.LLAMA)
    table = get_tensor_name_map(kind, config.num_hidden_layers)
    names = {}
    for tensor in tensors(config):
        theirs = table.get_name(tensor.name, (".weight", ".bias"))
        if theirs is not None:
            names[theirs] = tensor.name
    return names


def open_gguf(path: Path) -> GGUFReader:
    """A reader of the file's header. Raises UserError if the file or the package cannot be used."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UserError(
            "GGUF files need the package gguf", where=str(path), mend="pip install 'heteroreason[gguf]'"
        ) from None
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, OSError, KeyError, UnicodeDecodeError) as bad:
        raise UserError(f"the file is damaged ({bad})", where=str(path), mend="download the file again") from None
