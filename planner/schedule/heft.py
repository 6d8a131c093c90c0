"""List schedules: the hint that the solver starts from, and the floor that it must not fall below.

The order is that of HEFT (Topcuoglu, Hariri and Wu 2002), by upward rank and with insertion into gaps, weighted by the
probability that a task is used; a device may be busy with two tasks at once where no outcome has both.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from planner.graph import Task
from planner.machine import members
from planner.schedule.instance import Instance, Placement, Schedule, Slot, joined, occupied, scheduled


def list_schedule(instance: Instance, placement: Placement, speculate: bool = True) -> Schedule:
    """Each task in turn at its earliest time on the device of its role; `speculate` False waits for every guard."""
    slots: dict[str, Slot] = {}
    for task in _by_priority(instance, placement):
        device = instance.place(task, placement)
        duration = instance.duration_us[task.id, device]
        start = _ready_us(instance, device, slots, task, speculate)
        while (later := _conflict(instance, slots, Slot(task.id, device, start, start + duration))) is not None:
            start = later
        slots[task.id] = Slot(task.id, device, start, start + duration)
    return scheduled(instance, slots, placement, "heuristic")


def best_list_schedule(instance: Instance, worth: Callable[[Schedule], Any] = lambda s: s.objective_us) -> Schedule:
    """The best list schedule over all placements, with and without speculation; the least `worth` is the best."""
    return min(list_schedules(instance), key=worth)


def list_schedules(instance: Instance) -> list[Schedule]:
    """The list schedules of all placements, with and without speculation."""
    return [list_schedule(instance, p, speculate) for p in instance.placements for speculate in (True, False)]


def shift_left(instance: Instance, schedule: Schedule) -> Schedule:
    """The schedule with each task, in the order of its start, moved to its earliest time; as it was if that is worse.

    A solver leaves work that no outcome waits for anywhere in its slack; started early it says what may run ahead.
    """
    slots: dict[str, Slot] = {}
    moved: set[str] = set()
    rank = {task: i for i, task in enumerate(instance.graph.order)}
    followers = _followers(instance, schedule.by_task)
    for old in sorted(schedule.slots, key=lambda s: (s.start_us, rank[s.task])):
        if old.task in moved:
            continue  # it shares the pass of one that is in its place
        passed = [instance.graph.by_id[t] for t in (old.task, *followers.get(old.task, ()))]
        # Cancelled work needs its verdicts in place; a verdict that starts later keeps its time for now.
        verdicts = dict.fromkeys(l.verify for task in passed for l in task.guard)
        slots |= {v: schedule.by_task[v] for v in verdicts if v not in slots}
        if any(p.id not in slots for task in passed for p in instance.graph.producers(task.id)):
            return schedule
        duration = old.end_us - old.start_us
        start = max(_ready_us(instance, old.device, slots, task, speculate=True) for task in passed)
        names = [task.id for task in passed]
        slot = Slot(old.task, old.device, start, start + duration)
        while (start := _conflict(instance, slots, slot, names)) is not None:
            slot = Slot(old.task, old.device, start, start + duration)
        start = slot.start_us
        if start > old.start_us:
            return schedule  # what was placed by the verdict's old time would not hold
        slots |= {name: Slot(name, old.device, start, start + duration) for name in names}
        moved.update(names)
    found = scheduled(instance, slots, schedule.placement, schedule.status, schedule.lower_bound_us)
    return replace(found, bound=schedule.bound) if found.objective_us <= schedule.objective_us else schedule


def _followers(instance: Instance, slots: Mapping[str, Slot]) -> dict[str, list[str]]:
    """VERIFY -> those that are scored in its pass."""
    found: dict[str, list[str]] = {}
    first: dict[str, str] = {}
    for name in instance.graph.order:
        if joined(instance, slots, slots[name]):
            before = instance.graph.by_id[name].joins
            first[name] = first.get(before, before)
            found.setdefault(first[name], []).append(name)
    return found


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
        own = instance.duration_us[task, instance.place(graph.by_id[task], placement)]
        chance = instance.chance[task]
        rank[task] = chance * own + max((rank[s] for s in graph.order_graph.successors(task)), default=0.0)
    return rank


def _ready_us(instance: Instance, place: str, slots: Mapping[str, Slot], task: Task, speculate: bool) -> int:
    """When all that a task needs is there. A verdict that its own pass gives is not waited for."""
    needs = instance.needs(task, speculate)
    return max((instance.earliest_us(n, slots[n.source], task, place) for n in needs), default=0)


def _conflict(instance: Instance, slots: Mapping[str, Slot], slot: Slot, passed: Collection[str] = ()) -> int | None:
    """The earliest time after the slot's start at which something in its way ends; None if nothing is.

    `passed` are the tasks that share the slot.
    """
    # Two that would look as if they shared a pass, by chance, are kept apart.
    before = slots.get(instance.graph.by_id[slot.task].joins)
    ends = [before.end_us] if before and joined(instance, slots, slot) else []
    others = [s for s in slots.values() if s.task != slot.task and s.task not in passed]
    after = [s for s in others if instance.graph.by_id[s.task].joins == slot.task]
    ends += [s.end_us for s in after if joined(instance, {slot.task: slot}, s)]
    if ends:
        return min(ends)
    mine = set(members(slot.device))
    rivals = [s for s in others if mine.intersection(members(s.device))]
    for other in rivals:
        for number in instance.meetings(slot.task, other.task):
            when, theirs = (occupied(instance, slots, s, number) for s in (slot, other))
            if when and theirs and theirs[0] < when[1] and when[0] < theirs[1]:
                ends.append(theirs[1])
    return min(ends, default=None)
