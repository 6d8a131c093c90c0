"""The fault matrix in worker processes: every fault at every op ends with the same answer, and nothing hangs."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
from planner_cases import APART, DRAFT, THREE, Letters, committed, quick_plan, run_letters, workflow
from process_faults import FOLDER, LAST, PASSING, TellingWorkers, install

from planner import batch
from planner.graph import Op
from planner.machine import Machine
from planner.plan import Plan
from planner.runtime import child
from planner.runtime.child import limit, start_unheard
from planner.runtime.engine import Engine, Load
from planner.runtime.faults import DeviceFault
from planner.runtime.worker import Patience
from planner.trace import Event, Faulted, Replanned
from planner.workflow import Budget, Sampling, Workflow

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")

ROOT = Path(__file__).parents[1]
QUESTIONS = ("a", "bc", "cab", "cc", "ba", "ac", "b", "ca", "abc", "bb")
OPS = list(Op)
FLOW = workflow(accept=0.6, accept_refined=0.5, budget=Budget(6, 60, 12), sampling=Sampling(1.0, 0))
PLAN = quick_plan(
    FLOW,
    placement=APART,
    priorities=dict.fromkeys("abc", tuple(f"{op}@{round}" for op in Op for round in range(3))),
    draft_ahead=1,
    prefetch_refine=True,
    alternatives=True,
    early_next=True,
    shadow_sync=True,
    batch_verify=True,
    prefill_on={DRAFT: "c"},
    chunk_tokens=3,
)
"""Runs everything ahead that it can."""
LIMIT_US = 4_000_000
"""A chunk of letters takes a thousandth of it, and a stopped process is waited for as long."""


def on_what_is_left(left: Machine, flow: Workflow) -> Plan:
    if left == THREE:
        return PLAN
    names = cycle([d.name for d in left.devices])
    placement = {r: next(names) for r in PLAN.roles}
    return replace(PLAN, name="again", machine=left, workflow=flow, placement=placement, prefill_on={})


class Bench:
    """An engine over three worker processes, and what happened in it."""

    def __init__(self, folder: Path) -> None:
        self.events: list[Event] = []
        self.workers = TellingWorkers(THREE, folder)
        patience = Patience(otherwise_us=LIMIT_US)
        more = {"replan": on_what_is_left, "patience": patience}
        self.engine = self.workers.engine = Engine(PLAN, self.workers, Letters(), self.events.append, **more)

    def solve(self, concurrency: int) -> object:
        problems = [Letters().parse(q) for q in QUESTIONS]
        found = {s.problem.question: s for s in self.engine.solve_all(problems, Load(concurrency))}
        return committed([found[q] for q in QUESTIONS])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return tmp_path


@pytest.fixture
def bench(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(child, "PIPE_TIMEOUT_S", 1)
    before = children()
    bench = Bench(folder)
    with closing(bench.workers):
        yield bench
    assert children() == before


def children() -> set[int]:
    """The worker processes that this one has started and that are still there."""
    found = set()
    for line in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(line.read_text().rpartition(")")[2].split()[1])
            words = (line.parent / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue  # it is gone meanwhile
        if parent == os.getpid() and b"resource_tracker" not in words:
            found.add(int(line.parent.name))
    return found


def check(bench: Bench, op: Op, number: int, happens: str | Callable[[str], object]) -> list[Event]:
    """Have something happen at an op, and give what was told of it."""
    expected = committed(run_letters(PLAN, QUESTIONS)[0])
    del bench.events[:]
    bench.workers.arm(op, number, happens)
    for _ in range(5):
        assert bench.solve(1 + number) == expected
        if bench.workers.fired:
            break  # what runs ahead depends on the time, so an op may come less often than it was waited for
    assert bench.workers.fired, f"there was no {op} of number {number}"
    told = [e for e in bench.events if isinstance(e, Faulted)]
    if isinstance(happens, str):
        assert {e.device for e in told} <= {bench.workers.fired}
        assert [e.lost for e in told] == ([True] if happens in LAST else [] if happens == "is slow" else [False])
    return [e for e in bench.events if isinstance(e, Faulted | Replanned)]


def every_fault(bench: Bench, op: Op, numbers: tuple[int, ...], faults: tuple[str, ...]) -> None:
    for fault in faults:
        for number in numbers:
            check(bench, op, number, fault)
            if fault in LAST:
                bench.engine.add(bench.workers.fired)  # mended
    for number in numbers:
        removed = check(bench, op, number, bench.engine.remove)
        assert [e.why for e in removed if isinstance(e, Replanned)][-1].endswith("was removed")
        gone = bench.workers.fired
        # Without it no prompt is read elsewhere, and none moves.
        while_gone = Op.DRAFT if op is Op.TRANSFER else op
        added = check(bench, while_gone, number, lambda _, gone=gone: bench.engine.add(gone))
        assert [e.why for e in added if isinstance(e, Replanned)] == [f"device {gone} was added"]
    assert bench.engine.plan.placement == APART


def test_some_faults_at_an_op(bench: Bench) -> None:
    every_fault(bench, Op.VERIFY, (1,), ("raises", "scores that are none", "dies", "is stopped"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("op", OPS)
def test_every_fault_at_every_op(op: Op, bench: Bench) -> None:
    every_fault(bench, op, (0, 3), (*PASSING, *LAST))


UNHEARD = """
import multiprocessing, os, signal
from planner.runtime.child import start_unheard


