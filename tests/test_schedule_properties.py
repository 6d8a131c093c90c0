"""Schedules of windows with everything in them: valid in every outcome, worth what they say, no better than a bound."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from planner_cases import SEEDS
from schedule_cases import played, random_window, rich_instance, rich_instances, timed
from schedule_validator import every_schedule, faults, objective_us

from planner.graph import from_text, to_text
from planner.schedule.aim import Aim, Objective
from planner.schedule.bounds import lower_bound_mj, lower_bound_us
from planner.schedule.heft import list_schedules, shift_left
from planner.schedule.instance import Instance, Schedule, distinct, expected_mj, expected_us
from planner.schedule.search import Limit, solve

QUICK = Limit(0.02)


def sound(instance: Instance, schedule: Schedule) -> None:
    assert not list(faults(instance, schedule))
    assert schedule.objective_us == pytest.approx(objective_us(instance, schedule.by_task), rel=1e-9)
    us, mj = played(instance, schedule)
    assert schedule.objective_us == pytest.approx(us, rel=1e-9)
    assert schedule.energy_mj == pytest.approx(mj, rel=1e-9, abs=1e-12)
    assert schedule.objective_us >= lower_bound_us(instance) * (1 - 1e-9)
    assert schedule.energy_mj >= lower_bound_mj(instance) * (1 - 1e-9) - 1e-12
    assert schedule.objective_us >= schedule.lower_bound_us * (1 - 1e-9)


@given(rich_instances(most=12))
@settings(max_examples=60, deadline=None)
def test_list_schedules_are_sound_and_stay_so_when_they_are_shifted(instance: Instance) -> None:
    for schedule in list_schedules(instance):
        sound(instance, schedule)
        moved = shift_left(instance, schedule)
        sound(instance, moved)
        assert moved.objective_us <= schedule.objective_us


@given(rich_instances(most=8))
@settings(max_examples=25, deadline=None)
def test_solved_schedules_are_sound_by_every_objective(instance: Instance) -> None:
    floors = list_schedules(instance)
    for objective in Objective:
        aim = Aim(objective)
        schedule = solve(instance, QUICK, aim)
        sound(instance, schedule)
        assert aim.value(schedule) <= min(map(aim.value, floors)) * (1 + 1e-9)
        assert schedule.bound <= aim.value(schedule)
        assert schedule.status in ("optimal", "feasible")
        sound(instance, shift_left(instance, schedule))


@given(rich_instances(most=8))
@settings(max_examples=15, deadline=None)
def test_a_cap_holds_while_another_objective_is_least(instance: Instance) -> None:
    fast = solve(instance, QUICK)
    capped = solve(instance, QUICK, Aim(Objective.ENERGY, max_latency_us=1.1 * fast.objective_us))
    sound(instance, capped)
    assert capped.objective_us <= 1.1 * fast.objective_us * (1 + 2e-5)
    assert capped.energy_mj <= fast.energy_mj * (1 + 1e-9)
    frugal = solve(instance, QUICK, Aim(Objective.ENERGY))
    again = solve(instance, QUICK, Aim(Objective.LATENCY, max_energy_mj=1.01 * frugal.energy_mj))
    sound(instance, again)
    assert again.energy_mj <= 1.01 * frugal.energy_mj * (1 + 2e-5) + 1e-12


@given(SEEDS)
@settings(max_examples=12, deadline=None)
def test_optimal_is_what_trying_everything_gives(seed: int) -> None:
    instance = rich_instance(Random(seed), 3, 3)
    if len(instance.graph.tasks) > 3:
        instance = timed(Random(seed), from_text(TINY), 3)
    values = [
        (expected_us(instance, slots), expected_mj(instance, slots, placement))
        for placement in instance.placements
        for slots in every_schedule(replace(instance, placements=(placement,)))
    ]
    for objective in Objective:
        schedule, best = solve(instance, Limit(1.0), Aim(objective)), min(objective.of(*v) for v in values)
        value = Aim(objective).value(schedule)
        if objective is Objective.EDP:
            assert value >= best * (1 - 1e-9)
        else:
            assert value == pytest.approx(best, rel=1e-3, abs=1e-9)
        assert (schedule.bound or schedule.lower_bound_us) <= best * (1 + 1e-9) or objective is Objective.EDP
        if objective is Objective.EDP:
            assert schedule.bound <= best * (1 + 1e-9)


TINY = """\
window rounds=1
d = DRAFT draft round=0 in=0 out=1 context=0
v = VERIFY prm round=0 in=1 out=0 context=0 accept=0.75 from d
r = REFINE target round=0 in=0 out=1 context=0 if ?!v
"""


@given(SEEDS)
@settings(max_examples=60, deadline=None)
def test_texts_of_windows_round_trip(seed: int) -> None:
    graph = random_window(Random(seed), 2)
    assert from_text(to_text(graph)) == graph


@given(rich_instances())
@settings(max_examples=40, deadline=None)
def test_leaving_out_equal_placements_changes_no_objective(instance: Instance) -> None:
    fewer = replace(instance, placements=distinct(instance))
    assert set(map(str, fewer.placements)) <= set(map(str, instance.placements))
    assert lower_bound_us(fewer) == pytest.approx(lower_bound_us(instance), rel=1e-9)
    assert lower_bound_mj(fewer) == pytest.approx(lower_bound_mj(instance), rel=1e-9, abs=1e-12)
