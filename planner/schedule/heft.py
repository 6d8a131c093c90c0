"""List schedules: the hint that the solver starts from, and the floor that it must not fall below.

The order is that of HEFT (Topcuoglu, Hariri and Wu 2002), by upward rank and with insertion into gaps, weighted by the
probability that a task is used; a device may be busy with two tasks at once where no outcome has both.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import replace

from planner.graph import Task, holds
from planner.schedule.instance import Instance, Placement, Schedule, Slot, expected_us, occupied


def list_schedule(instance: Instance, placement: Placement, speculate: bool = True) -> Schedule:
    """Each task in turn at its earliest time on the device of its role; `speculate` False waits for every guard."""
    slots: dict[str, Slot] = {}
    for task in _by_priority(instance, placement):
        device = placement[task.role]
        duration = instance.duration_us[task.id, device]
        start = _ready_us(instance, placement, slots, task, speculate)
        while (later := _conflict(instance, slots, Slot(task.id, device, start, start + duration))) is not None:
            start = later
        slots[task.id] = Slot(task.id, device, start, start + duration)
    ordered = tuple(slots[t.id] for t in instance.graph.tasks)
    return Schedule(ordered, dict(placement), expected_us(instance, slots), 0.0, "heuristic")


def best_list_schedule(instance: Instance) -> Schedule:
    """The best list schedule over all placements, with and without speculation."""
    candidates = (list_schedule(instance, p, speculate) for p in instance.placements for speculate in (True, False))
    return min(candidates, key=lambda s: s.objective_us)


def shift_left(instance: Instance, schedule: Schedule) -> Schedule:
    """The schedule with each task, in the order of its start, moved to its earliest time; as it was if that is worse.

    A solver leaves work that no outcome waits for anywhere in its slack; started early it says what may run ahead.
    """
    slots: dict[str, Slot] = {}
    rank = {task: i for i, task in enumerate(instance.graph.order)}
    for old in sorted(schedule.slots, key=lambda s: (s.start_us, rank[s.task])):
        task = instance.graph.by_id[old.task]
        if any(l.verify not in slots for l in task.guard):
            # Cancelled work needs its verdicts in place; a verdict that starts later keeps its time for now.
            slots |= {l.verify: schedule.by_task[l.verify] for l in task.guard if l.verify not in slots}
        if any(p.id not in slots for p in instance.graph.producers(old.task)):
            return schedule
        duration = old.end_us - old.start_us
        start = _ready_us(instance, schedule.placement, slots, task, speculate=True)
        while (later := _conflict(instance, slots, Slot(old.task, old.device, start, start + duration))) is not None:
            start = later
        if start > old.start_us:
            return schedule  # what was placed by the verdict's old time would not hold
        slots[old.task] = Slot(old.task, old.device, start, start + duration)
    moved = tuple(slots[t.id] for t in instance.graph.tasks)
    objective = expected_us(instance, slots)
    return replace(schedule, slots=moved, objective_us=objective) if objective <= schedule.objective_us else schedule


def _by_priority(instance: Instance, placement: Placement) -> list[Task]:
    """Every task after what it waits for and, among those that could be next, the heaviest rank first."""
    graph = instance.graph
    rank = _upward_rank(instance, placement)
    missing = {t.id: graph.order_graph.in_degree(t.id) for t in graph.tasks}
    ready = [(-rank[t], t) for t, count in missing.items() if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, task = heapq.heappop(ready)
        order.append(graph.by_id[task])
        for after in graph.order_graph.successors(task):
            missing[after] -= 1
            if missing[after] == 0:
                heapq.heappush(ready, (-rank[after], after))
    return order


def _upward_rank(instance: Instance, placement: Placement) -> Mapping[str, float]:
    """Expected work from a task to the end of the window, each task weighted with its chance to be used."""
    graph = instance.graph
    rank: dict[str, float] = {}
    for task in reversed(graph.order):
        own = instance.duration_us[task, placement[graph.by_id[task].role]]
        chance = sum(p for o, p in graph.outcomes if holds(graph.by_id[task].guard, o))
        rank[task] = chance * own + max((rank[s] for s in graph.order_graph.successors(task)), default=0.0)
    return rank


def _ready_us(instance: Instance, placement: Placement, slots: Mapping[str, Slot], task: Task, speculate: bool) -> int:
    sources = [p.id for p in instance.graph.producers(task.id)]
    sources += [l.verify for l in (task.waits_for if speculate else task.guard)]
    device = placement[task.role]
    arrivals = (slots[s].end_us + instance.delay_us[slots[s].device, device] for s in sources)
    return max(arrivals, default=0)


def _conflict(instance: Instance, slots: Mapping[str, Slot], slot: Slot) -> int | None:
    """The earliest time after the slot's start at which something in its way ends; None if nothing is."""
    ends = []
    for number in range(len(instance.graph.outcomes)):
        mine = occupied(instance, slots, slot, number)
        if mine is None:
            continue
        for other in slots.values():
            if other.device != slot.device or other.task == slot.task:
                continue
            theirs = occupied(instance, slots, other, number)
            if theirs is not None and theirs[0] < mine[1] and mine[0] < theirs[1]:
                ends.append(theirs[1])
    return min(ends, default=None)
