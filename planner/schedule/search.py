"""The search for a schedule: best first over the placements, CP-SAT on each, as long as the limit allows.

A placement whose bound is no better than the best schedule so far is closed without a solve. The others take turns,
two at a time, the most promising first, each turn with more work than the last. What is found depends on the work done
and not on the time that it took, so a search that the limit of work ends can be repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from math import inf

from planner.errors import UserError
from planner.schedule.aim import Aim, Objective, Weights
from planner.schedule.bounds import lower_bound_mj, lower_bound_us
from planner.schedule.cpsat import Found, Solve
from planner.schedule.heft import list_schedules
from planner.schedule.instance import Instance, Schedule

Progress = Callable[[float, float, float], None]
"""Called with (seconds, objective, bound) at each better schedule, in the units of the objective."""

PROVEN = 2e-5
"""Gap at which a schedule is called optimal: the solver's weights are rounded by about so much."""
FIRST_WORK, MORE_WORK = 0.02, 3
"""Work of a placement's first turn, and by how much each further one has more."""
PRODUCT_TURNS = 3
"""Searches that a small product of time and energy is sought with."""


@dataclass(frozen=True)
class Limit:
    """When the search stops. The limit of work alone makes it repeatable."""

    work: float = 0.25
    """In CP-SAT's deterministic seconds, each about 10 s of one core for a window of 3 rounds."""
    wall_s: float = 60.0
    workers: int = 2
    """Solves at a time."""


def solve(
    instance: Instance, limit: Limit | None = None, aim: Aim | None = None, progress: Progress | None = None
) -> Schedule:
    """The best schedule found within the limit, never worse than the best list schedule.

    List schedules are the solver's hints and are kept outside it, so a search that is stopped early loses nothing.
    A KeyboardInterrupt ends the search with status `interrupted`. Raises UserError if no schedule that was found
    keeps the caps.
    """
    limit, aim = limit or Limit(), aim or Aim()
    floors = list_schedules(instance)
    if aim.objective is Objective.EDP:
        best = _least_product(instance, limit, aim, floors)
    else:
        weights = Weights(1.0, 0.0) if aim.objective is Objective.LATENCY else Weights(0.0, 1.0)
        best = _Search(instance, aim, weights, floors, progress).run(limit)
    if aim.over(best):
        raise UserError("no schedule of the window keeps the caps", mend="raise the cap, or leave it out")
    if best.bound >= aim.value(best) * (1 - PROVEN):
        best = replace(best, status="optimal")
    least_us = lower_bound_us(instance)
    if aim.objective is Objective.LATENCY:
        least_us, best = max(least_us, best.bound), replace(best, bound=0.0)
    bound = min(best.bound, aim.value(best))
    return replace(best, lower_bound_us=min(least_us, best.objective_us), bound=bound)


def _least_product(instance: Instance, limit: Limit, aim: Aim, floors: list[Schedule]) -> Schedule:
    """A small product of time and energy: least sums, weighted so that the best so far has equal parts of both.

    A smaller sum of `time / t + energy / e` than 2 has a smaller product than `t * e`. And if no schedule's sum is
    below s, and time and energy have bounds of their own, the product is least at an end of that line: the bound.
    """
    part = replace(limit, work=limit.work / PRODUCT_TURNS, wall_s=limit.wall_s / PRODUCT_TURNS)
    least_us, least_mj = lower_bound_us(instance), lower_bound_mj(instance)
    best = min(floors, key=lambda s: (aim.over(s), aim.value(s)))
    bound, status = least_us * least_mj, "feasible"
    for _ in range(PRODUCT_TURNS):
        t, e = max(best.objective_us, 1e-9), max(best.energy_mj, 1e-9)
        found = _Search(instance, aim, Weights(1 / t, 1 / e), [*floors, best], None).run(part)
        x, y = least_us / t, least_mj / e
        bound = max(bound, t * e * min(x * max(found.bound - x, y), y * max(found.bound - y, x)))
        status = found.status
        if (aim.over(found), aim.value(found)) >= (aim.over(best), aim.value(best) * (1 - PROVEN)):
            break
        best = found
        if status == "interrupted":
            break
    return replace(best, bound=bound, status=status)


