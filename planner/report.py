"""Report: what a run took and gave, beside what the plan expected. Times are of the trace's clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from planner.cost import active_mj, idle_mj
from planner.plan import Plan
from planner.policy import Event as Turn
from planner.trace import (
    Chunk,
    ClockKind,
    Decided,
    Event,
    Faulted,
    ProblemEnded,
    ProblemStarted,
    Replanned,
    RunStarted,
)

ASSUMED_CLOCK_HZ = 225e6
"""Clock of an FPGA whose cycles are simulated, an assumption: 64 bytes a cycle are then one channel of HBM."""


@dataclass(frozen=True)
class DeviceUse:
    """One device over all problems of a trace."""

    device: str
    busy_us: int
    wasted_us: int
    """Part of `busy_us` spent on what was not used."""
    utilisation: float
    """busy_us over the time of all problems, what is left to finish after an answer included."""
    active_mj: float
    """Active power while busy."""
    wasted_mj: float
    """Part of `active_mj` spent on what was not used."""
    idle_mj: float
    """Idle power for the rest of the time."""
    cycles_per_token: float | None = None
    """Simulated clock cycles for each token read or written; None for a device that is not simulated."""

    @property
    def energy_mj(self) -> float:
        """Active and idle."""
        return self.active_mj + self.idle_mj


@dataclass(frozen=True)
class Report:
    """Planned against happened."""

    plan: str
    plan_name: str
    clock: ClockKind
    problems: int
    correct: int
    total_us: int
    """The latencies of all problems together."""
    span_us: int
    """Time in which any of them was at hand: less than the total if several were at once."""
    mean_us: float
    p50_us: float
    p95_us: float
    stderr_us: float
    foresight_us: float
    """Mean time of a problem under perfect foresight, by the times of this run: only the steps that were committed are
    written, and none is verified. No plan with this placement is faster."""
    rounds: int
    mean_round_us: float
    planned_round_us: float
    """The plan's objective, for a few rounds amid a problem."""
    bound_round_us: float
    """The plan's lower bound on it."""
    turns: dict[str, int]
    """Rounds by what became of them."""
    acceptance: float | None
    """Share of drafted steps that were accepted; None without drafts that are scored."""
    devices: tuple[DeviceUse, ...]
    faults: tuple[str, ...] = ()
    """What devices did wrong, each kind once, with how often."""
    replanned: tuple[str, ...] = ()
    """Why the run went on by another plan, and by which."""

    @property
    def problems_per_s(self) -> float:
        """Throughput."""
        return 1e6 * self.problems / self.span_us if self.span_us else 0.0

    @property
    def energy_mj(self) -> float:
        """Energy of all devices."""
        return sum(d.energy_mj for d in self.devices)

    @property
    def waste(self) -> float:
        """Share of the busy time of all devices that went into what was not used."""
        busy = sum(d.busy_us for d in self.devices)
        return sum(d.wasted_us for d in self.devices) / busy if busy else 0.0

    @property
    def utilisation(self) -> float:
        """Mean over the devices that the plan uses."""
        return sum(d.utilisation for d in self.devices) / len(self.devices) if self.devices else 0.0

    def to_mapping(self) -> dict[str, Any]:
        """Plain data, with what follows from it and the label of its times."""
        derived = {
            "problems_per_s": self.problems_per_s,
            "energy_mj": self.energy_mj,
            "waste": self.waste,
            "utilisation": self.utilisation,
        }
        devices = [{**asdict(d), "energy_mj": d.energy_mj} for d in self.devices]
        return {**asdict(self), **derived, "devices": devices, "label": self.clock.label}


def report(plan: Plan, events: Sequence[Event]) -> Report:
    """Sum up a trace of a run by `plan`."""
    head = next(e for e in events if isinstance(e, RunStarted))
    starts = [e for e in events if isinstance(e, ProblemStarted)]
    ends = [e for e in events if isinstance(e, ProblemEnded)]
    turns = [e for e in events if isinstance(e, Decided) and not e.resumed]
    arrived = {s.problem: s.arrived_us for s in starts}
    took = [e.at_us - arrived[e.problem] for e in ends]
    span = _span_us(events)
    counts = Counter(e.event for e in turns)
    total = sum(took)
    scored = [e for e in turns if "draft" in e.scores]
    accepted = sum(e.event == Turn.ACCEPTED for e in scored)
    return Report(
        plan=plan.hash,
        plan_name=plan.name,
        clock=head.clock,
        correct=sum(bool(e.correct) for e in ends),
        span_us=span,
        **latencies(took),
        foresight_us=_foresight_us(events, ends),
        rounds=len(turns),
        mean_round_us=total / len(turns) if turns else 0.0,
        planned_round_us=plan.objective_us,
        bound_round_us=plan.lower_bound_us,
        turns=dict(sorted(counts.items())),
        acceptance=accepted / len(scored) if scored else None,
        devices=_devices(plan, events, ends, span),
        faults=_faults(events),
        replanned=tuple(f"{e.why}: plan {e.plan_name} ({e.plan})" for e in events if isinstance(e, Replanned)),
    )


