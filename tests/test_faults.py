"""Faults: every kind at every place; answers stay, or one sentence says why not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import cycle
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from planner_cases import (
    APART,
    DRAFT,
    MIXED,
    PRM,
    SEEDS,
    TARGET,
    THREE,
    LetterBackend,
    Letters,
    LinearCosts,
    committed,
    device,
    machine,
    quick_plan,
    random_plan,
    run_letters,
    workflow,
    workflows,
)

from planner.errors import UserError
from planner.graph import Op
from planner.machine import Machine
from planner.plan import Plan
from planner.runtime.backend import ModelInfo, Output, Work
from planner.runtime.engine import RETRIES, Engine, Load
from planner.runtime.faults import DeviceFault, Fault, FaultKind, without
from planner.runtime.host import Solved
from planner.runtime.worker import VirtualWorkers, modelled
from planner.trace import Chunk, Event, Faulted, ProblemEnded, Replanned
from planner.workflow import Arithmetic, Budget, Numerics, Role, Sampling, Workflow

QUESTIONS = ("a", "bc", "cab")
FLOW = workflow(accept=0.6, accept_refined=0.5, budget=Budget(6, 60, 12))
EAGER = {
    "draft_ahead": 1,
    "prefetch_refine": True,
    "alternatives": True,
    "early_next": True,
    "shadow_sync": True,
    "batch_verify": True,
    "chunk_tokens": 3,
}
KINDS = tuple(f"{op}@{round}" for op in Op for round in range(3))


def eager(flow: Workflow) -> Plan:
    """A plan that runs everything ahead that it can, and has the draft's prompt read elsewhere."""
    return quick_plan(flow, placement=APART, priorities=dict.fromkeys("abc", KINDS), prefill_on={DRAFT: "c"}, **EAGER)


def on_what_is_left(plan: Plan) -> Callable[[Machine, Workflow], Plan]:
    """Plans that place the roles in turn on the devices that are there."""

    def again(left: Machine, flow: Workflow) -> Plan:
        names = cycle([d.name for d in left.devices])
        placement = {r: next(names) for r in plan.roles}
        there = {r: d for r, d in plan.prefill_on.items() if d in [x.name for x in left.devices] and d != placement[r]}
        return replace(plan, name="again", machine=left, workflow=flow, placement=placement, prefill_on=there)

    return again


@cache
def expected(flow_seed: int) -> Any:
    return committed(run_letters(quick_plan(seeded(flow_seed)), QUESTIONS)[0])


def seeded(seed: int) -> Workflow:
    return replace(FLOW, sampling=Sampling(1.0, seed))


# --- the matrix -----------------------------------------------------------------------------------------------------


@dataclass
class Faulty(LetterBackend):
    """Does what it is told to do wrong with its next chunk, and for good where a device is gone."""

    wrong: Callable[[Output], Output] | None = None
    gone: DeviceFault | None = None
    refuses: Exception | None = None

    def load(self, name: str, role: Role, delimiter: str) -> ModelInfo:
        self.check()
        if self.refuses is not None:
            raise self.refuses
        return super().load(name, role, delimiter)

    def encode(self, name: str, text: str) -> tuple[int, ...]:
        self.check()
        return super().encode(name, text)

    def decode(self, name: str, tokens: Sequence[int]) -> str:
        self.check()
        return super().decode(name, tokens)

    def run(self, work: Work) -> Output:
        self.check()
        output, wrong = super().run(work), self.wrong
        if wrong is None:
            return output
        self.wrong = None
        # What a failing device leaves in its caches is anything.
        self.held[work.role, work.sequence] += (0, 1, 0)
        return wrong(output)

    def check(self) -> None:
        if self.gone is not None:
            raise self.gone


def raises(error: Exception) -> Callable[[Output], Output]:
    def wrong(output: Output) -> Output:
        raise error

    return wrong


