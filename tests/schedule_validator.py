"""Whether a schedule could really happen, worked out anew: nothing here asks the scheduler what it thinks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations, product

from planner.graph import EdgeKind, Op, Task, TaskGraph, Verdict
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


def first_step(graph: TaskGraph) -> str | None:
    """The step before the time of a steady window begins."""
    writers = (t.id for t in graph.tasks if t.op in (Op.DRAFT, Op.REFINE) and t.round == 0 and not t.guard)
    return next(writers) if graph.steady else None


def expected_rounds(graph: TaskGraph) -> float:
    """Rounds that are committed on average; the closing step of a steady window belongs to the next round."""
    return sum(
        p * (max(t.round for t in graph.tasks if is_used(t, world)) + (0 if graph.steady else 1))
        for world, p in worlds(graph)
    )


def objective_us(instance: Instance, slots: Mapping[str, Slot]) -> float:
    """Expected end of the last used task over expected number of rounds."""
    first = first_step(instance.graph)
    since = slots[first].end_us if first else 0
    time = 0.0
    for world, p in worlds(instance.graph):
        time += p * (max(slots[t.id].end_us for t in instance.graph.tasks if is_used(t, world)) - since)
    return time / expected_rounds(instance.graph)


def shares_pass(task: Task, slots: Mapping[str, Slot]) -> bool:
    """Whether a VERIFY is scored by the pass of the one that it may join."""
    if not task.joins or task.joins not in slots:
        return False
    mine, other = slots[task.id], slots[task.joins]
    return (mine.device, mine.start_us, mine.end_us) == (other.device, other.start_us, other.end_us)


def length_us(instance: Instance, slots: Mapping[str, Slot], task: Task) -> int:
    """How long a task's pass has to be: with all that join it, from the first that shares it on."""
    if shares_pass(task, slots):
        return length_us(instance, slots, instance.graph.by_id[task.joins])
    total, last = instance.duration_us[task.id, slots[task.id].device], task.id
    while more := [t for t in instance.graph.tasks if t.joins == last and t.id in slots and shares_pass(t, slots)]:
        last = more[0].id
        total += instance.joined_us[last, slots[last].device]
    return total


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
        apart = [t for t in tasks if not shares_pass(t, slots)]
        rows = [(t.id, slots[t.id].device, busy(instance, slots, t, world)) for t in apart]
        for (a, on_a, when_a), (b, on_b, when_b) in combinations(rows, 2):
            both = set(on_a.split("+")) & set(on_b.split("+"))
            if both and when_a and when_b and when_a[0] < when_b[1] and when_b[0] < when_a[1]:
                found.append(f"{a} {when_a} and {b} {when_b} overlap on {min(both)} if {world}")
    return found


def _task_faults(instance: Instance, schedule: Schedule, slots: Mapping[str, Slot], task: Task) -> Iterator[str]:
    slot = slots[task.id]
    if slot.device != instance.fixed.get(task.id, schedule.placement[task.role]):
        yield f"{task.id} is on {slot.device} and its role is not"
    if slot.start_us < 0 or slot.end_us - slot.start_us != length_us(instance, slots, task):
        yield f"{task.id} takes from {slot.start_us} to {slot.end_us}"
    if task.id == first_step(instance.graph) and slot.start_us:
        yield f"{task.id} begins the window at {slot.start_us}"
    producers = [e.source for e in instance.graph.edges if e.target == task.id and e.kind is EdgeKind.DATA]
    verdicts = [l.verify for l in task.guard[: len(task.guard) - task.ahead]]
    for source in producers + verdicts:
        arrives = slots[source].end_us + instance.delay_us[slots[source].device, slot.device]
        if slot.start_us < arrives:
            yield f"{task.id} starts at {slot.start_us}, before {source} arrives at {arrives}"
    for source in (e.source for e in instance.graph.edges if e.target == task.id and e.kind is EdgeKind.STREAM):
        yield from _stream_faults(instance, slots[source], task, slot)


def _stream_faults(instance: Instance, source: Slot, task: Task, slot: Slot) -> Iterator[str]:
    delay = instance.delay_us[source.device, slot.device]
    chunk = instance.chunk_us[instance.graph.by_id[source.task].role, source.device]
    begun = min(source.start_us + chunk, source.start_us + instance.duration_us[source.task, source.device])
    if slot.start_us < begun + delay:
        yield f"{task.id} starts at {slot.start_us}, before the first of {source.task} at {begun + delay}"
    last = source.end_us + delay + instance.read_us.get((task.role, slot.device), 0)
    if slot.start_us + instance.duration_us[task.id, slot.device] < last:
        yield f"{task.id} ends at {slot.end_us}, before it can have read {source.task} at {last}"


def every_schedule(instance: Instance) -> Iterator[Mapping[str, Slot]]:
    """All schedules of a tiny instance whose starts are within the sum of all durations and waits."""
    for placement in instance.placements:
        places = {t.id: instance.fixed.get(t.id, placement[t.role]) for t in instance.graph.tasks}
        length = {t.id: instance.duration_us[t.id, places[t.id]] for t in instance.graph.tasks}
        waits = max(instance.delay_us.values()) + max(instance.chunk_us.values())
        horizon = sum(length.values()) + len(length) * waits
        for starts in product(range(horizon), repeat=len(length)):
            slots = {
                name: Slot(name, places[name], start, start + length[name])
                for name, start in zip(length, starts, strict=True)
            }
            tried = Schedule(tuple(slots.values()), placement, 0.0, 0.0, "tried")
            if not any(True for _ in faults(instance, tried)):
                yield slots


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