def child():
    os.kill(os.getpid(), signal.SIGINT)
    print("alive", flush=True)


if __name__ == "__main__":
    for _ in range(2):
        process = multiprocessing.get_context("spawn").Process(target=child)
        start_unheard(process)
        process.join()
"""


def test_no_worker_hears_ctrl_c_not_even_the_first(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNHEARD)
    words = [sys.executable, str(tmp_path / "script.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)
    assert (found.stdout, found.stderr) == ("alive\nalive\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_process_starts_is_heard_when_it_has_begun(number: int) -> None:
    done: list[str] = []

    class Process:
        def start(self) -> None:
            os.kill(os.getpid(), number)
            time.sleep(0.01)
            done.append("begun")

    before = signal.signal(number, lambda *_: done.append("heard"))
    try:
        start_unheard(Process())  # type: ignore[arg-type]
    finally:
        signal.signal(number, before)
    assert done == ["begun", "heard"]


# --- messages that the other side stops in the middle of ---


def test_a_process_that_stops_is_no_hang_for_a_message_of_any_length(bench: Bench) -> None:
    """Neither one that it has no room for, nor one that it has sent a part of."""
    worker, _ = bench.workers._processes["a"]
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(DeviceFault, match="hung: a message to or from it was not over"):
        bench.workers.encode("a", DRAFT, "a" * 10_000_000)
    bench.workers.drop("a")
    ours, theirs = multiprocessing.Pipe()
    limit(ours)
    os.write(theirs.fileno(), struct.pack("!i", 1000) + b"the rest never comes")
    bench.workers._processes["a"] = (worker, ours)
    with pytest.raises(DeviceFault, match="hung: a message to or from it was not over"):
        bench.workers._receive("a")
    del bench.workers._processes["a"]
    ours.close()
    theirs.close()


# --- Ctrl-C and SIGTERM while an op runs ---

SCRIPT = """
import os, signal, sys
from contextlib import closing
from pathlib import Path
sys.path[:0] = [{tests!r}, {folder!r}]
from test_fault_processes import Bench, Load
from planner import batch
from planner.graph import Op


def ended(number, frame):
    sys.exit(128 + number)


signal.signal(signal.SIGTERM, ended)
folder, op, number, kind = sys.argv[1:]
if __name__ == "__main__":
    with closing(batch.resume(Path(folder))) as found:
        bench = Bench(Path({folder!r}))
        bench.engine.journal = found.journal
        with closing(bench.workers):
            pids = [p.pid for p, _ in bench.workers._processes.values()]
            print(*pids, flush=True)
            bench.workers.arm(Op(op), int(number), lambda device: os.kill(os.getpid(), int(kind)))
            try:
                for solved in bench.engine.solve_all(found.problems, Load(2)):
                    found.append_answer(solved.label)
            except KeyboardInterrupt:
                sys.exit(130)
"""


def stop(folder: Path, op: Op, number: int, kind: signal.Signals) -> None:
    """Stop a run by a signal while a chunk of the op runs; the run goes on in another process to the same end."""
    run = folder / f"{op}-{number}-{kind.name}"
    batch.begin(run, PLAN, [Letters().parse(q) for q in QUESTIONS]).close()
    script = folder / "stopped.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), folder=str(folder)))

    def go(number: int) -> int:
        words = [sys.executable, str(script), str(run), op.value, str(number), str(int(kind))]
        found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert "Traceback" not in found.stderr, found.stderr
        gone = [int(pid) for pid in found.stdout.split()]
        assert len(gone) == 3
        until = time.monotonic() + 30
        while any(Path(f"/proc/{pid}").exists() for pid in gone):
            assert time.monotonic() < until, "a worker stayed behind"
            time.sleep(0.05)
        return found.returncode

    assert go(number) == 128 + kind
    had = (run / "journal.jsonl").read_bytes()
    assert go(-1) == 0
    assert (run / "journal.jsonl").read_bytes().startswith(had[: had.rfind(b"\n") + 1])
    with closing(batch.resume(run)) as found:
        rows = found.rows()
    whole = run_letters(PLAN, QUESTIONS)[0]
    told = [(s.outcome.status.value, s.answer, list(s.steps)) for s in whole]
    assert [(r["status"], r["answer"], list(r["steps"])) for r in rows] == told
    lines = (run / "answers.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["number"] for line in lines) == list(range(1, len(QUESTIONS) + 1))


def test_a_signal_while_a_chunk_runs(folder: Path) -> None:
    stop(folder, Op.REFINE, 2, signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("op", OPS)
def test_a_signal_while_a_chunk_of_any_op_runs(op: Op, kind: signal.Signals, folder: Path) -> None:
    for number in (0, 2):
        stop(folder, op, number, kind)
