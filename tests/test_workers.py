"""Workers: a process for each device, backends that are shared, and a clock that stands still."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from planner_cases import (
    DRAFT,
    PRM,
    TARGET,
    LetterBackend,
    Letters,
    LinearCosts,
    committed,
    device,
    install_backend,
    machine,
    quick_plan,
    run_letters,
    workflow,
)

from planner.errors import UserError
from planner.machine import Machine
from planner.runtime import process
from planner.runtime.backend import Work
from planner.runtime.engine import Engine
from planner.runtime.faults import DeviceFault, Fault, FaultKind
from planner.runtime.process import ProcessWorkers
from planner.runtime.worker import Shelf, VirtualWorkers, modelled
from planner.trace import Chunk, ClockKind, Event
from planner.workflow import Budget

LIVELY = workflow(accept=0.6, accept_refined=0.5, budget=Budget(6, 60, 12))


BACKEND = '''
"""A backend that an entry point names, for tests of worker processes."""
import os, sys, time
sys.path.insert(0, {tests!r})
from planner_cases import LetterBackend
from planner.errors import UserError


class Backend(LetterBackend):
    def __init__(self, options):
        super().__init__()
        if os.environ.get("TEST_BACKEND") == "refuse":
            raise UserError("no such board", where="slot 3", mend="plug it in")

    def encode(self, name, text):
        if text == "pid":
            return (os.getpid(),)
        if text == "raise":
            raise UserError("cannot be written", where="here", mend="use letters")
        if text == "fault":
            raise ZeroDivisionError("oh")
        return super().encode(name, text)

    def run(self, work):
        if work.temperature in (0.3, 5.0):
            time.sleep(600 if work.temperature == 5.0 else 0.3)
        return super().run(work)
'''


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine of two devices whose backend is installed in a folder of its own; its processes inherit the path."""
    (tmp_path / "backend_of_test.py").write_text(BACKEND.format(tests=str(Path(__file__).parent)))
    install_backend(tmp_path, "backend_of_test")
    monkeypatch.syspath_prepend(str(tmp_path))
    return machine(device("a"), device("b"))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_worker_processes(board: Machine) -> None:
    flow = workflow(accept=0.6, accept_refined=0.5, budget=Budget(3, 30, 12))
    plan = quick_plan(flow, "overlapped", machine=board, placement={DRAFT: "a", PRM: "b", TARGET: "b"})
    events: list[Event] = []
    with closing(ProcessWorkers(board)) as workers:
        assert workers.clock is ClockKind.WALL
        engine = Engine(plan, workers, Letters(), events.append)
        solved = [engine.solve(Letters().parse(q)) for q in ("a", "bc")]
        # The same steps as on the virtual clock, and times that follow each other.
        assert committed(solved) == committed(run_letters(plan)[0])
        assert all(c.start_us <= c.end_us for c in events if isinstance(c, Chunk))
        pids = {d: workers.encode(d, DRAFT, "pid")[0] for d in ("a", "b")}
        assert len({os.getpid(), *pids.values()}) == 3
        with pytest.raises(UserError) as error:
            workers.encode("a", DRAFT, "raise")
        assert (error.value.what, error.value.where, error.value.mend) == ("cannot be written", "here", "use letters")
        with pytest.raises(DeviceFault, match="device a: raised: ZeroDivisionError: oh"):
            workers.encode("a", DRAFT, "fault")
        # It still answers, after a chunk that it is busy with too, until it is killed while it works.
        workers.submit("a", Work("draft", "0", 0, (1,), 4, temperature=0.3), 0, 60_000_000)
        assert workers.wait(workers.now_us() + 1000) is None
        assert workers.encode("a", DRAFT, "ab") == (0, 1)
        done = workers.wait()
        assert done is not None and done.device == "a"
        assert workers.encode("a", DRAFT, "ab") == (0, 1)
        work = Work("draft", "0", 0, (1,), 4, temperature=5.0)
        workers.submit("a", work, 0, 10_000)
        done = workers.wait()
        assert done is not None and done.fault is not None
        assert done.fault == Fault(FaultKind.HUNG, "a chunk was not over after 0.01 s")
        assert not alive(pids["a"])
        os.kill(pids["b"], signal.SIGKILL)
        with pytest.raises(DeviceFault, match="device b: died: its process ended with exit code -9"):
            workers.encode("b", DRAFT, "ab")
        workers.submit("b", work, 0, 60_000_000)
        done = workers.wait()
        assert done is not None and done.fault is not None and done.fault.kind is FaultKind.DIED
    assert not any(alive(pid) for pid in pids.values())
    workers.close()


def test_a_backend_that_cannot_be_made_says_why(board: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_BACKEND", "refuse")
    missing = replace(board, devices=(board.devices[0], replace(board.devices[1], backend="nobody")))
    with closing(ProcessWorkers(missing)) as workers:
        with pytest.raises(UserError, match=r"^slot 3: no such board; plug it in$"):
            workers.encode("a", DRAFT, "ab")
        with pytest.raises(UserError, match="backend 'nobody' of device b is not installed; use one of fake, "):
            workers.encode("b", DRAFT, "ab")


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="processes cannot be pinned here")
def test_each_process_is_pinned_to_its_device_s_core(board: Machine) -> None:
    cores = sorted(os.sched_getaffinity(0))
    there, missing = cores[-1], max(cores) + 1
    pinned = [replace(d, core=core) for d, core in zip(board.devices, (there, missing), strict=True)]
    with closing(ProcessWorkers(replace(board, devices=tuple(pinned)))) as workers:
        pids = [workers.encode(device, DRAFT, "pid")[0] for device in ("a", "b")]
        assert os.sched_getaffinity(pids[0]) == {there}
        assert os.sched_getaffinity(pids[1]) == set(cores), "a core that is not there is none to be pinned to"


def test_a_shelf_keeps_one_backend_a_kind(board: Machine) -> None:
    shelf = Shelf()
    a, b = (shelf.backend(d) for d in board.devices)
    assert a is b and isinstance(a, object)
    shelf.close()
    assert shelf.backend(board.devices[0]) is not a
    shelf.close()
    shelf.close()


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_processes_that_do_not_end_are_waited_for_together(board: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "CLOSE_TIMEOUT_S", 3.0)
    with closing(ProcessWorkers(board)) as workers:
        workers.load({DRAFT: ("a", LIVELY.roles[DRAFT]), PRM: ("b", LIVELY.roles[PRM])}, ".")
        pids = [workers.encode(device, DRAFT, "pid")[0] for device in ("a", "b")]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        workers.close()
        assert time.monotonic() - began < 5.5
    assert not any(map(alive, pids))


def test_a_virtual_clock_stands_still_but_for_waits() -> None:
    workers = VirtualWorkers(modelled(LinearCosts(otherwise_us=10)), {d: LetterBackend() for d in "abc"})
    workers.load({DRAFT: ("a", LIVELY.roles[DRAFT])}, ".")
    assert workers.encode("a", DRAFT, "ab") == (0, 1)
    workers.submit("a", Work("draft", "0", 0, (1,) * 20), 7, 1000)
    workers.submit("b", Work("draft", "0", 0, (1,) * 10), 3, 1000)
    assert workers.now_us() == 0
    done = workers.wait()
    assert (done.device, done.start_us, done.end_us, workers.now_us()) == ("b", 3, 13, 13)
    done = workers.wait()
    assert (done.device, done.start_us, done.end_us, workers.now_us()) == ("a", 7, 27, 27)
    workers.close()