NAN = float("nan")
ONCE: dict[str, Callable[[Output], Output]] = {
    "raises": raises(ZeroDivisionError("oh")),
    "user error": raises(UserError("the fan stopped", mend="clean it")),
    "out of memory": raises(RuntimeError("RESOURCE_EXHAUSTED: out of memory while allocating")),
    "no tokens, no scores": lambda o: Output() if o.tokens or o.scores else Output((1,)),
    "too many tokens": lambda o: replace(o, tokens=(*o.tokens, *(0,) * 60)),
    "tokens that are none": lambda o: replace(o, tokens=(-1,), complete=False),
    "scores that are none": lambda o: replace(o, scores=(NAN,) * max(1, len(o.scores))),
    "scores out of range": lambda o: replace(o, scores=(1.0001,) * max(1, len(o.scores))),
    "one score too many": lambda o: replace(o, scores=(*o.scores, 0.5)),
}
"""Faults after which the device works again."""
FOR_GOOD = {
    "dies": Fault(FaultKind.DIED, "its process ended with exit code -9"),
    "hangs": Fault(FaultKind.HUNG, "a chunk was not over after 60 s"),
    "raises for ever": Fault(FaultKind.RAISED, "ZeroDivisionError: oh"),
}
"""Faults after which it does not."""


@dataclass
class FaultyWorkers(VirtualWorkers):
    """Injects one fault into a chunk of an op: the first of a step, or a later one."""

    op: Op
    later: bool
    fault: str
    fired: str = ""
    """The device that the fault came from."""
    engine: Engine | None = None
    seen: int = 0
    made: dict[str, Faulty] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.made = {name: Faulty() for name in "abc"}
        durations = modelled(LinearCosts())
        super().__init__(lambda d, w, o: self.slowness(d) * durations(d, w, o), self.made)

    def slowness(self, name: str) -> int:
        return 10_000 if self.fired == name and self.fault == "is slow" else 1

    def submit(self, device: str, work: Work, delay_us: int, limit_us: int) -> None:
        assert self.engine is not None
        running = self.engine._running[device]
        request = running.start.request
        writes = request.op in (Op.DRAFT, Op.REFINE, Op.BACKTRACK)
        if request.op is self.op and not self.fired:
            later = request in running.session.partial if writes else self.seen > 0
            self.seen += 1
            if later is self.later:
                self.fired = device
                self.made[device].wrong = ONCE.get(self.fault)
                if self.fault in FOR_GOOD:
                    self.made[device].gone = DeviceFault(FOR_GOOD[self.fault])
        super().submit(device, work, delay_us, limit_us)


def run_faulty(plan: Plan, workers: FaultyWorkers, concurrency: int = 1) -> tuple[list[Solved], list[Event]]:
    events: list[Event] = []
    workers.engine = Engine(plan, workers, Letters(), events.append, replan=on_what_is_left(plan))
    problems = [Letters().parse(q) for q in QUESTIONS]
    solved = {s.problem.question: s for s in workers.engine.solve_all(problems, Load(concurrency))}
    return [solved[q] for q in QUESTIONS], events


OPS = list(Op)


@cache
def seeds(op: Op, later: bool, count: int) -> list[int]:
    """Seeds of runs in which there is such a chunk."""
    found: list[int] = []
    for seed in range(200):
        workers = FaultyWorkers(op, later, "none")
        run_faulty(eager(seeded(seed)), workers, concurrency=1 + seed % 3)
        found += [seed] if workers.fired else []
        if len(found) == count:
            return found
    raise AssertionError("there are too few")


def check_faults(op: Op, fault: str, later: bool, count: int) -> None:
    for seed in seeds(op, later, count):
        workers = FaultyWorkers(op, later, fault)
        solved, events = run_faulty(eager(seeded(seed)), workers, concurrency=1 + seed % 3)
        assert workers.fired
        assert committed(solved) == expected(seed)
        assert sum(isinstance(e, ProblemEnded) for e in events) == len(QUESTIONS)
        told = [e for e in events if isinstance(e, Faulted)]
        lost = [e for e in told if e.lost]
        assert all(e.device == workers.fired for e in told)
        if fault in FOR_GOOD:
            again = [e for e in events if isinstance(e, Replanned)]
            assert len(lost) == 1
            # Nothing is planned anew if there is no more work than the chunks that the two others are at.
            more = sum(isinstance(e, Chunk) for e in events[events.index(lost[0]) :])
            assert len(again) == 1 or (not again and more <= 2)
            assert all(workers.fired not in {*e.placement.values(), *e.prefill_on.values()} for e in again)
            assert len(told) == (RETRIES + 1 if fault == "raises for ever" else 1)
        else:
            # A slow device is none that fails.
            assert len(told) == (fault != "is slow") and not lost


