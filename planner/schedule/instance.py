"""The scheduling problem as plain numbers, the schedule as slots, and what a schedule is worth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from planner.cost import Costs, shortages
from planner.errors import UserError
from planner.graph import Outcome, Task, TaskGraph, broken_by, holds
from planner.machine import Machine, transfer_us
from planner.workflow import RoleName, Workflow

TOKEN_BYTES = 4
CHUNK_TOKENS = 8
"""Tokens in a chunk of generation: a cancel takes effect at the end of one."""

Placement = Mapping[RoleName, str]
"""The device of each role."""


@dataclass(frozen=True)
class Instance:
    """Durations, delays and room for one graph on one machine. Times are integer microseconds."""

    graph: TaskGraph
    devices: tuple[str, ...]
    duration_us: Mapping[tuple[str, str], int]
    """(task, device); a pair that is missing cannot be."""
    delay_us: Mapping[tuple[str, str], int]
    """(from device, to device): until tokens, or a verdict, have arrived."""
    chunk_us: Mapping[tuple[RoleName, str], int]
    """(role, device): the longest that cancelled work goes on."""
    placements: tuple[Placement, ...]
    """Every assignment of roles to devices whose arithmetic and memory suffice."""

    @cached_property
    def roles(self) -> tuple[RoleName, ...]:
        """The roles that the graph uses."""
        used = {t.role for t in self.graph.tasks}
        return tuple(r for r in RoleName if r in used)

    @cached_property
    def expected_rounds(self) -> float:
        """Mean number of rounds that the window commits: a backtrack ends it early."""
        return sum(p * (1 + max(t.round for t in used(self.graph, o))) for o, p in self.graph.outcomes)

    @cached_property
    def fate(self) -> Mapping[tuple[str, int], tuple[str, ...] | None]:
        """(task, outcome index) -> () if it is used, the verdicts that cancel it, or None if it never starts."""
        fates: dict[tuple[str, int], tuple[str, ...] | None] = {}
        for number, (outcome, _) in enumerate(self.graph.outcomes):
            for task in self.graph.tasks:
                fates[task.id, number] = _fate(task, outcome)
        return fates


@dataclass(frozen=True)
class Slot:
    """A task in its place. `end_us` is where it would end if it were not cancelled."""

    task: str
    device: str
    start_us: int
    end_us: int


@dataclass(frozen=True)
class Schedule:
    """Slots of all tasks of the window, what they are worth, and how much better it could be."""

    slots: tuple[Slot, ...]
    placement: Placement
    objective_us: float
    """Expected time until the window's last used task ends, a round."""
    lower_bound_us: float
    """No schedule of this window on this machine, with these durations, can be below it."""
    status: str
    """`optimal`, `feasible` (stopped at the limit) or `heuristic`."""

    @property
    def gap(self) -> float:
        """(objective - bound) / objective."""
        return 0.0 if self.objective_us == 0 else 1.0 - self.lower_bound_us / self.objective_us

    @cached_property
    def by_task(self) -> Mapping[str, Slot]:
        """Slots by the id of their task."""
        return {s.task: s for s in self.slots}


def used(graph: TaskGraph, outcome: Outcome) -> list[Task]:
    """The tasks whose result is used in the outcome."""
    return [t for t in graph.tasks if holds(t.guard, outcome)]


def occupied(instance: Instance, slots: Mapping[str, Slot], slot: Slot, outcome: int) -> tuple[int, int] | None:
    """From when to when a slot keeps its device busy in an outcome; None if it never starts there.

    `slots` must hold the VERIFY tasks of the slot's guard.
    """
    cancelled_by = instance.fate[slot.task, outcome]
    if cancelled_by is None:
        return None
    if not cancelled_by:
        return slot.start_us, slot.end_us
    known_us = min(slots[v].end_us for v in cancelled_by)
    if slot.start_us >= known_us:
        return None
    role = instance.graph.by_id[slot.task].role
    return slot.start_us, min(slot.end_us, known_us + instance.chunk_us[role, slot.device])


def expected_us(instance: Instance, slots: Mapping[str, Slot]) -> float:
    """The objective: mean over the outcomes of the end of the last used task, a round."""
    total = sum(p * max(slots[t.id].end_us for t in used(instance.graph, o)) for o, p in instance.graph.outcomes)
    return total / instance.expected_rounds


def build(graph: TaskGraph, workflow: Workflow, machine: Machine, costs: Costs) -> Instance:
    """The instance of a graph on a machine. Raises UserError if no placement has the arithmetic and the memory."""
    devices = tuple(d.name for d in machine.devices)
    roles = [r for r in RoleName if any(t.role is r for t in graph.tasks)]
    placements = tuple(_placements(roles, workflow, machine, costs))
    possible = {(r, d) for p in placements for r, d in p.items()}
    duration = {(t.id, d): _duration_us(t, d, costs) for t in graph.tasks for d in devices if (t.role, d) in possible}
    context = workflow.statistics.prompt_tokens
    chunk = {(r, d): costs.decode_us(r, d, CHUNK_TOKENS, context) for r, d in possible}
    payload = workflow.statistics.target_step_tokens * TOKEN_BYTES
    delay = {(a, b): transfer_us(machine, a, b, payload) for a, b in product(devices, devices)}
    return Instance(graph, devices, duration, delay, chunk, placements)


def _fate(task: Task, outcome: Outcome) -> tuple[str, ...] | None:
    if holds(task.guard, outcome):
        return ()
    if broken_by(task.waits_for, outcome):
        return None
    # A literal whose VERIFY task did not run in the outcome cancels nothing; then another one does.
    return tuple(broken_by(task.guard, outcome)) or None


def _duration_us(task: Task, device: str, costs: Costs) -> int:
    total = 0
    if task.tokens_in:
        total += costs.prefill_us(task.role, device, task.tokens_in, task.context)
    context = task.context + task.tokens_in
    for done in range(0, task.tokens_out, CHUNK_TOKENS):
        tokens = min(CHUNK_TOKENS, task.tokens_out - done)
        total += costs.decode_us(task.role, device, tokens, context + done)
    return total


def _placements(roles: list[RoleName], workflow: Workflow, machine: Machine, costs: Costs) -> Iterator[Placement]:
    able = [[d.name for d in machine.candidates(workflow.roles[role].numerics)] for role in roles]
    missing: list[str] = []
    fits = False
    for chosen in product(*able):
        placement = dict(zip(roles, chosen, strict=True))
        short = shortages(machine, placement, workflow, costs)
        if not short:
            fits = True
            yield placement
        missing = missing or [str(s) for s in short]
    if not fits:
        raise UserError(
            f"the models fit on no placement, for example {'; '.join(missing)}",
            where=f"machine {machine.name}",
            mend="add memory or a device, or choose smaller models",
        )
