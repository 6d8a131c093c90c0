"""Worker processes that do one thing wrong when they are told to: a backend, and the workers that tell it.

The backend runs in the worker's process and looks for a file of its device and role before each chunk; the workers, in
the process of the engine, know which op a chunk is of and put the file there.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing import current_process
from pathlib import Path
from typing import Any

from planner_cases import LetterBackend, install_backend

from planner.graph import Op
from planner.machine import Machine
from planner.runtime.backend import Output, Work
from planner.runtime.engine import Engine
from planner.runtime.process import ProcessWorkers

FOLDER = "TEST_FAULTS"
"""The environment variable that names the folder of the files."""
PASSING = (
    "raises",
    "out of memory",
    "no tokens, no scores",
    "too many tokens",
    "tokens that are none",
    "scores that are none",
    "one score too many",
    "is slow",
)
"""Faults after which the process works again."""
LAST = ("dies", "is killed", "hangs", "is stopped")
"""Faults after which it is gone."""


def install(folder: Path) -> None:
    """Register the backend as `fake`, for processes that have the folder on their path and `TEST_FAULTS` set to it."""
    install_backend(folder, "process_faults")


class Backend(LetterBackend):
    """Writes letters, and does what the file of a role says."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__()
        self.folder = Path(os.environ[FOLDER])

    def run(self, work: Work) -> Output:
        told = self.folder / f"{current_process().name.removeprefix('heteroreason-')}.{work.role}"
        if not told.exists():
            return self.right(work)
        what = told.read_text()
        told.unlink()
        if what in ("dies", "is killed", "hangs", "is stopped"):
            self.end(what)
        if what == "raises":
            raise ZeroDivisionError("oh")
        if what == "out of memory":
            raise MemoryError("no room")
        if what == "is slow":
            time.sleep(0.2)
            return self.right(work)
        output = self.right(work)
        self.held[work.role, work.sequence] += (0, 1, 0)
        return WRONG[what](output)

    def right(self, work: Work) -> Output:
        output = super().run(work)
        self.log.clear()
        return output

    def end(self, what: str) -> None:
        if what == "dies":
            os._exit(3)
        if what == "hangs":
            time.sleep(1000)
        os.kill(os.getpid(), signal.SIGKILL if what == "is killed" else signal.SIGSTOP)


WRONG: dict[str, Callable[[Output], Output]] = {
    "no tokens, no scores": lambda o: Output() if o.tokens or o.scores else Output((1,)),
    "too many tokens": lambda o: replace(o, tokens=(*o.tokens, *(0,) * 60)),
    "tokens that are none": lambda o: replace(o, tokens=(-1,), complete=False),
    "scores that are none": lambda o: replace(o, scores=(float("nan"),) * max(1, len(o.scores))),
    "one score too many": lambda o: replace(o, scores=(*o.scores, 0.5)),
}


class TellingWorkers(ProcessWorkers):
    """Has something happen at the n-th chunk of an op that is sent out: to its process, or in this one."""

    engine: Engine | None = None
    fired: str = ""
    """The device that the chunk went to."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        super().__init__(machine)
        self._folder, self._op, self._left = folder, Op.DRAFT, -1
        self._happens: str | Callable[[str], Any] = ""

    def arm(self, op: Op, number: int, happens: str | Callable[[str], Any]) -> None:
        """At that chunk have the process do `happens`, or call it with the device's name."""
        self._op, self._left, self._happens, self.fired = op, number, happens, ""

    def submit(self, device: str, work: Work, delay_us: int, limit_us: int) -> None:
        assert self.engine is not None
        request = self.engine._running[device].start.request
        if request.op is not self._op or self.fired or self._left < 0:
            super().submit(device, work, delay_us, limit_us)
            return
        self._left -= 1
        now = self._left < 0
        if now:
            self.fired = device
        if now and isinstance(self._happens, str):
            part = self._folder / "part"
            part.write_text(self._happens)
            part.rename(self._folder / f"{device}.{request.role}")
        super().submit(device, work, delay_us, limit_us)
        if now and callable(self._happens):
            self._happens(device)
