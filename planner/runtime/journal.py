"""The journal of a run: what each policy was given, line by line, so that a run that was killed can go on.

A policy's requests and its run depend on the results that it is sent and on nothing else. So the results that it was
sent are all that a run must keep: answered from the journal, it stands where it stood, and nothing that was committed
is computed again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from planner.errors import UserError
from planner.line_file import LineFile
from planner.plan import Plan, asked_of
from planner.policy import Result, Step
from planner.problems.base import Problem
from planner.runtime.host import Solved
from planner.yaml_file import from_mapping

SCHEMA = "heteroreason.journal/1"


@dataclass(frozen=True)
class Head:
    """The first line: of which run this is the journal."""

    asked: str
    """Hash of all that answers depend on: workflow, models, seed."""
    plan: str
    """Hash of the plan. Another plan of the same workflow gives the same answers."""
    problems: tuple[str, ...]
    """Keys of the problems in order."""
    settings: dict[str, str | int | bool | None] = field(default_factory=dict)
    """How the run was started: what a run that goes on from here takes over."""
    schema: str = SCHEMA
    kind: str = "head"


@dataclass(frozen=True)
class Noted:
    """A result that a policy went on with: a step or a score."""

    problem: str
    request: str
    step: Step | None = None
    score: float | None = None
    kind: str = "result"


@dataclass(frozen=True)
class Ended:
    """A problem is over."""

    problem: str
    status: str
    answer: str | None
    correct: bool
    steps: tuple[str, ...]
    latency_us: int
    error: str = ""
    kind: str = "end"

    @classmethod
    def of(cls, solved: Solved) -> Ended:
        """What the journal keeps of a result."""
        error = str(solved.error) if solved.error else ""
        status = solved.outcome.status.value
        return cls(solved.label, status, solved.answer, solved.correct, solved.steps, solved.latency_us, error)


KINDS: Mapping[str, type[Head | Noted | Ended]] = {"head": Head, "result": Noted, "end": Ended}


class JournalFile:
    """A journal in a file of JSON lines, each flushed; with `sync`, each is on the disk before the run goes on."""

    def __init__(self, path: str | Path, head: Head, sync: bool = False) -> None:
        """Begin a journal. Raises UserError if it cannot be written."""
        self.head, self._path = head, Path(path)
        self._results: dict[str, dict[str, Result]] = {}
        self.ends: dict[str, Ended] = {}
        """The problems that are over, by label, in the order in which they ended."""
        self._file = LineFile(self._path, new=True, sync=sync)
        self._write(head)

    @classmethod
    def resume(cls, path: str | Path, sync: bool = False) -> JournalFile:
        """Read a journal and go on with it. A last line that was cut off is taken out. Raises UserError."""
        journal = cls.__new__(cls)
        journal._path = Path(path)
        lines, whole = _whole_lines(journal._path)
        records = [_record(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
        if not records or not isinstance(records[0], Head):
            raise UserError("does not begin with a head", where=str(path), mend="run anew with `heteroreason run`")
        journal.head = records[0]
        if journal.head.schema != SCHEMA:
            what = f"schema is {journal.head.schema!r} and this version reads {SCHEMA!r}"
            raise UserError(what, where=str(path), mend="run anew with `heteroreason run`")
        journal._results, journal.ends = {}, {}
        for record in records:
            journal._take(record)
        journal._file = LineFile(journal._path, new=False, sync=sync)
        journal._file.truncate(whole)
        return journal

    def check(self, plan: Plan, problems: Sequence[Problem]) -> None:
        """Raise UserError unless this is the journal of these problems by a plan of the same workflow."""
        where = str(self._path)
        if self.head.asked != asked_of(plan):
            raise UserError(
                f"it is the journal of another workflow, other models or another seed than plan {plan.hash}",
                where=where,
                mend="resume with the plan that the run left, or run anew",
            )
        if self.head.problems != tuple(p.key for p in problems):
            raise UserError("it is the journal of other problems", where=where, mend="leave problems.jsonl as it was")

    def results(self, label: str) -> Mapping[str, Result]:
        """What the policy of a problem was given so far, by the name of the request."""
        return self._results.get(label, {})

    def ended(self, label: str) -> bool:
        """Whether a problem is over."""
        return label in self.ends

    def result(self, label: str, request: str, result: Result) -> None:
        """The policy is about to go on with a result."""
        step, score = (result, None) if isinstance(result, Step) else (None, result)
        self._write(Noted(label, request, step, score))

    def end(self, solved: Solved) -> None:
        """A problem is over."""
        ended = Ended.of(solved)
        self._write(ended)
        self._take(ended)

    def close(self) -> None:
        """Close the file; calling it twice is harmless."""
        self._file.close()

    def _take(self, record: Head | Noted | Ended) -> None:
        if isinstance(record, Noted):
            result = record.step if record.step is not None else record.score
            assert result is not None, "a record holds a step or a score"
            self._results.setdefault(record.problem, {})[record.request] = result
        elif isinstance(record, Ended):
            self.ends[record.problem] = record
            self._results.pop(record.problem, None)

    def _write(self, record: Head | Noted | Ended) -> None:
        self._file.write(asdict(record))


def _whole_lines(path: Path) -> tuple[list[str], int]:
    """The lines that were written to their end, and how many bytes they are."""
    try:
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        return data[:whole].decode().split("\n")[:-1], whole
    except FileNotFoundError:
        mend = "name the folder that `heteroreason run --out` was given"
        raise UserError("no such file", where=str(path), mend=mend) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read ({error})", where=str(path), mend="run anew") from None


def _record(line: str, where: str) -> Head | Noted | Ended:
    mend = "cut the journal before this line, and resume: what came after is computed again"
    try:
        raw: Any = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"not JSON ({error})", where=where, mend=mend) from None
    kind = KINDS.get(str(raw.get("kind"))) if isinstance(raw, dict) else None
    if kind is None:
        raise UserError("is no line of a journal", where=where, mend=mend)
    record = from_mapping(kind, raw, where)
    if isinstance(record, Noted) and (record.step is None) == (record.score is None):
        raise UserError("holds neither a step nor a score, or both", where=where, mend=mend)
    return record
