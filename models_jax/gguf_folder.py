"""A folder in Hugging Face layout for a GGUF file: its configuration, tokenizer and chat template written out once.

The weights stay in the file, which the folder links to as `model.gguf`. The folders lie in
`$XDG_CACHE_HOME/heteroreason/gguf`, by default under `~/.cache`; deleting them is harmless.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from models_jax.gguf_weights import open_gguf
from models_jax.rope import RopeScaling, inverse_frequencies
from planner.errors import UserError
from planner.user_cache import user_cache

if TYPE_CHECKING:
    from gguf import GGUFReader

FORMAT = 1
"""Raised when the folders are written in another way, so that old ones are left alone."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What the Llama 3 models use. A file holds the resulting factors alone, which are checked against these."""


def find(model: str, where: str = "") -> Path:
    """The folder for the file `model`, made if it is not there. Raises UserError; `where` names who asks."""
    path = Path(model).expanduser()
    if not path.is_file():
        raise UserError(f"there is no file {model}", where=where, mend="name a GGUF file")
    path = path.resolve()
    state = path.stat()
    key = hashlib.sha256(f"{FORMAT}\0{path}\0{state.st_size}\0{state.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = user_cache("gguf") / f"{path.stem}-{key}"
    if not (folder / "config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = Path(scratch) / "made"
            write_folder(path, made)
            _publish(made, folder)
    return folder


def write_folder(path: Path, folder: Path) -> None:
    """Write configuration and tokenizer of a GGUF file to a new `folder`, and link the file there."""
    from transformers import AutoConfig, AutoTokenizer

    reader = open_gguf(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name).to_dict()
    except Exception as bad:  # the library raises many kinds
        raise UserError(
            f"transformers cannot read its configuration or tokenizer ({bad})",
            where=str(path),
            mend="use the model in Hugging Face layout",
        ) from None
    tokenizer.save_pretrained(folder)
    head = _value(reader, f"{_value(reader, 'general.architecture')}.attention.key_length")
    if head is not None:
        config["head_dim"] = int(head)
    config["tie_word_embeddings"] = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config["rope_parameters"] = _rope(reader, config, path)
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": _ends(reader)}) + "\n")
    (folder / "model.gguf").symlink_to(path)


def _publish(made: Path, folder: Path) -> None:
    """Move a finished folder to its place, unless another process was first."""
    try:
        made.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)


def _value(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _ends(reader: GGUFReader) -> list[int]:
    found = (_value(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return sorted({int(i) for i in found if i is not None})


def _rope(reader: GGUFReader, config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """`rope_parameters`, with the scaling that transformers does not take from a GGUF file."""
    family = _value(reader, "general.architecture")
    theta = float(_value(reader, f"{family}.rope.freq_base") or 10_000.0)
    plain = {"rope_theta": theta, "rope_type": "default"}
    kind = _value(reader, f"{family}.rope.scaling.type") or "none"
    if kind != "none":
        return plain | {"rope_type": kind, "factor": float(_value(reader, f"{family}.rope.scaling.factor") or 1.0)}
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            return {"rope_theta": theta} | _llama3(np.asarray(tensor.data), theta, config, path).to_dict()
    return plain


def _llama3(divisors: np.ndarray, theta: float, config: Mapping[str, Any], path: Path) -> RopeScaling:
    """The llama3 scaling whose divisors of the frequencies are those of the file."""
    scaling = RopeScaling("llama3", float(divisors.max()), **LLAMA3)
    head = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    expected = inverse_frequencies(head, theta, None) / inverse_frequencies(head, theta, scaling)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise UserError(
            "rope_freqs.weight is not the scaling of a Llama 3 model", where=str(path), mend="use another model"
        )
    return scaling
