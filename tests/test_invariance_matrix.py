"""Plans never change answers, at length: every plan, each pass on and off, with faults and without, by the models that
ship. Each token of a model is worked out once (see `remembered`), so all the rest is the engine's own work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import pytest
from remembered import Memory, Remembered, Unreliable

from planner.api import as_workflow, costs_of, plan, with_seed
from planner.choose import Options
from planner.graph import Op
from planner.machine import Machine
from planner.plan import Plan
from planner.problems import problem_set
from planner.problems.base import Problem
from planner.runtime.engine import Engine, Load
from planner.runtime.session import Solved
from planner.runtime.worker import Shelf, VirtualWorkers, modelled
from planner.trace import Event, Faulted, ProblemEnded
from planner.workflow import RoleName, Sampling, Workflow

EXAMPLES = Path(__file__).parent.parent / "examples"
PLANS = (
    ("this-computer", "serial"),
    ("this-computer", "overlapped"),
    ("3x3090", "heteroreason"),
    ("3x3090", "auto"),
    ("u280-2x3090", "overlapped"),
    ("u280-2x3090", "solved"),
)
EVERYTHING = tuple(f"{op}@{round}" for op in Op for round in range(4))
SWITCHES: dict[str, Callable[[Plan], Plan]] = {
    "as it is": lambda p: p,
    "draft_ahead": lambda p: replace(p, draft_ahead=0 if p.draft_ahead else 2),
    "prefetch_refine": lambda p: replace(p, prefetch_refine=not p.prefetch_refine),
    "prefetch_ahead": lambda p: replace(p, prefetch_refine=True, prefetch_ahead=0 if p.prefetch_ahead else 1),
    "early_next": lambda p: replace(p, early_next=not p.early_next),
    "batch_verify": lambda p: replace(p, batch_verify=not p.batch_verify),
    "alternatives": lambda p: replace(p, alternatives=not p.alternatives),
    "shadow_sync": lambda p: replace(p, shadow_sync=not p.shadow_sync),
    "sync_ahead": lambda p: replace(p, shadow_sync=True, sync_ahead=not p.sync_ahead),
    "disaggregate_prefill": lambda p: replace(p, prefill_on={} if p.prefill_on else elsewhere(p, p.machine)),
    "chunks of one token": lambda p: replace(p, chunk_tokens=1),
}
"""A plan with one pass switched: on if it was off, off if it was on."""


def elsewhere(plan: Plan, machine: Machine) -> dict[RoleName, str]:
    """Another device for the prompt of each role that writes, where there is one."""
    found = {}
    for role in (r for r in plan.roles if r is not RoleName.PRM):
        places = [d.name for d in machine.candidates(plan.workflow.roles[role].numerics)]
        found |= {role: place for place in places if place != plan.placement[role]}
    return found


def switched(plan: Plan, switch: str) -> Plan:
    """The plan with a pass switched. A device starts ahead of need only what the plan lists, so it lists everything."""
    if switch == "as it is":
        return plan
    order = {d: (*own, *(k for k in EVERYTHING if k not in own)) for d, own in plan.priorities.items()}
    return replace(SWITCHES[switch](plan), priorities=order)


class Models:
    """The models that ship, remembered by the kind of backend that computes them."""

    def __init__(self) -> None:
        self._shelf, self._memories = Shelf(), dict[object, Memory]()

    def memory(self, plan: Plan, device: str) -> Memory:
        found = plan.machine.device(device)
        # Each workflow, seed included, has a memory of its own: another draft might be meant by the same name.
        kind = (found.backend, found.transport, plan.workflow.name, plan.workflow.sampling)
        if kind not in self._memories:
            self._memories[kind] = Memory(self._shelf.backend(found))
        return self._memories[kind]

    def close(self) -> None:
        self._shelf.close()


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    models = Models()
    yield models
    models.close()


@cache
def the_plan(workflow: str, machine: str, kind: str) -> Plan:
    flow = replace(as_workflow(EXAMPLES / f"{workflow}.yaml"), sampling=Sampling(0.8))
    return plan(flow, machine, kind, options=Options(rounds=2, limit_s=1.0, samples=8))


def on_what_is_left(plan: Plan) -> Callable[[Machine, Workflow], Plan]:
    """Plans that place the roles in turn on the devices that are there."""

    def again(left: Machine, flow: Workflow) -> Plan:
        places = [[d.name for d in left.candidates(flow.roles[r].numerics)] for r in plan.roles]
        placement = {r: names[n % len(names)] for n, (r, names) in enumerate(zip(plan.roles, places, strict=True))}
        order = {d.name: EVERYTHING for d in left.devices}
        moved = replace(plan, name="again", machine=left, placement=placement, priorities=order)
        return replace(moved, prefill_on=elsewhere(moved, left) if plan.prefill_on else {})

    return again


def run(plan: Plan, problems: list[Problem], models: Models, concurrency: int, faults: int | None) -> Run:
    """Run by a plan; `faults` is the seed of what goes wrong, None for nothing."""
    flow, names = plan.workflow, sorted(d.name for d in plan.machine.devices)
    there, lost = set(names), set[str]()
    seen: Counter[str] = Counter()

    def may_end(device: str) -> bool:
        """Whether each role has another place. The device is gone from now on, though the engine learns it later."""
        left = there - {device}
        if all(left & {d.name for d in plan.machine.candidates(flow.roles[r].numerics)} for r in plan.roles):
            there.discard(device)
        return device not in there

    def made(device: str) -> Remembered:
        memory = models.memory(plan, device)
        if faults is None:
            return Remembered(memory)
        return Unreliable(memory, Random(f"{faults} {device}"), lambda: may_end(device))

    def note(event: Event) -> None:
        seen[event.kind] += 1
        if isinstance(event, Faulted) and event.lost:
            seen["lost"] += 1
            lost.add(event.device)
        while isinstance(event, ProblemEnded) and lost:
            mended = min(lost)
            lost.discard(mended)
            there.add(mended)
            engine.add(mended)

    backends = {device: made(device) for device in names}
    workers = VirtualWorkers(modelled(costs_of(plan.workflow, plan.machine)), backends)
    engine = Engine(plan, workers, problem_set(plan.workflow.problems), note, replan=on_what_is_left(plan))
    found = {s.problem.key: s for s in engine.solve_all(problems, Load(concurrency))}
    return [told(found[p.key]) for p in problems], seen


Told = tuple[str, str | None, tuple[str, ...]]
Run = tuple[list[Told], Counter[str]]


def told(solved: Solved) -> Told:
    """What must not depend on the plan."""
    return solved.outcome.status.value, solved.answer, solved.steps


def differences(
    workflow: str, seed: int, count: int, models: Models, plans: tuple[tuple[str, str], ...] = PLANS
) -> tuple[list[str], Counter[str]]:
    """The runs in which a problem ended otherwise than by the first plan, and what happened in all of them."""
    problems = list({p.key: p for p in problem_set(workflow).generate(2 * count, seed=100 + seed)}.values())[:count]
    found: list[str] = []
    seen: Counter[str] = Counter()
    expected: list[Told] | None = None
    number = 0
    for machine, kind in plans:
        for switch in SWITCHES:
            for faults in (None, seed):
                this = switched(with_seed(the_plan(workflow, machine, kind), seed), switch)
                number += 1
                fault_seed = None if faults is None else 1000 * seed + number
                ends, happened = run(this, problems, models, 1 + number % 4, fault_seed)
                expected = expected or ends
                seen += happened
                seen["runs"] += 1
                seen["problems"] += len(ends)
                where = f"{kind} on {machine}, {switch}, {'with' if fault_seed else 'without'} faults"
                found += [f"{where}: {p.question}" for p, a, b in zip(problems, expected, ends, strict=True) if a != b]
    return found, seen


def test_each_pass_on_and_off_changes_no_answer(models: Models) -> None:
    found, seen = differences("countdown", 1, 4, models, PLANS[1:5:3])
    assert found == []
    assert seen["lost"] and seen["replan"] and seen["fault"] > seen["lost"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("workflow", ["sums", "countdown"])
def test_each_pass_on_and_off_changes_no_answer_at_length(workflow: str, seed: int, models: Models) -> None:
    found, seen = differences(workflow, seed, 100, models)
    print(workflow, seed, dict(seen))
    assert found == []
    assert seen["lost"] > 100 and seen["replan"] > 100 and seen["fault"] > 2 * seen["lost"]
