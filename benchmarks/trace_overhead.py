"""What a trace costs: the same problems by the same plan on the wall clock, with a trace written to a file and without.

Runs with and without alternate in one process over the same worker processes, so that only their ratio is looked at.
The engine makes its events in both; what is compared is keeping them, and writing each to the file as it happens.

    python benchmarks/trace_overhead.py [--problems 20] [--repeats 9]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median

from planner.api import open_workers, plan
from planner.problems import problem_set
from planner.runtime.engine import Engine
from planner.trace import ClockKind, Event, Sink, TraceFile, collector

WORKFLOW = Path(__file__).parents[1] / "examples" / "countdown.yaml"


def nothing(event: Event) -> None:
    """A run without a trace."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=9)
    words = parser.parse_args()
    made = plan(WORKFLOW, "this-computer", "heteroreason")
    kinds = problem_set(made.workflow.problems)
    problems = kinds.generate(words.problems, seed=3)
    count = 0
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder, open_workers(made, ClockKind.WALL) as workers:
        engine = Engine(made, workers, kinds, nothing)

        def solve(sink: Sink) -> float:
            engine._sink = sink
            began = time.perf_counter()
            for problem in problems:
                engine.solve(problem)
            return time.perf_counter() - began

        solve(nothing)  # warm
        for repeat in range(words.repeats):
            with closing(TraceFile(Path(folder) / "trace.jsonl")) as file:
                events, note = collector(file)
                ways: list[tuple[str, Sink]] = [("without", nothing), ("with", note)]
                for name, sink in ways if repeat % 2 else reversed(ways):
                    seconds[name].append(solve(sink))
                count = len(events)
        size = (Path(folder) / "trace.jsonl").stat().st_size
        began = time.perf_counter()
        with closing(TraceFile(Path(folder) / "again.jsonl")) as file:
            again, note = collector(file)
            for event in events:
                note(event)
        event_us = 1e6 * (time.perf_counter() - began) / len(again)
    ratios = [with_ / without for with_, without in zip(seconds["with"], seconds["without"], strict=True)]
    middle = median(seconds["without"])
    print(f"{words.problems} problems of countdown, plan {made.name}, {words.repeats} pairs of runs, wall clock")
    print("| | |\n|---|---:|")
    print(f"| without a trace, median | {middle:.3f} s |")
    print(f"| with a trace, median | {median(seconds['with']):.3f} s |")
    print(f"| with / without, median of pairs | {median(ratios):.4f} |")
    print(f"| smallest and largest | {min(ratios):.4f}, {max(ratios):.4f} |")
    print(f"| events, bytes in the file | {count}, {size} |")
    print(f"| an event written alone | {event_us:.1f} us |")
    print(f"| all events / the run without, by that | {count * event_us / 1e6 / middle:.2%} |")


if __name__ == "__main__":
    main()