PLACES = pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
FAULTS = pytest.mark.parametrize("fault", [*ONCE, *FOR_GOOD, "is slow"])


@PLACES
@FAULTS
@pytest.mark.parametrize("op", OPS)
def test_no_fault_at_any_place_changes_an_answer(op: Op, fault: str, later: bool) -> None:
    check_faults(op, fault, later, 1)


@pytest.mark.slow
@PLACES
@FAULTS
@pytest.mark.parametrize("op", OPS)
def test_no_fault_at_any_place_changes_an_answer_at_length(op: Op, fault: str, later: bool) -> None:
    check_faults(op, fault, later, 12)


@given(workflows(), SEEDS)
@settings(max_examples=25, deadline=None)
def test_devices_that_come_and_go_change_no_answer(flow: Workflow, seed: int) -> None:
    random = Random(seed)
    plan = random_plan(random, flow)
    whole = committed(run_letters(plan, QUESTIONS)[0])
    engine: Engine | None = None
    there = set("abc")

    def meddle(event: Event) -> None:
        if engine is None or random.random() > 0.1:
            return
        name = random.choice("abc")
        if name in there and len(there) > 1:
            engine.remove(name)
            there.discard(name)
        elif name not in there:
            engine.add(name)
            there.add(name)
        elif len(there) == 3:
            engine.swap(random_plan(random, flow), "for the test")

    workers = VirtualWorkers(modelled(LinearCosts()), {d: LetterBackend() for d in "abc"})
    engine = Engine(plan, workers, Letters(), meddle, replan=on_what_is_left(plan))
    problems = [Letters().parse(q) for q in QUESTIONS]
    solved = {s.problem.question: s for s in engine.solve_all(problems, Load(random.randint(1, 3)))}
    assert committed([solved[q] for q in QUESTIONS]) == whole


def test_a_device_that_comes_back_is_used_again() -> None:
    plan = eager(FLOW)
    back = {"plan": plan}
    events: list[Event] = []
    workers = VirtualWorkers(modelled(LinearCosts()), {d: LetterBackend() for d in "abc"})
    left = on_what_is_left(plan)
    engine = Engine(
        plan, workers, Letters(), events.append, replan=lambda m, f: back["plan"] if m == THREE else left(m, f)
    )
    problem = Letters().parse("bc")
    engine.remove("c")
    first = engine.solve(problem)
    assert "c" not in engine.plan.placement.values()
    engine.add("c")
    second = engine.solve(problem)
    assert engine.plan.placement == APART
    assert committed([first]) == committed([second])
    assert [e.why for e in events if isinstance(e, Replanned)] == ["device c was removed", "device c was added"]
    with pytest.raises(UserError, match="there is no device d"):
        engine.add("d")
    with pytest.raises(UserError, match="there is no device d"):
        engine.remove("d")


def test_a_swap_keeps_the_caches_of_roles_that_stay() -> None:
    plan = quick_plan(FLOW, placement=APART)
    backends = {d: LetterBackend() for d in "abc"}
    engine = Engine(plan, VirtualWorkers(modelled(LinearCosts()), backends), Letters(), lambda event: None)
    seen = 0

    def swap_once(event: Event) -> None:
        nonlocal seen
        seen += 1
        if seen == 12:
            engine.swap(replace(plan, placement={**APART, TARGET: "a"}, draft_ahead=1))

    engine._sink = swap_once
    engine.solve(Letters().parse("bc"))
    assert engine.plan.draft_ahead == 1
    assert sum(w.keep == 0 for w in backends["b"].log) == 1
    assert [w.keep for w in backends["a"].log if w.role == TARGET][:1] == [0]


