"""Plans never change answers: the same committed steps by every plan on every machine, with the models that ship."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from models_jax.sequences import Held
from planner.api import as_workflow, open_workers, plan, run
from planner.choose import Options, read_elsewhere
from planner.plan import Plan
from planner.problems import problem_set
from planner.problems.base import Problem
from planner.runtime.engine import Engine
from planner.runtime.worker import Shelf
from planner.trace import Chunk, ClockKind, Event
from planner.workflow import Policy, PolicyOptions, RoleName, Sampling

EXAMPLES = Path(__file__).parent.parent / "examples"
MACHINES = ("this-computer", "3x3090", "u280-2x3090")
"""The draft is on a CPU core, on a GPU and on an FPGA."""
PLANS = ("serial", "overlapped", "auto")

Steps = list[tuple[str, ...]]


@pytest.fixture(scope="module")
def shelf() -> Iterator[Shelf]:
    shelf = Shelf()
    yield shelf
    shelf.close()


POLICIES: dict[str, tuple[PolicyOptions, Sampling]] = {
    "specreason": (PolicyOptions(Policy.SPECREASON, first_target_steps=1), Sampling(0.0, 5)),
    "specreason, sampled": (PolicyOptions(Policy.SPECREASON, accept=0.9), Sampling(0.8, 5)),
    "best draft": (PolicyOptions(drafts=3, resample_alternatives=2), Sampling(0.0, 5, draft_temperature=1.2)),
    "vote": (PolicyOptions(Policy.SPECREASON, drafts=2, vote=2), Sampling(0.8, 5)),
}
"""Options of the policy that ask for other work than the examples do."""


@cache
def the_plan(workflow: str, machine: str, kind: str, temperature: float, policy: str = "") -> Plan:
    flow = as_workflow(EXAMPLES / f"{workflow}.yaml")
    flow = replace(flow, sampling=Sampling(temperature, seed=5))
    if policy:
        options, sampling = POLICIES[policy]
        flow = replace(flow, policy=options, sampling=sampling)
    return plan(flow, machine, kind, options=Options(rounds=2, limit_s=1.0, samples=8))


def committed(plan: Plan, problems: list[Problem], shelf: Shelf) -> tuple[Steps, list[Event]]:
    """The steps of each problem, and what happened."""
    events: list[Event] = []
    with open_workers(plan, ClockKind.VIRTUAL, shelf=shelf) as workers:
        engine = Engine(plan, workers, problem_set(plan.workflow.problems), events.append)
        return [engine.solve(problem).steps for problem in problems], events


def differences(
    workflow: str,
    temperature: float,
    count: int,
    shelf: Shelf,
    policy: str = "",
    machines: tuple[str, ...] = MACHINES,
) -> list[str]:
    """The plans whose steps are not those of the first one."""
    problems = problem_set(workflow).generate(count, seed=31)
    expected: Steps | None = None
    found = []
    for machine in machines:
        for kind in PLANS:
            steps, _ = committed(the_plan(workflow, machine, kind, temperature, policy), problems, shelf)
            expected = expected or steps
            found += [f"{kind} on {machine}: {p.question}" for p, a, b in zip(problems, expected, steps) if a != b]
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
@pytest.mark.parametrize("workflow", ["sums", "countdown"])
def test_plans_do_not_change_answers(workflow: str, temperature: float, shelf: Shelf) -> None:
    assert differences(workflow, temperature, 5, shelf) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_plans_do_not_change_answers_of_any_policy(policy: str, shelf: Shelf) -> None:
    assert differences("countdown", 0.0, 3, shelf, policy, machines=("3x3090",)) == []


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("workflow", ["sums", "countdown"])
@pytest.mark.timeout(900)
def test_plans_do_not_change_answers_of_any_policy_at_length(workflow: str, policy: str, shelf: Shelf) -> None:
    assert differences(workflow, 0.0, 50, shelf, policy) == []


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
@pytest.mark.parametrize("workflow", ["sums", "countdown"])
@pytest.mark.timeout(900)
def test_plans_do_not_change_answers_at_length(workflow: str, temperature: float, shelf: Shelf) -> None:
    assert differences(workflow, temperature, 100, shelf) == []


@pytest.mark.parametrize("role", ["draft", "prm", "target"])
def test_a_cache_that_is_rolled_back_wrongly_is_caught(role: str, shelf: Shelf, monkeypatch) -> None:
    right = Held.cut
    problems = problem_set("countdown").generate(8, seed=31)
    plans = [the_plan("countdown", "3x3090", kind, 0.8) for kind in ("serial", "overlapped")]
    expected, _ = committed(plans[0], problems, shelf)

    def forgetful(self: Held, keep: int) -> None:
        """The tokens are cut and the cache is not: what was computed for others stands in for the new ones."""
        computed = self.computed
        right(self, keep)
        if any(self is held for held in stale):
            self.computed = computed

    stale: list[Held] = []
    open_sequence = type(shelf_sequences(shelf, role)).open

    def watched(self, work):
        held = open_sequence(self, work)
        if self._role == role and not any(held is h for h in stale):
            stale.append(held)
        return held

    monkeypatch.setattr(Held, "cut", forgetful)
    monkeypatch.setattr(type(shelf_sequences(shelf, role)), "open", watched)
    found = [committed(p, problems, shelf)[0] for p in plans]
    assert any(steps != expected for steps in found)


def shelf_sequences(shelf: Shelf, role: str):
    """The host's record of a role's sequences in the `jax` backend."""
    backend = next(b for kind, b in shelf._backends.items() if kind[0] == "jax")
    return backend._runners[role]._sequences


def test_the_order_of_a_plan_reaches_the_devices(shelf: Shelf) -> None:
    first = the_plan("countdown", "1x3090", "overlapped", 0.0)
    problems = problem_set("countdown").generate(6, seed=8)
    order = first.priorities["gpu0"]
    refine_first = ("PREFILL@0", "REFINE@0", *(k for k in order if k not in ("PREFILL@0", "REFINE@0")))
    second = replace(first, priorities={"gpu0": refine_first})
    steps, events = committed(first, problems, shelf)
    other_steps, other_events = committed(second, problems, shelf)
    assert other_steps == steps
    assert ops(other_events) != ops(events)
    assert ops(other_events).index("REFINE") < ops(events).index("REFINE")


def ops(events: list[Event]) -> list[str]:
    """The ops of the chunks in the order in which they ran."""
    return [e.op for e in events if e.kind == "chunk"]


# --- the prompt on another device ---


def reads(events: list[Event], role: RoleName) -> list[tuple[str, str, int]]:
    """Op, device and tokens read of a role's chunks."""
    return [(e.op, e.device, e.tokens_in) for e in events if isinstance(e, Chunk) and e.role == role]


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
def test_a_prompt_that_another_device_reads_changes_no_answer(temperature: float, shelf: Shelf) -> None:
    """The twin on a GPU reads it, and the draft's FPGA goes on from its keys and values."""
    here = the_plan("countdown", "u280-2x3090", "heteroreason", temperature)
    fpga = here.placement[RoleName.DRAFT]
    there = read_elsewhere(here, RoleName.DRAFT, "gpu0")
    problems = problem_set("countdown").generate(5, seed=31)
    expected, before = committed(here, problems, shelf)
    steps, events = committed(there, problems, shelf)
    assert steps == expected
    prompts = [size for op, device, size in reads(events, RoleName.DRAFT) if (op, device) == ("PREFILL", "gpu0")]
    assert len(prompts) == len(problems)
    on_fpga = [(op, size) for op, device, size in reads(events, RoleName.DRAFT) if device == fpga]
    assert not any(op == "PREFILL" for op, _ in on_fpga) and on_fpga.count(("TRANSFER", 0)) == len(problems)
    fed = sum(size for _, device, size in reads(before, RoleName.DRAFT) if device == fpga)
    assert sum(size for _, size in on_fpga) <= fed - sum(prompts)


