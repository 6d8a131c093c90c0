"""Replay: a plan over a step trace of somebody's runs, through the same dispatch and engine as a run.

Each task takes the time that was measured for it, every device does one thing at a time, and cancels take effect at
the next token. A problem is cut where a backtrack was tried: what ran ahead of that verdict was for another path, and
nothing of it is kept. What the trace does not tell, such as a step of the target that was never written because the
draft was accepted, has the mean length and the costs of a cost model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.cost import Costs
from planner.plan import Plan
from planner.problems.base import Problem
from planner.report import Report, latencies, report
from planner.runtime.backend import ModelInfo, Output, Work
from planner.runtime.engine import Engine
from planner.runtime.worker import VirtualWorkers
from planner.stand_in import DELIMITER, FILLER, StandInBackend, StandInProblems
from planner.step_trace import StepRow, by_problem
from planner.trace import Sink, collector
from planner.workflow import Budget, Policy, Role, RoleName, Workflow

FIRST = 1 << 10
"""Tokens from here on begin a step. The first token of a step says which row it is and what became of it."""
LONGEST = 1 << 20
"""No step, and no problem, has so many tokens."""

ON_PATH, REJECTED, ELSEWHERE = range(3)
"""A step that the recorded run kept; a draft that it rejected; one that it never wrote."""

Segment = tuple[StepRow, ...]
"""Rows between two backtracks."""


@dataclass(frozen=True)
class Replay:
    """What a plan makes of a trace, beside the two ends of the scale. Times of the tasks are measured, all else is
    modelled."""

    report: Report
    """Latencies are those of a whole problem, its stretches between backtracks together."""
    serial_us: float
    """Mean of one task after another, as the trace was recorded."""
    foresight_us: float
    """Mean under perfect foresight: only the work on the committed path, and no verification of it."""


def replay(plan: Plan, rows: Sequence[StepRow], costs: Costs, sink: Sink | None = None) -> Replay:
    """What `plan` makes of the problems of a step trace."""
    segments = [s for rows_of in by_problem(rows).values() for s in _segments(rows_of)]
    # A task's time is all that was seen of it, and its chunks are there to be cancelled at any token.
    machine = replace(plan.machine, dispatch_us=0.0)
    replayed = replace(plan, workflow=_recorded(plan.workflow), machine=machine, chunk_tokens=1)
    backend = ReplayBackend(segments, replayed, costs)
    workers = VirtualWorkers(backend.took_us, dict.fromkeys(plan.places, backend))
    events, note = collector(sink)
    engine = Engine(replayed, workers, _Recorded(), note)
    took: dict[str, int] = {}
    for number, segment in enumerate(segments):
        solved = engine.solve(Problem("recorded", str(number), ""))
        took[segment[0].problem] = took.get(segment[0].problem, 0) + solved.latency_us
    serial = sum(r.serial_ms for r in rows)
    foresight = sum(r.draft_ms if r.accepted else r.target_ms for r in rows)
    merged = replace(report(replayed, events), **latencies(list(took.values())))
    return Replay(merged, 1000 * serial / len(took), 1000 * foresight / len(took))


def _segments(rows: Sequence[StepRow]) -> list[Segment]:
    found: list[list[StepRow]] = [[]]
    for row in rows:
        found[-1].append(row)
        if row.backtracked:
            found.append([])
    return [tuple(s) for s in found if s]


def _recorded(workflow: Workflow) -> Workflow:
    """The workflow as it was recorded: every step of the target was scored, and the row says what followed."""
    policy = replace(
        workflow.policy, kind=Policy.BACKTRACK, accept=0.5, accept_refined=0.5, max_backtracks=0, score_refined=True
    )
    return replace(workflow, policy=policy, budget=Budget(steps=LONGEST, tokens=LONGEST, step_tokens=LONGEST))


class _Recorded(StandInProblems):
    """The segments as problems, by number; one ends with its last row."""

    name = "recorded"

    def generate(self, count: int, seed: int) -> list[Problem]:
        return [self.parse(str(number)) for number in range(count)]

    def answer(self, step: str) -> str | None:
        return step if step.startswith("last") else None


@dataclass(frozen=True)
class _Place:
    """What the tokens of a sequence tell."""

    segment: Segment
    step: int
    """Whole steps."""
    fate: int
    """Of the last whole step."""
    drafted: bool
    """Whether the draft wrote it."""
    begun: int
    """Tokens of the step after it."""

    @property
    def row(self) -> StepRow | None:
        """The row of the step that would be written here; None off the recorded path."""
        on = self.fate == ON_PATH and self.step < len(self.segment)
        return self.segment[self.step] if on else None


class ReplayBackend(StandInBackend):
    """A backend that writes the steps of a trace, and knows what each chunk took."""

    name = "recorded"

    def __init__(self, segments: Sequence[Segment], plan: Plan, costs: Costs) -> None:
        """Steps that the trace does not hold have the statistics and the costs given."""
        super().__init__(costs.shapes)
        self._segments, self._plan, self._costs = segments, plan, costs
        self._last_us = 0.0

    def load(self, name: str, role: Role, delimiter: str) -> ModelInfo:
        """Nothing to load. Each recorded step has a time of its own."""
        return replace(super().load(name, role, delimiter), batches=False)

    def encode(self, name: str, text: str) -> tuple[int, ...]:
        """A prompt of the recorded length that tells the segment."""
        number = int(text)
        return (FIRST + number, *(FILLER,) * (self._segments[number][0].draft_in - 2), DELIMITER)

    def decode(self, name: str, tokens: Sequence[int]) -> str:
        """What the first token says."""
        step, fate, last = _unpack(tokens[0])
        return f"{'last ' if last and fate == ON_PATH else ''}{step}/{fate}\n"

    def run(self, work: Work) -> Output:
        """Read, write or score as recorded."""
        self._last_us = 0.0
        return super().run(work)

    def took_us(self, device: str, work: Work, output: Output) -> int:
        """The time of the chunk that ran last."""
        return round(self._last_us)

    def write(self, held: list[int], work: Work) -> tuple[int, ...]:
        """The next tokens of the step after the whole ones that are held."""
        place, role = self._place(held), RoleName(work.role)
        row, stats = place.row, self._plan.workflow.statistics
        drafts = role is RoleName.DRAFT
        if row is not None and (drafts or not row.accepted):
            length, us = (row.draft_out, row.draft_ms) if drafts else (row.target_out, row.target_ms)
            length, fate = max(2, length), ON_PATH if drafts == row.accepted else REJECTED
            each = 1000 * us / length
            start, end = place.begun, min(length, place.begun + work.max_new)
            self._last_us = round(end * each) - round(start * each)
        else:
            length = max(2, stats.draft_step_tokens if drafts else stats.target_step_tokens)
            fate, (start, end) = ELSEWHERE, (place.begun, min(length, place.begun + work.max_new))
            device = self._plan.placement[role]
            self._last_us = self._costs.decode_us(role, device, end - start, len(held))
            if start == 0:
                self._last_us += self._costs.prefill_us(role, device, 1, len(held))
        first = _pack(place.step, fate, place.step + 1 == len(place.segment))
        return (first, *(FILLER,) * (length - 2), DELIMITER)[start:end]

    def score(self, held: list[int]) -> float:
        """1 for a step that was kept. The time is that of the deepest step that the pass scores."""
        place = self._place(held)
        row = place.segment[place.step - 1] if place.step <= len(place.segment) else None
        if row is not None and place.fate != ELSEWHERE:
            first_ms = row.prm_ms / max(1, row.prm_calls)
            self._last_us = 1000 * (first_ms if place.drafted else row.prm_ms - first_ms)
        else:
            device = self._plan.placement[RoleName.PRM]
            self._last_us = self._costs.prefill_us(RoleName.PRM, device, 1, len(held))
        return float(place.fate == ON_PATH)

    def _place(self, tokens: list[int]) -> _Place:
        """Where a sequence stands."""
        segment = self._segments[tokens[0] - FIRST]
        ends = [i for i, t in enumerate(tokens) if t == DELIMITER]
        whole, begun = len(ends) - 1, len(tokens) - ends[-1] - 1
        if not whole:
            return _Place(segment, 0, ON_PATH, False, begun)
        fates = [_unpack(tokens[end + 1])[1] for end in ends[:-1]]
        # Nothing that follows a step which was not kept is on the path.
        on = all(f == ON_PATH for f in fates[:-1])
        fate = fates[-1] if on else ELSEWHERE
        last = segment[whole - 1] if whole <= len(segment) else None
        drafted = fate == REJECTED or (last is not None and last.accepted)
        return _Place(segment, whole, fate, drafted, begun)


def _pack(step: int, fate: int, last: bool) -> int:
    return FIRST + (step * 3 + fate) * 2 + last


def _unpack(token: int) -> tuple[int, int, bool]:
    rest, last = divmod(token - FIRST, 2)
    step, fate = divmod(rest, 3)
    return step, fate, bool(last)
