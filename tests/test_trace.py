"""Traces: their file, what is read back, and what is refused."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from planner_cases import SEEDS, quick_plan, random_plan, run_letters, workflow, workflows

from planner.errors import UserError
from planner.trace import (
    Chunk,
    ClockKind,
    Event,
    Faulted,
    ProblemEnded,
    Replanned,
    RunStarted,
    TraceFile,
    logged,
    read_trace,
)
from planner.workflow import Workflow

HEAD = RunStarted("00", "serial", ClockKind.WALL)
END = ProblemEnded("p", 9, "steps", None, None, ("a\nb", "ü\u2028"), ())


def written(path: Path, events: list[Event]) -> Path:
    file = TraceFile(path)
    for event in events:
        file(event)
    file.close()
    return path


def test_the_log_tells_of_faults_and_new_plans_and_is_quiet_by_default(caplog: pytest.LogCaptureFixture) -> None:
    failed = replace(END, status="error", error="its prompt is too long")
    events = [HEAD, Faulted(1, "a", "raised", "no", False), Replanned(2, "a is lost", "01", "anew", {}), END, failed]
    handed_on: list[Event] = []
    with caplog.at_level(logging.INFO, "planner"):
        for event in events:
            logged(handed_on.append)(event)
    assert handed_on == events
    assert [(r.levelname, r.name, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "planner", "device a raised: no; the work is done again"),
        ("INFO", "planner", "planned anew, for a is lost: plan anew (01)"),
        ("WARNING", "planner", "problem p could not be run: its prompt is too long"),
    ]
    quiet = "from planner.trace import LOG; LOG.warning('heard')"
    done = subprocess.run([sys.executable, "-c", quiet], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == done.stderr == ""


@given(workflows(), SEEDS)
@settings(max_examples=15, deadline=None)
def test_a_trace_round_trips(tmp_path_factory: pytest.TempPathFactory, flow: Workflow, seed: int) -> None:
    _, events = run_letters(random_plan(Random(seed), flow))
    path = tmp_path_factory.getbasetemp() / "trace.jsonl"
    assert read_trace(written(path, events)) == events


def test_odd_text_and_missing_answers_round_trip(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path / "t", [HEAD, END])) == [HEAD, END]


FAULT = Faulted(3, "gpu0", "raised", "ValueError: oh", False, "p", "r")
REPLAN = Replanned(5, "device gpu0 is lost", "01", "auto", {"draft": "gpu1"})


def test_faults_and_new_plans_round_trip(tmp_path: Path) -> None:
    events = [HEAD, FAULT, REPLAN, replace(END, error="no room")]
    assert read_trace(written(tmp_path / "t", events)) == events


def test_events_are_in_the_file_when_a_problem_is_over_or_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, now = tmp_path / "t", 100.0
    monkeypatch.setattr("planner.trace.time.monotonic", lambda: now)
    file = TraceFile(path)
    told: list[Event] = [HEAD]
    file(HEAD)
    assert read_trace(path) == told
    for event in [FAULT, REPLAN, END]:
        assert read_trace(path) == [HEAD]
        file(event)
        told.append(event)
    assert read_trace(path) == told, "a problem is over"
    for _ in range(TraceFile.MOST):
        assert read_trace(path) == told[:4]
        file(FAULT)
        told.append(FAULT)
    assert read_trace(path) == told, "so many wait"
    now += TraceFile.WITHIN_S
    file(FAULT)
    told.append(FAULT)
    assert read_trace(path) == told, "the last were written so long ago"
    file(REPLAN)
    file.close()
    file.close()
    assert read_trace(path) == [*told, REPLAN]


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "t", [HEAD, END])
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(first, len(whole)):
        path.write_bytes(whole[:size])
        assert read_trace(path) == [HEAD]


CHUNK = Chunk("p", "a", "draft", "DRAFT", 0, "r", 0, 1, 1, 1, 0, False)
LINE = json.dumps({"plan": "00", "plan_name": "x", "clock": "wall", "kind": "run", "schema": "heteroreason.trace/1"})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "does not begin with a run; name a trace that `heteroreason run` left"),
        (LINE, "does not begin with a run"),
        ('{"kind": "decision"}\n', "is missing"),
        (LINE + "\n{\n", "line 2: not JSON"),
        (LINE + "\n\n" + LINE + "\n", "line 2: not JSON"),
        (LINE + "\n" + "[" * 100_000 + "\n", "line 2: not JSON"),
        (LINE + '\n{"kind": "party"}\n', "line 2: is no event of a trace; use one of the kinds run, problem"),
        (LINE + '\n{"kind": ["run"]}\n', "line 2: is no event of a trace"),
        (LINE + "\n[1]\n", "line 2: is no event of a trace"),
        (LINE + '\n{"kind": "chunk"}\n', "line 2: problem is missing"),
        (LINE.replace('"00"', "0") + "\n", "line 1: plan is 0; use text"),
        (LINE.replace("wall", "sun") + "\n", "line 1: clock is"),
        (LINE.replace('"kind"', '"colour": 1, "kind"') + "\n", "line 1: colour is not a known key"),
        (LINE.replace("trace/1", "trace/2") + "\n", "schema is 'heteroreason.trace/2' and this version reads"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read_trace(path)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_trace(tmp_path / "none")
    with pytest.raises(UserError, match="cannot be read"):
        read_trace(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot be read"):
        read_trace(tmp_path / "binary")
    with pytest.raises(UserError, match="cannot be written"):
        TraceFile(tmp_path / "no" / "folder")


def test_clocks_are_labelled() -> None:
    assert ClockKind.VIRTUAL.label == "modelled (cost model)"
    assert ClockKind.WALL.label == "measured (wall clock)"
    _, events = run_letters(quick_plan(workflow()))
    assert isinstance(events[0], RunStarted) and events[0].clock is ClockKind.VIRTUAL
