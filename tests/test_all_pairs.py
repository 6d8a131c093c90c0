"""The solver's own plan against the presets on every pair of catalogue machine and workflow."""

from __future__ import annotations

from itertools import product

import pytest
from test_plan_quality import CLEAR, SHARE, WORKFLOWS, WORST, over_best_preset

from planner.machine import catalogue
from planner.schedule.aim import Objective


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("objective", [Objective.LATENCY, Objective.ENERGY])
def test_on_every_pair_no_preset_is_better_and_on_many_all_are_worse(objective: Objective) -> None:
    ratios = {}
    for name, on in product(WORKFLOWS, catalogue()):
        ratio = over_best_preset(name, on, objective)
        if ratio is not None:
            ratios[f"{name} on {on}"] = ratio
            print(f"{objective.value}: {name} on {on}: {ratio:.3f}", flush=True)  # with -s, the run goes on for long
    assert len(ratios) >= 2 * len(catalogue())
    assert {pair: ratio for pair, ratio in ratios.items() if ratio > WORST} == {}
    assert sum(ratio < CLEAR for ratio in ratios.values()) >= SHARE * len(ratios), ratios
