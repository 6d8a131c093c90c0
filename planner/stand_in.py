"""What stands in for problems and models where only lengths, verdicts and times count: in simulation and in replay.

A problem is a word. Tokens are numbers; the first token of a step says what is to be known of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial

from planner.problems.base import Problem
from planner.runtime.backend import Handed, ModelInfo, Output, Work, one_by_one
from planner.shape import ModelShape
from planner.workflow import Arithmetic, Role, RoleName

DELIMITER = 1
FILLER = 2


class StandInProblems(ABC):
    """Problems without an answer that could be right or wrong."""

    name: str
    delimiter = "\n"

    @abstractmethod
    def generate(self, count: int, seed: int) -> list[Problem]:
        """See `ProblemSet`."""

    @abstractmethod
    def answer(self, step: str) -> str | None:
        """See `ProblemSet`."""

    def parse(self, question: str) -> Problem:
        """See `ProblemSet`."""
        return Problem(self.name, question, "")

    def prompt(self, problem: Problem) -> str:
        """The question."""
        return problem.question

    def readable(self, step: str) -> str:
        """The step."""
        return step

    def grade(self, problem: Problem, steps: Sequence[str]) -> bool:
        """Nothing is right."""
        return False


class StandInBackend(ABC):
    """Keeps the tokens of sequences; what is written and how it scores is told by the two kinds."""

    name: str

    def __init__(self, shapes: Mapping[RoleName, ModelShape] | None = None) -> None:
        """No sequence is known. `shapes` say how many bytes a token's keys and values are."""
        self._shapes = shapes or {}
        self._sequences: dict[tuple[str, str], list[int]] = {}

    @abstractmethod
    def encode(self, name: str, text: str) -> tuple[int, ...]:
        """The tokens of a problem's prompt."""

    @abstractmethod
    def decode(self, name: str, tokens: Sequence[int]) -> str:
        """The text of a step."""

    @abstractmethod
    def write(self, held: list[int], work: Work) -> tuple[int, ...]:
        """The next tokens, at least one and at most `work.max_new`, of the step that `held` ends with or goes on to."""

    @abstractmethod
    def score(self, held: list[int]) -> float:
        """The score of the step that `held` ends with."""

    def load(self, name: str, role: Role, delimiter: str) -> ModelInfo:
        """Nothing to load."""
        shape = self._shapes.get(RoleName(name))
        bytes_per_token = shape.kv_bytes_per_token if shape else 0
        batches = role.numerics.arithmetic is not Arithmetic.INT8
        return ModelInfo(self.name, self.name, 0, bytes_per_token, 1 << 40, batches)

    def encode_prompt(self, name: str, text: str) -> tuple[int, ...]:
        """See `encode`."""
        return self.encode(name, text)

    def run(self, work: Work) -> Output:
        """Read, write or score."""
        if work.beside:
            return one_by_one(work, self.run, partial(self.fork, work.role), partial(self.rewind, work.role))
        held = self._held(work.role, work.sequence, work.keep)
        held[work.keep :] = work.feed
        if work.score:
            return Output(scores=tuple(self.score(held[: at + 1]) for at in work.score))
        written = self.write(held, work) if work.max_new else ()
        held += written
        return Output(written, complete=bool(written) and written[-1] == DELIMITER)

    def rewind(self, name: str, sequence: str, tokens: int) -> None:
        """Forget the rest."""
        del self._held(name, sequence, tokens)[tokens:]

    def fork(self, name: str, sequence: str, new_sequence: str) -> None:
        """Copy the tokens."""
        self._sequences[name, new_sequence] = list(self._sequences[name, sequence])

    def hand_over(self, name: str, sequence: str) -> Handed:
        """The tokens: there are no keys and values."""
        return Handed(tuple(self._sequences[name, sequence]), b"")

    def take_over(self, name: str, sequence: str, handed: Handed) -> None:
        """Keep the tokens."""
        self._sequences[name, sequence] = list(handed.tokens)

    def unload(self, name: str) -> None:
        """Forget the role's sequences."""
        self._sequences = {key: held for key, held in self._sequences.items() if key[0] != name}

    def close(self) -> None:
        """Forget all."""
        self._sequences.clear()

    def _held(self, name: str, sequence: str, keep: int) -> list[int]:
        held = self._sequences.setdefault((name, sequence), [])
        if keep > len(held):
            raise ValueError(f"sequence {sequence} holds {len(held)} tokens, not {keep}")
        return held
