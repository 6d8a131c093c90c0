"""The scheduling problem as plain numbers, the schedule as slots, and what a schedule is worth."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from planner.cost import CACHES, Costs, Shortage, shortages
from planner.errors import UserError
from planner.graph import EdgeKind, Op, Outcome, Task, TaskGraph, broken_by, holds
from planner.lengths import factors
from planner.machine import Machine, members, place_name, transfer_us
from planner.workflow import RoleName, Statistics, Workflow

CHUNK_TOKENS = 8
"""Tokens in a chunk of generation: a cancel takes effect at the end of one."""

Placement = Mapping[RoleName, str]
"""The place of each role: a device, or a set of devices that compute as one."""


class Power(NamedTuple):
    """Watts of a device."""

    active_w: float
    idle_w: float


class Need(NamedTuple):
    """What a task cannot start, or end, before."""

    source: str
    stream: bool
    """Whether it may run while the source runs."""


@dataclass(frozen=True)
class Instance:
    """Durations, delays and room for one graph on one machine. Times are integer microseconds.

    A place is a device or a set of devices, by its name.
    """

    graph: TaskGraph
    devices: tuple[str, ...]
    duration_us: Mapping[tuple[str, str], int]
    """(task, place); a pair that is missing cannot be."""
    delay_us: Mapping[tuple[str, str], int]
    """(from place, to place): until tokens, or a verdict, have arrived."""
    chunk_us: Mapping[tuple[RoleName, str], int]
    """(role, place): the longest that cancelled work goes on."""
    placements: tuple[Placement, ...]
    """Every assignment of roles to places whose arithmetic and memory suffice; equal ones once."""
    read_us: Mapping[tuple[RoleName, str], int] = field(default_factory=dict)
    """(role, place): what reading on is behind when the step that streams to it ends."""
    joined_us: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(VERIFY, place): by how much it lengthens the pass that it joins."""
    power: Mapping[str, Power] = field(default_factory=dict)
    """Of the devices; without it nothing takes energy."""
    fixed: Mapping[str, str] = field(default_factory=dict)
    """Tasks that do not run where their role does: a prompt that is read elsewhere."""

    def place(self, task: Task, placement: Placement) -> str:
        """Where a task runs."""
        return self.fixed.get(task.id, placement[task.role])

    def used_devices(self, placement: Placement) -> tuple[str, ...]:
        """The devices that take part, in the machine's order."""
        found = {d for place in (*placement.values(), *self.fixed.values()) for d in members(place)}
        return tuple(d for d in self.devices if d in found)

    def needs(self, task: Task, speculate: bool = True) -> list[Need]:
        """The producers of a task, and the verdicts that it waits for; all of its guard's if it may not speculate."""
        edges = self.graph.digraph.in_edges(task.id, data="kind")
        found = [Need(source, kind is EdgeKind.STREAM) for source, _, kind in edges]
        return found + [Need(l.verify, False) for l in (task.waits_for if speculate else task.guard)]

    def earliest_us(self, need: Need, source: Slot, task: Task, place: str) -> int:
        """The first time at which a task can start for one of its needs, once that has its slot."""
        delay = self.delay_us[source.device, place]
        if not need.stream:
            return source.end_us + delay
        first, rest = self.stream_us(source.task, source.device, task, place)
        return max(source.start_us + first + delay, source.end_us + rest + delay)

    def stream_us(self, source: str, source_place: str, task: Task, place: str) -> tuple[int, int]:
        """A STREAM edge as two lags: from the source's start, and from its end, to the task's start.

        The task waits for the first chunk, and ends no sooner than it can read the last.
        """
        duration = self.duration_us[source, source_place]
        first = min(duration, self.chunk_us[self.graph.by_id[source].role, source_place])
        return first, self.read_us.get((task.role, place), 0) - self.duration_us[task.id, place]

    def origin_us(self, slots: Mapping[str, Slot]) -> int:
        """When the window's time begins: with the first task, in a steady window when its first step is written."""
        return slots[self.graph.head].end_us if self.graph.head else 0

    def rounds(self, outcome: Outcome) -> int:
        """How many rounds an outcome commits. In a steady window its last step belongs to the next round."""
        return max(t.round for t in used(self.graph, outcome)) + (not self.graph.steady)

    @cached_property
    def roles(self) -> tuple[RoleName, ...]:
        """The roles that the graph uses."""
        used = {t.role for t in self.graph.tasks}
        return tuple(r for r in RoleName if r in used)

    @cached_property
    def expected_rounds(self) -> float:
        """Mean number of rounds that the window commits: a backtrack ends it early."""
        return sum(p * self.rounds(o) for o, p in self.graph.outcomes)

    @cached_property
    def chance(self) -> Mapping[str, float]:
        """Task -> the probability that it is used."""
        return {t.id: self.graph.chance(t.guard) for t in self.graph.tasks}

    def meetings(self, a: str, b: str) -> tuple[int, ...]:
        """Outcomes in which both tasks may be there: one for each way in which they fare together."""
        if (a, b) not in self._met:
            ways: dict[object, int] = {}
            for number in range(len(self.graph.outcomes)):
                way = (self.fate[a, number], self.fate[b, number])
                if None not in way:
                    ways.setdefault(way, number)
            self._met[a, b] = tuple(ways.values())
        return self._met[a, b]

    @cached_property
    def _met(self) -> dict[tuple[str, str], tuple[int, ...]]:
        return {}

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
    """A device, or a set of them."""
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
    """`optimal`, `feasible` (stopped at the limit of work), `cut` (at the limit of time: another solve may give
    another schedule), `interrupted` (by the user) or `heuristic`."""
    energy_mj: float = 0.0
    """Expected energy of the devices of the placement, a round."""
    bound: float = 0.0
    """Lower bound on what was minimised, if that is not the time."""

    @property
    def gap(self) -> float:
        """(objective - bound) / objective of the time."""
        return 0.0 if self.objective_us == 0 else 1.0 - self.lower_bound_us / self.objective_us

    @cached_property
    def by_task(self) -> Mapping[str, Slot]:
        """Slots by the id of their task."""
        return {s.task: s for s in self.slots}


