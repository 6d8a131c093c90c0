"""Ctrl-C and SIGTERM to the command: the first ends what runs, and a second finds that on its way."""

from __future__ import annotations

import signal
from collections.abc import Mapping

STOPS = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and what asks a process to end."""


def hear() -> Mapping[signal.Signals, object]:
    """Hear the next signal, though one may have been heard before. Gives the handlers from before."""
    return {number: signal.signal(number, _stopped) for number in STOPS}


def hear_no_more(before: Mapping[signal.Signals, object]) -> None:
    """Put the handlers from before back."""
    for number, handler in before.items():
        signal.signal(number, handler)  # pyright: ignore[reportArgumentType] - what signal.signal gave


def _stopped(number: int, frame: object) -> None:
    """End processes and close files, and exit with the code of the signal. A search for a plan answers Ctrl-C with the
    best that it has."""
    for each in STOPS:
        signal.signal(each, signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)
