"""Lower bounds that do not come from the solver.

For one placement and one outcome nothing can be faster than the longest chain of used tasks, delays included, nor than
the work of the busiest device; and the devices take at least the energy of the used work, and idle power for the rest
of that time. The mean of that over the outcomes, for the best placement, bounds every schedule: roles do not move
within a plan. Cancelled work is left out, so the bounds are optimistic.
"""

from __future__ import annotations

from planner.graph import Outcome
from planner.machine import members
from planner.schedule.instance import Instance, Placement, used


def lower_bound_us(instance: Instance) -> float:
    """Expected time a round that no schedule of the instance is below."""
    return min(_least_us(instance, p) for p in instance.placements) / instance.expected_rounds


def lower_bound_mj(instance: Instance) -> float:
    """Expected energy a round that no schedule of the instance is below."""
    return min(_least_mj(instance, p) for p in instance.placements) / instance.expected_rounds


def head_us(instance: Instance, placement: Placement) -> int:
    """When the first step of a steady window is written: it begins at once. 0 in another window."""
    head = instance.graph.head
    return instance.duration_us[head, instance.place(instance.graph.by_id[head], placement)] if head else 0


def least_end_us(instance: Instance, placement: Placement, outcome: Outcome) -> int:
    """A time before which the last used task of the outcome cannot end."""
    busy = load_us(instance, placement, outcome).values()
    return max(_longest_chain(instance, placement, outcome), *busy)


def load_us(instance: Instance, placement: Placement, outcome: Outcome) -> dict[str, int]:
    """Device -> the used work of the outcome; the passes of a verifier that may be one are."""
    load = dict.fromkeys(instance.devices, 0)
    for task in used(instance.graph, outcome):
        place = instance.place(task, placement)
        duration = instance.duration_us[task.id, place]
        shared = min(duration, instance.joined_us[task.id, place]) if task.joins else duration
        for device in members(place):
            load[device] += shared
    return load


def _longest_chain(instance: Instance, placement: Placement, outcome: Outcome) -> int:
    """End of the last used task if every device could do everything at once."""
    graph = instance.graph
    start: dict[str, int] = {}
    end: dict[str, int] = {}
    wanted = {t.id for t in used(graph, outcome)}
    for name in graph.order:
        if name not in wanted:
            continue
        task = graph.by_id[name]
        place = instance.place(task, placement)
        begin = 0
        for need in instance.needs(task):
            source = need.source
            source_place = instance.place(graph.by_id[source], placement)
            delay = instance.delay_us[source_place, place]
            if need.stream:
                first, rest = instance.stream_us(source, source_place, task, place)
                begin = max(begin, start[source] + first + delay, end[source] + rest + delay)
            else:
                begin = max(begin, end[source] + delay)
        start[name], end[name] = begin, begin + instance.duration_us[name, place]
    return max(end.values())


def _least_us(instance: Instance, placement: Placement) -> float:
    ends = ((p, least_end_us(instance, placement, outcome)) for outcome, p in instance.graph.outcomes)
    return sum(p * end for p, end in ends) - head_us(instance, placement)


def _least_mj(instance: Instance, placement: Placement) -> float:
    total, before = 0.0, head_us(instance, placement)
    devices = [d for d in instance.used_devices(placement) if d in instance.power]
    head = instance.graph.by_id[instance.graph.head] if instance.graph.head else None
    of_head = members(instance.place(head, placement)) if head else ()
    for outcome, p in instance.graph.outcomes:
        span = least_end_us(instance, placement, outcome) - before
        load = load_us(instance, placement, outcome)
        for device in devices:
            active, idle = instance.power[device]
            busy = load[device] - before * (device in of_head)
            total += p * (idle * span + (active - idle) * busy) / 1000
    return total
