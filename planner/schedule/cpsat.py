"""The window on one placement as a CP-SAT model: speculation, shared passes and starts chosen together.

Every task has one start, so what begins before a verdict is the same in all outcomes that can follow. For each
outcome and device the intervals of the tasks that run there do not overlap; a task whose guard turns out false is
an interval that is cut off when the verdict is known. `planner.schedule.search` goes through the placements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from ortools.sat.python import cp_model

from planner.graph import Task
from planner.machine import members
from planner.schedule.aim import Aim, Weights
from planner.schedule.bounds import least_end_us
from planner.schedule.instance import Instance, Placement, Schedule, Slot, joined, occupied, scheduled, used

Progress = Callable[[float, float], None]
"""Called with (objective, bound) of the placement at each better schedule."""

Fate = tuple[str, ...]
"""The verdicts that cancel a task; none if it is used."""
Run = tuple[str, Fate]
"""A task with its fate."""


@dataclass(frozen=True)
class Found:
    """What a solve gave."""

    schedule: Schedule | None
    bound: float
    """No schedule on the placement that keeps the caps has a lower weighted sum."""
    closed: bool
    """Whether there is nothing better to be found."""
    work: float
    """Deterministic seconds that were used."""


class Solve:
    """One solve on one placement; another thread may stop it."""

    def __init__(self, instance: Instance, aim: Aim, weights: Weights, hint: Schedule, below: float) -> None:
        """Schedules are sought whose weighted sum is at most `below`; the search starts from `hint`."""
        self._model = _Model(instance, hint.placement, aim, weights)
        self._model.cap(below)
        self._model.hint(hint)
        self._solver = cp_model.CpSolver()

    def run(self, work: float, seconds: float, progress: Progress | None = None) -> Found:
        """Solve until a limit is reached: `work` deterministic seconds, or `seconds` of time."""
        parameters, model = self._solver.parameters, self._model
        parameters.max_deterministic_time = work
        parameters.max_time_in_seconds = seconds
        parameters.num_workers = 1
        parameters.random_seed = 1
        parameters.catch_sigint_signal = False
        callback = _Watch(model.scale, progress) if progress else None
        status = self._solver.solve(model.model, callback)
        done = self._solver.deterministic_time
        if status == cp_model.INFEASIBLE:
            return Found(None, inf, True, done)
        bound = self._solver.best_objective_bound / model.scale
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return Found(model.read(self._solver), bound, status == cp_model.OPTIMAL, done)
        return Found(None, max(0.0, bound), False, done)

    def stop(self) -> None:
        """End `run` soon."""
        self._solver.stop_search()


class _Watch(cp_model.CpSolverSolutionCallback):
    """Hands each incumbent to the caller."""

    def __init__(self, scale: float, progress: Progress) -> None:
        super().__init__()
        self._scale, self._progress = scale, progress

    def on_solution_callback(self) -> None:
        self._progress(self.objective_value / self._scale, self.best_objective_bound / self._scale)


def _horizon_us(instance: Instance, placement: Placement) -> int:
    """By when some best schedule is over in every outcome, however rare: each task waits for others at most once."""
    longest = sum(instance.duration_us[t.id, instance.place(t, placement)] for t in instance.graph.tasks)
    waits = max(instance.delay_us.values()) + max(instance.chunk_us.values())
    waits += max(instance.read_us.values(), default=0)
    return longest + len(instance.graph.tasks) * waits


@dataclass
class _Model:
    instance: Instance
    placement: Placement
    aim: Aim
    weights: Weights
    model: cp_model.CpModel = field(default_factory=cp_model.CpModel)

    def __post_init__(self) -> None:
        self.horizon_us = _horizon_us(self.instance, self.placement)
        self.places = {t.id: self.instance.place(t, self.placement) for t in self.instance.graph.tasks}
        self._time_tasks()
        self._order_tasks()
        self._separate_tasks()
        self._end_outcomes()
        self._minimise()

    def _time(self, name: str, most: int | None = None) -> cp_model.IntVar:
        return self.model.new_int_var(0, self.horizon_us if most is None else most, name)

    # --- when ---

    def _time_tasks(self) -> None:
        m, instance = self.model, self.instance
        self.start, self.end = {}, {}
        self.join, self.extra = {}, {}
        for task in instance.graph.tasks:
            self.start[task.id], self.end[task.id] = self._time(f"start {task.id}"), self._time(f"end {task.id}")
            if task.joins:
                self.join[task.id] = m.new_bool_var(f"{task.id} joins")
                self.extra[task.joins] = self._time(f"extra {task.joins}")
        for task in instance.graph.tasks:
            start, end, extra = self.start[task.id], self.end[task.id], self.extra.get(task.id, 0)
            alone = m.add(end == start + instance.duration_us[task.id, self.places[task.id]] + extra)
            if task.joins:
                join, before = self.join[task.id], task.joins
                alone.only_enforce_if(join.negated())
                longer = instance.joined_us[task.id, self.places[task.id]] + extra
                m.add(self.extra[before] == longer).only_enforce_if(join)
                m.add(self.extra[before] == 0).only_enforce_if(join.negated())
                m.add(start == self.start[before]).only_enforce_if(join)
                m.add(end == self.end[before]).only_enforce_if(join)
        if instance.graph.head:
            m.add(self.start[instance.graph.head] == 0)

    def _order_tasks(self) -> None:
        instance = self.instance
        for task in instance.graph.tasks:
            for need in sorted(instance.needs(task)):
                start, here, there = self.start[task.id], self.places[task.id], self.places[need.source]
                delay = instance.delay_us[there, here]
                if need.stream:
                    first, rest = instance.stream_us(need.source, there, task, here)
                    self.model.add(start >= self.start[need.source] + first + delay)
                    self.model.add(start >= self.end[need.source] + rest + delay)
                else:
                    self.model.add(start >= self.end[need.source] + delay)

    def _separate_tasks(self) -> None:
        """No two tasks on a device at once in any outcome. A set of devices keeps all of its members."""
        instance = self.instance
        self.cut: dict[Run, tuple[cp_model.IntVar, cp_model.IntVar]] = {}
        self.known: dict[Fate, cp_model.IntVar] = {}
        self.both: dict[Run, cp_model.IntVar] = {}
        self.lengths: dict[Run, cp_model.IntVar] = {}
        self.intervals: dict[Run, cp_model.IntervalVar] = {}
        seen = set()
        for number in range(len(instance.graph.outcomes)):
            running = [(t, fate) for t in instance.graph.tasks if (fate := instance.fate[t.id, number]) is not None]
            for device in instance.devices:
                here = [(t, fate) for t, fate in running if device in members(self.places[t.id])]
                key = (device, frozenset((t.id, fate) for t, fate in here))
                if len(here) > 1 and key not in seen:
                    seen.add(key)
                    self.model.add_no_overlap(self._interval(task, fate) for task, fate in here)

    def _interval(self, task: Task, fate: Fate) -> cp_model.IntervalVar:
        key = (task.id, fate)
        if key not in self.intervals:
            m, start, label = self.model, self.start[task.id], f"{task.id} {fate}"
            duration = self.instance.duration_us[task.id, self.places[task.id]]
            if fate or task.id in self.extra:
                end = self._cut(task, fate)[1] if fate else self.end[task.id]
                length = self.lengths[key] = self._time("", None if task.id in self.extra else duration)
                self.intervals[key] = m.new_optional_interval_var(start, length, end, self._runs(task, fate), label)
            else:
                self.intervals[key] = m.new_optional_fixed_size_interval_var(
                    start, duration, self._runs(task, fate), label
                )
        return self.intervals[key]

    def _runs(self, task: Task, fate: Fate) -> cp_model.LiteralT:
        """Whether a task takes time of its own, where it has this fate."""
        conditions = [self._cut(task, fate)[0]] if fate else []
        if not task.joins:
            return conditions[0] if conditions else True
        apart = self.join[task.id].negated()
        if not conditions:
            return apart
        if (task.id, fate) not in self.both:
            self.both[task.id, fate] = self.model.new_bool_var(f"{task.id} runs")
            self.model.add_min_equality(self.both[task.id, fate], [*conditions, apart])
        return self.both[task.id, fate]

    def _cut(self, task: Task, cancelled_by: Fate) -> tuple[cp_model.IntVar, cp_model.IntVar]:
        """Whether a task that is cancelled had begun, and when its device is free again."""
        key = (task.id, cancelled_by)
        if key not in self.cut:
            m, known = self.model, self._known(cancelled_by)
            began = m.new_bool_var(f"{task.id} began")
            m.add(self.start[task.id] < known).only_enforce_if(began)
            m.add(self.start[task.id] >= known).only_enforce_if(began.negated())
            lag = self.instance.chunk_us[task.role, self.places[task.id]]
            end = self._time(f"{task.id} cut", 2 * self.horizon_us)
            m.add_min_equality(end, [self.end[task.id], known + lag])
            self.cut[key] = began, end
        return self.cut[key]

    def _known(self, verdicts: Fate) -> cp_model.IntVar:
        """When the first of the verdicts is there."""
        if len(verdicts) == 1:
            return self.end[verdicts[0]]
        if verdicts not in self.known:
            self.known[verdicts] = self._time("")
            self.model.add_min_equality(self.known[verdicts], [self.end[v] for v in verdicts])
        return self.known[verdicts]

    # --- how well ---

    def _end_outcomes(self) -> None:
        """When each outcome's last used task ends."""
        self.last = []
        for number, (outcome, _) in enumerate(self.instance.graph.outcomes):
            least = least_end_us(self.instance, self.placement, outcome)
            last = self.model.new_int_var(least, self.horizon_us, f"last {number}")
            for task in used(self.instance.graph, outcome):
                self.model.add(last >= self.end[task.id])
            self.last.append(last)

    def _minimise(self) -> None:
        """All weights are rounded down, so that the solver's bound is one of the unrounded objective.

        `share` stands for probability 1 and `unit` for weight 1; the sums must stay below 2 ** 63.
        """
        m, instance = self.model, self.instance
        graph, rounds, devices = instance.graph, instance.expected_rounds, instance.used_devices(self.placement)
        watts = sum(instance.power[d].active_w for d in devices if d in instance.power)
        energetic = self.weights.energy > 0 or self.aim.max_energy_mj < inf
        most = self.weights.time + self.weights.energy * watts / 1000
        self.share = 100_000 if energetic else 1_000_000
        unit = (100_000 if energetic else 1) / most
        self.share = max(100, min(self.share, int(1e18 / (unit * most * self.horizon_us))))
        self.spans = [int(self.share * p) for _, p in graph.outcomes]
        origin = self.end[graph.head] if graph.head else 0
        span = m.new_int_var(0, self.share * self.horizon_us, "span")
        m.add(span == sum(w * (last - origin) for w, last in zip(self.spans, self.last, strict=True)))
        self.span = span
        if self.aim.max_latency_us < inf:
            m.add(span <= int(self.aim.max_latency_us * rounds * self.share * (1 + 1e-6)))
        objective: cp_model.LinearExprT = int(self.weights.time * unit) * span
        self.worked: dict[Run, cp_model.IntVar] = {}
        if energetic:
            terms = list(self._energy(devices))
            watts_of = [int(self.weights.energy * unit * w / 1000) for w, _ in terms]
            objective = objective + cp_model.LinearExpr.weighted_sum([x for _, x in terms], watts_of)
            if self.aim.max_energy_mj < inf:
                scale = 100_000 / max(watts, 1e-9)
                most_mj = self.aim.max_energy_mj * 1000 * rounds * self.share * scale * (1 + 1e-6)
                m.add(sum(int(scale * w) * x for w, x in terms) <= int(min(most_mj, 4e18)))
        self.scale = self.share * unit * rounds
        self.objective = objective
        m.minimize(objective)

    def _energy(self, devices: tuple[str, ...]) -> Iterator[tuple[float, cp_model.LinearExprT]]:
        """(watts, expression): the sum is the expected energy of the window in uJ, times `share`."""
        instance, power = self.instance, self.instance.power
        yield sum(power[d].idle_w for d in devices if d in power), self.span
        chance: dict[Run, float] = {}
        for number, (_, p) in enumerate(instance.graph.outcomes):
            for task in instance.graph.tasks:
                fate = instance.fate[task.id, number]
                if fate is not None and task.id != instance.graph.head:
                    chance[task.id, fate] = chance.get((task.id, fate), 0.0) + p
        for (name, fate), p in chance.items():
            task = instance.graph.by_id[name]
            more = sum(power[d].active_w - power[d].idle_w for d in members(self.places[name]) if d in power)
            yield more, int(self.share * p) * self._work(task, fate)

    def _work(self, task: Task, fate: Fate) -> cp_model.LinearExprT:
        """How long a task keeps its place busy."""
        if not fate and not task.joins and task.id not in self.extra:
            return self.instance.duration_us[task.id, self.places[task.id]]
        worked = self.worked[task.id, fate] = self._time("")
        end = self._cut(task, fate)[1] if fate else self.end[task.id]
        self.model.add(worked >= end - self.start[task.id]).only_enforce_if(self._runs(task, fate))
        return worked

    def cap(self, value: float) -> None:
        """Look only for schedules whose weighted sum is no more than this."""
        if value < inf:
            self.model.add(self.objective <= int(value * self.scale * (1 + 1e-9)) + 1)

    # --- from and to schedules ---

    def hint(self, schedule: Schedule) -> None:
        """Start from a whole schedule: every variable gets its value."""
        m, slots, instance = self.model, schedule.by_task, self.instance
        for name, slot in slots.items():
            m.add_hint(self.start[name], slot.start_us)
            m.add_hint(self.end[name], slot.end_us)
        for name, join in self.join.items():
            m.add_hint(join, joined(instance, slots, slots[name]))
        for name, extra in self.extra.items():
            m.add_hint(extra, self._passed_on(slots, name))
        for (name, cancelled_by), (began, end) in self.cut.items():
            known = min(slots[v].end_us for v in cancelled_by)
            lag = instance.chunk_us[instance.graph.by_id[name].role, slots[name].device]
            m.add_hint(began, slots[name].start_us < known)
            m.add_hint(end, min(slots[name].end_us, known + lag))
        for verdicts, known in self.known.items():
            m.add_hint(known, min(slots[v].end_us for v in verdicts))
        for key, runs in self.both.items():
            m.add_hint(runs, self._busy(slots, *key) > 0)
        for key, time in (*self.lengths.items(), *self.worked.items()):
            m.add_hint(time, self._busy(slots, *key))
        ends = [max(slots[t.id].end_us for t in used(instance.graph, o)) for o, _ in instance.graph.outcomes]
        for last, end in zip(self.last, ends, strict=True):
            m.add_hint(last, end)
        origin = instance.origin_us(slots)
        m.add_hint(self.span, sum(w * (end - origin) for w, end in zip(self.spans, ends, strict=True)))

    def _passed_on(self, slots: Mapping[str, Slot], name: str) -> int:
        """By how much a VERIFY's pass is longer for those that join it."""
        follower = next(t for t in self.instance.graph.tasks if t.joins == name)
        if not joined(self.instance, slots, slots[follower.id]):
            return 0
        more = self.instance.joined_us[follower.id, slots[follower.id].device]
        return more + (self._passed_on(slots, follower.id) if follower.id in self.extra else 0)

    def _busy(self, slots: Mapping[str, Slot], name: str, fate: Fate) -> int:
        numbers = range(len(self.instance.graph.outcomes))
        outcome = next(n for n in numbers if self.instance.fate[name, n] == fate)
        when = occupied(self.instance, slots, slots[name], outcome)
        return when[1] - when[0] if when else 0

    def read(self, solver: cp_model.CpSolver) -> Schedule:
        """The solver's schedule, what it is worth computed anew from the slots."""
        times = {name: (solver.value(self.start[name]), solver.value(self.end[name])) for name in self.start}
        slots = {name: Slot(name, self.places[name], *time) for name, time in times.items()}
        return scheduled(self.instance, slots, self.placement, "feasible")