TWO_CORES = """
name: two-cores
source: assumption, for a test
devices:
  - {name: cpu0, kind: cpu, backend: jax, core: 0, memory_bytes: 2 GiB, bandwidth_bytes_per_s: 10 GB/s, active_w: 15 W,
     idle_w: 3 W, source: assumption, ops_per_s: {float32: 50 GFLOP/s, int8: 20 GOP/s}}
  - {name: fpga0, kind: fpga, backend: fpga, transport: emulate, memory_bytes: 1 GiB, bandwidth_bytes_per_s: 10 GB/s,
     active_w: 15 W, idle_w: 3 W, source: assumption, ops_per_s: {int8: 20 GOP/s}}
links:
  - {a: cpu0, b: fpga0, bandwidth_bytes_per_s: 2 GB/s, latency_us: 100 us, source: assumption}
"""


@pytest.mark.slow
def test_processes_hand_a_prompt_over_and_stream_into_the_shadow(tmp_path: Path) -> None:
    """The models that ship, each device a process, on the wall clock: the same steps, and the trace shows both."""
    file = tmp_path / "two-cores.yaml"
    file.write_text(TWO_CORES)
    here = plan(EXAMPLES / "countdown.yaml", file, "heteroreason")
    there = replace(read_elsewhere(here, RoleName.DRAFT, "cpu0"), chunk_tokens=4)
    assert here.placement[RoleName.DRAFT] == "fpga0"
    problems = problem_set("countdown").generate(12, seed=31)
    expected = run(replace(here, shadow_sync=False), problems, "virtual")
    found = run(there, problems, "wall")
    assert [s.steps for s in found.solved] == [s.steps for s in expected.solved]
    events = list(found.trace)
    assert not any((op, device) == ("PREFILL", "fpga0") for op, device, _ in reads(events, RoleName.DRAFT))
    assert any((op, device) == ("SYNC", "fpga0") for op, device, _ in reads(events, RoleName.DRAFT))
