"""Windows amid a problem: what they are made of, and that their time a round is that of long problems."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_cases import APART, DRAFT, PRM, TARGET, THREE, LinearCosts, plan_for, workflow

from planner.api import as_machine
from planner.cost import cost_model
from planner.graph import Op, from_text, to_text
from planner.lower import lower
from planner.machine import Machine
from planner.passes import DraftAhead, PrefetchRefine, run_passes
from planner.schedule.heft import list_schedule
from planner.schedule.instance import build
from planner.schedule.search import Limit, solve
from planner.shape import ModelShape
from planner.simulate import simulate
from planner.workflow import NEEDED_ROLES, Policy, Statistics, Workflow

SHORT = workflow(Policy.RSD, statistics=Statistics(0.75, 0.5, 24, 10, 12, 2))

STEADY = """\
window rounds=1 steady
draft = DRAFT draft round=0 in=0 out=10 context=24
verify = VERIFY prm round=0 in=10 out=0 context=24 accept=0.75 from draft
refine = REFINE target round=0 in=0 out=12 context=24 if !verify
draft.A = DRAFT draft round=1 in=0 out=10 context=34 from draft if verify
draft.R = DRAFT draft round=1 in=12 out=10 context=24 from refine if !verify
"""


def test_a_steady_window_goes_on_to_the_next_step_and_reads_no_prompt() -> None:
    assert to_text(lower(SHORT, 1, steady=True)) == STEADY
    graph = lower(SHORT, 1, steady=True)
    assert graph.head == "draft"
    assert from_text(STEADY) == graph


def test_after_a_backtrack_the_window_goes_on_too() -> None:
    graph = lower(replace(SHORT, policy=replace(SHORT.policy, kind=Policy.BACKTRACK)), 2, steady=True)
    closing = {t.id: t for t in graph.tasks if t.id == "draft.AB"}
    assert closing["draft.AB"].round == 2
    assert [p.id for p in graph.producers("draft.AB")] == ["recheck.A"]
    for outcome, _ in graph.outcomes:
        used = [t for t in graph.tasks if all(outcome.get(l.verify) == l.verdict for l in t.guard)]
        last = max(used, key=lambda t: t.round)
        assert last.op is Op.DRAFT and last.round in (1, 2)


def test_amid_a_long_problem_roles_are_behind_as_they_are_on_average() -> None:
    long = replace(SHORT, statistics=replace(SHORT.statistics, steps=42))
    graph = lower(long, 2, steady=True)
    # 20 rounds before, three steps accepted since the target wrote, and a quarter of a refined step unread by the PRM.
    assert graph.by_id["draft"].context == 24 + int(20 * (0.75 * 10 + 0.25 * 12))
    assert graph.by_id["refine"].tokens_in == 30
    assert graph.by_id["refine.A"].tokens_in == 40
    assert graph.by_id["refine.R"].tokens_in == 0
    assert graph.by_id["verify"].tokens_in == 10 + 3
    # Backtracks may go to what was accepted before the window.
    back = lower(replace(long, policy=replace(long.policy, kind=Policy.BACKTRACK)), 2, steady=True)
    assert "reverify" in back.by_id and back.by_id["verify"].tokens_in == 10


@pytest.mark.parametrize("kind", list(Policy))
def test_one_after_another_takes_the_sum_of_what_is_done(kind: Policy) -> None:
    # draft 200, verify 20 and refine 240 us; reading a refined step takes the draft 24 us, the verifier on the way 24.
    flow = replace(SHORT, policy=replace(SHORT.policy, kind=kind))
    costs = LinearCosts(otherwise_us=20)
    one = replace(THREE, devices=THREE.devices[:1], links=())
    instance = build(lower(flow, 1, steady=True), flow, one, costs)
    found = solve(instance, Limit(0.1))
    wanted = {
        Policy.DRAFT_ONLY: 200.0,
        Policy.TARGET_ONLY: 240.0,
        Policy.RSD: 20 + 200 + 0.25 * (240 + 24),
        Policy.BACKTRACK: 20 + 200 + 0.25 * (240 + 24),
        # The target reads the draft, and the question after it, to score it; so it has read what it goes on from.
        Policy.SPECREASON: 20 + 200 + 0.25 * (240 + 24),
    }[kind]
    assert found.objective_us == pytest.approx(wanted, rel=0.01)
    assert found.status == "optimal"


def compared(flow: Workflow, machine: Machine, costs: object, placement: dict, rounds: int = 3) -> tuple[float, float]:
    """(planned, simulated) time a round of the serial plan."""
    plan = plan_for(flow, "serial", machine, costs, placement=placement)
    instance = replace(build(lower(flow, rounds, steady=True), flow, machine, costs), placements=(plan.placement,))
    planned = list_schedule(instance, plan.placement, speculate=False).objective_us
    return planned, simulate(plan, costs, 150, 3).mean_round_us  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Policy.RSD, Policy.DRAFT_ONLY, Policy.TARGET_ONLY])
@pytest.mark.parametrize("accept", [0.3, 0.8])
def test_serial_rounds_take_what_the_simulation_of_long_problems_says(kind: Policy, accept: float) -> None:
    flow = workflow(kind, statistics=Statistics(accept, 0.7, 10, 15, 18, 30))
    costs = LinearCosts({(TARGET, "c"): 60, (PRM, "b"): 30})
    placement = {role: APART[role] for role in NEEDED_ROLES[kind]}
    planned, simulated = compared(flow, THREE, costs, placement)
    # Whole chunks and the beginning of a problem, where the target lags less, are not in the window.
    assert planned == pytest.approx(simulated, rel=0.03)


@pytest.mark.parametrize("name", ["1x3090", "3x3090", "a100", "h100"])
def test_so_they_do_with_the_roofline_of_the_catalogue(name: str) -> None:
    flow = workflow(Policy.RSD, statistics=Statistics(0.6, 0.7, 20, 15, 18, 30))
    shapes = {DRAFT: ModelShape(10**8, 10**4, 2 * 10**8), PRM: ModelShape(10**9, 10**4, 10**9)}
    shapes[TARGET] = ModelShape(4 * 10**9, 10**5, 2 * 10**9)
    machine = as_machine(name)
    costs = cost_model(machine, flow, shapes)
    names = [d.name for d in machine.devices]
    placement = {r: names[i % len(names)] for i, r in enumerate((DRAFT, PRM, TARGET))}
    planned, simulated = compared(flow, machine, costs, placement)
    assert planned == pytest.approx(simulated, rel=0.02)


@pytest.mark.parametrize("kind", [Policy.RSD, Policy.BACKTRACK])
def test_the_way_of_tokens_and_verdicts_counts_alike(kind: Policy) -> None:
    """Where links are as slow as the work, planned and simulated rounds agree: each charges the same ways."""
    flow = workflow(kind, statistics=Statistics(0.6, 1.0, 10, 15, 18, 30))
    slow = replace(THREE, links=tuple(replace(link, latency_us=100 + 50 * n) for n, link in enumerate(THREE.links)))
    planned, simulated = compared(flow, slow, LinearCosts(otherwise_us=20), APART)
    assert planned == pytest.approx(simulated, rel=0.03)
    near, _ = compared(flow, THREE, LinearCosts(otherwise_us=20), APART)
    assert planned > 1.3 * near


def test_running_ahead_across_the_edge_counts() -> None:
    flow = replace(SHORT, statistics=replace(SHORT.statistics, accept=1.0))
    costs = LinearCosts({(PRM, "b"): 200})
    apart = {DRAFT: "a", PRM: "b", TARGET: "c"}
    ahead = run_passes(lower(flow, 3, steady=True), [DraftAhead(3), PrefetchRefine()])
    instance = replace(build(ahead, flow, THREE, costs), placements=(apart,))
    # Verification and drafts take 200 us each: with drafts ahead a round takes no more than one of them.
    found = solve(instance, Limit(0.1))
    assert found.objective_us == pytest.approx(200, rel=0.05)
    waits = replace(build(lower(flow, 3, steady=True), flow, THREE, costs), placements=(apart,))
    assert solve(waits, Limit(0.1)).objective_us > 390
