"""Every machine of the catalogue with every shipped workflow: solver, presets, bound. Times are modelled."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from planner.api import as_workflow, costs_of, models_of
from planner.choose import CHOICE_SEED, Options, solved
from planner.errors import UserError
from planner.machine import Machine, catalogue
from planner.presets import PRESETS, preset
from planner.simulate import simulate

EXAMPLES = Path(__file__).parent.parent / "examples"
WORKFLOWS = ("sums", "countdown")


def main() -> None:
    """Simulate on other problems than the choice of `auto` is made by, and print a table."""
    table = Table(title="simulated ms a problem (modelled), 100 problems")
    for column in (
        "workflow",
        "machine",
        "serial",
        "overlapped",
        "solved",
        "bound / round",
        "gap",
        "status",
        "solver s",
    ):
        table.add_column(column)
    for name in WORKFLOWS:
        workflow = as_workflow(EXAMPLES / f"{name}.yaml")
        for on in catalogue():
            machine = Machine.load(on)
            costs, models = costs_of(workflow, machine), models_of(workflow)
            began = time.monotonic()
            try:
                plan = solved(workflow, machine, costs, models, Options())
            except UserError as error:
                table.add_row(name, on, str(error))
                continue
            took = time.monotonic() - began
            plans = [preset(p, workflow, machine, costs, models) for p in PRESETS] + [plan]
            means = [simulate(p, costs, 100, CHOICE_SEED + 1).mean_us / 1e3 for p in plans]
            cells = [f"{m:.2f}" for m in means]
            bound = f"{plan.lower_bound_us / 1e3:.2f} / {plan.objective_us / 1e3:.2f}"
            table.add_row(name, on, *cells, bound, f"{plan.gap:.1%}", plan.status, f"{took:.1f}")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
