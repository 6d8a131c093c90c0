"""Units of work in JAX's own profiles: each carries the name that the trace of the run has for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from planner.runtime.backend import Work

PROFILE = "HETEROREASON_JAX_PROFILE"
"""Environment variable with a folder: each process that computes with JAX leaves a profile there."""


class Profile:
    """A profile of all work from the first chunk on, if the environment asks for one."""

    def __init__(self) -> None:
        """Nothing is recorded yet: loading and compiling are no part of it."""
        folder = os.environ.get(PROFILE)
        # A folder for each process: they share a host's name, which is the name of JAX's file.
        self._folder = Path(folder) / f"process-{os.getpid()}" if folder else None
        self._records = False

    @contextmanager
    def unit(self, work: Work) -> Iterator[None]:
        """Name a chunk as the trace does, `op:role:place:attempt`. It costs about a microsecond if nobody records."""
        if self._folder is not None and not self._records:
            jax.profiler.start_trace(self._folder)
            self._records = True
        sizes = {"tokens_in": len(work.feed), "context": work.keep, "most_new": work.max_new}
        with jax.profiler.TraceAnnotation(work.label or work.role, **sizes):
            yield

    def close(self) -> None:
        """Write what was recorded; calling it twice is harmless."""
        if self._records:
            jax.profiler.stop_trace()
        self._records = False
