"""Replay of measured step traces: fitted on problems of one parity, replayed on the other, both ways, pooled.

The folder of the traces comes from HETEROREASON_TRACES; without it there is nothing to replay. The times of the tasks
are those that the traces hold, measured by others; what plans make of them is modelled.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from planner import api
from planner.choose import Options
from planner.fit import fit_steps
from planner.replay import replay
from planner.step_trace import read_step_trace, warmed
from planner.workflow import RoleName, Workflow

CONFIG = Path(__file__).parent.parent / "examples" / "published" / "config1.yaml"
AT = {RoleName.DRAFT: "gpu0", RoleName.PRM: "gpu1", RoleName.TARGET: "gpu2"}


def main() -> None:
    """Print total seconds and serial over each."""
    folder = os.environ.get("HETEROREASON_TRACES")
    if not folder:
        print("HETEROREASON_TRACES names no folder of traces: nothing to replay")
        return
    flow = Workflow.load(CONFIG)
    columns = ("trace", "problems", "serial s", *(f"serial / {k}" for k in ("overlapped", "auto", "perfect foresight")))
    table = Table(*columns, title="three RTX 3090, configuration 1", title_justify="left")
    for path in sorted(Path(folder).glob("*.csv")):
        rows = warmed(read_step_trace(path))
        total = dict.fromkeys(("serial s", "overlapped", "auto", "foresight"), 0.0)
        problems = 0
        for parity in (0, 1):
            known = [r for r in rows if int(r.problem) % 2 == parity]
            new = [r for r in rows if int(r.problem) % 2 != parity]
            fitted = fit_steps(known, AT, path.name)
            entries = tuple(replace(e, device=d) for e in fitted.entries for d in AT.values())
            fitted = replace(fitted, entries=entries)
            for kind in ("overlapped", "auto"):
                plan = api.plan(flow, "3x3090", kind, costs=fitted, options=Options(samples=60))
                found = replay(plan, new, api.costs_of(plan.workflow, plan.machine, fitted))
                total[kind] += found.report.total_us
            problems += found.report.problems
            total["serial s"] += found.serial_us * found.report.problems
            total["foresight"] += found.foresight_us * found.report.problems
        serial = total.pop("serial s")
        table.add_row(path.stem, str(problems), f"{serial / 1e6:.1f}", *(f"{serial / us:.3f}" for us in total.values()))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
