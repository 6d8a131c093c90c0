"""Every machine of the catalogue with the workflows of the models that ship: the solver's own plan over the presets'.

By latency and by energy, both modelled, with the gap to the bound and the time that planning took, which is measured.
The published configurations take about an hour more: name them with `--workflows`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from planner.api import as_workflow, costs_of, models_of
from planner.choose import Options, solved
from planner.errors import UserError
from planner.goal import Wish
from planner.machine import Machine, catalogue
from planner.presets import PRESETS, preset
from planner.schedule.aim import Objective
from planner.simulate import simulate

EXAMPLES = Path(__file__).parent.parent / "examples"
WORKFLOWS = ("sums", "countdown", "countdown-specreason")
SEED, PROBLEMS = 1001, 80
"""No plan is chosen on these problems."""


def main() -> None:
    """Print a table for each objective."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workflows", nargs="+", default=WORKFLOWS, help="examples, without their .yaml")
    given = parser.parse_args()
    for objective, unit in ((Objective.LATENCY, "ms"), (Objective.ENERGY, "J")):
        title = f"{objective} a problem, {unit}, modelled, {PROBLEMS} drawn problems"
        names = ("workflow", "machine", *PRESETS, "solved", "solved / best preset")
        table = Table(*names, "gap", "status", "planning s (measured)", title=title, title_justify="left")
        for name in given.workflows:
            workflow = as_workflow(EXAMPLES / f"{name}.yaml")
            for on in catalogue():
                machine = Machine.load(on)
                costs, models = costs_of(workflow, machine), models_of(workflow)
                began = time.monotonic()
                try:
                    plan = solved(workflow, machine, costs, models, Options(wish=Wish(objective)))
                except UserError:
                    continue  # the models do not fit
                took = time.monotonic() - began
                plans = [preset(p, workflow, machine, costs, models) for p in PRESETS] + [plan]
                reports = [simulate(p, costs, PROBLEMS, SEED) for p in plans]
                values = [objective.of(r.mean_us, r.energy_mj / r.problems) / 1e3 for r in reports]
                ratio = f"{values[-1] / min(values[:-1]):.3f}"
                cells = [f"{v:.4g}" for v in values]
                table.add_row(name, on, *cells, ratio, f"{plan.gap:.1%}", plan.status, f"{took:.1f}")
        Console(width=170).print(table)


if __name__ == "__main__":
    main()
