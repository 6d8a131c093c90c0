"""Schedules: list schedules, CP-SAT, bounds, all judged by a validator of their own."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from planner_cases import (
    DRAFT,
    MIXED,
    PRM,
    SEEDS,
    TARGET,
    THREE,
    LinearCosts,
    device,
    instances,
    machine,
    workflow,
)
from schedule_validator import best_us, faults, objective_us, overlaps, worlds

from planner.errors import UserError
from planner.graph import from_text
from planner.lower import lower
from planner.passes import DraftAhead, PrefetchRefine, run_passes
from planner.schedule.bounds import lower_bound_us
from planner.schedule.heft import best_list_schedule, list_schedule, shift_left
from planner.schedule.instance import Instance, Schedule, Slot, build, expected_us
from planner.schedule.search import Limit, solve
from planner.workflow import Policy, Statistics, Workflow

WORK = 0.5


def sound(instance: Instance, schedule: Schedule) -> None:
    assert not list(faults(instance, schedule))
    assert schedule.objective_us == pytest.approx(objective_us(instance, schedule.by_task), rel=1e-9)
    assert schedule.objective_us >= lower_bound_us(instance) * (1 - 1e-9)
    assert schedule.objective_us >= schedule.lower_bound_us * (1 - 1e-9)
    assert 0 <= schedule.gap <= 1


# --- the validator itself ---

SMALL = from_text("""\
window rounds=1
d = DRAFT draft round=0 in=0 out=1 context=0
v = VERIFY prm round=0 in=1 out=0 context=0 accept=0.75 from d
r = REFINE target round=0 in=0 out=1 context=0 if ?!v
s = SYNC draft round=0 in=1 out=0 context=0 if v
""")


def small(target: str = "b") -> Instance:
    """On one device, or the target on a second one."""
    devices = ("a", "b")
    length = {"d": 10, "v": 5, "r": 20, "s": 7}
    return Instance(
        SMALL,
        devices,
        {(t, d): us for t, us in length.items() for d in devices},
        {(x, y): 0 if x == y else 3 for x in devices for y in devices},
        {(r, d): 2 for r in (DRAFT, PRM, TARGET) for d in devices},
        ({DRAFT: "a", PRM: "a", TARGET: target},),
    )


def slots(instance: Instance, **starts: int) -> Schedule:
    placement = instance.placements[0]
    rows = []
    for task in instance.graph.tasks:
        on, start = placement[task.role], starts[task.id]
        rows.append(Slot(task.id, on, start, start + instance.duration_us[task.id, on]))
    by_task = {s.task: s for s in rows}
    return Schedule(tuple(rows), placement, expected_us(instance, by_task), 0.0, "heuristic")


def test_the_validator_by_hand() -> None:
    instance = small()
    assert worlds(SMALL) == [({"v": "accept"}, 0.75), ({"v": "reject"}, 0.25)]
    good = slots(instance, d=0, v=10, r=0, s=15)
    assert not list(faults(instance, good))
    assert good.objective_us == pytest.approx(0.75 * 22 + 0.25 * 20)
    assert "before d arrives at 10" in " ".join(faults(instance, slots(instance, d=0, v=9, r=0, s=15)))
    assert "before v arrives at 15" in " ".join(faults(instance, slots(instance, d=0, v=10, r=0, s=14)))
    short = replace(good, slots=tuple(replace(s, end_us=s.end_us - 1) if s.task == "r" else s for s in good.slots))
    assert "r takes from" in " ".join(faults(instance, short))
    assert "not one slot a task" in list(faults(instance, replace(good, slots=good.slots[1:])))
    assert "is not allowed" in " ".join(faults(instance, replace(good, placement={**good.placement, TARGET: "a"})))


def test_the_validator_cuts_cancelled_work_at_the_verdict_and_a_chunk() -> None:
    instance = small(target="a")
    # The refine that began at 14 ends at 15 + 2 if v accepts; s must wait for that, no longer.
    overlap = " ".join(faults(instance, slots(instance, d=0, v=10, r=14, s=17)))
    assert "v (10, 15) and r (14, 17) overlap" in overlap and "s" not in overlap.split("if")[0].split()
    clear = replace(SMALL, tasks=tuple(replace(t, role=TARGET) if t.id == "s" else t for t in SMALL.tasks))
    apart = replace(small(), graph=clear)
    assert not list(faults(apart, slots(apart, d=0, v=10, r=10, s=18)))
    assert "overlap on b" in " ".join(faults(apart, slots(apart, d=0, v=12, r=12, s=18)))
    # One that would begin when the verdict is there never does.
    assert not list(faults(apart, slots(apart, d=0, v=10, r=15, s=18)))


def test_the_scheduler_knows_the_same_outcomes() -> None:
    @given(instances())
    @settings(max_examples=40, deadline=None)
    def check(instance: Instance) -> None:
        ours = sorted((sorted(world.items()), pytest.approx(p)) for world, p in worlds(instance.graph))
        assert [
            (sorted(o.items()), p) for o, p in sorted(instance.graph.outcomes, key=lambda x: sorted(x[0].items()))
        ] == ours

    check()


# --- list schedules ---


@given(instances(most=12))
@settings(max_examples=60, deadline=None)
def test_every_list_schedule_is_valid(instance: Instance) -> None:
    for placement in instance.placements:
        for speculate in (True, False):
            schedule = list_schedule(instance, placement, speculate)
            sound(instance, schedule)
            if not speculate:
                late = schedule.by_task
                for task in instance.graph.tasks:
                    assert all(late[task.id].start_us >= late[l.verify].end_us for l in task.guard)
    best = best_list_schedule(instance)
    assert best.objective_us == min(
        list_schedule(instance, p, s).objective_us for p in instance.placements for s in (True, False)
    )


def loose(random: Random, instance: Instance) -> Schedule:
    """A valid schedule with air in it, such as a solver may leave."""
    placement = random.choice(instance.placements)
    slots: dict[str, Slot] = {}
    for name in instance.graph.order:
        task = instance.graph.by_id[name]
        device = placement[task.role]
        needs = [p.id for p in instance.graph.producers(name)] + [l.verify for l in task.waits_for]
        start = max((slots[n].end_us + instance.delay_us[slots[n].device, device] for n in needs), default=0)
        start += random.choice([0, random.randint(0, 30)])
        while True:
            slots[name] = Slot(name, device, start, start + instance.duration_us[name, device])
            if not overlaps(instance, slots):
                break
            start += 1
    ordered = tuple(slots[t.id] for t in instance.graph.tasks)
    return Schedule(ordered, dict(placement), expected_us(instance, slots), 0.0, "feasible")


@given(instances(most=10), SEEDS)
@settings(max_examples=60, deadline=None)
def test_shift_left_is_valid_and_no_worse(instance: Instance, seed: int) -> None:
    for schedule in (loose(Random(seed), instance), best_list_schedule(instance)):
        sound(instance, schedule)
        moved = shift_left(instance, schedule)
        sound(instance, moved)
        assert moved.objective_us <= schedule.objective_us
        assert all(moved.by_task[s.task].start_us <= s.start_us for s in schedule.slots)
        assert shift_left(instance, moved).objective_us <= moved.objective_us


def test_a_list_schedule_by_hand() -> None:
    schedule = list_schedule(small(), small().placements[0])
    assert {s.task: s.start_us for s in schedule.slots} == {"d": 0, "v": 10, "r": 0, "s": 15}
    waits = list_schedule(small(), small().placements[0], speculate=False)
    assert waits.by_task["r"].start_us == 15 + 3


# --- CP-SAT ---


def solved(instance: Instance, work: float = WORK) -> Schedule:
    return solve(instance, Limit(work))


@given(instances(most=8))
@settings(max_examples=25, deadline=None)
def test_the_solver_is_valid_and_never_worse_than_the_list(instance: Instance) -> None:
    schedule = solved(instance)
    sound(instance, schedule)
    assert schedule.objective_us <= best_list_schedule(instance).objective_us
    assert schedule.status in ("optimal", "feasible")
    left = shift_left(instance, schedule)
    sound(instance, left)
    if schedule.status == "optimal":
        assert schedule.gap < 0.01


@given(instances(most=5, longest_us=4, most_devices=2))
@settings(max_examples=40, deadline=None)
def test_optimal_is_what_trying_everything_gives(instance: Instance) -> None:
    schedule = solved(instance, 20.0)
    best = best_us(instance)
    assert schedule.status == "optimal"
    assert schedule.objective_us == pytest.approx(best, rel=1e-4)
    assert schedule.lower_bound_us <= best * (1 + 1e-9)
    assert lower_bound_us(instance) <= best * (1 + 1e-9)


@pytest.mark.slow
@given(instances(most=6, longest_us=5, most_devices=3))
@settings(max_examples=300, deadline=None)
def test_optimal_is_what_trying_everything_gives_at_length(instance: Instance) -> None:
    schedule = solved(instance, 20.0)
    assert schedule.objective_us == pytest.approx(best_us(instance), rel=1e-4)
    assert schedule.lower_bound_us <= best_us(instance) * (1 + 1e-9)


def test_a_rare_outcome_may_take_long() -> None:
    # The best plan makes the rare refine a hundred times slower than the list schedule that is best without it.
    graph = from_text("""\
