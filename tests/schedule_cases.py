"""Instances with all that a schedule may have to do with, and a simulation of a schedule in each outcome."""

from __future__ import annotations

import heapq
from dataclasses import replace
from itertools import combinations, product
from random import Random

from hypothesis import strategies as st
from planner_cases import SEEDS, random_graph, workflow
from schedule_validator import World, expected_rounds, first_step, is_used, length_us, shares_pass, worlds

from planner.graph import Task, TaskGraph
from planner.lower import lower
from planner.passes import (
    BatchVerify,
    DraftAhead,
    EarlyNext,
    Pass,
    PrefetchAhead,
    PrefetchAlternative,
    PrefetchRefine,
    Prune,
    ShadowSync,
    run_passes,
)
from planner.schedule.instance import Instance, Power, Schedule
from planner.workflow import Policy, RoleName, Statistics

PASSES: tuple[Pass, ...] = (
    Prune(0.2),
    DraftAhead(1),
    DraftAhead(2),
    PrefetchRefine(),
    PrefetchAhead(1),
    EarlyNext(),
    PrefetchAlternative(),
    BatchVerify(),
    ShadowSync(),
)


def rich_instances(most: int = 9, longest_us: int = 40) -> st.SearchStrategy[Instance]:
    """Random graphs with streams, or windows of workflows with passes; sets of devices, power, shared passes."""
    return SEEDS.map(lambda seed: rich_instance(Random(seed), most, longest_us))


def rich_instance(random: Random, most: int, longest_us: int) -> Instance:
    """One of `rich_instances`."""
    if random.random() < 0.4:
        graph = random_graph(random, random.randint(1, most), streams=True)
    else:
        graph = random_window(random, 1 if most < 12 else 2)
    return timed(random, graph, longest_us)


def random_window(random: Random, rounds: int) -> TaskGraph:
    """A window of a workflow with some of the passes."""
    share = [0.2, 0.5, 0.9]
    flow = workflow(
        random.choice(list(Policy)),
        statistics=Statistics(random.choice(share), random.choice(share), 10, 12, 14),
    )
    passes = [p for p in PASSES if random.random() < 0.6]
    return run_passes(lower(flow, rounds, steady=random.random() < 0.7), passes)


def timed(random: Random, graph: TaskGraph, longest_us: int) -> Instance:
    """A graph with durations, delays, power and placements that follow no cost model."""
    devices = tuple("abc"[: random.randint(1, 3)])
    sets = ["+".join(pair) for pair in combinations(devices, 2)]
    places = [*devices, *random.sample(sets, min(len(sets), 1))]
    roles = [r for r in RoleName if any(t.role is r for t in graph.tasks)]
    every = [dict(zip(roles, chosen, strict=True)) for chosen in product(places, repeat=len(roles))]
    lengths = {(t.id, d): random.randint(1, longest_us) for t in graph.tasks for d in places}

    def more(task: Task, place: str) -> int:
        # A pass over both is no shorter than one over either.
        alone, before = lengths[task.id, place], lengths[task.joins, place]
        return max(alone - before, 0) + random.randint(0, max(1, alone // 3))

    prompts = [t for t in graph.tasks if t.op.value == "PREFILL" and not t.guard]
    return Instance(
        graph,
        devices,
        lengths,
        {(a, b): 0 if a == b else random.randint(0, longest_us // 4) for a in places for b in places},
        {(r, d): random.randint(1, max(1, longest_us // 5)) for r in roles for d in places},
        tuple(random.sample(every, random.randint(1, min(3, len(every))))),
        {(r, d): random.randint(1, max(1, longest_us // 8)) for r in roles for d in places},
        {(t.id, d): more(t, d) for t in graph.tasks if t.joins for d in places},
        {d: Power(random.choice([5.0, 100.0, 333.3]), random.choice([0.0, 1.5, 5.0])) for d in devices},
        {t.id: random.choice(devices) for t in prompts if random.random() < 0.3},
    )


def played(instance: Instance, schedule: Schedule) -> tuple[float, float]:
    """(expected us, expected mJ) a round: every outcome is run forward, event by event."""
    time = energy = 0.0
    for world, p in worlds(instance.graph):
        us, mj = _play(instance, schedule, world)
        time, energy = time + p * us, energy + p * mj
    rounds = expected_rounds(instance.graph)
    return time / rounds, energy / rounds


def _play(instance: Instance, schedule: Schedule, world: World) -> tuple[float, float]:
    """Start what is due, cut off what a verdict refutes, and sum up how long each device was busy."""
    graph, slots = instance.graph, schedule.by_task
    order = {name: i for i, name in enumerate(graph.order)}
    events = [(slots[t.id].start_us, 1, order[t.id], t.id) for t in graph.tasks if not shares_pass(t, slots)]
    heapq.heapify(events)
    followers: dict[str, list[str]] = {}
    for name in graph.order:
        if shares_pass(graph.by_id[name], slots):
            followers.setdefault(graph.by_id[name].joins, []).append(name)
    known: World = {}
    begun: dict[str, int] = {}
    ends: dict[str, int] = {}
    holder: dict[str, str] = {}
    busy = dict.fromkeys(instance.devices, 0)

    def finish(name: str, now: int) -> None:
        for device in slots[name].device.split("+"):
            busy[device] += now - begun[name] if name != first_step(graph) else 0
            assert holder.pop(device) == name
        passed = [name]
        for one in passed:
            passed += followers.get(one, [])
        for one in (one for one in passed if one in world and is_used(graph.by_id[one], world)):
            known[one] = world[one]
        for other, start in begun.items():
            refuted = any(known.get(l.verify, l.verdict) != l.verdict for l in graph.by_id[other].guard)
            if other in holder.values() and refuted:
                chunk = instance.chunk_us[graph.by_id[other].role, slots[other].device]
                cut = min(ends[other], now + chunk)
                if cut < ends[other] and start < now:
                    ends[other] = cut
                    heapq.heappush(events, (cut, 0, order[other], other))

    while events:
        now, starts, _, name = heapq.heappop(events)
        task = graph.by_id[name]
        if not starts:
            if ends.get(name) == now and name in holder.values():
                finish(name, now)
            continue
        must_know = task.guard[: len(task.guard) - task.ahead]
        refuted = any(known.get(l.verify, l.verdict) != l.verdict for l in task.guard)
        if refuted or any(known.get(l.verify) != l.verdict for l in must_know):
            continue
        for device in slots[name].device.split("+"):
            assert device not in holder, f"{name} finds {device} busy with {holder[device]} at {now}"
            holder[device] = name
        begun[name], ends[name] = now, now + length_us(instance, slots, task)
        heapq.heappush(events, (ends[name], 0, order[name], name))
    used = [t for t in graph.tasks if is_used(t, world)]
    first = first_step(graph)
    span = max(slots[t.id].end_us if shares_pass(t, slots) else ends[t.id] for t in used)
    span -= ends[first] if first else 0
    taken = {d for place in (*schedule.placement.values(), *instance.fixed.values()) for d in place.split("+")}
    watts = {d: instance.power.get(d, Power(0.0, 0.0)) for d in taken}
    energy = sum(w.idle_w * span + (w.active_w - w.idle_w) * busy[d] for d, w in watts.items())
    return span, energy / 1000


def without_power(instance: Instance) -> Instance:
    """The same where nothing takes energy."""
    return replace(instance, power={})
