"""What the caches of one problem hold: for each role a main cache, and a shadow that reads on beside it.

Two guesses about the next step are worked on at once: the draft goes on from its own step, and reads the target's while
that is written. Each needs a cache. Whichever turns out to hold more of what is wanted next becomes the main one: that
is the swap, and it moves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.workflow import RoleName


@dataclass
class Held:
    """One cache: its sequence's name, and the tokens in it."""

    sequence: str
    tokens: list[int]

    def covers(self, wanted: Sequence[int]) -> int:
        """How many tokens of `wanted` it begins with."""
        return common_prefix(self.tokens, wanted)


@dataclass(frozen=True)
class Reading:
    """Where a piece of work reads, and what: see `planner.runtime.backend.Work`."""

    sequence: str
    keep: int
    feed: tuple[int, ...]
    copy_of: str = ""


class Caches:
    """The caches of a problem by role. It says what work has to read, and believes that the work is done."""

    def __init__(self, slot: str) -> None:
        """Sequences are named after the slot that the problem has among those that are worked on at once."""
        self._slot = slot
        self._main: dict[RoleName, Held] = {}
        self._shadow: dict[RoleName, Held] = {}

    def __contains__(self, role: RoleName) -> bool:
        """Whether a role has read anything."""
        return role in self._main

    def hold(self, role: RoleName, wanted: Sequence[int]) -> bool:
        """Whether either cache of a role holds all of `wanted`, and perhaps more."""
        found = (cache.get(role) for cache in (self._main, self._shadow))
        return any(held is not None and held.covers(wanted) == len(wanted) for held in found)

    def read(self, role: RoleName, wanted: Sequence[int]) -> Reading:
        """Let the main cache hold `wanted` and nothing else. The shadow is the main one from now on if it holds more
        of it."""
        main = self._main.setdefault(role, Held(self._slot, []))
        shadow = self._shadow.get(role)
        if shadow is not None and shadow.covers(wanted) > main.covers(wanted):
            self._main[role], self._shadow[role] = shadow, main
            main = shadow
        return _filled(main, wanted)

    def read_beside(self, role: RoleName, wanted: Sequence[int]) -> Reading:
        """Let the shadow hold `wanted`, and the main cache, which must be there, what it holds. The shadow begins as
        a copy where the main one holds more of it."""
        main = self._main[role]
        other = f"{self._slot}.shadow" if main.sequence == self._slot else self._slot
        shadow = self._shadow.setdefault(role, Held(other, []))
        if main.covers(wanted) <= shadow.covers(wanted):
            return _filled(shadow, wanted)
        shadow.tokens = list(main.tokens)
        return _filled(shadow, wanted, main.sequence)

    def append(self, role: RoleName, sequence: str, tokens: Sequence[int]) -> None:
        """Tokens were written behind what a sequence holds."""
        held = next(c[role] for c in (self._main, self._shadow) if role in c and c[role].sequence == sequence)
        held.tokens += tokens

    def forget(self, role: RoleName) -> None:
        """The caches of a role are lost."""
        self._main.pop(role, None)
        self._shadow.pop(role, None)


def _filled(held: Held, wanted: Sequence[int], copy_of: str = "") -> Reading:
    keep = held.covers(wanted)
    held.tokens = list(wanted)
    return Reading(held.sequence, keep, tuple(wanted[keep:]), copy_of)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two lists begin alike; by bisection, for lists compare fast."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low
