"""Ctrl-C and SIGTERM to the command, once and again, while it loads, solves and ends: one sentence, nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from planner import cli
from planner.api import plan

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc"),
]
ROOT = Path(__file__).parents[1]


def family(pid: int) -> set[int]:
    """The processes that a process has started."""
    found = set()
    for line in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(line.read_text().rpartition(")")[2].split()[1]) == pid:
                found.add(int(line.parent.name))
        except (OSError, ValueError):
            continue  # it is gone meanwhile
    return found


def wait_until(what, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.02)


def stopped(words: list[str], folder: Path, after_s: float, signals: list[signal.Signals], gap_s: float) -> None:
    """Run the command, and send the signals some time after its journal is there."""
    journal = folder / "journal.jsonl"
    had = journal.read_bytes() if journal.exists() else b""
    # A group of its own, so that a signal reaches the command's processes as it does from a terminal.
    command = [sys.executable, "-m", "planner.cli", "run", *words]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        wait_until(lambda: process.poll() is not None or (journal.exists() and family(process.pid)))
        time.sleep(after_s)
        children = family(process.pid)
        for number in signals:
            if process.poll() is None:
                os.killpg(process.pid, number) if number is signal.SIGINT else process.send_signal(number)
            time.sleep(gap_s)
        _, told = process.communicate(timeout=60)
    assert process.returncode in (0, 128 + signals[0]), told
    if process.returncode:
        assert told.strip() == f"stopped; go on with `heteroreason run --resume {folder}`"
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), 30.0)
    assert journal.read_bytes().startswith(had[: had.rfind(b"\n") + 1])


def test_signals_at_any_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random = Random(8)
    plan(ROOT / "examples" / "sums.yaml", "this-computer", "overlapped").save(tmp_path / "plan.json")
    folder = tmp_path / "out"
    problems = [str(tmp_path / "plan.json"), "-n", "40", "--shown", "0"]
    words = [*problems, "--out", str(folder), "--concurrency", "64"]
    for number in range(8):
        first = (signal.SIGINT, signal.SIGTERM)[number % 2]
        signals = [first] * random.choice([1, 2, 3])
        stopped(words, folder, random.choice([0.0, 1.0, 4.0, 12.0]), signals, random.choice([0.0, 0.01, 0.3]))
        words = ["--resume", str(folder), "--shown", "0"]
    for more in (words, [*problems, "--clock", "virtual"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(["run", *more, "--json"])
        assert stop.value.code == 0
    after, whole = (json.loads(text)["answers"] for text in split(capsys.readouterr().out))
    assert [(a["question"], a["status"], a["steps"]) for a in after] == [
        (a["question"], a["status"], a["steps"]) for a in whole
    ]


def split(text: str) -> list[str]:
    """The two JSON documents of an output."""
    decoder = json.JSONDecoder()
    _, end = decoder.raw_decode(text)
    return [text[:end], text[end:]]