def used(graph: TaskGraph, outcome: Outcome) -> list[Task]:
    """The tasks whose result is used in the outcome."""
    return [t for t in graph.tasks if holds(t.guard, outcome)]


def occupied(instance: Instance, slots: Mapping[str, Slot], slot: Slot, outcome: int) -> tuple[int, int] | None:
    """From when to when a slot keeps its device busy in an outcome; None if it never starts, or joins another's pass.

    `slots` must hold the VERIFY tasks of the slot's guard.
    """
    cancelled_by = instance.fate[slot.task, outcome]
    if cancelled_by is None or joined(instance, slots, slot):
        return None
    if not cancelled_by:
        return slot.start_us, slot.end_us
    known_us = min(slots[v].end_us for v in cancelled_by)
    if slot.start_us >= known_us:
        return None
    role = instance.graph.by_id[slot.task].role
    return slot.start_us, min(slot.end_us, known_us + instance.chunk_us[role, slot.device])


def joined(instance: Instance, slots: Mapping[str, Slot], slot: Slot) -> bool:
    """Whether a VERIFY is scored in the pass of the one that it may join: both are in one place at one time."""
    other = slots.get(instance.graph.by_id[slot.task].joins)
    return other is not None and replace(other, task=slot.task) == slot


def expected_us(instance: Instance, slots: Mapping[str, Slot]) -> float:
    """Mean over the outcomes of the end of the last used task, a round; in a steady window since its first step."""
    total = sum(p * max(slots[t.id].end_us for t in used(instance.graph, o)) for o, p in instance.graph.outcomes)
    return (total - instance.origin_us(slots)) / instance.expected_rounds


def expected_mj(instance: Instance, slots: Mapping[str, Slot], placement: Placement) -> float:
    """Mean energy over the outcomes, a round: active power for what runs, cancelled or not, idle power for the rest.

    The devices of the placement count, from the window's origin to the end of the last used task. The step before
    the origin belongs to the window before.
    """
    devices = [d for d in instance.used_devices(placement) if d in instance.power]
    origin, total = instance.origin_us(slots), 0.0
    for number, (outcome, p) in enumerate(instance.graph.outcomes):
        span = max(slots[t.id].end_us for t in used(instance.graph, outcome)) - origin
        busy = dict.fromkeys(instance.devices, 0)
        for slot in slots.values():
            when = None if slot.task == instance.graph.head else occupied(instance, slots, slot, number)
            for device in members(slot.device) if when else ():
                busy[device] += when[1] - when[0] if when else 0
        for device in devices:
            active, idle = instance.power[device]
            total += p * (idle * span + (active - idle) * busy[device]) / 1000
    return total / instance.expected_rounds


