"""What the timelines show, whatever draws them: boxes on devices, marks in time, and which box led to which."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from planner.graph import WRITES, Op, Outcome, Task, TaskGraph, Verdict, broken_by, holds
from planner.plan import Plan
from planner.schedule.instance import Slot
from planner.trace import Chunk, Decided, Event, Faulted, ProblemEnded, ProblemStarted, Replanned, RunStarted


@dataclass(frozen=True)
class Box:
    """A device was, or will be, busy."""

    name: str
    """Id of the task, or name of the request that a chunk belongs to."""
    device: str
    start_us: int
    end_us: int
    op: str
    role: str
    round: int
    tokens_in: int
    tokens_out: int
    speculative: bool
    """Started before it was known to be needed."""
    wasted: bool
    """Not needed in the end."""


@dataclass(frozen=True)
class Mark:
    """Something is known from here on."""

    at_us: int
    label: str
    good: bool
    detail: str = ""


@dataclass(frozen=True)
class Timeline:
    """Boxes by device and start; marks in order of time; arrows from the box that wrote a step to its verification."""

    devices: tuple[str, ...]
    boxes: tuple[Box, ...]
    marks: tuple[Mark, ...]
    arrows: tuple[tuple[Box, Box], ...]

    @property
    def end_us(self) -> int:
        """When the last of it is over."""
        return max([b.end_us for b in self.boxes] + [m.at_us for m in self.marks], default=0)


# --- planned ------------------------------------------------------------------------------------------------------


def likely_outcome(graph: TaskGraph) -> tuple[Outcome, float]:
    """The most likely outcome of a window and its probability; the earliest of equals."""
    return max(graph.outcomes, key=lambda outcome: outcome[1])


def planned(plan: Plan) -> Timeline:
    """The plan's timeline in its most likely outcome, with what is started and cancelled in it."""
    graph = plan.task_graph
    outcome, _ = likely_outcome(graph)
    slots = {s.task: s for s in plan.timeline if s.task in graph.by_id}
    found = [box for slot in slots.values() if (box := _planned_box(plan, graph, slots, slot, outcome))]
    devices = tuple(d.name for d in plan.machine.devices if d.name in {*plan.placement.values(), *_devices(found)})
    boxes = _without_overlap(found, devices)
    marks = [
        Mark(slots[v].end_us, v, verdict is Verdict.ACCEPT, str(verdict))
        for v, verdict in outcome.items()
        if v in slots
    ]
    by_name = {b.name: b for b in boxes}
    arrows = [
        (by_name[p.id], box)
        for box in boxes
        if box.op == Op.VERIFY
        for p in graph.producers(box.name)
        if p.tokens_out and p.id in by_name
    ]
    return Timeline(devices, boxes, tuple(sorted(marks, key=lambda m: (m.at_us, m.label))), tuple(arrows))


def _planned_box(plan: Plan, graph: TaskGraph, slots: Mapping[str, Slot], slot: Slot, outcome: Outcome) -> Box | None:
    """What the slot's device does of it in the outcome; None if it is not even begun."""
    task = graph.by_id[slot.task]
    needed, end_us = holds(task.guard, outcome), slot.end_us
    if not needed:
        known = [slots[v].end_us for v in broken_by(task.guard, outcome) if v in slots]
        if broken_by(task.waits_for, outcome) or not known or slot.start_us >= min(known):
            return None
        end_us = min(slot.end_us, min(known) + _chunk_us(plan, task, slot))
    ahead = any(slot.start_us < slots[l.verify].end_us for l in task.guard if l.verify in slots)
    counts = (task.tokens_in, task.tokens_out)
    return Box(task.id, slot.device, slot.start_us, end_us, task.op, task.role, task.round, *counts, ahead, not needed)


def _chunk_us(plan: Plan, task: Task, slot: Slot) -> int:
    """How long cancelled work goes on at most: one chunk's share of the slot."""
    length = slot.end_us - slot.start_us
    return length if task.tokens_out == 0 else length * plan.chunk_tokens // task.tokens_out


def _without_overlap(boxes: list[Box], devices: tuple[str, ...]) -> tuple[Box, ...]:
    """The boxes in order, cancelled ones cut where the next begins: the share of a chunk is an estimate."""
    place = {device: i for i, device in enumerate(devices)}
    ordered = sorted(boxes, key=lambda b: (place.get(b.device, len(place)), b.start_us, b.end_us, b.name))
    for i in range(len(ordered) - 1):
        box, after = ordered[i], ordered[i + 1]
        if box.wasted and box.device == after.device and box.start_us <= after.start_us < box.end_us:
            ordered[i] = replace(box, end_us=after.start_us)
    return tuple(ordered)


