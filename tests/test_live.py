"""Statistics live: a run that is not as its plan assumes is planned anew, at a border, and its answers stay."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from planner_cases import (
    APART,
    DRAFT,
    PRM,
    TARGET,
    THREE,
    LetterBackend,
    Letters,
    LinearCosts,
    committed,
    plan_anew,
    plan_nothing,
    plan_when_told,
    quick_plan,
    run_letters,
    workflow,
)

from planner.api import replanner
from planner.choose import Options
from planner.cost import CostOp, Origin
from planner.goal import Wish
from planner.machine import Machine
from planner.plan import Plan
from planner.report import report
from planner.runtime.engine import Engine, Load
from planner.runtime.watch import Live, Margins, ScaledCosts
from planner.runtime.worker import VirtualWorkers, modelled
from planner.schedule.aim import Cap, Objective
from planner.trace import Chunk, Decided, Event, Replanned
from planner.workflow import Budget, Sampling, Statistics

QUESTIONS = tuple("abc"[n % 3] * (1 + n // 3) for n in range(12))
FLOW = workflow(accept=0.6, accept_refined=0.5, budget=Budget(6, 60, 12), statistics=Statistics(accept=0.95))
FEW = Margins(samples=10)


class Patient(Live):
    """Waits for the plan that is being made, as a run on the wall clock need not."""

    def proposal(self, plan: Plan, machine: Machine) -> tuple[str, Plan] | None:
        until = time.monotonic() + 60
        found = super().proposal(plan, machine)
        while found is None and self._aside is not None and time.monotonic() < until:
            time.sleep(0.005)
            found = super().proposal(plan, machine)
        return found


def run_live(plan: Plan, watch: Any, costs: LinearCosts) -> tuple[list[Any], list[Event]]:
    events: list[Event] = []
    workers = VirtualWorkers(modelled(costs), {d: LetterBackend() for d in "abc"})
    with closing(watch):
        engine = Engine(plan, workers, Letters(), events.append, watch=watch)
        found = {s.problem.question: s for s in engine.solve_all([Letters().parse(q) for q in QUESTIONS], Load(2))}
    return [found[q] for q in QUESTIONS], events


def test_acceptance_that_is_not_as_assumed_leads_to_another_plan() -> None:
    plan = quick_plan(FLOW, "overlapped", placement=APART)
    solved, events = run_live(plan, Patient(LinearCosts(), plan_anew, FEW), LinearCosts())
    again = [e for e in events if isinstance(e, Replanned)]
    assert again
    assert again[0].why.endswith("of the drafts are accepted where the plan assumes 95%, off by more than 15 points")
    assert set(again[0].placement.values()) == {"a"}
    assert committed(solved) == committed(run_letters(plan, QUESTIONS)[0])
    after = events[events.index(again[0]) :]
    assert {e.device for e in after if isinstance(e, Chunk)} == {"a"}
    assert any("off by more than 15 points: plan anew" in line for line in report(plan, events).replanned)
    # The new plan assumes what was seen, so that it is not made again and again.
    assert len(again) <= 3


def test_the_best_of_several_drafts_is_not_taken_for_a_single_one() -> None:
    policy = replace(FLOW.policy, drafts=3)
    flow = replace(FLOW, policy=policy, sampling=Sampling(1.0, 0), statistics=Statistics(accept=0.5))
    plan, watch = quick_plan(flow, placement=APART), Live(LinearCosts(), plan_nothing, FEW)
    with closing(watch):
        for number in range(40):
            event = "accepted" if number % 8 else "refined"
            watch.see(Decided("p", 0, event, 1, "draft", "x", {"draft": 0.9}, 0))
        assert watch.off(plan) == "", "of 3 drafts with a share of 50% each one is accepted 7 of 8 times"
        said = replace(plan, workflow=replace(flow, statistics=Statistics(accept=0.85)))
        assert watch.off(said).startswith("50% of the drafts")


def test_costs_that_are_not_as_modelled_lead_to_another_plan() -> None:
    flow = replace(FLOW, statistics=Statistics(accept=0.4))
    plan = quick_plan(flow, "overlapped", placement=dict.fromkeys(APART, "b"))
    slow = LinearCosts({(r, "b"): 200 for r in (DRAFT, PRM, TARGET)})
    watch = Patient(LinearCosts(), plan_anew, replace(FEW, acceptance=1.0))
    solved, events = run_live(plan, watch, slow)
    again = [e for e in events if isinstance(e, Replanned)]
    assert again and "on b takes" in again[0].why and "times as long as the plan assumes" in again[0].why
    assert set(again[0].placement.values()) == {"a"}
    assert len(again) == 1, "what was put right is right"
    assert committed(solved) == committed(run_letters(plan, QUESTIONS)[0])


def test_what_is_as_assumed_is_left_alone() -> None:
    plan = quick_plan(replace(FLOW, statistics=Statistics(accept=0.4)), "overlapped", placement=APART)
    _, events = run_live(plan, Patient(LinearCosts(), plan_anew, replace(FEW, acceptance=0.5)), LinearCosts())
    assert not any(isinstance(e, Replanned) for e in events)


def test_a_plan_that_cannot_be_made_leaves_the_run_as_it_is() -> None:
    plan = quick_plan(FLOW, "overlapped", placement=APART)
    solved, events = run_live(plan, Patient(LinearCosts(), plan_nothing, replace(FEW, samples=60)), LinearCosts())
    assert not any(isinstance(e, Replanned) for e in events)
    assert committed(solved) == committed(run_letters(plan, QUESTIONS)[0])


def test_the_engine_does_not_wait_for_a_plan() -> None:
    plan = quick_plan(FLOW, "overlapped", placement=APART)
    watch = Live(LinearCosts(), plan_anew, FEW)
    calls: list[Any] = []

    class Never:
        def see(self, event: Event) -> None:
            watch.see(event)

        def proposal(self, plan: Plan, machine: Machine) -> None:
            calls.append(watch.off(plan))

        def close(self) -> None:
            watch.close()

    run_live(plan, Never(), LinearCosts())
    assert any(calls) and watch._aside is None


class WhenTold(Patient):
    """Has the plan come no sooner than the run has done so many chunks more, and then waits for it."""

    def __init__(self, told: Path, meanwhile: int) -> None:
        super().__init__(LinearCosts(), partial(plan_when_told, told), FEW)
        self.told, self.meanwhile = told, meanwhile
        self.chunks: list[Chunk] = []
        """Those that were over while the plan was being made."""

    def see(self, event: Event) -> None:
        if self._aside is not None and isinstance(event, Chunk):
            self.chunks.append(event)
        super().see(event)

    def proposal(self, plan: Plan, machine: Machine) -> tuple[str, Plan] | None:
        if len(self.chunks) < self.meanwhile:
            return Live.proposal(self, plan, machine)
        self.told.touch()
        return super().proposal(plan, machine)


def test_a_run_goes_on_while_a_plan_is_made_and_takes_it_up_between_chunks(tmp_path: Path) -> None:
    plan = quick_plan(FLOW, "overlapped", placement=APART)
    watch = WhenTold(tmp_path / "told", 120)
    solved, events = run_live(plan, watch, LinearCosts())
    again = [e for e in events if isinstance(e, Replanned)]
    assert again and len(watch.chunks) >= 120
    # What was done meanwhile was done by the old plan, and it was work: steps were committed.
    before = events[: events.index(again[0])]
    assert {e.device for e in watch.chunks[:120]} == set("abc") and all(e in before for e in watch.chunks[:120])
    first = before.index(watch.chunks[0])
    assert sum(e.kind == "decision" for e in before[first:]) > 5
    # No chunk runs while the plans change, and from then on the new one is followed.
    at = again[0].at_us
    chunks = [e for e in events if isinstance(e, Chunk)]
    assert not [e for e in chunks if e.start_us < at < e.end_us]
    assert {e.device for e in chunks if e.start_us >= at} == {"a"}
    assert committed(solved) == committed(run_letters(plan, QUESTIONS)[0])


def test_costs_put_right() -> None:
    seen: Mapping[Any, float] = {(DRAFT, "a"): 2.0, (TARGET, "c"): 4.0}
    costs = ScaledCosts(LinearCosts(otherwise_us=10), seen)
    assert costs.decode_us(DRAFT, "a", 3, 0) == 60
    assert costs.decode_us(DRAFT, "b", 3, 0) == 60  # as wrong as the same role elsewhere
    assert costs.prefill_us(PRM, "b", 10, 0) == 30  # as wrong as the rest
    assert costs.origin(TARGET, "c", CostOp.DECODE) is Origin.FITTED
    assert costs.shapes == LinearCosts().shapes
    assert ScaledCosts(LinearCosts(otherwise_us=10), {}).decode_us(PRM, "b", 1, 0) == 10
    assert {d.name for d in THREE.devices} == set("abc")


def test_a_plan_made_anew_keeps_to_the_goal_that_the_file_of_the_old_one_names(tmp_path: Path) -> None:
    """A run that goes on knows nothing but its plan: what it was made for is in there."""
    wish = Wish(Objective.ENERGY, max_latency=Cap(factor=1.2), max_energy=Cap(30_000.0))
    replace(quick_plan(workflow()), **vars(wish)).save(tmp_path / "plan.json")
    again = replanner(Plan.load(tmp_path / "plan.json"), options=Options(rounds=2))
    assert isinstance(again, partial)
    assert again.keywords["options"] == Options(rounds=2, wish=wish, best_when_stopped=False)
    assert again.keywords["kind"] == "serial"
