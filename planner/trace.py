"""What happened in a run: events, their JSON lines, and reading them back."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from planner.errors import UserError
from planner.line_file import LineFile
from planner.yaml_file import from_mapping

SCHEMA = "heteroreason.trace/1"
LOG = logging.getLogger("planner")


class ClockKind(StrEnum):
    """Where a trace's times come from: from the wall, or from the cost model (modelled)."""

    WALL = "wall"
    VIRTUAL = "virtual"

    @property
    def label(self) -> str:
        """How figures of this clock are labelled wherever they are shown."""
        return "measured (wall clock)" if self is ClockKind.WALL else "modelled (cost model)"


@dataclass(frozen=True)
class RunStarted:
    """The head of a trace."""

    plan: str
    """Hash of the plan."""
    plan_name: str
    clock: ClockKind
    kind: str = "run"
    schema: str = SCHEMA


@dataclass(frozen=True)
class ProblemStarted:
    """A problem is begun."""

    problem: str
    """Its name in this trace: its key, and a number where the same problem comes again."""
    question: str
    at_us: int
    arrived_us: int
    """When it began to wait; latencies count from here."""
    kind: str = "problem"


@dataclass(frozen=True)
class Chunk:
    """A device was busy with a piece of work."""

    problem: str
    device: str
    role: str
    op: str
    round: int
    request: str
    """Names the request; pieces of the same request carry the same."""
    start_us: int
    end_us: int
    tokens_in: int
    tokens_out: int
    context: int
    """Tokens in the cache before."""
    speculative: bool
    """Started before it was known to be needed."""
    cycles: int = 0
    """Simulated clock cycles of a device in simulation; 0 for all others."""
    beside: dict[str, int] = field(default_factory=dict)
    """Further drafts of the step that the same pass wrote: tokens by request. `tokens_out` counts them too."""
    kind: str = "chunk"

    def wrote(self) -> dict[str, int]:
        """Tokens of each draft by request."""
        return {self.request: self.tokens_out - sum(self.beside.values()), **self.beside}


@dataclass(frozen=True)
class Decided:
    """The policy took a turn."""

    problem: str
    at_us: int
    event: str
    depth: int
    """Committed steps now."""
    source: str
    text: str
    """The step as people read it."""
    scores: dict[str, float]
    went_back: int
    resumed: bool = False
    """Taken again by what the journal of an earlier run holds, in no time."""
    kind: str = "decision"


@dataclass(frozen=True)
class ProblemEnded:
    """A problem is over."""

    problem: str
    at_us: int
    status: str
    answer: str | None
    correct: bool | None
    """None if the problem set cannot tell."""
    steps: tuple[str, ...]
    """The committed steps as people read them."""
    used: tuple[str, ...]
    """The requests whose results counted; the chunks of all others were wasted."""
    path: tuple[str, ...] = ()
    """Those of them that wrote the committed steps."""
    error: str = ""
    """Why it could not be run, or not to its end."""
    kind: str = "end"


@dataclass(frozen=True)
class Faulted:
    """A device failed."""

    at_us: int
    device: str
    fault: str
    """Which kind: `raised`, `hung` and so on."""
    what: str
    lost: bool
    """Whether the device is taken out; otherwise the work is done again on it."""
    problem: str = ""
    """For which problem it worked; empty if for none."""
    request: str = ""
    """What it worked on."""
    busy_us: int = 0
    """How long it was at that."""
    kind: str = "fault"


@dataclass(frozen=True)
class Replanned:
    """The run goes on by another plan."""

    at_us: int
    why: str
    plan: str
    """Hash of the new plan."""
    plan_name: str
    placement: dict[str, str]
    """Role -> device."""
    prefill_on: dict[str, str] = field(default_factory=dict)
    """Role -> device that reads its prompt, where that is another one."""
    kind: str = "replan"