def _faults(events: Sequence[Event]) -> tuple[str, ...]:
    faults = [e for e in events if isinstance(e, Faulted)]
    counts = Counter((e.device, e.fault, e.what, e.lost) for e in faults)
    return tuple(
        f"{device} {fault}{' and is lost' if lost else ''}: {what}{f' ({n} times)' if n > 1 else ''}"
        for (device, fault, what, lost), n in counts.items()
    )


def latencies(took_us: Sequence[float]) -> dict[str, Any]:
    """The fields of a report that tell how long each problem took."""
    took = np.asarray(took_us, dtype=float)
    some, several = len(took) > 0, len(took) > 1
    return {
        "problems": len(took),
        "total_us": int(took.sum()),
        "mean_us": float(took.mean()) if some else 0.0,
        "p50_us": float(np.quantile(took, 0.5)) if some else 0.0,
        "p95_us": float(np.quantile(took, 0.95)) if some else 0.0,
        "stderr_us": float(took.std(ddof=1) / np.sqrt(len(took))) if several else 0.0,
    }


def _foresight_us(events: Sequence[Event], ends: Sequence[ProblemEnded]) -> float:
    """Mean time that a problem's committed steps took to write."""
    path = {(e.problem, name) for e in ends for name in e.path}
    wrote = [e for e in events if isinstance(e, Chunk) and e.tokens_out]
    chunks = [c for c in wrote if not path.isdisjoint((c.problem, name) for name in c.wrote())]
    return sum(c.end_us - c.start_us for c in chunks) / len(ends) if ends else 0.0


def _span_us(events: Sequence[Event]) -> int:
    """Time that the devices were there: while a problem was at hand, until the last work begun for it was over."""
    begun, last = {}, {}
    for event in events:
        if isinstance(event, ProblemStarted):
            begun[event.problem] = last[event.problem] = event.at_us
        elif isinstance(event, Chunk):
            last[event.problem] = max(last[event.problem], event.end_us)
        elif isinstance(event, ProblemEnded) or (isinstance(event, Faulted) and event.problem in last):
            last[event.problem] = max(last[event.problem], event.at_us)
    total = until = 0
    for problem, start in sorted(begun.items(), key=lambda item: item[1]):
        total += max(0, last[problem] - max(start, until))
        until = max(until, last[problem])
    return total


def _devices(plan: Plan, events: Sequence[Event], ends: list[ProblemEnded], span_us: int) -> tuple[DeviceUse, ...]:
    used = {(e.problem, name) for e in ends for name in e.used}
    rows = []
    moves = [(*e.placement.values(), *e.prefill_on.values()) for e in events if isinstance(e, Replanned)]
    places = dict.fromkeys(place for places in (plan.places, *moves) for place in places)
    for name in dict.fromkeys(member for place in places for member in plan.machine.members(place)):
        # Work of devices that compute together keeps each of them busy.
        within = {place for place in places if name in plan.machine.members(place)}
        chunks = [e for e in events if isinstance(e, Chunk) and e.device in within]
        failed = sum(e.busy_us for e in events if isinstance(e, Faulted) and e.device in within)
        busy = failed + sum(c.end_us - c.start_us for c in chunks)
        lost = failed + sum(c.end_us - c.start_us for c in chunks if used.isdisjoint((c.problem, n) for n in c.wrote()))
        device = plan.machine.device(name)
        idle = idle_mj(device, max(0, span_us - busy))
        share = busy / span_us if span_us else 0.0
        spent = (active_mj(device, busy), active_mj(device, lost), idle)
        rows.append(DeviceUse(name, busy, lost, share, *spent, _cycles(chunks)))
    return tuple(rows)


def _cycles(chunks: Sequence[Chunk]) -> float | None:
    tokens = sum(c.tokens_in + c.tokens_out for c in chunks)
    cycles = sum(c.cycles for c in chunks)
    return cycles / tokens if cycles and tokens else None
