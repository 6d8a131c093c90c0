"""Keys and values in the core's memory and as they are handed over."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpga_backend.cache_rows import read_rows, write_rows
from fpga_backend.core import Core
from fpga_backend.program import cache_plan
from models_jax.integer.files import Shape

powers = st.sampled_from


@given(powers([16, 32, 64]), powers([1, 2, 4]), st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.data())
@settings(max_examples=60, deadline=None)
def test_rows_lie_where_the_layout_says(lanes, engines, layers, heads, units, data) -> None:
    core = Core(lanes=lanes, engines=engines, context=128)
    dim = 8 * units * engines
    shape = Shape(20, 16, 16, layers, heads, heads, dim, 96, True)
    context = data.draw(st.integers(1, 96))
    tokens = data.draw(st.integers(1, context))
    plan = cache_plan(shape, core, context)
    rng = np.random.default_rng(tokens)
    rows = rng.integers(-128, 128, (layers, 2, tokens, heads, dim)).astype(np.int8)
    memory = rng.integers(0, 256, (engines, plan.total, lanes)).astype(np.uint8)
    before = memory.copy()
    write_rows(memory, plan, core, shape, rows)
    assert np.array_equal(read_rows(memory, plan, core, shape, tokens), rows)
    # Byte by byte, as `CachePlan` describes it.
    slot, layer, head, channel = (data.draw(st.integers(0, n - 1)) for n in (tokens, layers, heads, dim))
    key = layer * plan.layer + head * plan.key_head + slot // engines * plan.key_beats + channel // lanes
    assert memory[slot % engines, key, channel % lanes].view(np.int8) == rows[layer, 0, slot, head, channel]
    value = layer * plan.layer + plan.value_start + head * plan.value_head
    value += slot // lanes * plan.value_unit + channel // engines
    assert memory[channel % engines, value, slot % lanes].view(np.int8) == rows[layer, 1, slot, head, channel]
    # Nothing else is touched: each byte of the rows has one place.
    assert (memory != before).sum() <= rows.size


def test_fewer_rows_leave_the_later_slots_alone() -> None:
    core, shape = Core(lanes=16, engines=2, context=64), Shape(20, 16, 16, 2, 2, 1, 16, 64, True)
    plan = cache_plan(shape, core, 48)
    memory = np.zeros((2, plan.total, 16), np.uint8)
    rng = np.random.default_rng(0)
    whole = rng.integers(-128, 128, (2, 2, 40, 1, 16)).astype(np.int8)
    write_rows(memory, plan, core, shape, whole)
    few = rng.integers(-128, 128, (2, 2, 21, 1, 16)).astype(np.int8)
    write_rows(memory, plan, core, shape, few)
    found = read_rows(memory, plan, core, shape, 40)
    assert np.array_equal(found[:, :, :21], few) and np.array_equal(found[:, :, 21:], whole[:, :, 21:])
    with pytest.raises(ValueError):
        write_rows(memory, plan, core, shape, whole[:, :, :, :, :8])
