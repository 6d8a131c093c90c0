"""A lower bound on the objective that does not come from the solver.

For one placement and one outcome nothing can be faster than the longest chain of used tasks, delays included, nor than
the work of the busiest device. The mean of that over the outcomes, for the best placement, bounds every schedule:
roles do not move within a plan. Cancelled work is left out, so the bound is optimistic.
"""

from __future__ import annotations

from planner.graph import Outcome
from planner.schedule.instance import Instance, Placement, used


def lower_bound_us(instance: Instance) -> float:
    """Expected time a round that no schedule of the instance is below."""
    return min(_placement_bound(instance, p) for p in instance.placements) / instance.expected_rounds


def _placement_bound(instance: Instance, placement: Placement) -> float:
    return sum(
        p * max(_longest_chain(instance, placement, outcome), _busiest(instance, placement, outcome))
        for outcome, p in instance.graph.outcomes
    )


def _longest_chain(instance: Instance, placement: Placement, outcome: Outcome) -> int:
    """End of the last used task if every device could do everything at once."""
    graph = instance.graph
    end: dict[str, int] = {}
    wanted = {t.id for t in used(graph, outcome)}
    for name in graph.order:
        if name not in wanted:
            continue
        task = graph.by_id[name]
        device = placement[task.role]
        before = [p.id for p in graph.producers(name)] + [l.verify for l in task.waits_for]
        arrivals = (end[b] + instance.delay_us[placement[graph.by_id[b].role], device] for b in before)
        end[name] = max(arrivals, default=0) + instance.duration_us[name, device]
    return max(end.values())


def _busiest(instance: Instance, placement: Placement, outcome: Outcome) -> int:
    load = dict.fromkeys(instance.devices, 0)
    for task in used(instance.graph, outcome):
        load[placement[task.role]] += instance.duration_us[task.id, placement[task.role]]
    return max(load.values())
