"""What every backend does that has a runner for each role: it hands each call on to the role's own."""

from __future__ import annotations

from collections.abc import Sequence

from models_jax.runner import ModelRunner
from planner.runtime.backend import Handed, Output, Work


class RunnerBackend:
    """A backend but for `load`, which puts a role's runner into `_runners`."""

    def __init__(self) -> None:
        """No role is loaded."""
        self._runners: dict[str, ModelRunner] = {}

    def encode(self, name: str, text: str) -> tuple[int, ...]:
        """Token ids of `text` for role `name`."""
        return self._runner(name).encode(text)

    def encode_prompt(self, name: str, text: str) -> tuple[int, ...]:
        """Token ids of the prompt `text` for role `name`."""
        return self._runner(name).encode_prompt(text)

    def decode(self, name: str, tokens: Sequence[int]) -> str:
        """Text of `tokens` of role `name`."""
        return self._runner(name).decode(tokens)

    def run(self, work: Work) -> Output:
        """Do one chunk."""
        return self._runner(work.role).run(work)

    def rewind(self, name: str, sequence: str, tokens: int) -> None:
        """Forget all but the first `tokens` tokens of a sequence; with 0 its cache is freed."""
        self._runner(name).rewind(sequence, tokens)

    def fork(self, name: str, sequence: str, new_sequence: str) -> None:
        """Make `new_sequence` a copy of a known sequence, in place of what it was."""
        self._runner(name).fork(sequence, new_sequence)

    def hand_over(self, name: str, sequence: str) -> Handed:
        """What a known sequence of a role that writes holds."""
        return self._runner(name).hand_over(sequence)

    def take_over(self, name: str, sequence: str, handed: Handed) -> None:
        """Make a sequence of a role that writes what another device has handed over."""
        self._runner(name).take_over(sequence, handed)

    def unload(self, name: str) -> None:
        """Free a role's model and sequences, if it is loaded."""
        runner = self._runners.pop(name, None)
        if runner is not None:
            runner.close()

    def close(self) -> None:
        """Free all models; calling it twice is harmless."""
        for runner in self._runners.values():
            runner.close()
        self._runners.clear()

    def _runner(self, name: str) -> ModelRunner:
        runner = self._runners.get(name)
        if runner is None:
            raise ValueError(f"role {name!r} is not loaded here")
        return runner
