"""Which JAX device a backend runs on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax

from planner.errors import UserError

Device: TypeAlias = Any
"""A `jax.Device`, which type checkers take for a variable."""

OPTIONS = ("platform", "index")


def choose_device(options: Mapping[str, str]) -> Device:
    """The device that `platform` (cpu, gpu; default is JAX's own choice) and `index` among its devices name."""
    for key in options:
        if key not in OPTIONS:
            raise UserError(f"the jax backend has no option {key!r}", mend=f"use {' or '.join(OPTIONS)}")
    platform, index = options.get("platform"), options.get("index", "0")
    try:
        devices = jax.devices(platform)
    except RuntimeError:
        raise UserError(
            f"JAX finds no platform {platform!r}", mend="use cpu, or install heteroreason[gpu] on a machine with a GPU"
        ) from None
    if not index.isdecimal() or int(index) >= len(devices):
        raise UserError(f"JAX has {len(devices)} such devices, none of index {index!r}", mend="use a lower index")
    return devices[int(index)]