window rounds=1
d = DRAFT draft round=0 in=0 out=1 context=0
v = VERIFY prm round=0 in=1 out=0 context=0 accept=0.9999 from d
r = REFINE target round=0 in=0 out=1 context=0 if !v
s = DRAFT draft round=0 in=0 out=1 context=0 if v
""")
    devices = ("a", "b")
    rest = {("v", d): 2 for d in devices} | {("s", d): 2 for d in devices} | {("r", "a"): 4, ("r", "b"): 400}
    base = Instance(
        graph,
        devices,
        rest | {("d", "a"): 11, ("d", "b"): 10},
        {(x, y): 0 for x in devices for y in devices},
        {(r, d): 1 for r in (DRAFT, PRM, TARGET) for d in devices},
        (dict.fromkeys((DRAFT, PRM, TARGET), "a"), dict.fromkeys((DRAFT, PRM, TARGET), "b")),
    )
    schedule = solved(base)
    sound(base, schedule)
    assert schedule.placement[TARGET] == "b"
    assert schedule.objective_us == pytest.approx(best_placed(base))


def best_placed(instance: Instance) -> float:
    return min(list_schedule(instance, p).objective_us for p in instance.placements)


def test_no_time_at_all_leaves_the_list_schedule() -> None:
    flow = workflow()
    graph = run_passes(lower(flow, 3), [DraftAhead(2), PrefetchRefine()])
    instance = build(graph, flow, THREE, LinearCosts())
    schedule = solve(instance, Limit(0.0))
    sound(instance, schedule)
    assert schedule.objective_us == best_list_schedule(instance).objective_us
    assert schedule.lower_bound_us >= lower_bound_us(instance) * (1 - 1e-9)


def test_progress_is_reported_with_a_bound() -> None:
    flow = workflow(statistics=Statistics(draft_step_tokens=8, target_step_tokens=8))
    graph = run_passes(lower(flow, 2), [DraftAhead(1), PrefetchRefine()])
    instance = build(graph, flow, MIXED, LinearCosts({(TARGET, "gpu0"): 40, (TARGET, "gpu1"): 30}))
    seen: list[tuple[float, float, float]] = []
    schedule = solve(instance, Limit(WORK), progress=lambda *x: seen.append(x))
    sound(instance, schedule)
    assert seen
    assert all(bound <= objective + 1e-6 for _, objective, bound in seen)
    assert seen[-1][1] == pytest.approx(schedule.objective_us, rel=1e-3)


def test_speculation_pays_where_there_are_devices() -> None:
    flow = workflow(statistics=Statistics(accept=0.9, draft_step_tokens=8, target_step_tokens=8))
    eager = run_passes(lower(flow, 2), [DraftAhead(1), PrefetchRefine()])
    costs = LinearCosts()
    times = [solved(build(g, flow, THREE, costs)).objective_us for g in (eager, lower(flow, 2))]
    assert times[0] < times[1]


# --- instances ---


@pytest.mark.parametrize("kind", list(Policy))
def test_build_keeps_to_arithmetic_and_memory(kind: Policy) -> None:
    flow: Workflow = workflow(kind)
    graph = lower(flow, 2)
    instance = build(graph, flow, MIXED, LinearCosts())
    for placement in instance.placements:
        assert set(placement) == set(instance.roles)
        assert all(d != "fpga" for r, d in placement.items() if r is not DRAFT)
    if DRAFT in instance.roles:
        # With these costs devices that compute the same are equal: what only swaps them is left out.
        found = {p[DRAFT] for p in instance.placements}
        assert found == ({"fpga"} if kind is Policy.DRAFT_ONLY else {"fpga", "gpu0"})
    for task in graph.tasks:
        for placement in instance.placements:
            assert instance.duration_us[task.id, placement[task.role]] > 0
    assert instance.delay_us["gpu0", "gpu0"] == 0 < instance.delay_us["fpga", "gpu0"]


def test_memory_limits_placements() -> None:
    # A model with its caches needs 1000 + 2 * 256 * 10 bytes: one fits on `a`, three on `b`.
    tight = machine(device("a", memory_bytes=7000), device("b", memory_bytes=20_000))
    flow = workflow()
    instance = build(lower(flow, 1), flow, tight, LinearCosts())
    assert all(list(p.values()).count("a") <= 1 for p in instance.placements)
    assert dict.fromkeys((DRAFT, PRM, TARGET), "b") in instance.placements
    missing = r"the least is missing where a has 7e-06 GB and draft and prm and target need .* GB, .* GB too much; add"
    with pytest.raises(UserError, match=missing):
        build(lower(flow, 1), flow, machine(device("a", memory_bytes=7000)), LinearCosts())


def test_durations_are_those_of_chunks() -> None:
    flow = workflow(
        Policy.DRAFT_ONLY, statistics=Statistics(prompt_tokens=30, draft_step_tokens=20, draft_step_spread=0.0)
    )
    instance = build(lower(flow, 1), flow, machine(device("a")), LinearCosts(otherwise_us=10))
    assert instance.duration_us == {("prefill.draft", "a"): 30, ("draft", "a"): 200}
    assert instance.chunk_us == {(DRAFT, "a"): 80}
    assert instance.expected_rounds == 1
