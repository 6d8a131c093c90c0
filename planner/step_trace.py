"""Step traces: what somebody's runs took, one CSV row a reasoning step, for fitting costs and replaying plans.

Columns: `problem`, `step`; `phase` (D drafted and verified, T the target wrote, R its step was verified, B a backtrack
was verified: D is an accepted draft, DTR a refined step, DTB and DTBR backtracked); `draft_ms`, `prm_ms`, `target_ms`
(all calls of the step together); `draft_in`, `draft_out`, `prm_in`, `target_in`, `target_out` (tokens); `draft_calls`,
`prm_calls`, `target_calls`. Other columns are passed over.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median

from planner.errors import UserError

COLD = 20.0
"""A first row that took so many times the usual was a cold start."""


@dataclass(frozen=True)
class StepRow:
    """One step. Times are milliseconds over all its calls."""

    problem: str
    step: int
    phase: str
    draft_ms: float
    prm_ms: float
    target_ms: float
    draft_in: int
    draft_out: int
    prm_in: int
    target_in: int
    target_out: int
    draft_calls: int
    prm_calls: int
    target_calls: int

    @property
    def accepted(self) -> bool:
        """Whether the last draft of the step was accepted."""
        return self.phase == "D"

    @property
    def backtracked(self) -> bool:
        """Whether a backtrack was tried."""
        return "B" in self.phase

    @property
    def serial_ms(self) -> float:
        """The time of the step when one device runs after the other."""
        return self.draft_ms + self.prm_ms + self.target_ms


def read_step_trace(path: str | Path) -> list[StepRow]:
    """The rows of a CSV file. Raises UserError that names the line, the column and the value."""
    where = str(path)
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [f.name for f in fields(StepRow) if f.name not in (reader.fieldnames or [])]
            if missing:
                raise UserError(f"column {missing[0]} is missing", where=where, mend="add the column")
            rows = [_row(raw, f"{where}, line {reader.line_num}") for raw in reader]
    except FileNotFoundError:
        raise UserError("no such file", where=where, mend="check the path") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot be read ({error})", where=where, mend="name a CSV file") from None
    if not rows:
        raise UserError("has no rows", where=where, mend="name a trace with at least one step")
    return rows


def warmed(rows: Sequence[StepRow]) -> list[StepRow]:
    """The rows with the cold starts taken out of the first: a role that took far longer there than it mostly does
    counts with what it mostly takes."""
    first = rows[0]
    changes = {}
    for role in ("draft_ms", "prm_ms", "target_ms"):
        usual = median(getattr(r, role) for r in rows[1:]) if len(rows) > 1 else getattr(first, role)
        if usual > 0 and getattr(first, role) > COLD * usual:
            changes[role] = usual
    return [replace(first, **changes), *rows[1:]]


def by_problem(rows: Sequence[StepRow]) -> dict[str, list[StepRow]]:
    """Rows of each problem in their order."""
    found: dict[str, list[StepRow]] = {}
    for row in rows:
        found.setdefault(row.problem, []).append(row)
    return found


def _row(raw: dict[str, str], where: str) -> StepRow:
    values: dict[str, object] = {"problem": raw["problem"], "phase": raw["phase"]}
    if raw["phase"] not in ("D", "DTR", "DTB", "DTBR", "T"):
        raise UserError(f"phase is {raw['phase']!r}", where=where, mend="use D, DTR, DTB, DTBR or T")
    for field in fields(StepRow):
        if field.name in values:
            continue
        convert = float if field.name.endswith("_ms") else int
        try:
            number = convert(raw[field.name])
        except (TypeError, ValueError):
            number = -1
        if not 0 <= number < 1e12:
            raise UserError(f"{field.name} is {raw[field.name]!r}", where=where, mend="use a number from 0")
        values[field.name] = number
    return StepRow(**values)  # type: ignore[arg-type]