Event = RunStarted | ProblemStarted | Chunk | Decided | ProblemEnded | Faulted | Replanned
KINDS: dict[str, type[Event]] = {
    "run": RunStarted,
    "problem": ProblemStarted,
    "chunk": Chunk,
    "decision": Decided,
    "end": ProblemEnded,
    "fault": Faulted,
    "replan": Replanned,
}
Sink = Callable[[Event], None]


def collector(sink: Sink | None = None) -> tuple[list[Event], Sink]:
    """A list, and a sink that puts each event into it and hands it on to `sink`."""
    events: list[Event] = []

    def note(event: Event) -> None:
        events.append(event)
        if sink is not None:
            sink(event)

    return events, note


def happening(event: Faulted | Replanned) -> str:
    """One line about a device that failed, or about another plan."""
    if isinstance(event, Replanned):
        return f"planned anew, for {event.why}: plan {event.plan_name} ({event.plan})"
    then = "it is taken out" if event.lost else "the work is done again"
    return f"device {event.device} {event.fault}: {event.what}; {then}"


def logged(sink: Sink) -> Sink:
    """A sink that hands each event on, and tells the log `planner` what an operator would want to know."""

    def note(event: Event) -> None:
        if isinstance(event, Faulted | Replanned):
            LOG.log(logging.WARNING if isinstance(event, Faulted) else logging.INFO, "%s", happening(event))
        elif isinstance(event, ProblemEnded) and event.error:
            LOG.warning("problem %s could not be run: %s", event.problem, event.error)
        sink(event)

    return note


class TraceFile:
    """Appends events to a file, so that what happened survives the process.

    Events of a fast run are written together: one by one, each costs four times as much. They are in the file when a
    problem is over, and of a run that is killed at most those of the last `WITHIN_S` are lost.
    """

    MOST = 64
    """Events that wait at most."""
    WITHIN_S = 0.2
    """An event is written at once if the last were written so long ago."""

    def __init__(self, path: str | Path) -> None:
        """Begin the file anew."""
        self._file = LineFile(Path(path), new=True, mend="name another file")
        self._waiting: list[Event] = []
        self._wrote_s = 0.0

    def __call__(self, event: Event) -> None:
        """Take in an event. Raises UserError if it cannot be written."""
        self._waiting.append(event)
        late = time.monotonic() - self._wrote_s >= self.WITHIN_S
        if late or len(self._waiting) >= self.MOST or isinstance(event, ProblemEnded):
            self._write()

    def close(self) -> None:
        """Write what waits and close the file; calling it twice is harmless."""
        try:
            self._write()
        finally:
            self._file.close()

    def _write(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._file.write_all(map(vars, waiting))  # an event is flat, and asdict would take five times as long
        self._wrote_s = time.monotonic()


def read_trace(path: str | Path) -> list[Event]:
    """The events of a file. Raises UserError that names the line. A last line that was cut off is left out."""
    where = str(path)
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise UserError("no such file", where=where, mend="name a trace that `heteroreason run` left") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read ({error})", where=where, mend="name a trace file") from None
    # Each line is written whole with its end; what follows the last end is a line that a killed run began.
    events = list(_parse(lines[:-1], where))
    if not events or not isinstance(events[0], RunStarted):
        raise UserError("does not begin with a run", where=where, mend="name a trace that `heteroreason run` left")
    if events[0].schema != SCHEMA:
        what = f"schema is {events[0].schema!r} and this version reads {SCHEMA!r}"
        raise UserError(what, where=where, mend="run again")
    return events


def _parse(lines: list[str], where: str) -> Iterator[Event]:
    for number, line in enumerate(lines, 1):
        at = f"{where}, line {number}"
        try:
            raw: Any = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise UserError(f"not JSON ({error})", where=at, mend="take the line out") from None
        kind = KINDS.get(str(raw.get("kind"))) if isinstance(raw, dict) else None
        if kind is None:
            raise UserError("is no event of a trace", where=at, mend=f"use one of the kinds {', '.join(KINDS)}")
        yield from_mapping(kind, raw, at)