def scheduled(
    instance: Instance, slots: Mapping[str, Slot], placement: Placement, status: str, bound_us: float = 0.0
) -> Schedule:
    """Slots of all tasks as a schedule, with what they are worth."""
    ordered = tuple(slots[t.id] for t in instance.graph.tasks)
    energy = expected_mj(instance, slots, placement) if instance.power else 0.0
    return Schedule(ordered, dict(placement), expected_us(instance, slots), bound_us, status, energy)


def build(
    graph: TaskGraph,
    workflow: Workflow,
    machine: Machine,
    costs: Costs,
    chunk_tokens: int = CHUNK_TOKENS,
    prefill_on: Mapping[RoleName, str] | None = None,
    caches: int = CACHES,
) -> Instance:
    """The instance of a graph on a machine. Raises UserError if no placement has the arithmetic and the memory.

    `prefill_on` names the place where a role's prompt is read, where a TRANSFER follows it; `caches` are held a role.
    """
    devices = tuple(d.name for d in machine.devices)
    roles = [r for r in RoleName if any(t.role is r for t in graph.tasks)]
    placements = tuple(_placements(roles, workflow, machine, costs, caches))
    elsewhere = {t.id: place for r, place in (prefill_on or {}).items() for t in graph.tasks if _prompt(t, r)}
    possible = {(r, d) for p in placements for r, d in p.items()}
    places = dict.fromkeys([*devices, *(d for _, d in possible), *elsewhere.values()])
    pairs = {(t, d) for t in graph.tasks for d in places if (t.role, d) in possible or elsewhere.get(t.id) == d}
    sent = round(machine.dispatch_us)
    length = {(t.id, d): _duration_us(graph, t, d, costs, chunk_tokens, workflow.statistics, sent) for t, d in pairs}
    for task, d in pairs:
        if task.op is Op.TRANSFER:
            source = next((elsewhere[p.id] for p in graph.producers(task.id) if p.id in elsewhere), d)
            size = task.tokens_in * costs.shapes[task.role].kv_bytes_per_token
            length[task.id, d] = transfer_us(machine, source, d, size)
    context, payload = workflow.statistics.prompt_tokens, workflow.statistics.step_bytes
    instance = Instance(
        graph,
        devices,
        length,
        {(a, b): transfer_us(machine, a, b, payload) for a, b in product(places, places)},
        {(r, d): sent + costs.decode_us(r, d, chunk_tokens, context) for r, d in possible},
        placements,
        {(r, d): sent + costs.prefill_us(r, d, chunk_tokens, context) for r, d in possible},
        {(t.id, d): _extra_us(graph, t, d, costs) for t, d in pairs if t.joins},
        {d.name: Power(d.active_w, d.idle_w) for d in machine.devices},
        elsewhere,
    )
    return replace(instance, placements=distinct(instance))


def distinct(instance: Instance) -> tuple[Placement, ...]:
    """One placement of each kind: those that differ in which of several equal devices is meant are one kind."""
    stands_for: dict[str, list[str]] = {}
    for device in instance.devices:
        twin = next((d for d in stands_for if _interchangeable(instance, d, device)), device)
        stands_for.setdefault(twin, []).append(device)
    twins = {device: group for group in stands_for.values() for device in group}
    found: dict[tuple[str, ...], Placement] = {}
    for placement in instance.placements:
        named: dict[str, str] = {}
        for device in (d for place in placement.values() for d in members(place)):
            if device not in named:
                named[device] = next(d for d in twins[device] if d not in named.values())
        kind = tuple(place_name([named[d] for d in members(p)], instance.devices) for p in placement.values())
        found.setdefault(kind, placement)
    return tuple(found.values())


