"""The tensors of a checkpoint's files, read block by block through memory maps. Imports no jax."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open

from planner.errors import UserError

if TYPE_CHECKING:
    from models_jax.config import ModelConfig

FLOATS = ("F64", "F32", "F16", "BF16")
"""Number types of safetensors that are read."""


class Weights(Protocol):
    """The tensors of a checkpoint under the names that Hugging Face gives them."""

    def __iter__(self) -> Iterator[str]:
        """The names of all tensors."""
        ...

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor `name`."""
        ...

    def path(self, name: str) -> Path:
        """The file that tensor `name` is in."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of tensor `name`; linear layers are (out, in)."""
        ...

    def read(self, name: str, blocks: Sequence[slice]) -> Iterator[tuple[slice, np.ndarray]]:
        """Each block of rows of tensor `name` and its numbers, floating point."""
        ...


def open_weights(folder: Path, config: ModelConfig) -> Weights:
    """The weights in `folder`. Raises UserError if there are none or a file is damaged."""
    gguf = folder / "model.gguf"
    if gguf.exists():
        from models_jax.gguf_weights import GgufWeights

        return GgufWeights(gguf, config)
    return SafetensorsWeights(weight_files(folder))


class SafetensorsWeights:
    """Tensors of safetensors files. A map lasts as long as a block is read, so that its pages do not pile up."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Read the headers of all files."""
        self._paths: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118 (it is no mapping)
                    self._paths[name] = path
                    self._shapes[name] = tuple(file.get_slice(name).get_shape())

    def __iter__(self) -> Iterator[str]:
        """See `Weights`."""
        return iter(self._paths)

    def __contains__(self, name: str) -> bool:
        """See `Weights`."""
        return name in self._paths

    def path(self, name: str) -> Path:
        """See `Weights`."""
        return self._paths[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Weights`."""
        return self._shapes[name]

    def read(self, name: str, blocks: Sequence[slice]) -> Iterator[tuple[slice, np.ndarray]]:
        """See `Weights`. Raises UserError for numbers that are not floating point."""
        path = self._paths[name]
        for rows in blocks:
            with _opened(path) as file:
                tensor = file.get_slice(name)
                if tensor.get_dtype() not in FLOATS:
                    raise UserError(
                        f"tensor {name} is {tensor.get_dtype()}, not floating point",
                        where=str(path),
                        mend="use a checkpoint that is not quantised",
                    )
                yield rows, tensor[rows]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "np") as file:
            yield file
    except SafetensorError as bad:
        raise UserError(f"the file is damaged ({bad})", where=str(path), mend="download the file again") from None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: one, or the shards that its index lists."""
    index = folder / "model.safetensors.index.json"
    names = _shards(index) if index.exists() else ["model.safetensors"]
    for name in names:
        if not (folder / name).is_file():
            raise UserError(
                f"no {name}", where=str(folder), mend="copy the weights in safetensors format to that folder"
            )
    return [folder / name for name in names]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`, or UserError."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as bad:
        raise UserError(f"cannot be read ({bad})", where=str(path), mend="download the file again") from None
    if not isinstance(raw, dict):
        raise UserError("not a JSON object", where=str(path), mend="download the file again")
    return raw


def _shards(index: Path) -> list[str]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise UserError("no weight_map", where=str(index), mend="download the file again")
    names = sorted({str(name) for name in places.values()})
    for name in names:
        if Path(name).name != name:
            raise UserError(f"shard {name!r} is not in the same folder", where=str(index), mend="use plain file names")
    return names
