"""The files of a checkpoint's weights, one or many. Imports no jax."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from planner.errors import UserError


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
