"""What the command `run` does: run or go on, show what happens, and leave files."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path

from planner import api, batch, show
from planner.batch import Batch
from planner.choose import Options
from planner.errors import UserError
from planner.export import export, planned_and_happened
from planner.plan import Plan
from planner.problems.base import Problem
from planner.report import report
from planner.runtime.engine import Load
from planner.runtime.host import Solved
from planner.runtime.journal import Ended
from planner.show import err, out
from planner.stopping import hear
from planner.trace import ClockKind, Event, TraceFile, read_trace
from planner.yaml_file import from_mapping

REPORT = "report.json"
"""Written last: where it is, so are the other files."""


@dataclass(frozen=True)
class Settings:
    """How problems are run. A run that goes on takes them over."""

    clock: ClockKind = ClockKind.WALL
    concurrency: int = 1
    deadline_us: int | None = None
    costs: Path | None = None
    replan: bool = False


@dataclass(frozen=True)
class Job:
    """A plan and problems to run, in a folder or without one."""

    settings: Settings
    plan: Plan
    problems: tuple[Problem, ...]
    batch: Batch | None
    goes_on: bool = False
    """Whether a part of it ran before."""


def begin(settings: Settings, plan: Plan, problems: Sequence[Problem], folder: Path | None, sync: bool) -> Job:
    """A new job. With a folder, its plan, problems and journal are there when this returns."""
    if folder is None:
        return Job(settings, plan, tuple(problems), None)
    kept: dict[str, str | int | bool | None] = {
        "clock": settings.clock.value,
        "concurrency": settings.concurrency,
        "deadline_us": settings.deadline_us,
        "costs": str(settings.costs.resolve()) if settings.costs else None,
        "replan": settings.replan,
    }
    return Job(settings, plan, tuple(problems), batch.begin(folder, plan, problems, kept, sync))


def resume(folder: Path, sync: bool) -> Job:
    """The job that was stopped in a folder."""
    found = batch.resume(folder, sync)
    try:
        settings = from_mapping(Settings, dict(found.journal.head.settings), f"{folder / batch.JOURNAL}: settings")
    except UserError:
        found.close()
        raise
    return Job(settings, found.plan, found.problems, found, goes_on=True)


def carry_out(job: Job, options: Options, shown: int, as_json: bool) -> int:
    """Run the problems of a job that are not over. Gives the exit code."""
    if job.batch is None:
        with _told_how_to_go_on(None):
            return _tell(job, _run(job, options, shown, as_json, None), [], as_json)
    with closing(job.batch), _told_how_to_go_on(job.batch):
        if job.batch.over:
            return _tell(job, None, _leave_what_is_missing(job), as_json)
        if not job.goes_on:
            _forget(job.batch.folder)
        path = next(path for path in _traces(job.batch.folder) if not path.exists())
        with closing(TraceFile(path)) as trace:
            result = _run(job, options, shown, as_json, trace)
        return _tell(job, result, [*_leave(job.batch.folder, job.plan, result.trace), path], as_json)


def _run(job: Job, options: Options, shown: int, quiet: bool, trace: TraceFile | None) -> api.Run:
    settings = job.settings
    options = replace(options, demand=replace(options.demand, concurrency=settings.concurrency))
    if not quiet:
        out.print(show.plan_table(job.plan))
    ticker = show.Ticker(out, shown)

    def sink(event: Event) -> None:
        if not quiet:
            ticker(event)
        if trace is not None:
            trace(event)

    def on_solved(solved: Solved) -> None:
        if job.batch is not None:
            job.batch.append_answer(solved.label)

    if err.is_terminal:
        err.print("loading the models", style="dim")
    return api.run(
        job.plan,
        job.problems,
        settings.clock,
        costs=settings.costs,
        sink=sink,
        load=Load(settings.concurrency, deadline_us=settings.deadline_us),
        options=options,
        journal=job.batch.journal if job.batch else None,
        on_solved=on_solved,
        live=settings.replan,
    )


def _tell(job: Job, result: api.Run | None, left: Sequence[Path], as_json: bool) -> int:
    """Show what a run gave; `result` is None if there was nothing left to run."""
    solved = result.solved if result else ()
    rows = job.batch.rows() if job.batch else [batch.row(s.problem.question, Ended.of(s)) for s in solved]
    if as_json:
        report = result.report.to_mapping() if result else None
        show.print_json({"answers": rows, "report": report, "files": list(map(str, left))})
    elif result is None:
        out.print(f"all {len(rows)} problems are over: see {job.batch.folder / batch.ANSWERS}" if job.batch else "")
    else:
        out.print()
        out.print(show.report_table(job.plan, result.report))
        if len(rows) > len(result.solved):
            out.print(
                f"{len(rows) - len(result.solved)} more problems were over before: their answers stand as they were"
            )
        for path in left:
            out.print(f"left {path}", highlight=False)
    failed = [row["error"] for row in rows if "error" in row]
    if failed:
        text = f"{len(failed)} of {len(rows)} problems could not be run, the first for this: {failed[0]}"
        err.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
    return 1 if failed else 0


def _leave(folder: Path, plan: Plan, trace: Sequence[Event]) -> list[Path]:
    """Write what a run leaves behind beside what is there already."""
    events, summed_up = list(trace), report(plan, trace)
    files = {
        "plan.svg": export(plan, "svg"),
        "graph.svg": export(plan.task_graph, "svg"),
        "trace.svg": export(events, "svg"),
        "perfetto.json": planned_and_happened(plan, events),
        "report.md": show.report_markdown(plan, summed_up, events),
        REPORT: json.dumps(summed_up.to_mapping(), indent=1) + "\n",
    }
    for name, text in files.items():
        show.write_file(folder / name, text)
    there = (batch.PLAN, batch.PROBLEMS, batch.JOURNAL, batch.ANSWERS)
    return [folder / name for name in (*there, *files)]


def _leave_what_is_missing(job: Job) -> list[Path]:
    """Write what a run could not leave because it was killed when its last problem was over."""
    assert job.batch is not None, "only a run in a folder leaves files"
    folder = job.batch.folder
    if (folder / REPORT).exists():
        return []
    return _leave(folder, job.plan, read_trace(_traces_so_far(folder)[-1]))


def _traces(folder: Path) -> Iterator[Path]:
    """The trace of each part of a run, whether it is there yet or not: each stays beside those that follow."""
    yield folder / "trace.jsonl"
    for part in count(2):
        yield folder / f"trace-{part}.jsonl"


def _traces_so_far(folder: Path) -> list[Path]:
    return list(takewhile(Path.exists, _traces(folder)))


def _forget(folder: Path) -> None:
    """Take away what a former run left that could be taken for this one's."""
    for path in (folder / REPORT, *_traces_so_far(folder)):
        path.unlink(missing_ok=True)


@contextmanager
def _told_how_to_go_on(job: Batch | None) -> Iterator[None]:
    """Ctrl-C and SIGTERM end with a sentence and the exit code of the signal."""
    folder = job.folder if job else None
    hear()  # a Ctrl-C that ended the search for the plan is not the last one
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as stop:
        how = f"; go on with `heteroreason run --resume {folder}`" if folder else ""
        err.print(f"stopped{how}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(stop.code if isinstance(stop, SystemExit) else 130)
    except UserError as error:
        if job is None or job.over:
            raise  # there is nothing to go on with
        mend = f"{error.mend}, then go on with `heteroreason run --resume {folder}`".removeprefix(", then ")
        raise UserError(error.what, where=error.where, mend=mend) from error
