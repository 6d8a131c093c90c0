"""kill -9 of a run whose devices are processes: no committed step is lost, and its end is that of a calm run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from planner_cases import APART, Letters, quick_plan, run_letters, workflow
from process_faults import install

from planner import batch
from planner.api import plan
from planner.cli import main
from planner.plan import Plan
from planner.workflow import Budget

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")

ROOT = Path(__file__).parents[1]
FLOW = workflow(accept=0.6, accept_refined=0.5, budget=Budget(6, 60, 12))
PLAN = quick_plan(FLOW, "heteroreason", placement=APART, chunk_tokens=3)
QUESTIONS = tuple("abc"[n % 3] * (1 + n // 3) for n in range(24))

SCRIPT = """
import sys, time
from contextlib import closing
from pathlib import Path
sys.path[:0] = [{tests!r}, {folder!r}]
from planner_cases import Letters
from planner import batch
from planner.runtime.engine import Engine, Load
from planner.runtime.process import ProcessWorkers

if __name__ == "__main__":
    with closing(batch.resume(Path(sys.argv[1]))) as found, closing(ProcessWorkers(found.plan.machine)) as workers:
        print("resumed", flush=True)
        engine = Engine(found.plan, workers, Letters(), lambda event: time.sleep(0.002), journal=found.journal)
        print(*(p.pid for p, _ in workers._processes.values()), flush=True)
        for solved in engine.solve_all(found.problems, Load(3)):
            found.append_answer(solved.label)
"""


class Killed:
    """A run in a folder that goes on in a process of its own each time."""

    def __init__(self, words: Sequence[object], folder: Path) -> None:
        self.words, self.folder = [str(word) for word in words], folder
        self.kills = 0

    def go(self, random: Random | None, until_words: int, longest_s: float) -> None:
        """Go on with the run; kill it at a random time after it printed so many lines, or let it come to its end."""
        had = self.lines()
        with subprocess.Popen(self.words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            said = [process.stdout.readline() for _ in range(until_words)]
            if random is not None:
                time.sleep(random.uniform(0.0, longest_s))
                self.kills += process.poll() is None
                process.kill()
            _, told = process.communicate(timeout=300)
        assert process.returncode in (0, -signal.SIGKILL), told.decode()
        # Every line that was whole is still there, as it was.
        assert self.lines()[: len(had)] == had
        if len(said) > 1:
            self.wait_for_the_end([int(pid) for pid in said[1].split()])

    def lines(self) -> list[bytes]:
        journal = self.folder / "journal.jsonl"
        return journal.read_bytes().split(b"\n")[:-1] if journal.exists() else []

    def wait_for_the_end(self, pids: list[int]) -> None:
        """The workers of a killed run see that it is gone, and go too."""
        until = time.monotonic() + 30
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            assert time.monotonic() < until, "a worker stayed behind"
            time.sleep(0.02)

    def check(self, expected: list[tuple[str, str | None, tuple[str, ...]]]) -> None:
        """The end is the expected one, and nothing was committed twice."""
        with closing(batch.resume(self.folder)) as found:
            assert found.over
            rows = found.rows()
        assert [(r["status"], r["answer"], tuple(r["steps"])) for r in rows] == expected
        answers = [json.loads(line)["number"] for line in (self.folder / "answers.jsonl").read_text().splitlines()]
        assert sorted(answers) == list(range(1, len(expected) + 1))
        records = [json.loads(line) for line in self.lines()]
        names = [(r["problem"], r["request"]) for r in records if r["kind"] == "result"]
        assert len(names) == len(set(names))


def kill_letters(folder: Path, times: int, seed: int) -> int:
    """Kill a run of letters so often; some kills meet it while it reads its journal, or starts its processes."""
    random = Random(seed)
    install(folder)
    script, run = folder / "run.py", folder / "run"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), folder=str(folder)))
    batch.begin(run, PLAN, [Letters().parse(q) for q in QUESTIONS]).close()
    killed = Killed([sys.executable, script, run], run)
    while killed.kills < times:
        killed.go(random, random.choice([0, 1, 2, 2, 2]), 0.3)
        if killed.lines() and len(killed.lines()) > 1 and batch_over(run):
            killed.check(calm())
            batch.begin(run, PLAN, [Letters().parse(q) for q in QUESTIONS]).close()
    killed.go(None, 2, 0.0)
    killed.check(calm())
    return killed.kills


def batch_over(folder: Path) -> bool:
    with closing(batch.resume(folder)) as found:
        return found.over


def calm() -> list[tuple[str, str | None, tuple[str, ...]]]:
    return [(s.outcome.status.value, s.answer, s.steps) for s in run_letters(PLAN, QUESTIONS)[0]]


def test_kill_9_of_a_run_over_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_FAULTS", str(tmp_path))
    assert kill_letters(tmp_path, 2, seed=1) == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(5))
def test_kill_9_at_fifty_random_times(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_FAULTS", str(tmp_path))
    assert kill_letters(tmp_path, 10, seed + 2) == 10


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kill_9_of_the_command_on_a_file_of_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command itself, on the wall clock with the models that ship: killed while it plans, loads and solves."""
    random = Random(5)
    questions = [f"{3 * n + 7}-{n}+{11 * n % 37}" for n in range(1, 17)]
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(json.dumps({"question": q, "answer": "0"}) + "\n" for q in questions))
    made: Plan = plan(ROOT / "examples" / "sums.yaml", "this-computer", "overlapped")
    made.save(tmp_path / "plan.json")
    folder = tmp_path / "out"
    first = ["-m", "planner.cli", "run", tmp_path / "plan.json", "--file", problems, "--out", folder, "--shown", 0]
    command = [sys.executable, *map(str, first), "--concurrency", "2"]
    killed = Killed(command, folder)
    for _ in range(5):
        killed.go(random, 0, 25.0)
        if killed.lines():
            killed.words = [sys.executable, "-m", "planner.cli", "run", "--resume", str(folder), "--shown", "0"]
    killed.go(None, 0, 0.0)
    with pytest.raises(SystemExit):
        main(["run", str(tmp_path / "plan.json"), "--file", str(problems), "--clock", "virtual", "--json"])
    whole = json.loads(capsys.readouterr().out)["answers"]
    killed.check([(a["status"], a["answer"], tuple(a["steps"])) for a in whole])