def _interchangeable(instance: Instance, a: str, b: str) -> bool:
    """Whether nothing changes if two devices swap their names."""
    names = {a: b, b: a}

    def other(name: str) -> str:
        return place_name([names.get(d, d) for d in members(name)], instance.devices)

    def same(table: Mapping[Any, Any]) -> bool:
        return all(table.get((key, other(place))) == value for (key, place), value in table.items())

    between = all(instance.delay_us.get((other(x), other(y))) == us for (x, y), us in instance.delay_us.items())
    tables = (instance.duration_us, instance.chunk_us, instance.read_us, instance.joined_us)
    placed = {tuple(p.values()) for p in instance.placements}
    return (
        between
        and all(map(same, tables))
        and instance.power.get(a) == instance.power.get(b)
        and all(other(place) == place for place in instance.fixed.values())
        and all(tuple(map(other, places)) in placed for places in placed)
    )


def _prompt(task: Task, role: RoleName) -> bool:
    return task.op is Op.PREFILL and task.role is role


def _fate(task: Task, outcome: Outcome) -> tuple[str, ...] | None:
    if holds(task.guard, outcome):
        return ()
    if broken_by(task.waits_for, outcome):
        return None
    # A literal whose VERIFY task did not run in the outcome cancels nothing; then another one does.
    return tuple(broken_by(task.guard, outcome)) or None


def _duration_us(
    graph: TaskGraph, task: Task, place: str, costs: Costs, chunk: int, statistics: Statistics, sent_us: int
) -> int:
    """The mean over the lengths that steps have; a prompt has one length.

    A pass of a block of rows costs the same for one row as for all, so that the mean length does not have the mean
    cost. Each chunk is sent first; what is read before the first token is in that token's chunk.
    """
    if task.op is Op.PREFILL:
        return sent_us + costs.prefill_us(task.role, place, task.tokens_in, task.context) if task.tokens_in else 0
    streams = any(kind is EdgeKind.STREAM for _, _, kind in graph.digraph.in_edges(task.id, data="kind"))
    drafted = task.role is RoleName.DRAFT or any(p.op is Op.DRAFT for p in graph.producers(task.id))
    shares = factors(statistics.draft_step_spread if drafted else statistics.target_step_spread)
    total = 0
    for share in shares:
        read, written = round(task.tokens_in * share), round(task.tokens_out * share)
        for done, tokens in _chunks(read, chunk if streams else read):
            sent = 0 if written else sent_us
            total += sent + costs.prefill_us(task.role, place, tokens, task.context + done)
        for done, tokens in _chunks(written, chunk):
            total += sent_us + costs.decode_us(task.role, place, tokens, task.context + task.tokens_in + done)
    return round(total / len(shares))


def _chunks(tokens: int, size: int) -> Iterable[tuple[int, int]]:
    """(tokens before, tokens of the chunk)."""
    return ((done, min(size, tokens - done)) for done in range(0, tokens, max(1, size)))


def _extra_us(graph: TaskGraph, task: Task, place: str, costs: Costs) -> int:
    """What a pass takes longer for the step of `task` too; no less than makes it as long as that step alone."""
    before = graph.by_id[task.joins]
    both = costs.prefill_us(task.role, place, before.tokens_in + task.tokens_in, before.context)
    alone = [costs.prefill_us(t.role, place, t.tokens_in, t.context) if t.tokens_in else 0 for t in (before, task)]
    return max(both, *alone) - alone[0]


def _placements(
    roles: list[RoleName], workflow: Workflow, machine: Machine, costs: Costs, caches: int
) -> Iterator[Placement]:
    able = [[d.name for d in machine.candidates(workflow.roles[role].numerics)] for role in roles]
    nearest: list[Shortage] = []
    fits = False
    for chosen in product(*able):
        placement = dict(zip(roles, chosen, strict=True))
        short = shortages(machine, placement, workflow, costs, caches)
        if not short:
            fits = True
            yield placement
        elif not nearest or _missing(short) < _missing(nearest):
            nearest = short
    if not fits:
        missing = "; ".join(f"{s}, {s.missing_bytes / 1e9:.3g} GB too much" for s in nearest)
        raise UserError(
            f"the models fit on no placement; the least is missing where {missing}",
            where=f"machine {machine.name}",
            mend="add memory or a device, or choose smaller models",
        )


def _missing(short: list[Shortage]) -> int:
    return sum(s.missing_bytes for s in short)
