"""Several problems at once: the same answers, nothing lost, more done in the same time."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from io import StringIO
from itertools import islice, pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import (
    APART,
    SEEDS,
    LetterBackend,
    Letters,
    LinearCosts,
    committed,
    quick_plan,
    random_plan,
    run_letters,
    workflow,
    workflows,
)
from rich.console import Console

from planner.api import in_order
from planner.errors import UserError
from planner.plan import Plan
from planner.policy import Status
from planner.runtime.engine import Engine, Load
from planner.runtime.host import Solved
from planner.runtime.worker import VirtualWorkers, modelled
from planner.show import Ticker
from planner.simulate import Demand, simulate
from planner.trace import Chunk, Decided, Event, ProblemEnded, ProblemStarted
from planner.workflow import Statistics, Workflow

QUESTIONS = ("a", "bc", "a", "b", "ccb", "ab")
FLOW = workflow(statistics=Statistics(0.8, 0.6, 10, 12, 14, 4))
COSTS = LinearCosts({})


def run_load(plan: Plan, load: Load) -> tuple[list[Solved], list[Event]]:
    events: list[Event] = []
    workers = VirtualWorkers(modelled(COSTS), {d.name: LetterBackend() for d in plan.machine.devices})
    problems = [Letters().parse(q) for q in QUESTIONS]
    found = list(Engine(plan, workers, Letters(), events.append).solve_all(problems, load))
    return list(in_order(found, problems)), events


@given(workflows(), SEEDS, st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_concurrency_changes_no_answer(flow: Workflow, seed: int, concurrency: int) -> None:
    plan = random_plan(Random(seed), flow)
    expected, _ = run_letters(plan, QUESTIONS)
    solved, events = run_load(plan, Load(concurrency))
    assert committed(solved) == committed(expected)
    ends = [e.problem for e in events if isinstance(e, ProblemEnded)]
    assert len(set(ends)) == len(ends) == len(QUESTIONS)


@given(workflows(), SEEDS, st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_a_device_does_one_thing_at_a_time(flow: Workflow, seed: int, concurrency: int) -> None:
    _, events = run_load(random_plan(Random(seed), flow), Load(concurrency))
    by_device: dict[str, list[Chunk]] = {}
    for chunk in (e for e in events if isinstance(e, Chunk)):
        by_device.setdefault(chunk.device, []).append(chunk)
    for chunks in by_device.values():
        ordered = sorted(chunks, key=lambda c: c.start_us)
        assert all(a.end_us <= b.start_us for a, b in pairwise(ordered))


@given(workflows(), SEEDS, st.lists(st.integers(0, 3000), min_size=6, max_size=6))
@settings(max_examples=25, deadline=None)
def test_problems_that_arrive_later_get_the_same_answers(flow: Workflow, seed: int, gaps: list[int]) -> None:
    plan = random_plan(Random(seed), flow)
    at = [sum(gaps[: i + 1]) for i in range(6)]
    solved, events = run_load(plan, Load(2, at))
    assert committed(solved) == committed(run_letters(plan, QUESTIONS)[0])
    started = [e for e in events if isinstance(e, ProblemStarted)]
    assert [e.arrived_us for e in started] == at
    assert all(e.at_us >= e.arrived_us for e in started)


@given(workflows(), SEEDS, st.integers(1, 3), st.integers(0, 4000))
@settings(max_examples=40, deadline=None)
def test_a_deadline_returns_a_prefix_of_the_undisturbed_path(
    flow: Workflow, seed: int, concurrency: int, deadline_us: int
) -> None:
    plan = random_plan(Random(seed), replace(flow, policy=replace(flow.policy, max_backtracks=0)))
    # Of several runs that vote, the first.
    once = replace(flow, policy=replace(plan.workflow.policy, vote=1))
    whole, _ = run_letters(replace(plan, workflow=once), QUESTIONS)
    elected, _ = run_letters(plan, QUESTIONS)
    solved, events = run_load(plan, Load(concurrency, deadline_us=deadline_us))
    assert len([e for e in events if isinstance(e, ProblemEnded)]) == len(QUESTIONS)
    for cut, first, full in zip(solved, whole, elected, strict=True):
        if cut.outcome.status is Status.DEADLINE:
            path, complete = cut.outcome.node.path, first.outcome.node.path
            assert path == complete[: len(path)]
        else:
            assert committed([cut]) == committed([full])
        assert cut.latency_us <= deadline_us or cut.outcome.status is not Status.DEADLINE


def test_a_deadline_leaves_what_backtracking_had_committed() -> None:
    """With backtracks the path may shrink again: what is returned is a place that the undisturbed run was at."""
    plan = quick_plan(workflow(accept=0.6, accept_refined=0.6))
    whole, _ = run_letters(plan, QUESTIONS)
    solved, _ = run_load(plan, Load(deadline_us=400))
    for cut, full in zip(solved, whole, strict=True):
        places = [(), *(tuple(d.node.path) for d in full.outcome.decisions)]
        assert tuple(cut.outcome.node.path) in places


def test_more_problems_at_once_are_done_in_less_time() -> None:
    plan = quick_plan(FLOW, "serial", placement=APART)
    one = simulate(plan, COSTS, 40, 3)
    eight = simulate(plan, COSTS, 40, 3, demand=Demand(8))
    assert eight.span_us < 0.7 * one.span_us
    assert eight.problems_per_s > one.problems_per_s
    assert eight.mean_us > one.mean_us
    assert eight.turns == one.turns


def test_a_busier_stream_waits_longer() -> None:
    plan = quick_plan(FLOW, "overlapped", placement=APART)
    alone = simulate(plan, COSTS, 60, 3).mean_us
    calm, busy = (simulate(plan, COSTS, 60, 3, demand=Demand(4, load * 1e6 / alone)) for load in (0.1, 1.2))
    assert calm.p95_us < busy.p95_us
    assert calm.mean_us == pytest.approx(alone, rel=0.2)


# --- results that nobody takes ---


def an_engine(plan: Plan) -> Engine:
    workers = VirtualWorkers(modelled(COSTS), {d.name: LetterBackend() for d in plan.machine.devices})
    return Engine(plan, workers, Letters(), lambda event: None)


@given(workflows(), SEEDS)
@settings(max_examples=25, deadline=None)
def test_problems_that_are_given_up_leave_nothing_in_the_way_of_others(flow: Workflow, seed: int) -> None:
    """Whoever stops taking results gives the rest up; the same engine then solves others as if they had never been."""
    random = Random(seed)
    plan = random_plan(random, flow)
    engine = an_engine(plan)
    for _ in range(4):
        asked = [Letters().parse("".join(random.choices("abc", k=random.randint(1, 5)))) for _ in range(6)]
        with closing(engine.solve_all(asked, Load(random.randint(1, 4)))) as results:
            for solved in islice(results, random.randint(0, 5)):
                alone = run_letters(plan, (solved.problem.question,))[0]
                assert committed([solved]) == committed(alone)
    assert not engine._sessions


def test_an_engine_solves_one_batch_at_a_time() -> None:
    engine = an_engine(quick_plan(workflow()))
    results = engine.solve_all([Letters().parse("a"), Letters().parse("bc")], Load(2))
    next(results)
    with pytest.raises(RuntimeError, match="the engine is at work on other problems"):
        next(engine.solve_all([Letters().parse("a")]))
    assert len(list(results)) == 1
    assert len(list(engine.solve_all([Letters().parse("a")]))) == 1


@pytest.mark.parametrize("concurrency", [0, -1])
def test_a_load_under_which_nothing_could_run_is_refused(concurrency: int) -> None:
    with pytest.raises(UserError, match=f"concurrency is {concurrency}; use 1 or more"):
        Load(concurrency)


def test_what_is_shown_stands_under_its_own_question() -> None:
    _, events = run_load(quick_plan(FLOW, "overlapped", placement=APART), Load(4))
    console = Console(file=StringIO(), width=200)
    ticker = Ticker(console, 5)
    for event in events:
        ticker(event)
    shown = console.file.getvalue().strip().split("\n\n")
    starts = [e for e in events if isinstance(e, ProblemStarted)][:5]
    assert [block.splitlines()[0] for block in shown] == [e.question for e in starts]
    for block, start in zip(shown, starts, strict=True):
        steps = [e.text for e in events if isinstance(e, Decided) and e.problem == start.problem]
        (end,) = (e for e in events if isinstance(e, ProblemEnded) and e.problem == start.problem)
        lines = block.splitlines()[1:]
        assert all(step in line for step, line in zip(steps, lines[:-1], strict=True))
        assert f"({end.status})" in lines[-1] and (end.answer or "no answer") in lines[-1]


def test_no_problem_starves() -> None:
    """A target's step is the last thing in the order of the plan, and every other problem asks for earlier ones."""
    order = {"a": ("DRAFT@0", "VERIFY@0", "PREFILL@0", "REFINE@0")}
    flow = workflow(statistics=replace(FLOW.statistics, accept=0.97, steps=4))
    plan = quick_plan(flow, placement=dict.fromkeys(APART, "a"), priorities=order)
    events: list[Event] = []
    simulate(plan, COSTS, 200, 3, events.append, Demand(4))
    begun = [e.problem for e in events if isinstance(e, ProblemStarted)]
    ended = [e.problem for e in events if isinstance(e, ProblemEnded)]
    # Of those that began later no more may end before it than there were beside it, a few times over.
    assert max(ended.index(problem) - at for at, problem in enumerate(begun)) <= 12
