"""How the solver closes in on its bound, and what it found beside the presets. All times are modelled."""

from __future__ import annotations

from pathlib import Path

import planner
from planner.choose import Options

HERE = Path(__file__).parent


def watch(seconds: float, objective_us: float, bound_us: float) -> None:
    print(f"  {seconds:5.2f} s: {objective_us:8.0f} us a round, bound {bound_us:8.0f} us")


def main() -> None:
    for kind in ("serial", "overlapped", "solved"):
        print(kind)
        plan = planner.plan(
            HERE / "countdown.yaml", "u280-2x3090", kind, options=Options(rounds=3, limit_s=5), progress=watch
        )
        gap = f"gap {plan.gap:.1%}, {plan.status}"
        print(f"  {plan.objective_us:.0f} us a round, bound {plan.lower_bound_us:.0f} us, {gap}")


if __name__ == "__main__":
    main()
