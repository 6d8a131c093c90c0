"""The small interface of one loaded model, which the float and the integer runner share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from planner.runtime.backend import Handed, ModelInfo, Output, Work


class ModelRunner(Protocol):
    """One role's model, ready to run. The role is known, so names are left out."""

    info: ModelInfo

    def encode(self, text: str) -> tuple[int, ...]:
        """See `planner.runtime.backend.Backend.encode`."""
        ...

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """See `planner.runtime.backend.Backend.encode_prompt`."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """See `planner.runtime.backend.Backend.decode`."""
        ...

    def run(self, work: Work) -> Output:
        """Do one chunk."""
        ...

    def rewind(self, sequence: str, tokens: int) -> None:
        """Forget all but the first `tokens` tokens of the sequence."""
        ...

    def fork(self, sequence: str, new_sequence: str) -> None:
        """Make `new_sequence` a copy of a known sequence, in place of what it was."""
        ...

    def hand_over(self, sequence: str) -> Handed:
        """See `planner.runtime.backend.Backend.hand_over`."""
        ...

    def take_over(self, sequence: str, handed: Handed) -> None:
        """See `planner.runtime.backend.Backend.take_over`."""
        ...

    def close(self) -> None:
        """Free what is held; calling it twice is harmless."""
        ...
