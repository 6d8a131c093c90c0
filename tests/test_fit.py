"""Fitting costs: known factors are found again, cold starts left out, bad rows named."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planner_cases import DRAFT, PRM, TARGET, LinearCosts, device, machine, plan_for, quick_plan, workflow

from planner.cost import CostEntry, CostOp, CostTable, Origin
from planner.errors import UserError
from planner.fit import dispatch_us, fit_events, fit_steps, robust
from planner.simulate import simulate
from planner.step_trace import StepRow, read_step_trace, warmed
from planner.workflow import RoleName
from planner.yaml_file import to_mapping

ON = {RoleName.DRAFT: "gpu0", RoleName.PRM: "gpu1", RoleName.TARGET: "gpu2"}
HEAD = (
    "problem,step,phase,draft_ms,prm_ms,target_ms,draft_in,draft_out,prm_in,target_in,target_out,"
    "draft_calls,prm_calls,target_calls"
)


def made_up(rows: int, seed: int = 0, noise: float = 0.01) -> list[StepRow]:
    """Rows whose times follow from known factors."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(rows):
        refined = i % 5 == 0
        context, written, again = (int(n) for n in rng.integers([100, 10, 20], [400, 80, 120]))
        calls = 2 if refined else 1
        read = calls * (context + written)
        wobble = 1 + noise * rng.standard_normal(3)
        target = (40 + 0.05 * context + 20 * again) * wobble[2] if refined else 0.0
        found.append(
            StepRow(
                str(i // 6), i % 6 + 1, "DTR" if refined else "D", (3 + 4 * written) * wobble[0],
                (10 * calls + 0.2 * read) * wobble[1], target, context, written, read,
                context if refined else 0, again if refined else 0, 1, calls, int(refined),
            )
        )  # fmt: skip
    return found


def test_known_factors_are_found() -> None:
    rows = made_up(600)
    # The first row of a run carries the start of a model: seconds, not milliseconds.
    cold = [*rows[:1], *rows[1:]]
    cold[0] = StepRow(**{**cold[0].__dict__, "prm_ms": 3800.0})
    table = fit_steps(cold, ON, "made up")
    draft = table.find(RoleName.DRAFT, "gpu0", CostOp.DECODE)
    prm = table.find(RoleName.PRM, "gpu1", CostOp.PREFILL)
    target = table.find(RoleName.TARGET, "gpu2", CostOp.DECODE)
    assert draft is not None and prm is not None and target is not None
    assert draft.origin is Origin.FITTED
    assert draft.us(50, 200) == pytest.approx(203_000, rel=0.02)
    assert prm.us(50, 250) == pytest.approx(70_000, rel=0.02)
    assert target.per_token_us == pytest.approx(20_000, rel=0.02)
    fits = {fit.role: fit for fit in table.fits}
    assert fits[RoleName.PRM].left_out >= 1 and fits[RoleName.PRM].rows == 600
    assert all(abs(fit.total_error) < 0.01 and fit.median_error < 0.02 for fit in table.fits)
    assert table.statistics is not None and table.statistics.accept == pytest.approx(0.8)


def test_a_table_round_trips_through_yaml_data() -> None:
    table = fit_steps(made_up(60), ON, "made up")
    assert CostTable.from_mapping(to_mapping(table), "here") == table


def test_our_own_traces_give_back_the_costs_of_the_clock() -> None:
    plan = plan_for(workflow(), "overlapped")
    costs = LinearCosts()
    events: list = []
    simulate(plan, costs, 60, 3, events.append)
    table = fit_events(plan, events, "a trace")
    for role, place in plan.placement.items():
        entry = table.find(role, place, CostOp.DECODE) or table.find(role, place, CostOp.PREFILL)
        assert entry is not None
        priced = costs.decode_us if entry.op is CostOp.DECODE else costs.prefill_us
        assert entry.us(8, 30) == pytest.approx(priced(role, place, 8, 30), rel=0.1)


def test_devices_that_equal_one_of_the_trace_have_its_costs() -> None:
    other = machine(device("a", core=0), device("b", active_w=11.0), device("c", core=1), device("d"))
    plan = quick_plan(workflow(), machine=other, placement={DRAFT: "a", PRM: "a", TARGET: "b"})
    events: list = []
    simulate(plan, LinearCosts({(DRAFT, "a"): 3, (TARGET, "b"): 90}), 60, 3, events.append)
    table = fit_events(plan, events, "a trace")
    # One that is bound to a core does not equal one that is not.
    for role, devices in ((DRAFT, "ac"), (PRM, "ac"), (TARGET, "b")):
        assert {e.device for e in table.entries if e.role is role} == set(devices)
    drafted = [table.find(DRAFT, d, CostOp.DECODE) for d in "ac"]
    assert len({e.us(8, 30) for e in drafted if e}) == 1
    assert [e.source for e in drafted if e] == ["a trace", "a trace, on its equal a"]
    assert {f.device for f in table.fits} == {"a", "b"}, "nothing was seen elsewhere"


@pytest.mark.parametrize(("preset", "us", "off"), [("serial", 0, 1), ("serial", 700, 1), ("overlapped", 150, 60)])
def test_the_engines_time_before_a_chunk_is_found_again(preset: str, us: float, off: float) -> None:
    plan, events = plan_for(workflow(), preset), []
    slow = replace(plan, machine=replace(plan.machine, dispatch_us=us))
    simulate(slow, LinearCosts(), 40, 3, events.append)
    # Where devices overlap, another chunk may end while a chunk is being sent: then less is seen.
    assert fit_events(slow, events, "a trace").dispatch_us == pytest.approx(us, abs=off)
    assert dispatch_us(plan, []) is None


def test_factors_are_never_negative() -> None:
    terms = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    factors, kept = robust(terms, np.array([30.0, 20.0, 10.0]))
    assert (factors >= 0).all() and len(kept) == 3


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "column problem is missing"),
        ("problem,step\n1,2\n", "column phase is missing"),
        (f"{HEAD}\n", "has no rows"),
        (f"{HEAD}\n0,1,X,1,1,0,1,1,1,0,0,1,1,0\n", "line 2: phase is 'X'"),
        (f"{HEAD}\n0,1,D,fast,1,0,1,1,1,0,0,1,1,0\n", "line 2: draft_ms is 'fast'"),
        (f"{HEAD}\n0,1,D,1,1,0,1,-1,1,0,0,1,1,0\n", "line 2: draft_out is '-1'"),
        (f"{HEAD}\n0,1,D,nan,1,0,1,1,1,0,0,1,1,0\n", "line 2: draft_ms is 'nan'"),
    ],
)
def test_bad_step_traces(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=r"trace\.csv") as caught:
        read_step_trace(path)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def step_us(table: CostTable, row: StepRow) -> float:
    """What the table says of a row, one call after another, given its counts of tokens and calls."""

    def factors(role: RoleName, op: CostOp) -> CostEntry:
        entry = table.find(role, ON[role], op)
        assert entry is not None
        return entry

    def written(role: RoleName, calls: float, tokens: float, context: float) -> float:
        entry = factors(role, CostOp.DECODE)
        before = context + (tokens / calls - 1) / 2
        return calls * entry.base_us + tokens * (entry.per_token_us + entry.per_context_us * before)

    total, prm = 0.0, factors(RoleName.PRM, CostOp.PREFILL)
    total += row.prm_calls * prm.base_us + row.prm_in * prm.per_token_us
    if row.draft_calls:
        total += written(RoleName.DRAFT, row.draft_calls, row.draft_out, row.draft_in / row.draft_calls)
    if row.target_calls:
        read = factors(RoleName.TARGET, CostOp.PREFILL)
        total += row.target_calls * read.base_us + row.target_in * read.per_token_us
        total += written(RoleName.TARGET, row.target_calls, row.target_out, row.target_in / row.target_calls)
    return total


@pytest.mark.skipif("HETEROREASON_TRACES" not in os.environ, reason="HETEROREASON_TRACES names no folder of traces")
@pytest.mark.parametrize("name", ["gsm8k_c1", "math500_c1"])
def test_measured_traces_are_told_by_a_fit_to_their_other_half(name: str) -> None:
    rows = warmed(read_step_trace(Path(os.environ["HETEROREASON_TRACES"]) / f"{name}.csv"))
    told, seen = [], []
    for parity in (0, 1):
        table = fit_steps([r for r in rows if int(r.problem) % 2 == parity], ON, name)
        others = [r for r in rows if int(r.problem) % 2 != parity]
        told += [step_us(table, r) for r in others]
        seen += [1000 * r.serial_ms for r in others]
    assert abs(sum(told) / sum(seen) - 1) < 0.01
    assert np.median(np.abs(np.array(told) / seen - 1)) < 0.05
