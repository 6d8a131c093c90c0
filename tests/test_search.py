"""The search over placements: repeatable, stopped by limits and by the user, with the best so far."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from planner_cases import DRAFT, MODELS, PRM, TARGET, THREE, LinearCosts, workflow

from planner.choose import Options, solved
from planner.lower import lower
from planner.passes import BatchVerify, DraftAhead, EarlyNext, PrefetchAhead, PrefetchRefine, run_passes
from planner.schedule.heft import best_list_schedule
from planner.schedule.instance import Instance, build
from planner.schedule.search import Limit, solve

ROOT = Path(__file__).parent.parent
COSTS = LinearCosts({(DRAFT, "a"): 17, (PRM, "a"): 40, (PRM, "b"): 30, (TARGET, "c"): 60, (TARGET, "b"): 90})


def window(rounds: int = 3) -> Instance:
    passes = [DraftAhead(rounds), PrefetchRefine(), PrefetchAhead(2), EarlyNext(), BatchVerify()]
    flow = workflow()
    return build(run_passes(lower(flow, rounds, steady=True), passes), flow, THREE, COSTS)


def busy_core() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "while True: pass"])


def test_the_limit_of_work_makes_a_search_repeatable_whatever_else_the_computer_does() -> None:
    alone = solve(window(), Limit(0.08))
    others = [busy_core() for _ in range(3)]
    try:
        again = solve(window(), Limit(0.08))
    finally:
        for process in others:
            process.kill()
            process.wait()
    assert again == alone
    assert alone.status in ("optimal", "feasible")


def test_a_plan_has_the_same_hash_twice() -> None:
    options = Options(rounds=2, work=0.03, samples=10)
    first, second = (solved(workflow(), THREE, COSTS, dict(MODELS), options) for _ in range(2))
    assert first.hash == second.hash


def test_the_wall_limit_is_told() -> None:
    instance = window(4)
    found = solve(instance, Limit(work=100.0, wall_s=0.3))
    assert found.status == "cut"
    assert found.objective_us <= best_list_schedule(instance).objective_us
    assert found.lower_bound_us <= found.objective_us


def test_without_work_the_list_schedule_is_left() -> None:
    found = solve(window(), Limit(work=0.0))
    assert found.objective_us == best_list_schedule(window()).objective_us
    assert found.status == "feasible"


def test_progress_gets_better_and_bounds_stay_below() -> None:
    seen: list[tuple[float, float, float]] = []
    found = solve(window(), Limit(0.08), progress=lambda *x: seen.append(x))
    assert seen and min(value for _, value, _ in seen) >= found.objective_us * (1 - 1e-4)
    assert all(bound <= value * (1 + 1e-9) for _, value, bound in seen)


HEARS_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
"""What a shell puts in the background inherits that Ctrl-C is ignored, and so would the tests' processes."""


def interrupted(script: str, marker: str = "begin") -> tuple[int, str]:
    """Run Python in a process of its own, interrupt it a moment after its first line; (exit code, output)."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", HEARS_CTRL_C + textwrap.dedent(script)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "COLUMNS": "200"},
    )  # fmt: skip
    assert process.stdout is not None
    while marker not in (line := process.stdout.readline()):
        assert line, f"ended before it wrote {marker}"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=120)[0]
    return process.returncode, rest


def test_ctrl_c_in_the_api_gives_the_best_plan_so_far() -> None:
    code, said = interrupted("""
        from planner_cases import MODELS, THREE, workflow
        from test_search import COSTS
        from planner import choose
        def begun(*found):
            print("begin", flush=True)
        options = choose.Options(rounds=4, work=1e6, limit_s=100, samples=4)
        plan = choose.solved(workflow(), THREE, COSTS, dict(MODELS), options, begun)
        print(plan.status, 0 < plan.lower_bound_us <= plan.objective_us, len(plan.timeline) > 10)
        """)
    assert (code, said.splitlines()[-1]) == (0, "interrupted True True"), said


def test_ctrl_c_while_a_run_plans_anew_is_for_the_run() -> None:
    """Else it would go on, and hear no second one."""
    code, said = interrupted("""
        from dataclasses import replace
        from planner import api
        from planner.choose import Options
        plan = replace(api.plan("examples/countdown.yaml", "3x3090", "overlapped"), name="auto")
        again = api.replanner(plan, None, Options(rounds=4, work=1e6, limit_s=100))
        print("begin", flush=True)
        again(plan.machine, plan.workflow)
        print("went on")
        """)
    assert code != 0 and "KeyboardInterrupt" in said and "went on" not in said, said


def test_ctrl_c_on_the_command_line_gives_the_best_plan_so_far(tmp_path: Path) -> None:
    code, said = interrupted(f"""
        from planner import api, cli
        api_plan = api.plan
        def plan(*a, progress=None, **k):
            def note(*found):
                print("begin", flush=True)
            return api_plan(*a, progress=note, **k)
        api.plan = plan
        words = "plan examples/countdown.yaml -m 3x3090 --rounds 4 --work 900 --limit 100".split()
        cli.main([*words, "-o", {str(tmp_path / "plan.json")!r}])
        """)
    assert code == 0, said
    assert "interrupted" in said
    assert (tmp_path / "plan.json").exists()


@pytest.mark.parametrize("words", [["--objective", "speed"], ["--max-latency", "soon"], ["--max-energy", "3"]])
def test_a_wrong_goal_is_one_sentence(words: list[str]) -> None:
    command = [sys.executable, "-m", "planner.cli", "plan", "examples/countdown.yaml", "-m", "1x3090", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env={**os.environ})
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert words[0].lstrip("-").split("-")[-1] in done.stderr
