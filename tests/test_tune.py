"""Tuning a plan: never worse than what it began with, by each objective, and within its caps."""

from __future__ import annotations

import pytest
from planner_cases import MODELS, THREE, LinearCosts, plan_for, workflow

from planner.choose import CHOICE_SEED, Options, auto, solved
from planner.simulate import simulate
from planner.tune import Goal, Objective, Order, ordered, tune

SAMPLES = 12


@pytest.mark.parametrize("objective", list(Objective))
def test_a_tuned_plan_is_not_worse(objective: Objective) -> None:
    costs, goal = LinearCosts(), Goal(objective)
    plan = ordered(plan_for(workflow(), "overlapped"))
    placements = [plan.placement, dict.fromkeys(plan.placement, THREE.devices[0].name)]
    tuned = tune(plan, placements, costs, goal, SAMPLES, CHOICE_SEED)
    before, after = (goal.value(simulate(p, costs, SAMPLES, CHOICE_SEED)) for p in (plan, tuned))
    assert after <= before


def test_a_cap_is_kept() -> None:
    costs = LinearCosts()
    fast = ordered(plan_for(workflow(), "overlapped"))
    cap = 1.1 * simulate(fast, costs, SAMPLES, CHOICE_SEED).mean_us
    goal = Goal(Objective.ENERGY, max_latency_us=cap)
    tuned = tune(fast, [fast.placement], costs, goal, SAMPLES, CHOICE_SEED)
    result = simulate(tuned, costs, SAMPLES, CHOICE_SEED)
    assert result.mean_us <= cap
    assert result.energy_mj <= simulate(fast, costs, SAMPLES, CHOICE_SEED).energy_mj


@pytest.mark.parametrize("order", list(Order))
def test_every_order_lists_what_a_device_may_be_asked_for(order: Order) -> None:
    plan = ordered(plan_for(workflow(), "overlapped"), order)
    listed = {key for keys in plan.priorities.values() for key in keys}
    assert {"VERIFY@0", "DRAFT@0", "REFINE@0", "BACKTRACK@0", "DRAFT@1", "VERIFY@1"} <= listed


def test_auto_is_never_worse_than_a_preset_where_it_was_chosen() -> None:
    costs, options = LinearCosts(), Options(rounds=2, limit_s=1.0, samples=SAMPLES)
    best, judged = auto(workflow(), THREE, costs, dict(MODELS), options)
    found = simulate(best, costs, SAMPLES, CHOICE_SEED).mean_us
    assert found <= min(report.mean_us for report in judged.values()) * (1 + 1e-9)


def test_the_bound_of_a_solved_plan_is_below_its_objective() -> None:
    plan = solved(workflow(), THREE, LinearCosts(), dict(MODELS), Options(rounds=2, limit_s=1.0, samples=SAMPLES))
    assert plan.lower_bound_us <= plan.objective_us
