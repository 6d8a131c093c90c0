"""Costs and statistics from what happened: our own traces, or CSV step traces of somebody's runs.

Each role's time is a sum of non-negative terms: a constant a call, tokens read, tokens written, and tokens written
times the context before them. The fit is least squares by iterated reweighting (Huber), which leaves cold starts and
other strays out of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from planner.cost import CostEntry, CostOp, CostTable, Fit, Origin
from planner.errors import UserError
from planner.machine import Machine, transfer_us
from planner.plan import Plan
from planner.policy import Event as Turn
from planner.report import report
from planner.step_trace import StepRow, by_problem
from planner.trace import Chunk, Decided, Event, ProblemEnded
from planner.workflow import RoleName, Statistics

STRAY = 8.0
"""Residuals beyond so many times the typical one are strays: they are left out and counted."""
BEND = 2.0
"""Residuals beyond so many times the typical one count linearly (Huber)."""
PASSES = 40


@dataclass(frozen=True)
class Observed:
    """Calls of one role on one device. Arrays of one number a row; a row may hold several like calls."""

    role: RoleName
    device: str
    us: np.ndarray
    calls: np.ndarray
    tokens_in: np.ndarray
    """Tokens read in all calls of the row."""
    tokens_out: np.ndarray
    context: np.ndarray
    """Tokens before those that are written, in each call."""
    rereads: bool
    """Whether each call reads its whole context anew, so that `tokens_in` holds it."""

    def terms(self) -> np.ndarray:
        """(rows, 4): calls, tokens read, tokens written, tokens written times those before them."""
        each = self.tokens_out / np.maximum(self.calls, 1)
        spread = self.tokens_out * (self.context + (each - 1) / 2)
        return np.stack([self.calls, self.tokens_in, self.tokens_out, spread], axis=1).astype(float)


def fit_steps(rows: Sequence[StepRow], devices: Mapping[RoleName, str], source: str) -> CostTable:
    """Costs and statistics of a step trace; `devices` says where each role ran."""
    observed = [
        Observed(
            RoleName.DRAFT, devices[RoleName.DRAFT], _us(rows, "draft_ms"), _column(rows, "draft_calls"),
            np.zeros(len(rows)), _column(rows, "draft_out"), _each(rows, "draft_in", "draft_calls"), False,
        ),
        Observed(
            RoleName.PRM, devices[RoleName.PRM], _us(rows, "prm_ms"), _column(rows, "prm_calls"),
            _column(rows, "prm_in"), np.zeros(len(rows)), np.zeros(len(rows)), True,
        ),
        Observed(
            RoleName.TARGET, devices[RoleName.TARGET], _us(rows, "target_ms"), _column(rows, "target_calls"),
            _column(rows, "target_in"), _column(rows, "target_out"), _each(rows, "target_in", "target_calls"), True,
        ),
    ]  # fmt: skip
    return _table(observed, step_statistics(rows), source)


def fit_events(plan: Plan, events: Sequence[Event], source: str) -> CostTable:
    """Costs and statistics of a trace of our own runtime.

    Devices that equal one of the trace have its costs. A plan would else look better wherever it has not run, for a
    profile says less than a run.
    """
    observed = []
    # What reads and writes nothing, such as a cache that moves, costs nothing by these models.
    worked = [e for e in events if isinstance(e, Chunk) and (e.tokens_in or e.tokens_out)]
    for role, device in plan.placement.items():
        chunks = [e for e in worked if (e.role, e.device) == (role, device)]
        if not chunks:
            continue
        columns = [[c.end_us - c.start_us, 1, c.tokens_in, c.tokens_out, c.context + c.tokens_in] for c in chunks]
        us, calls, read, written, context = np.array(columns, dtype=float).T
        observed.append(Observed(role, device, us, calls, read, written, context, False))
    if not observed:
        raise UserError("the trace holds no work", where=source, mend="name a trace that `heteroreason run` left")
    table = _table(observed, event_statistics(plan, events), source)
    entries = (*table.entries, *_on_equals(table.entries, plan.machine))
    return replace(table, entries=entries, dispatch_us=dispatch_us(plan, events))


def _on_equals(entries: Sequence[CostEntry], machine: Machine) -> Iterator[CostEntry]:
    """The entries again for the devices that equal theirs."""
    for group in machine.equal_devices():
        for entry in entries:
            for own in (device for device in group if device.name == entry.device):
                for other in group:
                    # One that is bound to a core has other costs than one that is not.
                    alike = (own.core is None, len(own.processors)) == (other.core is None, len(other.processors))
                    if alike and other is not own:
                        yield replace(entry, device=other.name, source=f"{entry.source}, on its equal {own.name}")


def dispatch_us(plan: Plan, events: Sequence[Event]) -> float | None:
    """What the engine needed before a chunk: the mean time since the last end of another, which made it send this one,
    less the way between their devices. First chunks of problems do not count. None if there is no other."""
    chunks = [e for e in events if isinstance(e, Chunk)]
    ends = sorted((c.end_us, c.device) for c in chunks)
    size = plan.workflow.statistics.step_bytes
    gaps, begun = [], set()
    for chunk in sorted(chunks, key=lambda c: c.start_us):
        before = bisect_left(ends, (chunk.start_us + 1, ""))
        if chunk.problem in begun and before:
            end_us, device = ends[before - 1]
            gaps.append(max(0, chunk.start_us - end_us - transfer_us(plan.machine, device, chunk.device, size)))
        begun.add(chunk.problem)
    if not gaps:
        return None
    most = STRAY * float(np.median(gaps))
    return round(float(np.mean([g for g in gaps if g <= most])), 1)


def step_statistics(rows: Sequence[StepRow]) -> Statistics:
    """Shares and mean lengths of a step trace."""
    problems = by_problem(rows)
    refined = [r for r in rows if not r.accepted]
    drafted = sum(r.draft_out for r in rows) / max(1, sum(r.draft_calls for r in rows))
    written = sum(r.target_out for r in refined) / max(1, sum(r.target_calls for r in refined))
    return Statistics(
        accept=1 - len(refined) / len(rows),
        accept_refined=1 - sum(r.backtracked for r in refined) / len(refined) if refined else 1.0,
        prompt_tokens=max(1, round(np.mean([p[0].draft_in for p in problems.values()]))),
        draft_step_tokens=max(1, round(drafted)),
        target_step_tokens=max(1, round(written or drafted)),
        steps=round(max(1.0, len(rows) / len(problems)), 2),
        draft_step_spread=_spread([r.draft_out for r in rows if r.draft_calls == 1]),
        target_step_spread=_spread([r.target_out for r in refined if r.target_calls == 1]),
        steps_spread=_spread([len(p) for p in problems.values()], 0.0),
        persistence=_persistence([[r.accepted for r in p] for p in problems.values()]),
    )


def event_statistics(plan: Plan, events: Sequence[Event]) -> Statistics:
    """Shares and mean lengths of one of our own traces; what it does not show stays as the workflow says."""
    old = plan.workflow.statistics
    turns = [e for e in events if isinstance(e, Decided)]
    ends = [e for e in events if isinstance(e, ProblemEnded)]
    scored = [t for t in turns if "refined" in t.scores]
    verdicts: dict[str, list[bool]] = {}
    for turn in turns:
        if "draft" in turn.scores:
            verdicts.setdefault(turn.problem, []).append(turn.event == Turn.ACCEPTED)
    weak = sum(t.event in (Turn.KEPT_WEAK, Turn.BACKTRACKED) for t in scored)
    accept = report(plan, events).acceptance
    drafted, written = _step_lengths(events, RoleName.DRAFT), _step_lengths(events, RoleName.TARGET)
    return replace(
        old,
        accept=old.accept if accept is None else plan.workflow.policy.single(accept),
        accept_refined=1 - weak / len(scored) if scored else old.accept_refined,
        draft_step_tokens=max(1, round(np.mean(drafted))) if drafted else old.draft_step_tokens,
        target_step_tokens=max(1, round(np.mean(written))) if written else old.target_step_tokens,
        steps=round(max(1.0, float(np.mean([len(e.steps) for e in ends]))), 2) if ends else old.steps,
        draft_step_spread=_spread(drafted, old.draft_step_spread),
        target_step_spread=_spread(written, old.target_step_spread),
        steps_spread=_spread([len(e.steps) for e in ends], old.steps_spread),
        persistence=_persistence(list(verdicts.values())),
    )


def _step_lengths(events: Sequence[Event], role: RoleName) -> list[int]:
    """Tokens of each step that a role wrote and that counted."""
    used = {(e.problem, name) for e in events if isinstance(e, ProblemEnded) for name in e.used}
    lengths: Counter[tuple[str, str]] = Counter()
    for c in events:
        if isinstance(c, Chunk) and c.role == role and c.tokens_out:
            for request, tokens in c.wrote().items():
                if (c.problem, request) in used:
                    lengths[c.problem, request] += tokens
    return list(lengths.values())


def _persistence(verdicts: Sequence[Sequence[bool]]) -> float:
    """Share of accepted drafts after an accepted one, minus the share after one that was not; 0 where either is
    unknown."""
    after: dict[bool, list[bool]] = {True: [], False: []}
    for problem in verdicts:
        for before, verdict in pairwise(problem):
            after[before].append(verdict)
    if not all(after.values()):
        return 0.0
    return round(max(0.0, float(np.mean(after[True]) - np.mean(after[False]))), 3)


def _spread(lengths: Sequence[int], otherwise: float = Statistics.draft_step_spread) -> float:
    """Standard deviation over mean of the log-normal distribution with the spread of the logarithms: one step that ran
    away counts little."""
    if len(lengths) < 2:
        return otherwise
    return round(float(np.sqrt(np.expm1(np.var(np.log(np.maximum(lengths, 1)), ddof=1)))), 3)


def _table(observed: Sequence[Observed], statistics: Statistics, source: str) -> CostTable:
    entries: list[CostEntry] = []
    fits = []
    for seen in observed:
        terms = seen.terms()
        busy = seen.us > 0
        factors, kept = robust(terms[busy], seen.us[busy])
        entries += _entries(seen, factors, source)
        predicted, us = terms[busy][kept] @ factors, seen.us[busy][kept]
        fits.append(
            Fit(
                seen.role,
                seen.device,
                rows=int(busy.sum()),
                left_out=int((~kept).sum()),
                median_error=float(np.median(np.abs(predicted - us) / us)),
                total_error=float(predicted.sum() / us.sum() - 1),
            )
        )
    return CostTable(tuple(entries), f"fitted to {source}", statistics, tuple(fits))


def _entries(seen: Observed, factors: np.ndarray, source: str) -> list[CostEntry]:
    call, read, write, spread = (round(float(f), 4) for f in factors)
    writes = bool(seen.tokens_out.any())
    # A call that reads and writes has one constant: it stands with what every call of the row does.
    first = call if seen.rereads or not writes else 0.0
    prefill = CostEntry(
        seen.role, seen.device, CostOp.PREFILL, read, source,
        base_us=first, per_context_us=read if seen.rereads else 0.0, origin=Origin.FITTED,
    )  # fmt: skip
    decode = CostEntry(
        seen.role, seen.device, CostOp.DECODE, write, source,
        base_us=call - first, per_context_us=spread, origin=Origin.FITTED,
    )  # fmt: skip
    return [prefill, decode] if writes else [prefill]


def robust(terms: np.ndarray, us: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Non-negative factors of the terms, and which rows they were fitted to."""
    from scipy.optimize import nnls  # half a second that only a fit is worth

    if len(us) < 2:
        raise UserError(f"{len(us)} rows are too few to fit costs to", mend="use a longer trace")
    weight = np.ones(len(us))
    factors = np.zeros(terms.shape[1])
    scale = np.where(terms.max(axis=0) > 0, terms.max(axis=0), 1.0)
    for _ in range(PASSES):
        root = np.sqrt(weight)
        factors = nnls(terms / scale * root[:, None], us * root)[0] / scale
        size = np.abs(us - terms @ factors)
        typical = 1.4826 * np.median(size) + 1e-9
        weight = np.where(size > STRAY * typical, 1e-9, np.minimum(1.0, BEND * typical / np.maximum(size, 1e-9)))
    return factors, weight > 1e-8


def _column(rows: Sequence[StepRow], name: str) -> np.ndarray:
    return np.array([getattr(r, name) for r in rows], dtype=float)


def _us(rows: Sequence[StepRow], name: str) -> np.ndarray:
    return 1000.0 * _column(rows, name)


def _each(rows: Sequence[StepRow], name: str, calls: str) -> np.ndarray:
    return _column(rows, name) / np.maximum(_column(rows, calls), 1)