def test_a_plan_of_another_workflow_is_refused() -> None:
    plan = quick_plan(FLOW, placement=APART)
    engine = Engine(
        plan, VirtualWorkers(modelled(LinearCosts()), {d: LetterBackend() for d in "abc"}), Letters(), print
    )
    with pytest.raises(UserError, match="it is a plan of another workflow, other models or another seed"):
        engine.swap(quick_plan(seeded(3)))
    with pytest.raises(UserError, match="it is a plan of another workflow, other models or another seed"):
        engine.swap(replace(plan, models={**plan.models, DRAFT: "11"}))
    engine.remove("b")
    with pytest.raises(UserError, match="role prm is placed on b, which is not there or computes otherwise"):
        engine.swap(plan)


# --- no place is left ---


def lose(plan: Plan, name: str, replan: Any = None) -> UserError:
    """The sentence that a run ends with whose device dies at its first chunk."""
    backends = {d.name: Faulty() for d in plan.machine.devices}
    workers = VirtualWorkers(modelled(LinearCosts()), backends)
    engine = Engine(plan, workers, Letters(), lambda event: None, replan=replan or on_what_is_left(plan))
    backends[name].wrong = raises(DeviceFault(FOR_GOOD["dies"]))
    with pytest.raises(UserError) as caught:
        engine.solve(Letters().parse("a"))
    return caught.value


def test_a_role_without_a_place_is_named_with_device_and_fault() -> None:
    plan = quick_plan(FLOW, on=MIXED, placement={DRAFT: "fpga", PRM: "gpu0", TARGET: "gpu0"}, machine=MIXED)
    narrow = replace(plan, machine=without(MIXED, "gpu1"))
    assert str(lose(narrow, "gpu0")) == (
        "machine test: device gpu0 is lost (died: its process ended with exit code -9), and no other device can take"
        " role prm and target; mend the device, or plan for another machine"
    )


def test_a_float_role_never_moves_to_another_kind_of_processor() -> None:
    """Not even where the machine that is left has one kind only."""
    two = machine(device("a"), device("b", processor="other"))
    roles = {r: Role("made/up", Numerics(Arithmetic.FLOAT32)) for r in (DRAFT, PRM, TARGET)}
    plan = quick_plan(replace(FLOW, roles=roles), placement=dict.fromkeys(APART, "a"), machine=two)
    assert "no other device can take role draft and prm and target" in str(lose(plan, "a"))
    # An integer role may.
    roles = {r: Role("made/up", Numerics(Arithmetic.INT8)) for r in (DRAFT, PRM, TARGET)}
    whole = quick_plan(replace(FLOW, roles=roles), placement=dict.fromkeys(APART, "a"), machine=two)
    backends = {"a": Faulty(wrong=raises(DeviceFault(FOR_GOOD["dies"]))), "b": Faulty()}
    workers = VirtualWorkers(modelled(LinearCosts()), backends)
    engine = Engine(whole, workers, Letters(), lambda event: None, replan=on_what_is_left(whole))
    assert engine.solve(Letters().parse("a")).outcome.node.path
    assert set(engine.plan.placement.values()) == {"b"}


def test_a_plan_that_cannot_be_made_is_told() -> None:
    def none(left: Machine, flow: Workflow) -> Plan:
        raise UserError("the models do not fit", mend="buy memory")

    text = str(lose(quick_plan(FLOW, placement=APART), "c", none))
    assert "device c is lost (died: its process ended with exit code -9)" in text
    assert "there is no plan without it (the models do not fit; buy memory)" in text


def test_a_device_that_refuses_a_role_is_taken_out_too() -> None:
    backends = {d: Faulty() for d in "abc"}
    plan = quick_plan(FLOW, placement=APART)
    events: list[Event] = []
    workers = VirtualWorkers(modelled(LinearCosts()), backends)
    engine = Engine(plan, workers, Letters(), events.append, replan=on_what_is_left(plan))
    backends["c"].wrong = raises(DeviceFault(FOR_GOOD["dies"]))
    backends["a"].refuses = MemoryError("no room")
    solved = [engine.solve(Letters().parse(q)) for q in QUESTIONS]
    assert committed(solved) == committed(run_letters(plan, QUESTIONS)[0])
    assert set(engine.plan.placement.values()) == {"b"}
    assert {e.device for e in events if isinstance(e, Faulted) and e.lost} == {"a", "c"}


