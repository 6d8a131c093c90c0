"""Quantities with units in files: `24 GiB`, `936 GB/s`, `71 TFLOP/s`, `5 us`, `350 W`, or a number in the base unit."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BYTES |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
BYTES_PER_S = {f"{unit}/s": factor for unit, factor in BYTES.items()}
PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
OPS_PER_S = {f"{prefix}{op}/s": by for op in ("OP", "FLOP") for prefix, by in PREFIXES.items()}
MICROSECONDS = {"us": 1, "ns": 1e-3, "ms": 10**3, "s": 10**6}
WATTS = {"W": 1, "mW": 1e-3, "kW": 10**3}

_QUANTITY = re.compile(r"([-+]?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,2})?) ?([A-Za-z/]+)")


def quantity(text: str, units: Mapping[str, float], example: str) -> float:
    """The number of base units in `text`. Raises ValueError with the mend.

    >>> quantity("1.5 GB/s", BYTES_PER_S, "936 GB/s")
    1500000000.0
    """
    match = _QUANTITY.fullmatch(text.strip())
    if not match:
        raise ValueError(f"use a number and a unit, such as {example}")
    number, unit = match.groups()
    if unit not in units:
        raise ValueError(f"use one of the units {', '.join(units)}, as in {example}")
    return float(number) * units[unit]


def _reader(units: Mapping[str, float], example: str, whole: bool = False) -> Callable[[Any], Any]:
    """What pydantic calls before its own checks: text becomes a number, all else stays."""

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        number = quantity(value, units, example)
        return round(number) if whole else number

    return read


Bytes = Annotated[int, BeforeValidator(_reader(BYTES, "24 GiB", whole=True))]
BytesPerSecond = Annotated[float, BeforeValidator(_reader(BYTES_PER_S, "936 GB/s"))]
OpsPerSecond = Annotated[float, BeforeValidator(_reader(OPS_PER_S, "71 TFLOP/s"))]
Microseconds = Annotated[float, BeforeValidator(_reader(MICROSECONDS, "5 us"))]
Watts = Annotated[float, BeforeValidator(_reader(WATTS, "350 W"))]
