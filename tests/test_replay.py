"""Replay of step traces: the recorded times, through the same dispatch and engine as a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import APART, THREE, LinearCosts, quick_plan, workflow

from planner import api
from planner.choose import Options
from planner.cost import CostTable
from planner.fit import fit_steps
from planner.plan import Plan
from planner.replay import replay
from planner.step_trace import StepRow, by_problem, read_step_trace, warmed
from planner.trace import Chunk, Event
from planner.tune import ordered
from planner.workflow import RoleName, Workflow

COSTS = LinearCosts({})
EXAMPLES = Path(__file__).parent.parent / "examples"
AT = {RoleName.DRAFT: "gpu0", RoleName.PRM: "gpu1", RoleName.TARGET: "gpu2"}
TRACES = os.environ.get("HETEROREASON_TRACES")


def plan(**knobs: object) -> Plan:
    return ordered(replace(quick_plan(workflow(), "overlapped", machine=THREE, placement=APART), **knobs))


def row(problem: str, step: int, phase: str = "D", draft: float = 10, prm: float = 6, target: float = 40) -> StepRow:
    refined, calls = phase != "D", 1 if phase == "D" else 2
    wrote = (12 if refined else 0, 9, 30 if refined else 0)
    return StepRow(problem, step, phase, draft, prm, target if refined else 0.0, 20, 8, 28, *wrote[:1], wrote[2],
                   1, calls, int(refined))  # fmt: skip


@st.composite
def traces(draw: st.DrawFn) -> list[StepRow]:
    times = st.floats(0.5, 200)
    found = []
    for problem in range(draw(st.integers(1, 3))):
        for step in range(draw(st.integers(1, 6))):
            phase = draw(st.sampled_from(["D", "D", "D", "DTR", "DTB"]))
            found.append(row(str(problem), step + 1, phase, draw(times), draw(times), draw(times)))
    return found


@given(traces())
@settings(max_examples=40, deadline=None)
def test_the_serial_plan_takes_what_was_recorded(rows: list[StepRow]) -> None:
    serial = quick_plan(workflow(), "serial", machine=THREE, placement=APART)
    found = replay(serial, rows, COSTS)
    problems = len(by_problem(rows))
    assert found.report.problems == problems
    # Transfers and whole microseconds are all that is added.
    assert found.report.mean_us == pytest.approx(found.serial_us, rel=1e-3, abs=60 * len(rows))
    assert found.serial_us == pytest.approx(1000 * sum(r.serial_ms for r in rows) / problems)
    assert found.report.waste == 0


@given(traces(), st.integers(0, 3), st.booleans(), st.integers(0, 2), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_plan_lies_between_foresight_and_serial(
    rows: list[StepRow], ahead: int, prefetch: bool, far: int, early: bool, batch: bool
) -> None:
    knobs = {"draft_ahead": ahead, "prefetch_refine": prefetch, "prefetch_ahead": far}
    events: list[Event] = []
    found = replay(plan(**knobs, early_next=early, batch_verify=batch), rows, COSTS, events.append)
    slack = 60 * len(rows)
    assert found.foresight_us - slack <= found.report.mean_us
    chunks: dict[str, list[Chunk]] = {}
    for event in events:
        if isinstance(event, Chunk):
            chunks.setdefault(event.device, []).append(event)
    for here in chunks.values():
        assert all(a.end_us <= b.start_us for a, b in pairwise(sorted(here, key=lambda c: c.start_us)))
    turns = found.report.turns
    assert turns.get("accepted", 0) == sum(r.accepted for r in rows)
    assert turns.get("refined", 0) == sum(not r.accepted for r in rows)


def test_overlap_by_hand() -> None:
    """Draft 10, verify 6, three times accepted: the second and third draft run while the step before is verified."""
    rows = [row("p", i) for i in (1, 2, 3)]
    found = replay(plan(draft_ahead=1, prefetch_refine=False, early_next=False), rows, COSTS)
    assert found.report.mean_us == pytest.approx(36_000, abs=300)
    assert (found.serial_us, found.foresight_us) == (48_000, 30_000)


def test_nothing_from_before_a_backtrack_is_kept() -> None:
    """The step after a backtrack is drafted only once the verdict is in."""
    rows = [row("p", 1, "DTB"), row("p", 2)]
    found = replay(plan(draft_ahead=3, early_next=True), rows, COSTS)
    assert found.report.mean_us >= 40_000 + 3_000 + 10_000 + 6_000 - 100


def test_a_cold_start_is_taken_out() -> None:
    rows = [replace(row("p", 1), prm_ms=3000.0), *(row("p", i) for i in (2, 3, 4))]
    assert [r.prm_ms for r in warmed(rows)] == [6, 6, 6, 6]
    assert warmed(rows[1:]) == rows[1:]
    assert warmed(rows[:1]) == rows[:1]


def halves(rows: Sequence[StepRow]) -> list[tuple[list[StepRow], list[StepRow]]]:
    """Fitted on problems of one parity, replayed on the other, both ways."""
    odd = [r for r in rows if int(r.problem) % 2]
    even = [r for r in rows if not int(r.problem) % 2]
    return [(odd, even), (even, odd)]


def everywhere(table: CostTable) -> CostTable:
    """The fitted costs on each of the three like cards."""
    entries = tuple(replace(e, device=d) for e in table.entries for d in AT.values())
    return replace(table, entries=entries)


def pooled(name: str) -> dict[str, float]:
    """Total time of each plan, and of serial work and perfect foresight, over both halves."""
    rows = warmed(read_step_trace(Path(str(TRACES)) / f"{name}_c1.csv"))
    flow = Workflow.load(EXAMPLES / "published" / "config1.yaml")
    total = dict.fromkeys(("serial", "overlapped", "auto", "foresight"), 0.0)
    for known, new in halves(rows):
        table = everywhere(fit_steps(known, AT, name))
        for kind in ("overlapped", "auto"):
            made = api.plan(flow, "3x3090", kind, costs=table, options=Options(samples=60))
            found = replay(made, new, api.costs_of(made.workflow, made.machine, table))
            total[kind] += found.report.total_us
        problems = found.report.problems
        total["serial"] += found.serial_us * problems
        total["foresight"] += found.foresight_us * problems
    return total


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not TRACES, reason="HETEROREASON_TRACES names no folder of traces")
@pytest.mark.parametrize(("name", "least"), [("gsm8k", 1.26), ("math500", 1.37)])
def test_plans_fitted_on_one_half_pay_on_the_other(name: str, least: float) -> None:
    total = pooled(name)
    assert total["serial"] / total["auto"] >= least
    assert total["auto"] <= total["overlapped"]
    assert total["foresight"] < total["auto"]
