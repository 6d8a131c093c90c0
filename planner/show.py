"""What the command line prints: tables and lines of a run, every figure with the label of where it comes from."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from planner.api import Run
from planner.errors import UserError
from planner.evaluate import Evaluation
from planner.export.timeline import episodes
from planner.machine import Machine
from planner.plan import Plan
from planner.policy import Event as Turn
from planner.report import ASSUMED_CLOCK_HZ, Report
from planner.schedule.aim import Objective
from planner.trace import Decided, Event, Faulted, ProblemEnded, ProblemStarted, Replanned, happening

err = Console(stderr=True)
out = Console()
"""Where results are printed; progress and errors go to the error stream."""

STYLE = {Turn.ACCEPTED: "green", Turn.REFINED: "yellow", Turn.KEPT_WEAK: "magenta", Turn.BACKTRACKED: "red"}


class Ticker:
    """Prints each decision of the oldest problem that is not over as it is taken; what others do waits for its turn."""

    def __init__(self, console: Console, most: int) -> None:
        """At most `most` problems are shown step by step."""
        self._console, self._left = console, most
        self._lines: dict[str, list[str]] = {}
        """What is still to be printed of each problem that is shown, the oldest first."""
        self._over: set[str] = set()

    def __call__(self, event: Event) -> None:
        """Take in an event of a run."""
        if isinstance(event, Faulted | Replanned):
            self._console.print(f"[yellow]{escape(happening(event))}[/yellow]")
        elif isinstance(event, ProblemStarted) and self._left:
            self._left -= 1
            self._lines[event.problem] = [f"\n[bold]{escape(event.question)}[/bold]"]
        elif isinstance(event, Decided) and event.problem in self._lines:
            self._lines[event.problem].append(decision_line(event))
        elif isinstance(event, ProblemEnded) and event.problem in self._lines:
            self._lines[event.problem].append(_end_line(event))
            self._over.add(event.problem)
        self._print()

    def _print(self) -> None:
        for problem, lines in list(self._lines.items()):
            for line in lines:
                self._console.print(line)
            lines.clear()
            if problem not in self._over:
                return
            del self._lines[problem]


def _end_line(event: ProblemEnded) -> str:
    style = {True: "green", False: "red", None: "dim"}[event.correct]
    answer = "no answer" if event.answer is None else f"answer [bold]{escape(event.answer)}[/bold]"
    return f"  {answer}, [{style}]{_graded(event)}[/{style}] ({event.status})"


def decision_line(event: Decided) -> str:
    """One line: what became of the round, the scores that led there, the step."""
    style = STYLE[Turn(event.event)]
    scores = "  ".join(f"{name} {score:.2f}" for name, score in event.scores.items())
    back = f" (gave up {event.went_back})" if event.went_back else ""
    return f"  [{style}]{event.event + back:<22}[/{style}] {escape(event.text):<34} [dim]{scores}[/dim]"


def plan_table(plan: Plan) -> Table:
    """The plan in short."""
    shown = table(f"plan {plan.name} ({plan.hash})", "", "")
    for role, device in plan.placement.items():
        shown.add_row(f"{role} runs on", device)
    shown.add_row("drafts ahead", str(plan.draft_ahead))
    shown.add_row("prefetches the target's step", "yes" if plan.prefetch_refine else "no")
    for device, order in plan.priorities.items():
        shown.add_row(f"order on {device}", "  ".join(order) or "what is needed")
    shown.add_row("expected time a round", f"{ms(plan.objective_us)}, {plan.cost_source}")
    if plan.energy_mj:
        shown.add_row("expected energy a round", f"{joule(plan.energy_mj)}, modelled")
    least = "" if plan.objective is Objective.LATENCY else f" of the {plan.objective}"
    shown.add_row("lower bound of the window", f"{ms(plan.lower_bound_us)}, gap{least} {plan.gap:.1%}, {plan.status}")
    for role, device in plan.prefill_on.items():
        shown.add_row(f"{role} reads the prompt on", device)
    shown.add_row("found by", f"{plan.solver.name} in {plan.solver.seconds:.2f} s")
    return shown


def report_table(plan: Plan, report: Report, graded: bool = True) -> Table:
    """Planned against happened. Drawn problems have no answers to grade."""
    shown = table("planned against happened", "", f"planned, {plan.cost_source}", f"happened, {report.clock.label}")
    shown.add_row("time a round", ms(report.planned_round_us), ms(report.mean_round_us))
    shown.add_row("lower bound", ms(report.bound_round_us), "")
    shown.add_row("time a problem, mean", "", ms(report.mean_us))
    shown.add_row("  median, 95th percentile", "", f"{ms(report.p50_us)}, {ms(report.p95_us)}")
    expected = f"{plan.workflow.statistics.accept:.2f}"
    shown.add_row("drafts accepted", expected, "none" if report.acceptance is None else f"{report.acceptance:.2f}")
    turns = "  ".join(f"{name} {count}" for name, count in report.turns.items())
    shown.add_row("rounds", "", f"{report.rounds}: {turns}")
    if graded:
        shown.add_row("answers right", "", f"{report.correct} of {report.problems}")
    for use in report.devices:
        lost = use.wasted_us / use.busy_us if use.busy_us else 0.0
        shown.add_row(f"{use.device} busy", "", f"{use.utilisation:.0%} of the time, {lost:.0%} of it wasted")
        if use.cycles_per_token:
            rate, clock = ASSUMED_CLOCK_HZ / use.cycles_per_token, f"{ASSUMED_CLOCK_HZ / 1e6:.0f} MHz (assumption)"
            cycles = f"{use.cycles_per_token:.0f}, {rate:.0f} tokens/s at {clock}"
            shown.add_row("  cycles a token, simulated", "", cycles)
    shown.add_row("energy a problem, modelled", "", joule(report.energy_mj / max(1, report.problems)))
    for use in report.devices:
        parts = [joule(mj / max(1, report.problems)) for mj in (use.active_mj, use.wasted_mj, use.idle_mj)]
        shown.add_row(f"  {use.device}", "", "active {}, of it wasted {}, idle {}".format(*parts))
    shown.add_row("problems a second", "", f"{report.problems_per_s:.3g}")
    for fault in report.faults:
        shown.add_row("fault", "", escape(fault))
    for change in report.replanned:
        shown.add_row("planned anew", "", escape(change))
    return shown


def add_floor(shown: Table, mean_us: float, serial_us: float | None, foresight_us: float) -> None:
    """Rows that say where a simulated plan stands between one task after another and perfect foresight."""
    if serial_us is not None:
        shown.add_row("one task after another", "", f"{ms(serial_us)}, {serial_us / mean_us:.3f} of this")
    shown.add_row("perfect foresight", "", f"{ms(foresight_us)}, {foresight_us / mean_us:.3f} of this")


def print_json(data: Any) -> None:
    """Print JSON to the standard output."""
    sys.stdout.write(json.dumps(data, indent=1, allow_nan=False) + "\n")


def write_file(path: Path, text: str) -> None:
    """Write a file. Raises UserError if that cannot be."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot be written ({error.strerror})", where=str(path), mend="name another file") from None


