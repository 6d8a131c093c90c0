"""A run that lives in a folder: its plan, its problems and its journal are there from the start, so that it can go on
after it was stopped, and each answer is there as soon as it is known.

| file | what |
|---|---|
| `plan.json` | the plan |
| `problems.jsonl` | the problems, one a line, in order |
| `journal.jsonl` | what each policy was given, and each problem that is over |
| `answers.jsonl` | one line a problem that is over |
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from planner.errors import UserError
from planner.folder_lock import FolderLock
from planner.line_file import LineFile
from planner.plan import Plan, asked_of
from planner.problems.base import Problem, label_of
from planner.runtime.journal import Ended, Head, JournalFile
from planner.yaml_file import from_mapping

PLAN, PROBLEMS, JOURNAL, ANSWERS = "plan.json", "problems.jsonl", "journal.jsonl", "answers.jsonl"


@dataclass(frozen=True)
class Batch:
    """A plan and its problems, with the journal that is being written."""

    folder: Path
    plan: Plan
    problems: tuple[Problem, ...]
    journal: JournalFile
    lock: FolderLock

    def close(self) -> None:
        """Close the journal and leave the folder to others; calling it twice is harmless."""
        self.journal.close()
        self.lock.close()

    @property
    def over(self) -> bool:
        """Whether every problem is over."""
        return len(self.journal.ends) == len(self.problems)

    def rows(self) -> list[dict[str, Any]]:
        """What is known of each problem that is over, in the order of the problems."""
        return [self._row(label) for label in self._numbers if self.journal.ended(label)]

    def write_answers(self) -> None:
        """Write `answers.jsonl` anew, as the journal has it: no line is missing, and none is there twice."""
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows())
        _write(self.folder / ANSWERS, text)

    def append_answer(self, label: str) -> None:
        """Append the line of a problem that is over."""
        with closing(LineFile(self.folder / ANSWERS, new=False)) as file:
            file.write(self._row(label), ensure_ascii=False)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """Label -> place among the problems, from 1."""
        return {label: number for number, label in enumerate(labels(self.problems), 1)}

    def _row(self, label: str) -> dict[str, Any]:
        number = self._numbers[label]
        return {"number": number, **row(self.problems[number - 1].question, self.journal.ends[label])}


def row(question: str, end: Ended) -> dict[str, Any]:
    """The answer to a question as files and `--json` have it."""
    found = {
        "question": question,
        "answer": end.answer,
        "correct": end.correct,
        "status": end.status,
        "steps": end.steps,
        "latency_us": end.latency_us,
    }
    return {**found, "error": end.error} if end.error else found


def begin(
    folder: Path,
    plan: Plan,
    problems: Sequence[Problem],
    settings: dict[str, str | int | bool | None] | None = None,
    sync: bool = False,
) -> Batch:
    """Begin a run in a folder. Raises UserError if it holds one that is not over or at work, or cannot be written."""
    head = Head(asked_of(plan), plan.hash, tuple(p.key for p in problems), dict(settings or {}))
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(closing(FolderLock(folder)))
            _refuse_to_wipe_out(folder)
            # The journal goes first, for it says whose the other files are; a new one begins when they are there.
            (folder / JOURNAL).unlink(missing_ok=True)
        except OSError as error:
            what = f"cannot be made ({error.strerror})"
            raise UserError(what, where=str(folder), mend="name another folder") from None
        _write(folder / PLAN, plan.to_json())
        _write(folder / PROBLEMS, "".join(json.dumps(asdict(p), ensure_ascii=False) + "\n" for p in problems))
        _write(folder / ANSWERS, "")
        found = Batch(folder, plan, tuple(problems), JournalFile(folder / JOURNAL, head, sync), lock)
        stack.pop_all()
        return found


def resume(folder: Path, sync: bool = False) -> Batch:
    """Go on with the run of a folder. Raises UserError if there is none, or its files do not belong together."""
    with ExitStack() as stack:
        lock = stack.enter_context(closing(FolderLock(folder)))
        plan, problems, journal = _read(folder, sync)
        found = Batch(folder, plan, problems, stack.enter_context(closing(journal)), lock)
        found.write_answers()
        stack.pop_all()
        return found


def _read(folder: Path, sync: bool = False) -> tuple[Plan, tuple[Problem, ...], JournalFile]:
    """The run of a folder, its journal open. Raises UserError if there is none, or its files do not fit together."""
    journal = JournalFile.resume(folder / JOURNAL, sync)
    try:
        plan, problems = Plan.load(folder / PLAN), tuple(_read_problems(folder / PROBLEMS))
        journal.check(plan, problems)
    except UserError:
        journal.close()
        raise
    return plan, problems, journal


def labels(problems: Sequence[Problem]) -> list[str]:
    """The names of problems in trace and journal."""
    seen: Counter[str] = Counter()
    found = []
    for problem in problems:
        seen[problem.key] += 1
        found.append(label_of(problem, seen[problem.key]))
    return found


def check_folder(folder: Path) -> None:
    """Raise UserError if a new run in the folder would wipe out one that is not over, or it is no folder."""
    if folder.exists() and not folder.is_dir():
        raise UserError("is no folder", where=str(folder), mend="name another folder")
    if folder.exists():
        with closing(FolderLock(folder)):
            _refuse_to_wipe_out(folder)


def _refuse_to_wipe_out(folder: Path) -> None:
    """Raise UserError if the folder, which is locked, holds a run that is not over."""
    try:
        _, problems, journal = _read(folder)
    except UserError as error:
        if not _holds_results(folder / JOURNAL):
            return  # nothing to lose
        what = f"holds a run that cannot go on: {error.where}: {error.what}"
        raise UserError(what, where=str(folder), mend=f"{error.mend}, or name another folder") from None
    journal.close()
    left = len(problems) - len(journal.ends)
    if left:
        raise UserError(
            f"holds a run of which {left} problems are not over",
            where=str(folder),
            mend=f"go on with `heteroreason run --resume {folder}`, or name another folder",
        )


def _holds_results(journal: Path) -> bool:
    """Whether there is more in a journal than its head."""
    try:
        return journal.read_bytes().count(b"\n") > 1
    except OSError:
        return False


def _read_problems(path: Path) -> list[Problem]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        return [from_mapping(Problem, json.loads(line), f"{path}, line {n}") for n, line in enumerate(lines[:-1], 1)]
    except (OSError, ValueError) as error:
        raise UserError(f"cannot be read ({error})", where=str(path), mend="run anew") from None


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    try:
        part = path.with_name(f"{path.name}.part")
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise UserError(f"cannot be written ({error.strerror})", where=str(path), mend="name another file") from None
