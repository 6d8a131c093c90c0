"""Soak on worker processes: a thousand problems, eight at once, many of them cut off or given up.

Memory stays flat in the engine's process and in those of the devices, no process or thread stays behind, and every
problem is accounted for.
"""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from planner_cases import APART, THREE, Letters, quick_plan, run_letters, workflow
from process_faults import install

from planner.api import open_workers, plan
from planner.plan import Plan
from planner.policy import Status
from planner.problems import problem_set
from planner.problems.base import Problem, ProblemSet
from planner.runtime.engine import Engine, Load
from planner.runtime.process import ProcessWorkers
from planner.runtime.session import Solved
from planner.trace import ClockKind, Decided, Event, ProblemStarted
from planner.workflow import Budget

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")

ROOT = Path(__file__).parents[1]
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Soak:
    """What a soak has seen."""

    solved: list[Solved] = field(default_factory=list)
    asked: int = 0
    given_up: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    sizes: dict[str, list[int]] = field(default_factory=dict)
    """Bytes in memory after each batch from the warm-up on, by process."""

    def note(self, event: Event) -> None:
        self.kinds[event.kind] += 1

    def measure(self, workers: ProcessWorkers) -> None:
        gc.collect()
        pids = {"engine": os.getpid()} | {d: p.pid or 0 for d, (p, _) in workers._processes.items()}
        for name, pid in pids.items():
            size = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
            self.sizes.setdefault(name, []).append(size)

    def growth(self) -> dict[str, float]:
        """The most memory over the first, by process."""
        return {name: max(sizes) / sizes[0] - 1 for name, sizes in self.sizes.items()}


def soak(
    made: Plan,
    workers: ProcessWorkers,
    problems: ProblemSet,
    questions: Sequence[Problem],
    count: int,
    deadline_us: int,
) -> Soak:
    """Run `count` problems in batches with deadlines of any length up to the given one, or none; some are given up."""
    random, seen = Random(11), Soak()
    engine = Engine(made, workers, problems, seen.note)
    batch = 0
    while seen.asked < count:
        asked = [random.choice(questions) for _ in range(min(25, count - seen.asked))]
        deadline = random.choice([None, random.randint(1, deadline_us), random.randint(1, deadline_us)])
        stop_at = random.randrange(len(asked)) if batch % 5 == 4 else len(asked)
        begun, taken = seen.kinds["problem"], 0
        with closing(engine.solve_all(asked, Load(8, deadline_us=deadline))) as results:
            while taken < stop_at:
                seen.solved.append(next(results))
                taken += 1
        seen.asked += len(asked)
        seen.given_up += len(asked) - taken
        assert seen.kinds["problem"] - begun <= len(asked)
        batch += 1
        if seen.asked > count // 4:
            seen.measure(workers)
    assert not engine._sessions
    return seen


@dataclass
class Calm:
    """An undisturbed run: the paths that each problem went through, the last one its end."""

    paths: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)

    def note(self, event: Event) -> None:
        if isinstance(event, ProblemStarted):
            self._path = self.paths.setdefault(event.question, [()])
        elif isinstance(event, Decided):
            self._path.append((*self._path[-1][: event.depth - 1], event.text))


def check(seen: Soak, count: int, calm: Calm) -> None:
    statuses = Counter(s.outcome.status for s in seen.solved)
    print("\n", seen.asked, "problems:", dict(statuses), seen.given_up, "given up;", dict(seen.kinds))
    print({name: [f"{size / 2**20:.1f} MiB" for size in (s[0], max(s), s[-1])] for name, s in seen.sizes.items()})
    assert seen.asked == len(seen.solved) + seen.given_up == count
    assert statuses[Status.DEADLINE] > count // 50 and sum(statuses.values()) - statuses[Status.DEADLINE] > count // 10
    assert seen.kinds["fault"] == 0 and seen.given_up
    # Those whose results were taken have ended in the trace, and no others but such as ended before they were given up.
    assert len(seen.solved) <= seen.kinds["end"] <= seen.kinds["problem"] <= count
    for solved in seen.solved:
        paths = calm.paths[solved.problem.question]
        assert solved.steps in (paths if solved.outcome.status is Status.DEADLINE else paths[-1:])
    assert all(growth <= 0.05 for growth in seen.growth().values()), seen.sizes


def soak_letters(folder: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    install(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("TEST_FAULTS", str(folder))
    flow = workflow(accept=0.6, accept_refined=0.5, budget=Budget(6, 60, 12))
    made = quick_plan(flow, "heteroreason", placement=APART, chunk_tokens=3)
    questions = [Letters().parse("abc"[n % 3] * (1 + n // 3)) for n in range(60)]
    calm = Calm()
    for event in run_letters(made, [q.question for q in questions])[1]:
        calm.note(event)
    threads = threading.active_count()
    with closing(ProcessWorkers(THREE)) as workers:
        seen = soak(made, workers, Letters(), questions, count, 30_000)
        pids = [p.pid for p, _ in workers._processes.values()]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids) and threading.active_count() == threads
    check(seen, count, calm)


def test_a_short_soak_on_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soak_letters(tmp_path, monkeypatch, 200)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_thousand_small_problems_on_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soak_letters(tmp_path, monkeypatch, 4000)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_problems_by_the_models_that_ship() -> None:
    made = plan(ROOT / "examples" / "countdown.yaml", "this-computer", "heteroreason")
    kinds = problem_set("countdown")
    questions = list({p.key: p for p in kinds.generate(120, seed=4)}.values())
    threads = threading.active_count()
    with open_workers(made, ClockKind.WALL) as workers:
        assert isinstance(workers, ProcessWorkers)
        seen = soak(made, workers, kinds, questions, 1000, 1_000_000)
        pids = [p.pid for p, _ in workers._processes.values()]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids) and threading.active_count() == threads
    calm = Calm()
    with open_workers(made, ClockKind.VIRTUAL) as rehearsed:
        engine = Engine(made, rehearsed, kinds, calm.note)
        for problem in questions:
            engine.solve(problem)
    check(seen, 1000, calm)
