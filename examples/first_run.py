"""Plan a workflow for this computer, run it on fresh problems, and read what happened."""

from __future__ import annotations

from pathlib import Path

import planner
from planner.problems import problem_set
from planner.trace import Decided, ProblemEnded, ProblemStarted

HERE = Path(__file__).parent


def main() -> None:
    plan = planner.plan(HERE / "countdown.yaml", "this-computer")
    problems = problem_set(plan.workflow.problems).generate(3, seed=1)
    run = planner.run(plan, problems)
    for event in run.trace:
        if isinstance(event, ProblemStarted):
            print(event.question)
        elif isinstance(event, Decided):
            print(f"  {event.event:<12} {event.text}")
        elif isinstance(event, ProblemEnded):
            print(f"  answer {event.answer}, {'right' if event.correct else 'wrong'}, {event.status}")
    report = run.report
    print(f"planned  {plan.objective_us:10.0f} us a round, {plan.cost_source}")
    print(f"happened {report.mean_round_us:10.0f} us a round, {report.clock.label}")


if __name__ == "__main__":  # each device is a process that reads this file again
    main()