@dataclass
class _Lane:
    """A placement in the search."""

    instance: Instance
    best: Schedule
    bound: float
    turns: int = 0
    closed: bool = False


class _Search:
    """The least weighted sum under the caps."""

    def __init__(
        self, instance: Instance, aim: Aim, weights: Weights, floors: Sequence[Schedule], progress: Progress | None
    ) -> None:
        self._aim, self._weights, self._progress = aim, weights, progress
        self._began = time.monotonic()
        self._lanes = []
        for placement in instance.placements:
            alone = replace(instance, placements=(placement,))
            mine = min((s for s in floors if s.placement == placement), key=self._worth)
            energy = weights.energy * lower_bound_mj(alone) if weights.energy else 0.0
            self._lanes.append(_Lane(alone, mine, weights.time * lower_bound_us(alone) + energy))
        self._best = min((lane.best for lane in self._lanes), key=self._worth)

    def _worth(self, schedule: Schedule) -> tuple[float, float, float]:
        tie = schedule.energy_mj if not self._weights.energy else schedule.objective_us
        return self._aim.over(schedule), self._weights.value(schedule), tie

    def run(self, limit: Limit) -> Schedule:
        """The best schedule, with the bound of the weighted sum and why the search ended."""
        left, status = limit.work, "feasible"
        with ThreadPoolExecutor(limit.workers) as pool:
            while left > 0 and (lanes := self._next(limit.workers)):
                seconds = limit.wall_s - (time.monotonic() - self._began)
                if seconds <= 0:
                    status = "cut"
                    break
                work = min(left / len(lanes), FIRST_WORK * MORE_WORK ** min(lane.turns for lane in lanes))
                founds, interrupted = self._turn(pool, lanes, work, seconds)
                left -= sum(found.work for found in founds)
                for lane, found in zip(lanes, founds, strict=True):
                    self._take(lane, found)
                if interrupted:
                    status = "interrupted"
                    break
        return replace(self._best, bound=self._bound(), status=status)

    def _next(self, count: int) -> list[_Lane]:
        """The most promising placements that may hold something better."""
        limit = self._limit() * (1 - PROVEN)
        wanted = [lane for lane in self._lanes if not lane.closed and lane.bound < limit]
        return sorted(wanted, key=lambda lane: (lane.turns, self._worth(lane.best)))[:count]

    def _limit(self) -> float:
        """What a better schedule must be below."""
        return inf if self._aim.over(self._best) else self._weights.value(self._best)

    def _turn(
        self, pool: ThreadPoolExecutor, lanes: list[_Lane], work: float, seconds: float
    ) -> tuple[list[Found], bool]:
        """Solve on some placements at the same time; whether the user has stopped it."""
        below = self._limit()
        solves = [Solve(lane.instance, self._aim, self._weights, lane.best, below) for lane in lanes]
        jobs = [pool.submit(one.run, work, seconds, self._watch) for one in solves]
        interrupted = False
        while True:
            try:
                wait(jobs)
                return [job.result() for job in jobs], interrupted
            except KeyboardInterrupt:
                interrupted = True
                for one in solves:
                    one.stop()

    def _watch(self, objective: float, bound: float) -> None:
        # The first schedules of a placement may be worse than what another has given.
        if self._progress is not None and objective <= self._limit():
            self._progress(time.monotonic() - self._began, objective, min(objective, self._bound()))

    def _take(self, lane: _Lane, found: Found) -> None:
        lane.turns += 1
        lane.bound, lane.closed = max(lane.bound, found.bound), found.closed
        if found.schedule is not None:
            lane.best = min(lane.best, found.schedule, key=self._worth)
            self._best = min(self._best, lane.best, key=self._worth)

    def _bound(self) -> float:
        """No placement has a lower weighted sum."""
        return min(min(lane.bound for lane in self._lanes), self._weights.value(self._best))
