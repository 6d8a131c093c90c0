"""The published configurations 1 and 2 on U280 and V80: our plans beside weak, strong and the published system.

All figures are modelled, on the costs and the power that arXiv 2609.28717 publishes; what it does not publish comes
from the roofline. Weak is three GPUs one after another, strong three GPUs that overlap, the published system the preset
`heteroreason`. Outcomes are drawn from the shares and lengths of MATH500 and GSM8K with configuration 1.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from planner import api
from planner.cost import CostTable
from planner.machine import Machine
from planner.plan import Plan
from planner.report import Report
from planner.simulate import simulate
from planner.workflow import Statistics, Workflow

FOLDER = Path(__file__).parent.parent / "examples" / "published"
SETS = {
    # Counted in the step traces of the paper's artifact.
    "MATH500": Statistics(0.805, 0.856, 125, 68, 82, 12, 0.93, 0.94, 0.63, 0.37),
    "GSM8K": Statistics(0.836, 0.897, 115, 47, 68, 7, 0.73, 0.61, 0.28, 0.25),
}
ROWS = (
    ("weak: 3 GPUs, serial", "3x3090", "serial"),
    ("strong: 3 GPUs, overlapped", "3x3090", "overlapped"),
    ("published on U280", "u280-2x3090", "heteroreason"),
    ("published on V80", "v80-2x3090", "heteroreason"),
    ("auto on 3 GPUs", "3x3090", "auto"),
    ("auto on U280", "u280-2x3090", "auto"),
    ("auto on V80", "v80-2x3090", "auto"),
)


def measured(flow: Workflow, config: int, machine: str, kind: str) -> tuple[Plan, Report]:
    """A plan, and its simulation on problems that it was not chosen by."""
    table = CostTable.load(FOLDER / f"costs-{machine}-config{config}.yaml")
    on = Machine.load(FOLDER / f"{machine}.yaml")
    plan = api.plan(flow, on, kind, costs=table)
    return plan, simulate(plan, api.costs_of(flow, on, table), 150, 1001)


def main() -> None:
    """Print a table for each configuration and set."""
    for config in (1, 2):
        for name, statistics in SETS.items():
            flow = Workflow.load(FOLDER / f"config{config}.yaml")
            flow = replace(flow, statistics=statistics)
            title = f"configuration {config}, {name}: modelled on published costs"
            table = Table("", "s a problem", "weak / this", "strong / this", "J a problem", "weak / this", "plan",
                          title=title, title_justify="left")  # fmt: skip
            found = [(label, *measured(flow, config, on, kind)) for label, on, kind in ROWS]
            weak, strong = found[0][2], found[1][2]
            for label, plan, report in found:
                energy = [r.energy_mj / r.problems for r in (weak, report)]
                table.add_row(
                    label, f"{report.mean_us / 1e6:.2f}", f"{weak.mean_us / report.mean_us:.2f}",
                    f"{strong.mean_us / report.mean_us:.2f}", f"{energy[1] / 1e3:.0f}", f"{energy[0] / energy[1]:.2f}",
                    f"{plan.draft_ahead} ahead, draft on {plan.placement['draft']}",
                )  # fmt: skip
            best = min(found, key=lambda row: row[2].mean_us)
            Console(width=140).print(table, f"least time: {best[0]}\n")


if __name__ == "__main__":
    main()
