"""Tuning a plan: never worse than what it began with, by each objective, and within its caps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from planner_cases import DRAFT, MIXED, MODELS, PRM, TARGET, THREE, LinearCosts, plan_for, workflow

from planner.choose import CHOICE_SEED, Options, auto, solved
from planner.errors import UserError
from planner.goal import Cap, Goal, Wish, read_caps
from planner.graph import from_text
from planner.plan import Plan
from planner.schedule.aim import Objective
from planner.schedule.instance import Placement
from planner.simulate import simulate
from planner.trace import Chunk, Event
from planner.tune import MOVES, WINDOW_MOVES, Judge, Order, improvements, ordered
from planner.workflow import RoleName, Statistics

SAMPLES = 12
QUICK = Options(rounds=2, work=0.02, samples=SAMPLES)


def tuned(plan: Plan, placements: Sequence[Placement], goal: Goal, costs: LinearCosts) -> Plan:
    found = improvements(plan, placements, Judge(costs, goal, SAMPLES, CHOICE_SEED), (*MOVES, *WINDOW_MOVES))
    return [plan, *found][-1]


@pytest.mark.parametrize("objective", list(Objective))
def test_a_tuned_plan_is_not_worse(objective: Objective) -> None:
    costs, goal = LinearCosts(), Goal(objective)
    plan = ordered(plan_for(workflow(), "overlapped"))
    placements = [plan.placement, dict.fromkeys(plan.placement, THREE.devices[0].name)]
    best = tuned(plan, placements, goal, costs)
    before, after = (goal.value(simulate(p, costs, SAMPLES, CHOICE_SEED)) for p in (plan, best))
    assert after <= before


def test_each_improvement_is_one_and_the_search_can_stop_at_any() -> None:
    costs, goal = LinearCosts({(TARGET, "c"): 60}), Goal()
    judge = Judge(costs, goal, SAMPLES, CHOICE_SEED)
    found = list(improvements(plan_for(workflow()), [], judge, MOVES))
    values = [judge.worth(plan) for plan in found]
    assert found and values == sorted(values, reverse=True)


def test_a_cap_is_kept() -> None:
    costs = LinearCosts()
    fast = ordered(plan_for(workflow(), "overlapped"))
    cap = 1.1 * simulate(fast, costs, SAMPLES, CHOICE_SEED).mean_us
    best = tuned(fast, [fast.placement], Goal(Objective.ENERGY, max_latency_us=cap), costs)
    result = simulate(best, costs, SAMPLES, CHOICE_SEED)
    assert result.mean_us <= cap
    assert result.energy_mj <= simulate(fast, costs, SAMPLES, CHOICE_SEED).energy_mj


def test_a_plan_beyond_a_cap_comes_nearer_to_it() -> None:
    costs = LinearCosts()
    slow = plan_for(workflow(), "serial")
    took = simulate(slow, costs, SAMPLES, CHOICE_SEED).mean_us
    best = tuned(slow, [slow.placement], Goal(Objective.ENERGY, max_latency_us=0.5 * took), costs)
    assert simulate(best, costs, SAMPLES, CHOICE_SEED).mean_us < took


@pytest.mark.parametrize("order", list(Order))
def test_every_order_lists_what_a_device_may_be_asked_for(order: Order) -> None:
    plan = ordered(plan_for(workflow(), "overlapped"), order)
    listed = {key for keys in plan.priorities.values() for key in keys}
    assert {"VERIFY@0", "DRAFT@0", "REFINE@0", "BACKTRACK@0", "DRAFT@1", "VERIFY@1"} <= listed


def test_auto_is_never_worse_than_a_preset_where_it_was_chosen() -> None:
    costs = LinearCosts()
    best, judged = auto(workflow(), THREE, costs, dict(MODELS), QUICK)
    found = simulate(best, costs, SAMPLES, CHOICE_SEED).mean_us
    assert found <= min(report.mean_us for report in judged.values()) * (1 + 1e-9)


UNEVEN = LinearCosts({(DRAFT, "fpga"): 25, (PRM, "gpu1"): 15, (TARGET, "gpu0"): 70, (TARGET, "gpu1"): 60})
"""Fast and frugal are not the same."""
FRUGAL = replace(
    MIXED, devices=tuple(replace(d, active_w=4.0 if d.name == "fpga" else 100.0, idle_w=1.0) for d in MIXED.devices)
)


@pytest.mark.parametrize("objective", list(Objective))
def test_a_solved_plan_has_a_bound_of_its_objective(objective: Objective) -> None:
    plan = solved(workflow(), FRUGAL, UNEVEN, dict(MODELS), replace(QUICK, wish=Wish(objective)))
    assert plan.objective is objective
    assert plan.lower_bound_us <= plan.objective_us
    assert plan.energy_mj > 0
    assert 0 <= plan.gap < 1
    assert plan.bound <= objective.of(plan.objective_us, plan.energy_mj)
    assert from_text(plan.graph).steady
    assert Plan.from_mapping({"schema": "heteroreason.plan/1", "hash": plan.hash, **plan.to_mapping()}, "x") == plan


def test_each_objective_is_least_where_it_is_asked_for() -> None:
    plans = {o: solved(workflow(), FRUGAL, UNEVEN, dict(MODELS), replace(QUICK, wish=Wish(o))) for o in Objective}
    reports = {o: simulate(p, UNEVEN, SAMPLES, CHOICE_SEED) for o, p in plans.items()}
    for wanted in Objective:
        values = {o: Goal(wanted).value(r) for o, r in reports.items()}
        assert values[wanted] <= min(values.values()) * 1.005, wanted


def test_a_relative_cap_is_a_multiple_of_the_fastest_plans() -> None:
    def plan(wish: Wish) -> Plan:
        return solved(workflow(), FRUGAL, UNEVEN, dict(MODELS), replace(QUICK, wish=wish))

    fast = simulate(plan(Wish()), UNEVEN, SAMPLES, CHOICE_SEED)
    made = plan(Wish(Objective.ENERGY, Cap(factor=1.2)))
    assert (made.objective, made.max_latency, made.max_energy) == (Objective.ENERGY, Cap(factor=1.2), Cap())
    capped = simulate(made, UNEVEN, SAMPLES, CHOICE_SEED)
    assert capped.mean_us <= 1.2 * fast.mean_us * (1 + 1e-9)
    assert capped.energy_mj <= fast.energy_mj
    with pytest.raises(UserError, match=r"no plan was found that takes at most .* ms a problem; the nearest takes"):
        plan(Wish(Objective.ENERGY, Cap(factor=0.2)))


@dataclass(frozen=True)
class SlowReader(LinearCosts):
    """A device that reads no faster than it writes; the others read a hundred times faster."""

    def prefill_us(self, role: RoleName, device: str, tokens: int, context: int) -> int:
        written = self.decode_us(role, device, tokens, context)
        return written if device == "fpga" else max(1, written // 100)


def test_a_prompt_is_read_where_that_is_fast_and_its_cache_is_moved() -> None:
    flow = workflow(statistics=Statistics(prompt_tokens=200))
    quick_writer = {(DRAFT, "fpga"): 5, (DRAFT, "gpu0"): 90, (DRAFT, "gpu1"): 90}
    options = Options(rounds=1, work=0.02, samples=4)
    plan = solved(flow, MIXED, SlowReader(quick_writer), dict(MODELS), options)
    assert plan.placement[DRAFT] == "fpga"
    assert plan.prefill_on[DRAFT] in ("gpu0", "gpu1")
    # It is what the runtime does: the simulation shows it, and is faster for it.
    events: list[Event] = []
    elsewhere = simulate(plan, SlowReader(quick_writer), 8, sink=events.append)
    on_fpga = {e.op for e in events if isinstance(e, Chunk) and e.device == "fpga"}
    assert "TRANSFER" in on_fpga and "PREFILL" not in on_fpga
    here = simulate(replace(plan, prefill_on={}), SlowReader(quick_writer), 8)
    assert elsewhere.mean_us < here.mean_us
    # Where the draft's own device reads as fast, nothing is moved.
    assert solved(flow, MIXED, LinearCosts(quick_writer), dict(MODELS), options).prefill_on == {}
    # Nor where the other devices have no room for its weights too: a model with its caches needs 6120 bytes.
    tight = replace(MIXED, devices=tuple(replace(d, memory_bytes=7000) for d in MIXED.devices))
    assert solved(flow, tight, SlowReader(quick_writer), dict(MODELS), options).prefill_on == {}


def test_caps_are_read_from_words() -> None:
    assert read_caps(None, None) == (Cap(), Cap())
    assert read_caps("250ms", "30 J") == (Cap(250_000.0), Cap(30_000.0))
    assert read_caps("1.2x", "0.5x") == (Cap(factor=1.2), Cap(factor=0.5))
    assert Cap(factor=1.5).of(2.0) == 3.0 and Cap(7.0).of(2.0) == 7.0
    for wrong in ("x", "fast", "-1ms", "0x", "nanx", "infx", "3", "3 J"):
        with pytest.raises(UserError, match=r"--max-latency is .*; use a factor such as 1\.2x"):
            read_caps(wrong, None)