def compare_table(found: Mapping[str, tuple[Plan, Run]]) -> Table:
    """The plans side by side."""
    first = next(iter(found.values()))[1].report
    shown = table(f"{first.problems} problems, {first.clock.label}", "", *found)
    reports = [run.report for _, run in found.values()]
    plans = [plan for plan, _ in found.values()]
    shown.add_row("found by", *(p.solver.name for p in plans))
    serial = reports[0].mean_us
    shown.add_row("time a problem", *(f"{ms(r.mean_us)} ± {ms(r.stderr_us)}" for r in reports))
    shown.add_row("  serial / this", *(f"{serial / r.mean_us:.2f}" for r in reports))
    shown.add_row("time a round", *(ms(r.mean_round_us) for r in reports))
    shown.add_row("  planned", *(ms(p.objective_us) for p in plans))
    shown.add_row("  lower bound", *(ms(p.lower_bound_us) for p in plans))
    shown.add_row("energy a problem, modelled", *(joule(r.energy_mj / max(1, r.problems)) for r in reports))
    shown.add_row("devices busy", *(f"{r.utilisation:.0%}" for r in reports))
    shown.add_row("work wasted", *(f"{r.waste:.0%}" for r in reports))
    shown.add_row("answers right", *(f"{r.correct} of {r.problems}" for r in reports))
    runs = [run for _, run in found.values()]
    for i, solved in enumerate(runs[0].solved[:8]):
        answers = (escape(r.solved[i].answer or "none") for r in runs)
        shown.add_row(escape(solved.problem.question), *answers)
    return shown


