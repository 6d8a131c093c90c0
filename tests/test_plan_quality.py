"""The solver's own plan against the presets, on problems that the choice has not seen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.api import as_workflow, costs_of, models_of
from planner.choose import Options, solved
from planner.errors import UserError
from planner.goal import Wish
from planner.machine import Machine
from planner.presets import PRESETS, preset
from planner.report import Report
from planner.schedule.aim import Objective
from planner.simulate import simulate

EXAMPLES = Path(__file__).parent.parent / "examples"
WORKFLOWS = ("sums", "countdown", "countdown-specreason", "published/config1", "published/config2")
SEED, PROBLEMS = 1001, 80
WORST, CLEAR, SHARE = 1.01, 0.98, 0.3


def over_best_preset(name: str, on: str, objective: Objective) -> float | None:
    """The solved plan's objective over the best preset's, simulated; None if the models fit nowhere on the machine."""
    flow, machine = as_workflow(EXAMPLES / f"{name}.yaml"), Machine.load(on)
    costs, models = costs_of(flow, machine), models_of(flow)

    def value(report: Report) -> float:
        return objective.of(report.mean_us, report.energy_mj)

    try:
        fixed = [preset(p, flow, machine, costs, models) for p in PRESETS]
    except UserError as error:
        assert "fit on no placement" in str(error) or "no device provides" in str(error)
        return None
    plan = solved(flow, machine, costs, models, Options(wish=Wish(objective)))
    assert plan.lower_bound_us <= plan.objective_us * (1 + 1e-9)
    best = min(value(simulate(p, costs, PROBLEMS, SEED)) for p in fixed)
    return value(simulate(plan, costs, PROBLEMS, SEED)) / best


@pytest.mark.parametrize(
    ("name", "on", "objective"),
    [
        ("sums", "kv260-l4", Objective.LATENCY),
        ("countdown", "3x3090", Objective.LATENCY),
        ("sums", "1x3090", Objective.ENERGY),
        ("countdown", "2x3090", Objective.ENERGY),
    ],
)
def test_a_solved_plan_is_not_worse_than_any_preset(name: str, on: str, objective: Objective) -> None:
    ratio = over_best_preset(name, on, objective)
    assert ratio is not None and ratio <= WORST


def test_pairs_are_of_all_machines_and_shipped_workflows() -> None:
    def shipped() -> Iterator[str]:
        for path in sorted([*EXAMPLES.glob("*.yaml"), *(EXAMPLES / "published").glob("config*.yaml")]):
            yield str(path.relative_to(EXAMPLES).with_suffix(""))

    # The same sums, sampled: outcomes are drawn from the same statistics. Models that nobody ships have no sizes here.
    assert set(shipped()) - {"sums-sampled", "qwen-math"} == set(WORKFLOWS)
