"""Where a model's files are, and what can be told of it without loading: its configuration and its hash."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from planner.errors import UserError

GROUP = "heteroreason.models"
"""Entry points: a prefix such as `zoo` and the function that gives the folder of its models."""

FINDERS = "heteroreason.finders"
"""Entry points: a prefix such as `hub`, or the end of a file's name such as `gguf`, and a function that takes the model
as it was asked for and where, and gives a folder in Hugging Face layout."""

FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""Files that a model's hash covers, beside all of its weights."""
WEIGHTS = ("*.safetensors", "*.gguf")


def model_folder(model: str, where: str = "") -> Path:
    """The folder of `PREFIX/NAME` for a registered prefix, of a file of a registered kind, else of a path.

    Raises UserError that names `where` the model was asked for.
    """
    prefix, _, name = model.partition("/")
    shelves = {entry.name: entry for entry in entry_points(group=GROUP)}
    if prefix in shelves and name:
        shelf: Path = shelves[prefix].load()()
        known = sorted(p.name for p in shelf.iterdir() if (p / "config.json").is_file())
        if name not in known:
            raise UserError(
                f"there is no model {model}",
                where=where,
                mend=f"use one of {', '.join(f'{prefix}/{k}' for k in known)}",
            )
        return shelf / name
    finders = {entry.name: entry for entry in entry_points(group=FINDERS)}
    for kind in (prefix if name else "", Path(model).suffix.removeprefix(".")):
        if kind in finders:
            return finders[kind].load()(model, where)
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"there is no folder {model}",
            where=where,
            mend="name a folder in Hugging Face layout, or zoo/draft, zoo/prm, zoo/target, or hub/OWNER/NAME",
        )
    return folder


def model_config(folder: Path) -> dict[str, Any]:
    """The content of the model's config.json."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError("has no config.json", where=str(folder), mend="name a folder in Hugging Face layout") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"not JSON ({error})", where=str(path), mend="download the file again") from None
    if not isinstance(raw, dict):
        raise UserError("is no JSON object", where=str(path), mend="download the file again")
    return raw


def model_hash(folder: Path) -> str:
    """16 hex digits over the names and contents of the model's files."""
    weights = [path for pattern in WEIGHTS for path in folder.glob(pattern)]
    there = [path for path in sorted([folder / f for f in FILES] + weights) if path.is_file()]
    return _hash_of(tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in there))


@lru_cache(maxsize=64)
def _hash_of(files: tuple[tuple[Path, int, int], ...]) -> str:
    """The hash of files; size and time say whether a file is still the one that was read before."""
    digest = hashlib.sha256()
    for path, _, _ in files:
        digest.update(path.name.encode())
        _add(digest, path)
    return digest.hexdigest()[:16]


def _add(digest: hashlib._Hash, path: Path) -> None:
    """Feed a file to the digest, a part at a time: weights may be larger than the memory."""
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