@pytest.mark.parametrize("error", [RuntimeError("no driver"), DeviceFault(FOR_GOOD["dies"])])
def test_a_device_that_fails_at_the_start_is_done_without(error: Exception) -> None:
    class Refuses(LetterBackend):
        def load(self, name: str, role: Role, delimiter: str) -> ModelInfo:
            raise error

    plan = quick_plan(FLOW, placement=APART)
    backends = {"a": LetterBackend(), "b": Refuses(), "c": LetterBackend()}
    workers = VirtualWorkers(modelled(LinearCosts()), backends)
    engine = Engine(plan, workers, Letters(), lambda event: None, replan=on_what_is_left(plan))
    assert committed([engine.solve(Letters().parse("bc"))]) == committed(run_letters(plan, ("bc",))[0])
    assert "b" not in engine.plan.placement.values()


def test_what_the_user_can_mend_at_the_start_comes_out_as_it_is() -> None:
    refused = UserError("no such board", where="slot 3", mend="plug it in")

    class Refuses(LetterBackend):
        def load(self, name: str, role: Role, delimiter: str) -> ModelInfo:
            raise refused

    workers = VirtualWorkers(modelled(LinearCosts()), {"a": LetterBackend(), "b": Refuses(), "c": LetterBackend()})
    plan = quick_plan(FLOW, placement=APART)
    with pytest.raises(UserError) as caught:
        Engine(plan, workers, Letters(), lambda event: None, replan=on_what_is_left(plan))
    assert caught.value is refused


# --- problems that cannot be run ---


class Picky(LetterBackend):
    """Cannot write some questions in tokens, and fails over others."""

    def encode(self, name: str, text: str) -> tuple[int, ...]:
        if "x" in text:
            raise UserError("x is no letter", where="encode", mend="use letters")
        if "y" in text:
            raise ZeroDivisionError("y")
        return super().encode(name, text)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_problem_that_cannot_be_run_does_not_keep_others_from_it(concurrency: int) -> None:
    plan = quick_plan(FLOW, placement=APART)
    questions = ("a", "x", "bc", "c" * 500, "y", "cab")
    events: list[Event] = []
    workers = VirtualWorkers(modelled(LinearCosts()), {d: Picky() for d in "abc"})
    engine = Engine(plan, workers, Letters(), events.append, replan=on_what_is_left(plan))
    found = {s.problem.question: s for s in engine.solve_all(map(Letters().parse, questions), Load(concurrency))}
    assert set(found) == set(questions)
    good = ("a", "bc", "cab")
    assert committed([found[q] for q in good]) == committed(run_letters(plan, good)[0])
    errors = {q: str(s.error) for q, s in found.items() if s.error is not None}
    assert set(errors) == {"x", "c" * 500, "y"}
    assert errors["x"] == "encode: x is no letter; use letters"
    assert "ZeroDivisionError: y" in errors["y"]
    assert "prompt and budget need 561 tokens" in errors["c" * 500]
    assert all(found[q].outcome.status == "error" for q in errors)
    ends = {e.problem: e for e in events if isinstance(e, ProblemEnded)}
    assert len(ends) == len(questions) and sum(bool(e.error) for e in ends.values()) == 3
    assert not any(isinstance(e, Replanned) for e in events)


def test_a_tokenizer_that_fails_now_and_then_costs_nothing() -> None:
    """Whatever call to a device fails, it is as if it had not been made."""

    class Flaky(LetterBackend):
        def fail(self) -> None:
            Flaky.calls += 1
            if Flaky.calls % 5 == 0:
                raise ZeroDivisionError("oh")

        def encode(self, name: str, text: str) -> tuple[int, ...]:
            self.fail()
            return super().encode(name, text)

        def decode(self, name: str, tokens: Sequence[int]) -> str:
            self.fail()
            return super().decode(name, tokens)

    plan = eager(FLOW)
    Flaky.calls = 0
    assert committed(run_letters(plan, QUESTIONS, make=Flaky)[0]) == committed(run_letters(plan, QUESTIONS)[0])
    assert Flaky.calls > 10
