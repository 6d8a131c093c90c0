"""Soak: many problems with deadlines, faults and devices that come and go; nothing grows, nothing stays behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from contextlib import closing
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from random import Random

import pytest
from planner_cases import LetterBackend, Letters, LinearCosts, quick_plan, run_letters, workflow

from planner.machine import Machine
from planner.plan import Plan
from planner.policy import Status
from planner.runtime.backend import Output, Work
from planner.runtime.engine import Engine, Load
from planner.runtime.worker import VirtualWorkers, modelled
from planner.trace import Event, Faulted, ProblemEnded, ProblemStarted
from planner.workflow import Budget, Workflow

FLOW = workflow(accept=0.6, accept_refined=0.5, budget=Budget(6, 60, 12))


class Shaky(LetterBackend):
    """Fails now and then, and keeps no log."""

    random = Random(5)

    def run(self, work: Work) -> Output:
        if self.random.random() < 0.01:
            raise ZeroDivisionError("oh")
        output = super().run(work)
        self.log.clear()
        return output


def soak(count: int) -> None:
    random = Random(3)
    plan = quick_plan(FLOW, "overlapped")
    names = [random.choice("abc") * random.randint(1, 20) for _ in range(count)]
    problems = [Letters().parse(name) for name in names]
    events = {"begun": 0, "ended": 0, "faults": 0}
    backends = {d: Shaky() for d in "abc"}
    there = set("abc")

    def note(event: Event) -> None:
        events["begun"] += isinstance(event, ProblemStarted)
        events["ended"] += isinstance(event, ProblemEnded)
        events["faults"] += isinstance(event, Faulted)

    def again(left: Machine, flow: Workflow) -> Plan:
        places = cycle([d.name for d in left.devices])
        return replace(plan, machine=left, placement={r: next(places) for r in plan.roles})

    before = set(threading.enumerate()), set(multiprocessing.active_children())
    workers = VirtualWorkers(modelled(LinearCosts()), backends)
    statuses: dict[str, int] = {}
    sizes: list[int] = []
    warm = count // 4
    with closing(workers):
        engine = Engine(plan, workers, Letters(), note, replan=again)
        for number, solved in enumerate(engine.solve_all(problems, Load(8, deadline_us=3000))):
            statuses[solved.outcome.status] = statuses.get(solved.outcome.status, 0) + 1
            if random.random() < 0.05:
                lost = sorted(set("abc") - there)
                if lost:
                    engine.add(lost[0])
                    there.add(lost[0])
                else:
                    name = random.choice("abc")
                    engine.remove(name)
                    there.discard(name)
            if number > warm and number % (count // 20) == 0:
                gc.collect()
                sizes.append(resident_bytes())
    assert sum(statuses.values()) == events["begun"] == events["ended"] == count
    assert statuses[Status.DEADLINE] > count // 20 and statuses[Status.ANSWER] > count // 20
    assert events["faults"] > count // 20
    assert max(sizes) <= 1.05 * sizes[0], sizes
    assert (set(threading.enumerate()), set(multiprocessing.active_children())) == before
    assert not engine._sessions and not engine._running


def resident_bytes() -> int:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_a_thousand_problems_leave_nothing_behind() -> None:
    soak(1000)


def test_answers_of_the_soak_are_those_of_a_calm_run() -> None:
    """Faults and devices that come and go, at concurrency 8: the same answers."""
    plan = quick_plan(FLOW, "overlapped")
    questions = ["abc"[n % 3] * (1 + n // 3) for n in range(30)]
    workers = VirtualWorkers(modelled(LinearCosts()), {d: Shaky() for d in "abc"})
    engine = Engine(plan, workers, Letters(), lambda event: None)
    found = {s.problem.question: s.steps for s in engine.solve_all(map(Letters().parse, questions), Load(8))}
    assert [found[q] for q in questions] == [s.steps for s in run_letters(plan, questions)[0]]
