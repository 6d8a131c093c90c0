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
from planner.trace import Chunk, ClockKind, Decided, Event, ProblemEnded, ProblemStarted, RunStarted

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
    energy_mj: float
    """Active power while busy, idle power else."""
    cycles_per_token: float | None = None
    """Simulated clock cycles for each token read or written; None for a device that is not simulated."""


@dataclass(frozen=True)
class Report:
    """Planned against happened."""

    plan: str
    plan_name: str
    clock: ClockKind
    problems: int
    correct: int
    total_us: int
    """Time of all problems, one after another."""
    mean_us: float
    p50_us: float
    p95_us: float
    stderr_us: float
    rounds: int
    mean_round_us: float
    planned_round_us: float
    """The plan's objective, for the first rounds of a problem."""
    bound_round_us: float
    """The plan's lower bound on it."""
    turns: dict[str, int]
    """Rounds by what became of them."""
    acceptance: float | None
    """Share of drafted steps that were accepted; None without drafts that are scored."""
    devices: tuple[DeviceUse, ...]

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
        derived = {"energy_mj": self.energy_mj, "waste": self.waste, "utilisation": self.utilisation}
        return {**asdict(self), **derived, "label": self.clock.label}


def report(plan: Plan, events: Sequence[Event]) -> Report:
    """Sum up a trace of a run by `plan`."""
    head = next(e for e in events if isinstance(e, RunStarted))
    starts = [e for e in events if isinstance(e, ProblemStarted)]
    ends = [e for e in events if isinstance(e, ProblemEnded)]
    turns = [e for e in events if isinstance(e, Decided)]
    # Problems run one after another, the same one perhaps twice; the last may have no end.
    took = np.array([e.at_us - s.at_us for s, e in zip(starts, ends, strict=False)], dtype=float)
    counts = Counter(e.event for e in turns)
    total = int(took.sum())
    scored = [e for e in turns if "draft" in e.scores]
    accepted = sum(e.event == Turn.ACCEPTED for e in scored)
    return Report(
        plan=plan.hash,
        plan_name=plan.name,
        clock=head.clock,
        problems=len(ends),
        correct=sum(bool(e.correct) for e in ends),
        total_us=total,
        mean_us=float(took.mean()) if len(took) else 0.0,
        p50_us=float(np.quantile(took, 0.5)) if len(took) else 0.0,
        p95_us=float(np.quantile(took, 0.95)) if len(took) else 0.0,
        stderr_us=float(took.std(ddof=1) / np.sqrt(len(took))) if len(took) > 1 else 0.0,
        rounds=len(turns),
        mean_round_us=total / len(turns) if turns else 0.0,
        planned_round_us=plan.objective_us,
        bound_round_us=plan.lower_bound_us,
        turns=dict(sorted(counts.items())),
        acceptance=accepted / len(scored) if scored else None,
        devices=_devices(plan, events, ends, _span_us(events)),
    )


def _span_us(events: Sequence[Event]) -> int:
    """Time that the devices were there: each problem until its end, or until the last work begun for it was over."""
    total = begun = last = 0
    for event in events:
        if isinstance(event, ProblemStarted):
            begun = last = event.at_us
        elif isinstance(event, Chunk):
            last = max(last, event.end_us)
        elif isinstance(event, ProblemEnded):
            total += max(last, event.at_us) - begun
    return total


def _devices(plan: Plan, events: Sequence[Event], ends: list[ProblemEnded], span_us: int) -> tuple[DeviceUse, ...]:
    used = {(e.problem, name) for e in ends for name in e.used}
    rows = []
    for name in dict.fromkeys(plan.placement.values()):
        chunks = [e for e in events if isinstance(e, Chunk) and e.device == name]
        busy = sum(c.end_us - c.start_us for c in chunks)
        lost = sum(c.end_us - c.start_us for c in chunks if (c.problem, c.request) not in used)
        device = plan.machine.device(name)
        energy = active_mj(device, busy) + idle_mj(device, max(0, span_us - busy))
        rows.append(DeviceUse(name, busy, lost, busy / span_us if span_us else 0.0, energy, _cycles(chunks)))
    return tuple(rows)


def _cycles(chunks: Sequence[Chunk]) -> float | None:
    tokens = sum(c.tokens_in + c.tokens_out for c in chunks)
    cycles = sum(c.cycles for c in chunks)
    return cycles / tokens if cycles and tokens else None
