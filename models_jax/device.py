"""Which JAX device a backend runs on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax

from planner.errors import UserError

Device: TypeAlias = Any
"""A `jax.Device`, which type checkers take for a variable."""

OPTIONS = ("platform", "devices")


def choose_devices(options: Mapping[str, str]) -> tuple[Device, ...]:
    """The devices of `platform` (cpu, gpu; default is JAX's own choice) whose indices `devices` lists: by default 0.

    Several, such as "0,1", compute roles together whose `numerics.tensor_parallel` asks for it.
    """
    for key in options:
        if key not in OPTIONS:
            raise UserError(f"the jax backend has no option {key!r}", mend=f"use {' or '.join(OPTIONS)}")
    platform, listed = options.get("platform"), options.get("devices", "0").split(",")
    try:
        devices = jax.devices(platform)
    except RuntimeError:
        raise UserError(
            f"JAX finds no platform {platform!r}", mend="use cpu, or install heteroreason[gpu] on a machine with a GPU"
        ) from None
    for index in listed:
        if not index.isdecimal() or int(index) >= len(devices):
            raise UserError(f"JAX has {len(devices)} such devices, none of index {index!r}", mend="use a lower index")
    if len(set(listed)) < len(listed):
        raise UserError(f"devices is {','.join(listed)!r}", mend="name each device once")
    return tuple(devices[int(index)] for index in listed)
