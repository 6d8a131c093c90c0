"""Chrome trace events, the JSON that https://ui.perfetto.dev opens: what is planned, what happened, or both."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from planner.export.text import one_line
from planner.export.timeline import Box, Episode, Timeline, episodes, happened, planned, run_of
from planner.plan import Plan
from planner.trace import Event, Faulted, Replanned

PLANNED, HAPPENED = 1, 2
"""Process ids."""
PROBLEMS = 1
"""Thread of the problems; the devices follow."""

TraceEvent = dict[str, Any]


def perfetto_plan(plan: Plan) -> str:
    """The plan's most likely outcome."""
    return _file(_planned(plan), {"plan": plan.name, "planned": plan.cost_source})


def perfetto_trace(events: Sequence[Event]) -> str:
    """What happened."""
    return _file(_happened(events), _origin(events))


def planned_and_happened(plan: Plan, events: Sequence[Event]) -> str:
    """Both as two processes on one time axis that begins with the run."""
    about = {"plan": plan.name, "planned": plan.cost_source, **_origin(events)}
    return _file([*_planned(plan), *_happened(events)], about)


def _file(events: Sequence[TraceEvent], about: dict[str, str]) -> str:
    """One event a line."""
    lines = ",\n".join(json.dumps(event, allow_nan=False) for event in events)
    return f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n{lines}\n]}}\n'


def _origin(events: Sequence[Event]) -> dict[str, str]:
    run = run_of(events)
    return {"happened": run.clock.label, "plan_hash": run.plan} if run else {}


def _planned(plan: Plan) -> list[TraceEvent]:
    timeline = planned(plan)
    return [*_names(PLANNED, f"planned: {plan.name} ({plan.cost_source})", timeline), *_timeline(PLANNED, timeline)]


def _happened(events: Sequence[Event]) -> list[TraceEvent]:
    found, run = episodes(events), run_of(events)
    timeline = happened(found)
    zero = min((t for e in found for t in e.times_us()), default=0)
    title = f"happened: {run.plan_name} ({run.clock.label})" if run else "happened"
    problems = [_problem(e, zero) for e in found if list(e.times_us())]
    others = [_incident(e, zero, timeline.devices) for e in events if isinstance(e, Faulted | Replanned)]
    return [*_names(HAPPENED, title, timeline), *problems, *_timeline(HAPPENED, timeline), *others]


def _names(pid: int, title: str, timeline: Timeline) -> Iterator[TraceEvent]:
    """Names and order of a process and of its threads."""
    yield _meta("process_name", pid, 0, name=title)
    yield _meta("process_sort_index", pid, 0, sort_index=pid)
    threads = ["decisions", *timeline.devices]
    for tid, name in enumerate(threads, PROBLEMS):
        yield _meta("thread_name", pid, tid, name=name)
        yield _meta("thread_sort_index", pid, tid, sort_index=tid)


def _meta(what: str, pid: int, tid: int, **args: object) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _timeline(pid: int, timeline: Timeline) -> Iterator[TraceEvent]:
    """A slice a box, an instant a mark, a flow an arrow."""
    tid = {device: i for i, device in enumerate(timeline.devices, PROBLEMS + 1)}
    for box in timeline.boxes:
        yield _slice(pid, tid[box.device], box)
    for mark in timeline.marks:
        common = {"ph": "i", "s": "p", "cat": "decision", "pid": pid, "tid": PROBLEMS}
        yield {**common, "name": mark.label, "ts": mark.at_us, "args": {"good": mark.good, "detail": mark.detail}}
    for number, (writer, check) in zip(count(1), timeline.arrows, strict=False):
        common = {"name": "verify", "cat": "step", "id": pid * 1_000_000 + number, "pid": pid}
        # A flow begins inside of the slice that it leaves, and the slice's end is no longer inside.
        yield {**common, "ph": "s", "tid": tid[writer.device], "ts": max(writer.start_us, writer.end_us - 1)}
        yield {**common, "ph": "f", "bp": "e", "tid": tid[check.device], "ts": check.start_us}


def _incident(event: Faulted | Replanned, zero: int, devices: Sequence[str]) -> TraceEvent:
    """An instant: a fault on its device, or a plan made anew."""
    place, scope = PROBLEMS, "p"
    if isinstance(event, Replanned):
        name = f"plan {event.plan_name} ({event.plan})"
    else:
        name = f"{event.device} {event.fault}" + (", taken out" if event.lost else "")
        if event.device in devices:
            place, scope = PROBLEMS + 1 + devices.index(event.device), "t"
    args = {key: value for key, value in vars(event).items() if key not in ("at_us", "kind")}
    at = {"pid": HAPPENED, "tid": place, "ts": max(0, event.at_us - zero)}
    return {"ph": "i", "s": scope, "cat": event.kind, "name": name, **at, "args": args}


def _slice(pid: int, tid: int, box: Box) -> TraceEvent:
    args = {
        "task": box.name,
        "op": box.op,
        "role": box.role,
        "round": box.round,
        "tokens_in": box.tokens_in,
        "tokens_out": box.tokens_out,
        "speculative": box.speculative,
        "wasted": box.wasted,
    }
    name = box.name if pid == PLANNED else f"{box.op} {box.role}"
    kinds = [box.op] + ["speculative"] * box.speculative + ["wasted"] * box.wasted
    span = {"ts": box.start_us, "dur": box.end_us - box.start_us}
    return {"ph": "X", "name": name, "cat": ",".join(kinds), "pid": pid, "tid": tid, **span, "args": args}


def _problem(episode: Episode, zero: int) -> TraceEvent:
    """A slice as long as the problem took; work that it left running may end later."""
    times = list(episode.times_us())
    start = times[0] if episode.start_us is None else episode.start_us
    end = max(times) if episode.end is None else episode.end.at_us
    args: dict[str, object] = {"problem": episode.problem, "question": episode.question}
    if episode.end is not None:
        args |= {"status": episode.end.status, "answer": episode.end.answer, "correct": episode.end.correct}
        args["steps"] = list(episode.end.steps)
    name = one_line(episode.question) or episode.problem
    span = {"ts": start - zero, "dur": max(0, end - start)}
    return {"ph": "X", "name": name, "cat": "problem", "pid": HAPPENED, "tid": PROBLEMS, **span, "args": args}
