"""Whether a schedule could really happen, worked out anew: nothing here asks the scheduler what it thinks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations, product

from planner.graph import Task, TaskGraph, Verdict
from planner.schedule.instance import Instance, Placement, Schedule, Slot

World = dict[str, Verdict]
"""The verdicts that come in one outcome."""


def worlds(graph: TaskGraph) -> list[tuple[World, float]]:
    """Every outcome with its probability: all combinations of verdicts, less those that never meet."""
    judges = [t for t in graph.tasks if t.accept is not None]
    found: dict[tuple[tuple[str, Verdict], ...], float] = {}
    for verdicts in product(Verdict, repeat=len(judges)):
        coin = dict(zip((t.id for t in judges), verdicts, strict=True))
        world: World = {}
        while True:
            more = [t for t in judges if t.id not in world and all(world.get(l.verify) == l.verdict for l in t.guard)]
            if not more:
                break
            world |= {t.id: coin[t.id] for t in more}
        p = 1.0
        for task in judges:
            if task.id in world:
                assert task.accept is not None
                p *= task.accept if world[task.id] is Verdict.ACCEPT else 1 - task.accept
        if p > 0:
            found[tuple(sorted(world.items()))] = p
    return [(dict(key), p) for key, p in found.items()]


def is_used(task: Task, world: World) -> bool:
    """Whether its result is used."""
    return all(world.get(l.verify) == l.verdict for l in task.guard)


def busy(instance: Instance, slots: Mapping[str, Slot], task: Task, world: World) -> tuple[int, int] | None:
    """From when to when the task keeps its device in one outcome."""
    slot = slots[task.id]
    if is_used(task, world):
        return slot.start_us, slot.end_us
    must_know = task.guard[: len(task.guard) - task.ahead]
    if not all(world.get(l.verify) == l.verdict for l in must_know):
        return None
    refuted_us = min(slots[l.verify].end_us for l in task.guard if world.get(l.verify) not in (None, l.verdict))
    if slot.start_us >= refuted_us:
        return None
    return slot.start_us, min(slot.end_us, refuted_us + instance.chunk_us[task.role, slot.device])


def objective_us(instance: Instance, slots: Mapping[str, Slot]) -> float:
    """Expected end of the last used task over expected number of rounds."""
    time, rounds = 0.0, 0.0
    for world, p in worlds(instance.graph):
        used = [t for t in instance.graph.tasks if is_used(t, world)]
        time += p * max(slots[t.id].end_us for t in used)
        rounds += p * (1 + max(t.round for t in used))
    return time / rounds


def faults(instance: Instance, schedule: Schedule) -> Iterator[str]:
    """What is wrong with a schedule, in words."""
    graph, slots = instance.graph, {s.task: s for s in schedule.slots}
    if sorted(slots) != sorted(t.id for t in graph.tasks) or len(schedule.slots) != len(graph.tasks):
        yield "not one slot a task"
        return
    if dict(schedule.placement) not in [dict(p) for p in instance.placements]:
        yield f"the placement {schedule.placement} is not allowed"
    for task in graph.tasks:
        yield from _task_faults(instance, schedule, slots, task)
    yield from overlaps(instance, slots)


def overlaps(instance: Instance, slots: Mapping[str, Slot]) -> list[str]:
    """Which of the tasks that have a slot are on a device at once, in words."""
    found = []
    tasks = [t for t in instance.graph.tasks if t.id in slots]
    for world, _ in worlds(instance.graph):
        rows = [(t.id, slots[t.id].device, busy(instance, slots, t, world)) for t in tasks]
        for (a, on_a, when_a), (b, on_b, when_b) in combinations(rows, 2):
            if on_a == on_b and when_a and when_b and when_a[0] < when_b[1] and when_b[0] < when_a[1]:
                found.append(f"{a} {when_a} and {b} {when_b} overlap on {on_a} if {world}")
    return found


def _task_faults(instance: Instance, schedule: Schedule, slots: Mapping[str, Slot], task: Task) -> Iterator[str]:
    slot = slots[task.id]
    if slot.device != schedule.placement[task.role]:
        yield f"{task.id} is on {slot.device} and its role is not"
    if slot.start_us < 0 or slot.end_us - slot.start_us != instance.duration_us[task.id, slot.device]:
        yield f"{task.id} takes from {slot.start_us} to {slot.end_us}"
    producers = [e.source for e in instance.graph.edges if e.target == task.id]
    verdicts = [l.verify for l in task.guard[: len(task.guard) - task.ahead]]
    for source in producers + verdicts:
        arrives = slots[source].end_us + instance.delay_us[slots[source].device, slot.device]
        if slot.start_us < arrives:
            yield f"{task.id} starts at {slot.start_us}, before {source} arrives at {arrives}"


def best_us(instance: Instance) -> float:
    """The least objective of all schedules of a tiny instance: every start is tried."""
    return min(_best_of(instance, p) for p in instance.placements)


def _best_of(instance: Instance, placement: Placement) -> float:
    graph = instance.graph
    every = worlds(graph)
    used = [[is_used(t, world) for world, _ in every] for t in graph.tasks]
    rounds = sum(
        p * (1 + max(t.round for t, u in zip(graph.tasks, used, strict=True) if u[w])) for w, (_, p) in enumerate(every)
    )
    length = [instance.duration_us[t.id, placement[t.role]] for t in graph.tasks]
    horizon = sum(length) + len(length) * max(instance.delay_us.values())
    best = float("inf")

    def place(number: int, slots: dict[str, Slot], occupied: list[tuple[int, str, tuple[int, int]]], last: list[int]):
        """Tasks stand in an order in which each follows what it needs."""
        nonlocal best
        worth = sum(p * end for (_, p), end in zip(every, last, strict=True)) / rounds
        if worth >= best - 1e-9:
            return
        if number == len(graph.tasks):
            best = worth
            return
        task, device = graph.tasks[number], placement[graph.tasks[number].role]
        needs = [e.source for e in graph.edges if e.target == task.id]
        needs += [l.verify for l in task.guard[: len(task.guard) - task.ahead]]
        ready = max((slots[n].end_us + instance.delay_us[slots[n].device, device] for n in needs), default=0)
        for start in range(ready, horizon + 1):
            slot = Slot(task.id, device, start, start + length[number])
            slots[task.id] = slot
            mine = [(w, busy(instance, slots, task, world)) for w, (world, _) in enumerate(every)]
            rows = [(w, device, when) for w, when in mine if when]
            clash = any(
                w == v and on == device and when[0] < then[1] and then[0] < when[1]
                for w, _, when in rows
                for v, on, then in occupied
            )
            if not clash:
                ends = [max(e, slot.end_us) if u else e for e, u in zip(last, used[number], strict=True)]
                place(number + 1, slots, occupied + rows, ends)
            del slots[task.id]

    place(0, {}, [], [0] * len(every))
    return best
