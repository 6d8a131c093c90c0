"""The colours that all pictures share."""

from __future__ import annotations

from typing import NamedTuple


class Colours(NamedTuple):
    """Fill and line of a box."""

    fill: str
    line: str


OPS = {
    "PREFILL": Colours("#e3e8ef", "#64748b"),
    "DRAFT": Colours("#c9ecd8", "#1f8a57"),
    "VERIFY": Colours("#fce7b2", "#b27409"),
    "REFINE": Colours("#cfe0fb", "#2b62c4"),
    "BACKTRACK": Colours("#fbd3cb", "#c2412d"),
    "SYNC": Colours("#e4d7f8", "#7545ba"),
    "TRANSFER": Colours("#dcdcdc", "#5c5c5c"),
}
"""By op."""
OTHER = Colours("#eeeeee", "#777777")
"""For an op that is not known here."""
INK = "#1f2937"
FAINT_INK = "#6b7280"
PAPER = "#ffffff"
LANE = "#f6f8fa"
RULE = "#dfe4ea"
DATA = "#8793a5"
STREAM = "#7545ba"
ACCEPT = "#1f8a57"
REJECT = "#c2412d"
WASTED_OPACITY = 0.38


def of(op: str) -> Colours:
    """The colours of an op."""
    return OPS.get(op, OTHER)