def evaluation_table(evaluations: Sequence[Evaluation]) -> Table:
    """Accuracy of each policy on each set."""
    shown = table(
        "accuracy on the same fresh problems", "set", "policy", "problems", "right", "95 % interval",
        "drafts accepted", "backtrack taken", "tried",
    )  # fmt: skip
    for evaluation in evaluations:
        for row in evaluation.rows:
            accepted = "" if row.acceptance is None else f"{row.acceptance:.3f}"
            interval = f"{row.low:.1%} to {row.high:.1%}"
            went = [f"{n / row.problems:.1%}" if row.tried else "" for n in (row.backtracked, row.tried)]
            count = f"{row.problems}, {evaluation.distinct} distinct"
            cells = (count, f"{row.share:.1%}", interval, accepted, *went)
            shown.add_row(evaluation.problem_set, row.policy, *cells)
        shown.add_section()
    return shown


def evaluation_note(evaluation: Evaluation) -> str:
    """How the policies that were compared differ, a line each."""
    return "\n".join(
        f"{evaluation.problem_set}: {pair.one} alone solves {pair.only_one}, {pair.other} alone {pair.only_other} "
        f"(exact McNemar test, p = {pair.p_value:.2g})"
        for pair in evaluation.pairs
    )


def machine_table(machines: Sequence[Machine]) -> Table:
    """The catalogue."""
    shown = table("machines", "name", "devices", "description")
    for machine in machines:
        devices = ", ".join(f"{d.name} ({d.kind_of_processor})" for d in machine.devices)
        shown.add_row(machine.name, devices, machine.description)
    return shown


def device_table(machine: Machine) -> Table:
    """One machine, each figure as it is used."""
    shown = table(machine.name, "device", "backend", "memory", "bandwidth", "arithmetic", "active / idle", "source")
    for d in machine.devices:
        backend = d.backend + (f", {d.transport}" if d.transport else "")
        ops = ", ".join(f"{a} {ops / 1e12:.3g} T" for a, ops in d.ops_per_s.items())
        memory, bandwidth = f"{d.memory_bytes / 1e9:.3g} GB", f"{d.bandwidth_bytes_per_s / 1e9:.4g} GB/s"
        shown.add_row(d.name, backend, memory, bandwidth, ops, f"{d.active_w:g} / {d.idle_w:g} W", d.source)
    return shown


def report_markdown(plan: Plan, report: Report, events: Sequence[Event]) -> str:
    """The report as a file for people, and what became of each problem of the trace."""
    lines = [
        f"# Run of plan {plan.name} ({plan.hash})",
        "",
        f"Workflow `{plan.workflow.name}` on machine `{plan.machine.name}`. Times of the run are "
        f"{report.clock.label}, planned times are {plan.cost_source}, energy is modelled.",
        "",
        "| | planned | happened |",
        "|---|---|---|",
    ]
    for row in zip(*(column.cells for column in report_table(plan, report).columns), strict=True):
        lines.append("| " + " | ".join(str(cell).strip() for cell in row) + " |")
    lines += ["", "## Problems", ""]
    arrived = {e.problem: e.arrived_us for e in events if isinstance(e, ProblemStarted)}
    for episode in episodes(events):
        if episode.end is None:
            continue  # a killed run was at it
        took = ms(episode.end.at_us - arrived[episode.problem])
        lines.append(f"- `{episode.question}`: {episode.end.answer or 'no answer'}, {_graded(episode.end)}, {took}")
        lines += [f"  - {turn.event}: `{turn.text}`" for turn in episode.decisions]
    return "\n".join(lines) + "\n"


def _graded(end: ProblemEnded) -> str:
    return {True: "right", False: "wrong", None: "not graded"}[end.correct]


def ms(us: float) -> str:
    """Microseconds for people."""
    return f"{us / 1e6:.2f} s" if us >= 1e6 else f"{us / 1e3:.2f} ms"


def joule(mj: float) -> str:
    """Millijoules for people."""
    return f"{mj / 1e3:.2f} J" if mj >= 1e3 else f"{mj:.1f} mJ"


def table(title: str, *columns: str) -> Table:
    """An empty table in the style of all."""
    made = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold")
    return made
