"""The same problems on three machines that need not be here: other times, the same steps."""

from __future__ import annotations

from pathlib import Path

import planner
from planner.problems import problem_set

HERE = Path(__file__).parent
MACHINES = ("this-computer", "2x3090", "u280-2x3090")


def main() -> None:
    workflow = planner.Workflow.load(HERE / "sums.yaml")
    problems = problem_set(workflow.problems).generate(5, seed=1)
    steps = []
    for machine in MACHINES:
        plan = planner.plan(workflow, machine)
        run = planner.run(plan, problems, clock="virtual")
        places = ", ".join(f"{role} on {device}" for role, device in plan.placement.items())
        print(f"{machine:<14} {run.report.mean_us:10.0f} us a problem, {run.report.clock.label}; {places}")
        steps.append([solved.steps for solved in run.solved])
    print("the same steps everywhere" if all(s == steps[0] for s in steps) else "different steps: this is a fault")


if __name__ == "__main__":
    main()