def _devices(boxes: Sequence[Box]) -> set[str]:
    return {b.device for b in boxes}


# --- happened -----------------------------------------------------------------------------------------------------


@dataclass
class Episode:
    """The events of one problem."""

    problem: str
    question: str = ""
    start_us: int | None = None
    chunks: list[Chunk] = field(default_factory=list)
    decisions: list[Decided] = field(default_factory=list)
    end: ProblemEnded | None = None

    def times_us(self) -> Iterator[int]:
        """All points in time that it names."""
        yield from () if self.start_us is None else (self.start_us,)
        for chunk in self.chunks:
            yield from (chunk.start_us, chunk.end_us)
        yield from (d.at_us for d in self.decisions)
        yield from () if self.end is None else (self.end.at_us,)


def run_of(events: Sequence[Event]) -> RunStarted | None:
    """The head of a trace, if it has one."""
    return next((e for e in events if isinstance(e, RunStarted)), None)


def episodes(events: Sequence[Event]) -> list[Episode]:
    """The problems of a trace in the order in which they were begun."""
    found: list[Episode] = []
    latest: dict[str, Episode] = {}
    for event in events:
        if isinstance(event, RunStarted | Faulted | Replanned):
            continue
        if isinstance(event, ProblemStarted) or event.problem not in latest:
            latest[event.problem] = Episode(event.problem)
            found.append(latest[event.problem])
        _take(latest[event.problem], event)
    return found


def _take(episode: Episode, event: ProblemStarted | Chunk | Decided | ProblemEnded) -> None:
    if isinstance(event, ProblemStarted):
        episode.question, episode.start_us = event.question, event.at_us
    elif isinstance(event, Chunk):
        episode.chunks.append(event)
    elif isinstance(event, Decided):
        episode.decisions.append(event)
    else:
        episode.end = event


def happened(found: Sequence[Episode]) -> Timeline:
    """What devices did for these problems and what was decided; time begins with the first of it."""
    zero = min((t for episode in found for t in episode.times_us()), default=0)
    boxes, marks, arrows = [], [], []
    for episode in found:
        mine = [_happened_box(chunk, episode, zero) for chunk in episode.chunks]
        boxes += mine
        marks += [_decision(d, zero) for d in episode.decisions]
        arrows += _arrows(mine, episode)
    boxes.sort(key=lambda b: (b.device, b.start_us, b.end_us, b.name))
    marks.sort(key=lambda m: (m.at_us, m.label))
    return Timeline(tuple(sorted(_devices(boxes))), tuple(boxes), tuple(marks), tuple(arrows))


def _happened_box(c: Chunk, episode: Episode, zero: int) -> Box:
    wasted = episode.end is not None and set(c.wrote()).isdisjoint(episode.end.used)
    span = (c.start_us - zero, max(c.start_us, c.end_us) - zero)
    counts = (c.round, c.tokens_in, c.tokens_out)
    return Box(c.request, c.device, *span, c.op, c.role, *counts, c.speculative, wasted)


def _decision(d: Decided, zero: int) -> Mark:
    """Accepted drafts are good; whatever needed the target is not."""
    scores = ", ".join(f"{what} {score:.2f}" for what, score in d.scores.items())
    back = f"\nback {d.went_back}" if d.went_back else ""
    step = f"{d.event}: step {d.depth} by {d.source}"
    return Mark(d.at_us - zero, d.event, d.event == "accepted", f"{step}\n{scores}{back}\n{d.text}")


def _arrows(boxes: Sequence[Box], episode: Episode) -> Iterator[tuple[Box, Box]]:
    """From the last chunk of each used step to the first of its verification, which the policy asks for next."""
    used = () if episode.end is None else episode.end.used
    first: dict[str, Box] = {}
    last: dict[str, Box] = {}
    for box in sorted(boxes, key=lambda b: (b.start_us, b.end_us)):
        first.setdefault(box.name, box)
        last[box.name] = box
    for writer, check in pairwise(used):
        if writer in last and last[writer].op in WRITES and check in first and first[check].op == Op.VERIFY:
            yield last[writer], first[check]
