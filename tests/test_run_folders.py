"""What may happen to the folder of a run: a full disk, two runs at once, lines that were cut off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from planner_cases import LetterBackend, Letters, LinearCosts, quick_plan, run_letters, workflow

from planner import batch, cli_run
from planner.batch import Batch
from planner.errors import UserError
from planner.line_file import LineFile
from planner.runtime.engine import Engine, Load
from planner.runtime.worker import VirtualWorkers, modelled
from planner.trace import ClockKind, TraceFile
from planner.workflow import Budget

resource = pytest.importorskip("resource")

FLOW = workflow(accept=0.6, accept_refined=0.5, budget=Budget(6, 60, 12))
PLAN = quick_plan(FLOW, "overlapped")
QUESTIONS = tuple("abc"[n % 3] * (1 + n // 3) for n in range(12))
FULL = "cannot be written (File too large); make room on the disk"


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file can grow beyond so many bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def go_on(found: Batch, traced: bool = False) -> None:
    """Run what is left, with a trace or without."""
    workers = VirtualWorkers(modelled(LinearCosts()), {d: LetterBackend() for d in "abc"})
    with closing(found), closing(TraceFile(found.folder / "trace.jsonl")) as trace:
        sink = trace if traced else lambda event: None
        engine = Engine(found.plan, workers, Letters(), sink, journal=found.journal)
        for solved in engine.solve_all(found.problems, Load(3)):
            found.append_answer(solved.label)


def begin(folder: Path) -> Batch:
    return batch.begin(folder, PLAN, [Letters().parse(q) for q in QUESTIONS])


def check(folder: Path) -> None:
    whole = [(s.outcome.status.value, s.answer, s.steps) for s in run_letters(PLAN, QUESTIONS)[0]]
    with closing(batch.resume(folder)) as found:
        assert [(r["status"], r["answer"], tuple(r["steps"])) for r in found.rows()] == whole


@pytest.mark.parametrize("traced", [False, True], ids=["journal", "trace"])
def test_a_full_disk_ends_a_run_with_a_sentence_and_loses_nothing(traced: bool, tmp_path: Path) -> None:
    """Wherever it strikes: in the journal, in the trace, in the answers; at the first line or at any later one."""
    go_on(begin(tmp_path / "whole"), traced)
    size = (tmp_path / "whole" / ("trace.jsonl" if traced else "journal.jsonl")).stat().st_size
    folder = tmp_path / "run"
    for limit in range(1, size, max(1, size // 15)):
        if folder.exists():
            go_on(batch.resume(folder))
        found = begin(folder)
        with files_up_to(limit), pytest.raises(UserError) as caught:
            go_on(found, traced)
        assert FULL in str(caught.value) and "\n" not in str(caught.value)
        if limit % 3 == 0:
            with files_up_to(limit), suppress(UserError):
                go_on(batch.resume(folder), traced)
        go_on(batch.resume(folder))
        check(folder)


def test_a_full_disk_at_the_start(tmp_path: Path) -> None:
    for limit in (0, 100, 1000):
        with files_up_to(limit), pytest.raises(UserError, match="cannot be written"):
            begin(tmp_path / str(limit))
        go_on(begin(tmp_path / str(limit)))
        check(tmp_path / str(limit))


def test_a_line_is_whole_or_the_run_stops(tmp_path: Path) -> None:
    with closing(LineFile(tmp_path / "f", new=True)) as file:
        file.write({"a": "é"}, ensure_ascii=False)
        with files_up_to(20), pytest.raises(UserError, match="f: cannot be written"):
            file.write({"long": "x" * 100})
    assert (tmp_path / "f").read_bytes()[:20].startswith('{"a": "é"}\n'.encode())
    with pytest.raises(UserError, match="cannot be written"):
        LineFile(tmp_path / "no" / "f", new=True)


def test_one_run_at_a_time_in_a_folder(tmp_path: Path) -> None:
    busy = "another run is at work in this folder; wait for its end, stop it, or name another folder"
    with closing(begin(tmp_path)):
        for attempt in (begin, batch.resume, batch.check_folder):
            had = (tmp_path / "journal.jsonl").read_bytes()
            with pytest.raises(UserError, match=busy):
                attempt(tmp_path)
            assert (tmp_path / "journal.jsonl").read_bytes() == had
    with closing(batch.resume(tmp_path)), pytest.raises(UserError, match=busy):
        batch.resume(tmp_path)
    # What could not go on lets go of the folder too.
    (tmp_path / "plan.json").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"plan\.json: no such file"):
        batch.resume(tmp_path)
    (tmp_path / "elsewhere").rename(tmp_path / "plan.json")
    go_on(batch.resume(tmp_path))
    check(tmp_path)


def test_a_folder_is_looked_at_without_a_change(tmp_path: Path) -> None:
    """What a new run asks of a folder leaves the run that is in it as it was."""
    begin(tmp_path).close()
    had = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for attempt in (batch.check_folder, begin):
        with pytest.raises(UserError, match="holds a run of which 12 problems are not over"):
            attempt(tmp_path)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == had


@pytest.mark.parametrize(
    ("kept", "settings"),
    [
        ({}, cli_run.Settings()),
        ({"clock": "virtual", "concurrency": 3}, cli_run.Settings(ClockKind.VIRTUAL, 3)),
        (
            {"deadline_us": 5, "costs": "c.yaml", "replan": True},
            cli_run.Settings(ClockKind.WALL, 1, 5, Path("c.yaml"), True),
        ),
    ],
)
def test_the_settings_of_a_run_that_goes_on(kept: Any, settings: cli_run.Settings, tmp_path: Path) -> None:
    """A run that a program began has none, and goes on by the command as well."""
    batch.begin(tmp_path, PLAN, [Letters().parse("a")], kept).close()
    job = cli_run.resume(tmp_path, sync=False)
    assert job.settings == settings and job.batch is not None
    job.batch.close()


@pytest.mark.parametrize(
    "kept", [{"clock": "solar"}, {"concurrency": "many"}, {"deadline_us": "soon"}, {"mood": "good"}]
)
def test_settings_that_are_none(kept: Any, tmp_path: Path) -> None:
    batch.begin(tmp_path, PLAN, [Letters().parse("a")], kept).close()
    with pytest.raises(UserError, match=next(iter(kept))) as caught:
        cli_run.resume(tmp_path, sync=False)
    assert str(caught.value).startswith(f"{tmp_path / 'journal.jsonl'}")
    with pytest.raises(UserError, match="1 problems are not over"):
        begin(tmp_path)


@pytest.mark.parametrize("name", ["answers.jsonl", "journal.jsonl", "trace.jsonl"])
def test_a_last_line_that_was_cut_off_does_no_harm(name: str, tmp_path: Path) -> None:
    with closing(begin(tmp_path)) as found:
        workers = VirtualWorkers(modelled(LinearCosts()), {d: LetterBackend() for d in "abc"})
        engine = Engine(found.plan, workers, Letters(), lambda event: None, journal=found.journal)
        for solved in [*engine.solve_all(found.problems[:5])]:
            found.append_answer(solved.label)
    with (tmp_path / name).open("a") as file:
        file.write('{"number": 3, "question": "ab')
    go_on(batch.resume(tmp_path))
    check(tmp_path)
    for line in (tmp_path / "answers.jsonl").read_text().splitlines():
        json.loads(line)
