"""Several problems at once: throughput and latency of the presets and of auto. All figures are modelled."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from planner import api
from planner.choose import Options
from planner.presets import PRESETS
from planner.simulate import Demand, simulate

EXAMPLES = Path(__file__).parent.parent / "examples"


def main() -> None:
    """Closed loop: a new problem begins whenever one ends."""
    flow = api.as_workflow(EXAMPLES / "countdown.yaml")
    for machine in ("3x3090", "u280-2x3090"):
        title = f"countdown on {machine}, 200 problems, modelled"
        table = Table("at once", "plan", "problems a second", "ms a problem", "95 %", "J a problem", title=title)
        costs = api.costs_of(flow, api.as_machine(machine))
        for concurrency in (1, 4, 8):
            demand = Demand(concurrency)
            for kind in (*PRESETS, "auto"):
                plan = api.plan(flow, machine, kind, options=Options(demand=demand))
                r = simulate(plan, costs, 200, 1001, demand=demand)
                cells = (f"{r.problems_per_s:.1f}", f"{r.mean_us / 1e3:.2f}", f"{r.p95_us / 1e3:.2f}")
                table.add_row(str(concurrency), kind, *cells, f"{r.energy_mj / r.problems / 1e3:.2f}")
        Console(width=120).print(table)


if __name__ == "__main__":
    main()
