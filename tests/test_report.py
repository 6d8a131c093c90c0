"""Reports: by hand on a tiny trace, and consistent with any trace."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from random import Random

import pytest
from hypothesis import given, settings
from planner_cases import APART, DRAFT, PRM, SEEDS, TARGET, quick_plan, random_plan, run_letters, workflow, workflows
from rich.console import Console

from planner.report import report
from planner.show import report_table
from planner.trace import (
    Chunk,
    ClockKind,
    Decided,
    Event,
    Faulted,
    ProblemEnded,
    ProblemStarted,
    Replanned,
    RunStarted,
)
from planner.workflow import Workflow

PLAN = quick_plan(workflow(), "overlapped", placement=APART)


def chunk(device: str, request: str, start_us: int, end_us: int, problem: str = "p") -> Chunk:
    role = {"a": DRAFT, "b": PRM, "c": TARGET}[device]
    return Chunk(problem, device, role, "DRAFT", 0, request, start_us, end_us, 1, 1, 0, False)


def turn(event: str, **scores: float) -> Decided:
    return Decided("p", 0, event, 1, "draft", "x", scores, 0)


TINY: list[Event] = [
    RunStarted(PLAN.hash, "tiny", ClockKind.VIRTUAL),
    ProblemStarted("p", "?", 100, 100),
    chunk("a", "d1", 100, 400),
    chunk("a", "d2", 400, 500),
    chunk("b", "v1", 400, 450),
    chunk("c", "r1", 100, 700),
    turn("accepted", draft=0.9),
    turn("refined", draft=0.1),
    turn("kept weak", draft=0.2, refined=0.1),
    chunk("c", "r2", 700, 900),
    ProblemEnded("p", 1100, "answer", "3", True, ("x",), ("d1", "v1", "r2")),
]


def test_by_hand() -> None:
    found = report(PLAN, TINY)
    assert (found.plan, found.plan_name, found.clock) == (PLAN.hash, PLAN.name, ClockKind.VIRTUAL)
    assert (found.problems, found.correct, found.total_us) == (1, 1, 1000)
    assert (found.mean_us, found.p50_us, found.p95_us, found.stderr_us) == (1000, 1000, 1000, 0)
    assert (found.rounds, found.mean_round_us) == (3, pytest.approx(1000 / 3))
    assert found.turns == {"accepted": 1, "kept weak": 1, "refined": 1}
    assert found.acceptance == pytest.approx(1 / 3)
    use = {d.device: d for d in found.devices}
    assert {n: (d.busy_us, d.wasted_us, d.utilisation) for n, d in use.items()} == {
        "a": (400, 100, 0.4),
        "b": (50, 0, 0.05),
        "c": (800, 600, 0.8),
    }
    # 10 W while busy, 1 W else: microseconds times watts are microjoules.
    assert use["a"].energy_mj == pytest.approx((400 * 10 + 600 * 1) / 1000)
    assert found.energy_mj == pytest.approx((1250 * 10 + 1750 * 1) / 1000)
    assert found.waste == pytest.approx(700 / 1250)
    assert found.utilisation == pytest.approx(1.25 / 3)
    assert (found.planned_round_us, found.bound_round_us) == (PLAN.objective_us, PLAN.lower_bound_us)
    raw = found.to_mapping()
    assert json.loads(json.dumps(raw))["label"] == "modelled (cost model)"
    assert raw["energy_mj"] == found.energy_mj


def test_work_that_ends_after_the_answer_is_part_of_the_time_of_its_device() -> None:
    late = [*TINY[:-1], chunk("c", "r3", 900, 1500), TINY[-1]]
    found = report(PLAN, late)
    assert found.total_us == 1000
    use = {d.device: d for d in found.devices}
    assert all(d.utilisation <= 1 for d in found.devices)
    assert use["c"].utilisation == pytest.approx(1400 / 1400)
    # The other devices wait until the last one is done.
    assert use["a"].energy_mj == pytest.approx((400 * 10 + 1000 * 1) / 1000)


def test_the_same_problem_may_come_twice() -> None:
    again: list[Event] = [
        ProblemStarted("p#2", "?", 2000, 1900),
        replace(chunk("a", "d1", 2000, 2100), problem="p#2"),
        ProblemEnded("p#2", 2200, "answer", "3", False, ("x",), ("d1",)),
    ]
    found = report(PLAN, TINY + again)
    assert (found.problems, found.correct, found.total_us, found.mean_us) == (2, 1, 1300, 650)
    assert found.stderr_us == pytest.approx(350)
    assert (found.span_us, found.problems_per_s) == (1200, pytest.approx(2e6 / 1200))


@pytest.mark.parametrize("events", [TINY[:1], TINY[:4]], ids=["nothing", "cut off"])
def test_a_trace_that_was_cut_off(events: list[Event]) -> None:
    found = report(PLAN, events)
    assert (found.problems, found.total_us, found.mean_us, found.rounds) == (0, 0, 0, 0)
    assert found.acceptance is None


@given(workflows(), SEEDS)
@settings(max_examples=25, deadline=None)
def test_totals_are_those_of_the_trace(flow: Workflow, seed: int) -> None:
    plan = random_plan(Random(seed), flow)
    solved, events = run_letters(plan, ("a", "bc", "a"))
    found = report(plan, events)
    assert found.problems == 3
    assert found.total_us == sum(s.latency_us for s in solved)
    assert found.correct == sum(s.correct for s in solved)
    assert found.rounds == sum(found.turns.values()) == sum(len(s.outcome.decisions) for s in solved)
    busy = {d: sum(e.end_us - e.start_us for e in events if isinstance(e, Chunk) and e.device == d) for d in "abc"}
    assert {d.device: d.busy_us for d in found.devices} == {d: busy[d] for d in plan.places}
    for use in found.devices:
        assert 0 <= use.wasted_us <= use.busy_us
        assert 0 <= use.utilisation <= 1
        assert use.energy_mj >= use.busy_us * 10 / 1000
    assert 0 <= found.waste <= 1
    if not any(plan.priorities.values()):
        assert found.waste == 0


def test_simulated_cycles_are_told_for_the_devices_that_have_them() -> None:
    events = [replace(e, cycles=700) if isinstance(e, Chunk) and e.device == "a" else e for e in TINY]
    use = {d.device: d.cycles_per_token for d in report(PLAN, events).devices}
    # Two chunks that read one token and write one.
    assert use == {"a": 350.0, "b": None, "c": None}
    console = Console(width=120, file=StringIO())
    console.print(report_table(PLAN, report(PLAN, events)))
    shown = console.file.getvalue()
    assert "350, 642857 tokens/s at 225 MHz (assumption)" in shown and shown.count("simulated") == 1


def test_faults_and_new_plans_are_told() -> None:
    plan = quick_plan(workflow(), placement=APART)
    _, events = run_letters(plan)
    fault = Faulted(1, "c", "raised", "ValueError: oh", False)
    lost = Faulted(2, "c", "died", "its process ended with exit code -9", True)
    moved = Replanned(3, "device c is lost", "01", "again", {DRAFT: "a", PRM: "b", TARGET: "b"})
    calm, made = report(plan, events), report(plan, [*events, fault, fault, lost, moved])
    assert calm.faults == calm.replanned == ()
    assert made.faults == (
        "c raised: ValueError: oh (2 times)",
        "c died and is lost: its process ended with exit code -9",
    )
    assert made.replanned == ("device c is lost: plan again (01)",)
    assert made.devices == calm.devices
    json.dumps(made.to_mapping(), allow_nan=False)
    rows = [str(cell) for column in report_table(plan, made).columns for cell in column.cells]
    assert [r for r in rows if r in (*made.faults, *made.replanned)] == [*made.faults, *made.replanned]


def test_devices_that_a_run_moved_to_are_in_the_report() -> None:
    plan = quick_plan(workflow(), placement=dict.fromkeys(APART, "a"))
    _, events = run_letters(plan)
    moved = Replanned(3, "device a was removed", "01", "again", dict.fromkeys(APART, "b"))
    assert [d.device for d in report(plan, [*events, moved]).devices] == ["a", "b"]
