"""Keys and values as the core stores them, and as devices hand them over. The layout is `program.CachePlan`'s."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fpga_backend.core import Core
from fpga_backend.program import CachePlan
from models_jax.integer.files import Shape


def read_rows(memory: NDArray[np.uint8], plan: CachePlan, core: Core, shape: Shape, tokens: int) -> NDArray[np.int8]:
    """The first `tokens` slots of a cache: int8 (layers, 2, tokens, key heads, head_dim).

    `memory` (engines, beats, lanes) is what each engine has of it.
    """
    found = np.zeros((shape.num_hidden_layers, 2, tokens, shape.num_key_value_heads, shape.head_dim), np.uint8)
    for layer, head, engine in _parts(shape, core):
        keys, values = _views(memory[engine], plan, core, layer, head)
        mine = slice(engine, None, core.engines)
        slots = len(range(tokens)[mine])
        found[layer, 0, mine, head] = keys[:slots, : shape.head_dim]
        found[layer, 1, :, head, mine] = _by_slot(values)[:tokens]
    return found.view(np.int8)


def write_rows(memory: NDArray[np.uint8], plan: CachePlan, core: Core, shape: Shape, rows: NDArray[np.int8]) -> None:
    """The inverse of `read_rows`: fill the first slots of a cache."""
    new, tokens = np.ascontiguousarray(rows).view(np.uint8), rows.shape[2]
    for layer, head, engine in _parts(shape, core):
        keys, values = _views(memory[engine], plan, core, layer, head)
        mine = slice(engine, None, core.engines)
        part = new[layer, 0, mine, head]
        keys[: len(part), : shape.head_dim] = part
        by_slot = _by_slot(values).copy()
        by_slot[:tokens] = new[layer, 1, :, head, mine]
        values[:] = by_slot.reshape(len(values), core.lanes, -1).swapaxes(1, 2)


def _parts(shape: Shape, core: Core) -> Iterator[tuple[int, int, int]]:
    """(layer, key head, engine)."""
    yield from np.ndindex(shape.num_hidden_layers, shape.num_key_value_heads, core.engines)


def _views(
    memory: NDArray[np.uint8], plan: CachePlan, core: Core, layer: int, head: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The keys of a head in one engine (slots / engines, bytes), and the values (blocks, channels / engines, lanes)."""
    first = layer * plan.layer + head * plan.key_head
    keys = memory[first : first + plan.key_head].reshape(-1, plan.key_beats * core.lanes)
    first = layer * plan.layer + plan.value_start + head * plan.value_head
    return keys, memory[first : first + plan.value_head].reshape(-1, plan.value_unit, core.lanes)


def _by_slot(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Values (blocks, channels, lanes) as (slots, channels)."""
    return values.swapaxes(1, 2).reshape(-1, values.shape[1])
