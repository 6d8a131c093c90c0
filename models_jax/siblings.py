"""Several drafts of one step in one pass, where that gives each the bits of a draft written alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from models_jax.sequences import apart
from models_jax.transformer import Cache
from planner.runtime.backend import ModelInfo, Output, Work, one_by_one


class WritesTogether(Protocol):
    """What is asked of the runner of a role."""

    info: ModelInfo

    def run(self, work: Work) -> Output:
        """Do one chunk."""
        ...

    def read(self, work: Work) -> None:
        """Let a sequence hold what it is to hold before anything is generated, and read it but for its last token."""
        ...

    def together(self, works: Sequence[Work]) -> list[Output]:
        """Write in as many sequences at once, each as `run` would."""
        ...

    def cache(self, sequence: str) -> Cache:
        """The cache of a sequence, (1, ...)."""
        ...

    def rewind(self, sequence: str, tokens: int) -> None:
        """Forget all but the first `tokens` tokens."""
        ...

    def fork(self, sequence: str, new_sequence: str) -> None:
        """Make `new_sequence` a copy of a sequence."""
        ...


class Siblings:
    """Writes works with drafts beside them: in one pass if it is proven for so many, else one by one."""

    def __init__(self, runner: WritesTogether, row_block: int, vocab_size: int, *, tries: bool) -> None:
        """Without `tries` all are written one by one."""
        self._runner, self._row_block, self._vocab_size, self._tries = runner, row_block, vocab_size, tries
        self._proven: dict[int, bool] = {}

    def run(self, work: Work) -> Output:
        """Do a chunk. Drafts for which a block has no row are written alone."""
        runner, rows = self._runner, self._row_block - 1
        near, rest = work.beside[:rows], work.beside[rows:]
        writes = work.max_new and not work.score and all(own.max_new for own in near)
        if not (near and writes and self._alike(work, 1 + len(near))):
            return one_by_one(work, runner.run, runner.fork, runner.rewind)
        main, *others = self._together(replace(work, beside=near))

        def run(part: Work) -> Output:
            return main if part.sequence == work.sequence else runner.run(part)

        output = one_by_one(replace(work, beside=rest), run, runner.fork, runner.rewind)
        return replace(output, beside=(*others, *output.beside))

    def _together(self, work: Work) -> list[Output]:
        """The main draft in its sequence and the others in copies of it, which are dropped."""
        runner = self._runner
        runner.read(work)
        main = replace(work, keep=work.keep + len(work.feed), feed=(), beside=())
        others = [replace(own, sequence=f"{own.sequence}.beside.{i}") for i, own in enumerate(apart(work))]
        try:
            for own in others:
                runner.fork(main.sequence, own.sequence)
            return runner.together([main, *others])
        finally:
            for own in others:
                runner.rewind(own.sequence, 0)

    def _alike(self, work: Work, count: int) -> bool:
        """Whether so many drafts have the bits of one alone on this processor. It is tried once."""
        if count not in self._proven:
            self._proven[count] = self._tries and self._proof(f"{work.sequence}.proof", work.role, count)
        return self._proven[count]

    def _proof(self, name: str, role: str, count: int) -> bool:
        """Write different drafts together and each alone: keys, values and tokens must be the same bits.

        Each goes on from another number of tokens, about a block. Without room for them nothing is proven.
        """
        runner, size = self._runner, self._row_block + count
        if 2 * size >= runner.info.context_tokens:
            return False
        tokens = np.arange(count * size).reshape(count, size) * 7 % self._vocab_size
        works = [
            Work(role, f"{name}.{key}", 0, tuple(row.tolist())[key:], size, key=key, temperature=1.0)
            for key, row in enumerate(tokens)
        ]
        found = [(output, self._bits(work, output)) for work, output in zip(works, runner.together(works), strict=True)]
        for work in works:
            runner.rewind(work.sequence, 0)
        alone = []
        for work in works:
            output = runner.run(work)
            alone.append((output, self._bits(work, output)))
            runner.rewind(work.sequence, 0)
        return found == alone

    def _bits(self, work: Work, output: Output) -> list[bytes]:
        """Keys and values of all tokens but the last, which is in no cache yet."""
        cache, until = self._runner.cache(work.sequence), len(work.feed) + len(output.tokens) - 1
        return [np.asarray(part)[:, :, :until].tobytes() for part in (*cache.k, *cache.v)]
