"""The window as a CP-SAT model: placement, speculation and starts chosen together.

Every task has one start, so what begins before a verdict is the same in all outcomes that can follow. For each
outcome and device the intervals of the tasks that run there do not overlap; a task whose guard turns out false is
an interval that is cut off when the verdict is known. Transfers are written per source device: one constraint for
a pair (edge, source device) with the delays to the possible targets as a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ortools.sat.python import cp_model

from planner.schedule.bounds import lower_bound_us
from planner.schedule.heft import best_list_schedule
from planner.schedule.instance import Instance, Schedule, Slot, expected_us, used
from planner.workflow import RoleName

WEIGHT_SCALE = 1_000_000
"""Probabilities become integers out of this many."""

Progress = Callable[[float, float, float], None]
"""Called with (seconds, objective_us, bound_us) at each better schedule."""


def solve(instance: Instance, limit_s: float = 5.0, progress: Progress | None = None, workers: int = 2) -> Schedule:
    """The best schedule found within `limit_s` seconds, never worse than the best list schedule.

    The list schedule is the solver's complete hint and is kept outside it, so a solver that is stopped early loses
    nothing. The bound is the better one of the solver's and `bounds.lower_bound_us`.
    """
    floor = best_list_schedule(instance)
    bound = lower_bound_us(instance)
    model = _Model(instance, _horizon_us(instance))
    model.hint(floor)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = workers
    solver.parameters.repair_hint = False
    solver.parameters.random_seed = 1
    callback = _Watch(model.scale, progress) if progress else None
    status = solver.solve(model.model, callback)
    best, optimal = floor, False
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        found = model.read(solver)
        best = min(found, floor, key=lambda s: s.objective_us)
        optimal = status == cp_model.OPTIMAL
        # The rounded weights move the objective by `rounding_us` at most.
        bound = max(bound, solver.best_objective_bound / model.scale - model.rounding_us)
    proven = optimal or bound >= best.objective_us * (1 - 1e-9)
    found_by = "optimal" if proven else "feasible"
    return Schedule(best.slots, best.placement, best.objective_us, min(bound, best.objective_us), found_by)


def _horizon_us(instance: Instance) -> int:
    """By when some best schedule is over in every outcome, however rare: each task waits for others at most once."""
    longest = sum(max(instance.duration_us[t.id, p[t.role]] for p in instance.placements) for t in instance.graph.tasks)
    waits = max(instance.delay_us.values()) + max(instance.chunk_us.values())
    return longest + len(instance.graph.tasks) * waits


class _Watch(cp_model.CpSolverSolutionCallback):
    """Hands each incumbent to the caller."""

    def __init__(self, scale: float, progress: Progress) -> None:
        super().__init__()
        self._scale, self._progress = scale, progress

    def on_solution_callback(self) -> None:
        self._progress(self.wall_time, self.objective_value / self._scale, self.best_objective_bound / self._scale)


@dataclass
class _Model:
    instance: Instance
    horizon_us: int
    model: cp_model.CpModel = field(default_factory=cp_model.CpModel)

    def __post_init__(self) -> None:
        self._place_roles()
        self._time_tasks()
        self._order_tasks()
        self._separate_tasks()
        self._minimise()

    def _place_roles(self) -> None:
        """Exactly one of the placements that have the arithmetic and the memory."""
        m, placements = self.model, self.instance.placements
        options = [m.new_bool_var(f"placement{i}") for i in range(len(placements))]
        m.add_exactly_one(options)
        self.options = options
        self.place: dict[tuple[RoleName, str], cp_model.IntVar] = {}
        for role in self.instance.roles:
            for device in self.instance.devices:
                chosen = [o for o, p in zip(options, placements, strict=True) if p[role] == device]
                if chosen:
                    self.place[role, device] = m.new_bool_var(f"{role}@{device}")
                    m.add(sum(chosen) == self.place[role, device])

    def _devices(self, role: RoleName) -> list[str]:
        return [d for d in self.instance.devices if (role, d) in self.place]

    def _time_tasks(self) -> None:
        m = self.model
        self.start, self.end = {}, {}
        for task in self.instance.graph.tasks:
            self.start[task.id] = m.new_int_var(0, self.horizon_us, f"start {task.id}")
            durations = {d: self.instance.duration_us[task.id, d] for d in self._devices(task.role)}
            length = sum(us * self.place[task.role, d] for d, us in durations.items())
            self.end[task.id] = m.new_int_var(0, self.horizon_us, f"end {task.id}")
            m.add(self.end[task.id] == self.start[task.id] + length)

    def _order_tasks(self) -> None:
        graph = self.instance.graph
        for task in graph.tasks:
            needs = {p.id for p in graph.producers(task.id)} | {l.verify for l in task.waits_for}
            for source in sorted(needs):
                self._after(source, task.id)

    def _after(self, source: str, target: str) -> None:
        by_id, delay = self.instance.graph.by_id, self.instance.delay_us
        role, next_role = by_id[source].role, by_id[target].role
        for device in self._devices(role):
            wait = sum(delay[device, d] * self.place[next_role, d] for d in self._devices(next_role))
            arrives = self.model.add(self.start[target] >= self.end[source] + wait)
            arrives.only_enforce_if(self.place[role, device])

    def _separate_tasks(self) -> None:
        """No two tasks on a device at once in any outcome."""
        instance = self.instance
        self.cut: dict[tuple[str, tuple[str, ...]], tuple[cp_model.IntVar, cp_model.IntVar]] = {}
        self.intervals: dict[tuple[str, tuple[str, ...], str], cp_model.IntervalVar] = {}
        seen = set()
        for number in range(len(instance.graph.outcomes)):
            running = [(t, fate) for t in instance.graph.tasks if (fate := instance.fate[t.id, number]) is not None]
            for device in instance.devices:
                here = [(t.id, fate) for t, fate in running if (t.role, device) in self.place]
                key = (device, frozenset(here))
                if len(here) > 1 and key not in seen:
                    seen.add(key)
                    self.model.add_no_overlap(self._interval(task, fate, device) for task, fate in here)

    def _interval(self, task: str, cancelled_by: tuple[str, ...], device: str) -> cp_model.IntervalVar:
        key = (task, cancelled_by, device)
        if key not in self.intervals:
            m, role = self.model, self.instance.graph.by_id[task].role
            here = self.place[role, device]
            if cancelled_by:
                began, end = self._cut(task, cancelled_by)
                present = m.new_bool_var(f"{task} cut on {device}")
                m.add_min_equality(present, [began, here])
            else:
                present, end = here, self.end[task]
            length = m.new_int_var(0, self.horizon_us, "")
            self.intervals[key] = m.new_optional_interval_var(self.start[task], length, end, present, f"{key}")
        return self.intervals[key]

    def _cut(self, task: str, cancelled_by: tuple[str, ...]) -> tuple[cp_model.IntVar, cp_model.IntVar]:
        """Whether a task that is cancelled had begun, and when its device is free again."""
        key = (task, cancelled_by)
        if key not in self.cut:
            m, role = self.model, self.instance.graph.by_id[task].role
            known = self.end[cancelled_by[0]]
            if len(cancelled_by) > 1:
                known = m.new_int_var(0, self.horizon_us, "")
                m.add_min_equality(known, [self.end[v] for v in cancelled_by])
            began = m.new_bool_var(f"{task} began")
            m.add(self.start[task] < known).only_enforce_if(began)
            m.add(self.start[task] >= known).only_enforce_if(began.negated())
            lag = sum(self.instance.chunk_us[role, d] * self.place[role, d] for d in self._devices(role))
            end = m.new_int_var(0, 2 * self.horizon_us, f"{task} cut")
            m.add_min_equality(end, [self.end[task], known + lag])
            self.cut[key] = began, end
        return self.cut[key]

    def _minimise(self) -> None:
        graph = self.instance.graph
        weights = [max(1, round(p * WEIGHT_SCALE)) for _, p in graph.outcomes]
        self.scale = sum(weights) * self.instance.expected_rounds
        drift = sum(abs(w / sum(weights) - p) for w, (_, p) in zip(weights, graph.outcomes, strict=True))
        self.rounding_us = drift / 2 * self.horizon_us / self.instance.expected_rounds
        self.makespan = []
        for number, (outcome, _) in enumerate(graph.outcomes):
            last = self.model.new_int_var(0, self.horizon_us, f"makespan {number}")
            for task in used(graph, outcome):
                self.model.add(last >= self.end[task.id])
            self.makespan.append(last)
        self.model.minimize(sum(w * last for w, last in zip(weights, self.makespan, strict=True)))

    def hint(self, schedule: Schedule) -> None:
        """Start from a whole schedule: every variable that it decides gets its value."""
        m, slots = self.model, schedule.by_task
        for option, placement in zip(self.options, self.instance.placements, strict=True):
            m.add_hint(option, placement == schedule.placement)
        for (role, device), variable in self.place.items():
            m.add_hint(variable, schedule.placement[role] == device)
        for task, slot in slots.items():
            m.add_hint(self.start[task], slot.start_us)
            m.add_hint(self.end[task], slot.end_us)
        for (task, cancelled_by), (began, end) in self.cut.items():
            known = min(slots[v].end_us for v in cancelled_by)
            role = self.instance.graph.by_id[task].role
            lag = self.instance.chunk_us[role, slots[task].device]
            m.add_hint(began, slots[task].start_us < known)
            m.add_hint(end, min(slots[task].end_us, known + lag))
        for last, (outcome, _) in zip(self.makespan, self.instance.graph.outcomes, strict=True):
            m.add_hint(last, max(slots[t.id].end_us for t in used(self.instance.graph, outcome)))

    def read(self, solver: cp_model.CpSolver) -> Schedule:
        """The solver's schedule, its objective computed anew from the slots."""
        placement = {role: device for (role, device), v in self.place.items() if solver.boolean_value(v)}
        slots = tuple(
            Slot(t.id, placement[t.role], solver.value(self.start[t.id]), solver.value(self.end[t.id]))
            for t in self.instance.graph.tasks
        )
        by_task = {s.task: s for s in slots}
        return Schedule(slots, placement, expected_us(self.instance, by_task), 0.0, "feasible")
