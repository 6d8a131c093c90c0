"""Faults that come back: of one op, of a tokenizer, of a text; and changes of devices that follow each other."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
from planner_cases import (
    APART,
    DRAFT,
    LETTERS,
    PRM,
    TARGET,
    THREE,
    LetterBackend,
    Letters,
    LinearCosts,
    committed,
    plan_anew,
    quick_plan,
    run_letters,
)
from test_faults import QUESTIONS, eager, on_what_is_left, seeded

from planner.api import plan as make_plan
from planner.api import replanner
from planner.cost import CostEntry, CostOp, CostTable
from planner.errors import UserError
from planner.line_file import LineFile
from planner.plan import Plan
from planner.policy import Status
from planner.report import report
from planner.runtime import child
from planner.runtime.backend import ModelInfo, Output, Work
from planner.runtime.engine import RETRIES, Engine, Load
from planner.runtime.faults import DeviceFault, Fault, FaultKind, without
from planner.runtime.watch import Live, Margins, _Aside
from planner.runtime.worker import VirtualWorkers, modelled
from planner.trace import Chunk, Event, Faulted, ProblemEnded, ProblemStarted, Replanned
from planner.workflow import Role, RoleName, Workflow

FLOW = seeded(1)
OTHER = (".", "c", "b", "a", "ab", "c.")
"""The letters by other ids, some in pairs."""
APART_TOKENS = {DRAFT: LETTERS, PRM: OTHER, TARGET: ("b", "a", "c", ".")}


def solve(
    plan: Plan, backends: Mapping[str, LetterBackend], load: Load | None = None, questions: tuple[str, ...] = QUESTIONS
) -> tuple[list[Any], list[Event]]:
    events: list[Event] = []
    workers = VirtualWorkers(modelled(LinearCosts()), backends)
    engine = Engine(plan, workers, Letters(), events.append, replan=on_what_is_left(plan))
    found = {s.problem.question: s for s in engine.solve_all(map(Letters().parse, questions), load)}
    return [found[q] for q in questions], events


# --- what fails again and again ---


@dataclass
class FailsAt(LetterBackend):
    """Cannot do one op, and all others."""

    op: str = ""

    def run(self, work: Work) -> Output:
        output = super().run(work)
        if self.op and work.label.startswith(f"{self.op}:"):
            self.held[work.role, work.sequence] += (0, 1, 0)
            raise ZeroDivisionError("oh")
        return output


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("elsewhere", [{}, {DRAFT: "c"}])
@pytest.mark.parametrize("op", ["PREFILL", "TRANSFER", "DRAFT", "VERIFY", "REFINE", "BACKTRACK", "SYNC"])
def test_a_device_that_never_does_an_op_is_lost_whatever_else_it_does(
    op: str, elsewhere: dict[RoleName, str], concurrency: int
) -> None:
    """The repair of what it forgot is work that it does well, and no reason to go on for ever."""
    lost = 0
    for seed in range(4):
        plan = replace(eager(seeded(seed)), prefill_on=elsewhere)
        for broken in "abc":
            backends = {d: FailsAt(op=op if d == broken else "") for d in "abc"}
            solved, events = solve(plan, backends, Load(concurrency))
            assert committed(solved) == committed(run_letters(quick_plan(seeded(seed)), QUESTIONS)[0])
            told = [e for e in events if isinstance(e, Faulted)]
            assert len(told) <= (RETRIES + 1) * 6, "it is tried for long"
            assert all(e.device == broken and e.busy_us > 0 for e in told)
            lost += sum(e.lost for e in told)
    assert lost >= 2 or (op == "TRANSFER" and not elsewhere)


@pytest.mark.parametrize("at", range(0, 42, 2))
def test_a_tokenizer_that_fails_once_costs_nothing_wherever_it_is(at: int) -> None:
    """Roles with tokens of their own read steps as text, amid the run."""
    calls = 0

    class Once(LetterBackend):
        def encode(self, name: str, text: str) -> tuple[int, ...]:
            nonlocal calls
            calls += 1
            if calls == at + 1:
                raise MemoryError("oh")
            return super().encode(name, text)

    for plan in (quick_plan(FLOW, placement=APART), eager(FLOW)):
        calls = 10**9
        right = solve(plan, {d: Once(APART_TOKENS) for d in "abc"})[0]
        calls = 0
        found, events = solve(plan, {d: Once(APART_TOKENS) for d in "abc"})
        assert committed(found) == committed(right)
        assert sum(isinstance(e, Faulted) for e in events) == 1 and calls > at


def test_a_device_whose_tokenizer_is_broken_is_taken_out_and_no_problem_is_blamed() -> None:
    class Broken(LetterBackend):
        def encode(self, name: str, text: str) -> tuple[int, ...]:
            raise ZeroDivisionError("no vocabulary")

    for broken in "abc":
        backends = {d: Broken() if d == broken else LetterBackend() for d in "abc"}
        solved, events = solve(quick_plan(FLOW, placement=APART), backends)
        assert committed(solved) == committed(run_letters(quick_plan(FLOW), QUESTIONS)[0])
        assert [e.device for e in events if isinstance(e, Faulted) and e.lost] == [broken]


def test_a_tokenizer_that_fails_for_a_moment_costs_no_problem() -> None:
    calls = 0

    class Moment(LetterBackend):
        def encode_prompt(self, name: str, text: str) -> tuple[int, ...]:
            nonlocal calls
            calls += 1
            if 2 <= calls <= 4:
                raise MemoryError("for a moment")
            return super().encode_prompt(name, text)

    solved, _ = solve(quick_plan(FLOW, placement=APART), {d: Moment() for d in "abc"})
    assert committed(solved) == committed(run_letters(quick_plan(FLOW), QUESTIONS)[0])


@pytest.mark.parametrize("seed", range(3))
def test_a_step_at_which_a_tokenizer_fails_ends_its_problem_and_takes_no_device_out(seed: int) -> None:
    class Fails(LetterBackend):
        def encode(self, name: str, text: str) -> tuple[int, ...]:
            if name == PRM and "cc" in text:
                raise TypeError("a fault of the tokenizer's own")
            return super().encode(name, text)

    for plan in (quick_plan(seeded(seed), placement=APART), eager(seeded(seed))):
        backends = {d: Fails(APART_TOKENS) for d in "abc"}
        solved, events = solve(plan, backends, Load(2), ("a", "b", "ab", "ba", "aab", "bba", "abab", "bab"))
        assert {s.outcome.status for s in solved} > {Status.ERROR}
        assert all("a fault of the tokenizer's own" in str(s.error) for s in solved if s.error)
        assert not any(e.lost for e in events if isinstance(e, Faulted))


# --- a step that a role cannot read ---


class NoC(LetterBackend):
    """The PRM's vocabulary lacks a letter that the others write."""

    def encode(self, name: str, text: str) -> tuple[int, ...]:
        if name == PRM and "c" in text:
            raise UserError("c is no letter", where="encode", mend="use letters")
        return super().encode(name, text)


def no_c() -> dict[str, LetterBackend]:
    return {d: NoC(APART_TOKENS | {PRM: (".", "b", "a")}) for d in "abc"}


@pytest.mark.parametrize("seed", range(6))
def test_a_step_that_a_role_cannot_read_ends_its_problem_and_by_every_plan_the_same(seed: int) -> None:
    questions = ("a", "b", "ab", "ba", "aab", "bba")
    ahead = eager(seeded(seed))
    plans = [quick_plan(seeded(seed), placement=APART), ahead, replace(ahead, chunk_tokens=1)]
    runs = [solve(plan, no_c(), Load(n), questions) for n, plan in enumerate(plans, 1)]
    assert len({str(committed(solved)) for solved, _ in runs}) == 1
    for solved, events in runs:
        errors = [s for s in solved if s.outcome.status is Status.ERROR]
        assert errors, "no step had the letter"
        assert all(str(s.error) == "encode: c is no letter; use letters" for s in errors)
        assert {e.error for e in events if isinstance(e, ProblemEnded) if e.status == "error"} == {str(errors[0].error)}
        assert not any(isinstance(e, Faulted) for e in events)


# --- one change after another ---


@dataclass
class MayRefuse(LetterBackend):
    """Loads nothing once it is broken."""

    broken: bool = False

    def load(self, name: str, role: Role, delimiter: str) -> ModelInfo:
        if self.broken:
            raise MemoryError("no room")
        return super().load(name, role, delimiter)


def changed(plan: Plan, change: Any, replan: bool, load: Load | None = None, after: int = 8) -> Engine:
    """Solve, and have something change while a chunk runs."""
    left = after

    def note(event: Event) -> None:
        nonlocal left
        left -= isinstance(event, Chunk)
        if left == 0 and isinstance(event, Chunk):
            change(engine)

    workers = VirtualWorkers(modelled(LinearCosts()), {d: MayRefuse() for d in "abc"})
    engine = Engine(plan, workers, Letters(), note, replan=on_what_is_left(plan) if replan else None)
    found = {s.problem.question: s for s in engine.solve_all(map(Letters().parse, QUESTIONS), load)}
    assert left < 0
    assert committed([found[q] for q in QUESTIONS]) == committed(run_letters(quick_plan(FLOW), QUESTIONS)[0])
    return engine


@pytest.mark.parametrize("replan", [True, False])
def test_a_plan_that_is_asked_for_goes_before_one_for_the_devices_that_are_left(replan: bool) -> None:
    mine = replace(eager(FLOW), name="mine", placement={DRAFT: "b", PRM: "b", TARGET: "c"})

    def before(engine: Engine) -> None:
        engine.swap(mine)
        engine.remove("a")

    def after(engine: Engine) -> None:
        engine.remove("a")
        engine.swap(mine)

    for change in (before, after):
        assert changed(eager(FLOW), change, replan).plan == mine


@pytest.mark.parametrize("replan", [True, False])
def test_a_device_that_is_back_at_once_was_never_gone(replan: bool) -> None:
    def blink(engine: Engine) -> None:
        engine.remove("a")
        engine.add("a")

    assert set(changed(eager(FLOW), blink, replan).plan.placement.values()) == set("abc")


def test_problems_that_arrive_while_a_change_is_due_do_not_hold_it_up() -> None:
    for after in range(2, 30):
        changed(eager(FLOW), lambda engine: engine.remove("b"), True, Load(8, (0, 40, 90)), after)


def test_a_plan_that_is_due_and_loses_an_idle_device_is_given_up() -> None:
    there = {DRAFT: "a", PRM: "a", TARGET: "b"}
    plan = quick_plan(FLOW, placement=there)
    mine = replace(plan, name="mine", placement={**there, TARGET: "c"})

    def swap_and_remove(engine: Engine) -> None:
        engine.swap(mine)
        engine.remove("c")

    def swap(engine: Engine) -> None:
        engine.swap(mine)
        engine.workers._backends["c"].broken = True

    for replan in (True, False):
        for change in (swap_and_remove, swap):
            assert "c" not in changed(plan, change, replan).plan.places


def test_a_change_that_is_due_while_nothing_runs_is_taken_up_at_once() -> None:
    plan = eager(FLOW)
    started: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, ProblemStarted) and not started:
            started.append(event.problem)
            engine.remove("a")

    workers = VirtualWorkers(modelled(LinearCosts()), {d: LetterBackend() for d in "abc"})
    engine = Engine(plan, workers, Letters(), note, replan=on_what_is_left(plan))
    found = list(engine.solve_all(map(Letters().parse, QUESTIONS), Load(deadline_us=100_000)))
    assert committed(found) == committed(run_letters(quick_plan(FLOW), QUESTIONS)[0])


class Loading(VirtualWorkers):
    """Knows which models each device holds; one device refuses one of them."""

    def __init__(self, refuses: tuple[str, RoleName]) -> None:
        super().__init__(modelled(LinearCosts()), {d: LetterBackend() for d in "abc"})
        self.refuses, self.held = refuses, set[tuple[str, RoleName]]()

    def load(self, placed: Mapping[RoleName, tuple[str, Role]], delimiter: str) -> dict[RoleName, ModelInfo]:
        for role, (device, _) in placed.items():
            if (device, role) != self.refuses:
                self.held.add((device, role))
        if self.refuses in {(device, role) for role, (device, _) in placed.items()}:
            raise DeviceFault(Fault(FaultKind.REFUSED, "no room"), self.refuses[0])
        return super().load(placed, delimiter)

    def unload(self, device: str, name: RoleName) -> None:
        self.held.discard((device, name))

    def drop(self, device: str) -> None:
        super().drop(device)
        self.held = {(d, role) for d, role in self.held if d != device}


@pytest.mark.parametrize("refuses", [("a", DRAFT), ("b", PRM), ("c", TARGET)])
def test_no_model_stays_where_another_device_refused_its_own(refuses: tuple[str, RoleName]) -> None:
    workers = Loading(refuses)
    plan = quick_plan(FLOW, placement=APART)
    engine = Engine(plan, workers, Letters(), lambda event: None, replan=on_what_is_left(plan))
    assert {(place, role) for role, place in engine.plan.placement.items()} == workers.held


# --- the report ---


def test_a_chunk_that_failed_has_kept_its_device_busy() -> None:
    plan = eager(FLOW)
    solved, events = solve(plan, {d: FailsAt(op="DRAFT" if d == "a" else "") for d in "abc"})
    told = [e for e in events if isinstance(e, Faulted)]
    without = [e for e in events if not isinstance(e, Faulted)]
    failed, free = ({d.device: d for d in report(plan, found).devices} for found in (events, without))
    assert failed["a"].busy_us - free["a"].busy_us == sum(e.busy_us for e in told) > 0
    assert failed["a"].wasted_us - free["a"].wasted_us == sum(e.busy_us for e in told)
    assert len(solved) == len(QUESTIONS)


def test_a_device_that_reads_prompts_by_a_later_plan_is_in_the_report() -> None:
    two = {DRAFT: "a", PRM: "b", TARGET: "b"}
    plan = quick_plan(FLOW, placement=two)
    events: list[Event] = []
    workers = VirtualWorkers(modelled(LinearCosts()), {d: LetterBackend() for d in "abc"})
    engine = Engine(plan, workers, Letters(), events.append)
    engine.swap(replace(plan, prefill_on={DRAFT: "c"}))
    engine.solve(Letters().parse("abc"))
    assert any(isinstance(e, ProblemStarted) for e in events)
    assert {d.device: d.busy_us > 0 for d in report(plan, events).devices} == {"a": True, "b": True, "c": True}


# --- a plan that is made aside ---


def test_a_planner_that_stops_in_the_middle_of_its_plan_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "PIPE_TIMEOUT_S", 1)
    aside = _Aside(plan_anew, quick_plan(FLOW).machine, FLOW, {})
    aside._process.kill()
    aside._ours.close()
    for ends in (False, True):
        aside._ours, theirs = Pipe()
        child.limit(aside._ours)
        os.write(theirs.fileno(), struct.pack("!i", 1000) + b"the rest never comes")
        if ends:
            theirs.close()
        assert aside.ready() and aside.result() is None


def test_costs_that_another_plan_was_not_made_by_are_off_again() -> None:
    """A plan for the devices that are left knows nothing of what the run has shown."""
    plan = quick_plan(FLOW, placement=APART)
    watch = Live(LinearCosts(otherwise_us=10), plan_anew, Margins(samples=4))

    def slow_chunks() -> None:
        for n in range(5):
            watch.see(Chunk("p", "a", "draft", "DRAFT", 0, "r", 1000 * n, 1000 * n + 300, 0, 10, 5, False))

    slow_chunks()
    off = "work of draft on a takes 3.00 times as long as the plan assumes, off by more than 1.5 times"
    assert watch.off(plan) == off
    watch._seen, watch._proposed = {(DRAFT, "a"): 3.0}, "mine"
    watch.see(Replanned(9, "off", "mine", "auto", {}))
    slow_chunks()
    assert watch.off(plan) == ""
    watch.see(Replanned(9, "device c is lost", "another", "auto", {}))
    slow_chunks()
    assert watch.off(plan) != ""


# --- files and figures ---


def test_a_line_that_could_not_be_written_whole_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = LineFile(tmp_path / "lines", new=True)
    file.write({"n": 1})
    whole = file._file

    class Full:
        """Has room for three bytes more."""

        left = 3

        def __getattr__(self, name: str) -> Any:
            return getattr(whole, name)

        def write(self, data: memoryview) -> int:
            if not self.left:
                raise OSError(28, "No space left on device")
            self.left, written = 0, whole.write(data[: self.left])
            return written

    monkeypatch.setattr(file, "_file", Full())
    with pytest.raises(UserError, match="make room on the disk"):
        file.write({"n": 2})
    monkeypatch.setattr(file, "_file", whole)
    file.write({"n": 3})
    file.close()
    assert (tmp_path / "lines").read_text() == '{"n": 1}\n{"n": 3}\n'


def test_a_cost_table_of_lost_devices_keeps_what_is_left() -> None:
    left = without(THREE, "b")
    entries = [CostEntry(DRAFT, d, CostOp.DECODE, 5.0, "here") for d in ("a", "b", "b+c", "a+c")]
    found = CostTable(tuple(entries), "measured").on(left)
    assert found is not None and [e.device for e in found.entries] == ["a", "a+c"]
    assert CostTable((entries[1],)).on(left) is None


def test_a_run_with_measured_costs_goes_on_without_a_device() -> None:
    flow = Workflow.load(Path(__file__).parent.parent / "examples" / "sums.yaml")
    roles = (DRAFT, PRM, TARGET)
    entries = [CostEntry(r, f"cpu{n}", CostOp.PREFILL, 20.0, "here") for r in roles for n in (0, 1)]
    entries += [CostEntry(r, f"cpu{n}", CostOp.DECODE, 90.0, "here") for r in (DRAFT, TARGET) for n in (0, 1)]
    table = CostTable(tuple(entries), "measured")
    plan = make_plan(flow, "this-computer", "serial", costs=table)
    again = replanner(plan, table)
    assert set(again(without(plan.machine, "cpu0"), flow).placement.values()) == {"cpu1"}


def test_all_devices_that_refuse_at_once_are_told_of() -> None:
    fault = Fault(FaultKind.HUNG, "it did not load")
    both = DeviceFault(fault, "a")
    both.others = (DeviceFault(fault, "b"),)

    class Hang(VirtualWorkers):
        def load(self, placed: Mapping[RoleName, tuple[str, Role]], delimiter: str) -> dict[RoleName, ModelInfo]:
            if any(device in "ab" for device, _ in placed.values()):
                raise both
            return super().load(placed, delimiter)

    plan, events = quick_plan(FLOW, placement=APART), []
    workers = Hang(modelled(LinearCosts()), {d: LetterBackend() for d in "abc"})
    engine = Engine(plan, workers, Letters(), events.append, replan=on_what_is_left(plan))
    assert set(engine.plan.placement.values()) == {"c"}
    assert [e.device for e in events if isinstance(e, Faulted) and e.lost] == ["a", "b"]


# --- several runs, deadlines, arrivals ---


def test_what_later_runs_of_a_vote_read_again_counts_as_used() -> None:
    """Each run has a root of its own, which its prompts are named after."""
    flow = replace(seeded(1), policy=replace(seeded(1).policy, vote=3))
    plan = quick_plan(flow, placement=APART, prefill_on={DRAFT: "c"}, priorities={})
    _, events = run_letters(plan, ("cab",))
    last = sum(isinstance(e, Chunk) and e.device == "a" for e in events) - 1

    class FailsLate(LetterBackend):
        calls = 0

        def run(self, work: Work) -> Output:
            self.calls += 1
            if self.calls == last:
                raise ZeroDivisionError("oh")
            return super().run(work)

    _, events = solve(plan, {"a": FailsLate(), "b": LetterBackend(), "c": LetterBackend()}, questions=("cab",))
    (end,) = (e for e in events if isinstance(e, ProblemEnded))
    read = [e for e in events if isinstance(e, Chunk) and e.op in ("PREFILL", "TRANSFER") and e.role == DRAFT]
    assert len(read) > 2 and {e.request for e in read} <= set(end.used)


def test_a_deadline_amid_a_vote_gives_the_answer_of_the_first_run() -> None:
    hits = 0
    for seed in range(12):
        alone = run_letters(quick_plan(seeded(seed), placement=APART), ("cab",))[0][0]
        flow = replace(seeded(seed), policy=replace(seeded(seed).policy, vote=3))
        load = Load(deadline_us=alone.latency_us + 5)
        backends = {d: LetterBackend() for d in "abc"}
        (found,), _ = solve(quick_plan(flow, placement=APART), backends, load, questions=("cab",))
        if found.outcome.status is Status.DEADLINE:
            assert (found.answer, found.steps, found.correct) == (alone.answer, alone.steps, alone.correct)
            hits += found.answer is not None
    assert hits


def test_nothing_is_begun_for_a_problem_whose_time_is_up() -> None:
    backends = {d: LetterBackend() for d in "abc"}
    questions = tuple("cab"[: 1 + n % 3] * (1 + n // 3) for n in range(12))
    load = Load(1, [0] * len(questions), deadline_us=500)
    _, events = solve(quick_plan(FLOW, placement=APART), backends, load, questions=questions)
    late = {e.problem for e in events if isinstance(e, ProblemStarted) and e.at_us >= e.arrived_us + 500}
    assert late and not any(isinstance(e, Chunk) and e.problem in late for e in events)
    assert late < {e.problem for e in events if isinstance(e, ProblemEnded) and e.status == "deadline"}


def test_problems_come_in_the_order_of_their_times() -> None:
    backends = {d: LetterBackend() for d in "abc"}
    _, events = solve(quick_plan(FLOW, placement=APART), backends, Load(1, [9000, 0, 4000]), questions=("a", "bc", "b"))
    starts = [e for e in events if isinstance(e, ProblemStarted)]
    assert [e.arrived_us for e in starts] == [0, 4000, 9000]
    with pytest.raises(UserError, match="there are 1 arrivals for 2 problems"):
        solve(quick_plan(FLOW, placement=APART), backends, Load(1, [0]), questions=("a", "bc"))


def test_work_that_hangs_after_the_deadline_is_part_of_the_time_that_devices_were_there() -> None:
    class Hangs(LetterBackend):
        left = 0

        def run(self, work: Work) -> Output:
            self.left -= 1
            if self.left == 0:
                raise DeviceFault(Fault(FaultKind.HUNG, "hung"))
            return super().run(work)

    plan = quick_plan(FLOW, placement=APART, priorities={})
    late = 0
    for at in range(2, 16):
        broken = Hangs()
        broken.left = at
        backends = {"a": broken, "b": LetterBackend(), "c": LetterBackend()}
        (found,), events = solve(plan, backends, Load(deadline_us=600), questions=("cab",))
        late += found.outcome.status is Status.DEADLINE and any(isinstance(e, Faulted) for e in events)
        assert all(0 <= use.utilisation <= 1 for use in report(plan, events).devices)
    assert late


def test_a_tokenizer_that_hangs_while_it_is_tried_is_lost() -> None:
    """Its late answer must not be taken for that to another call."""

    class Slow(LetterBackend):
        def encode_prompt(self, name: str, text: str) -> tuple[int, ...]:
            if text == Letters.delimiter:
                raise DeviceFault(Fault(FaultKind.HUNG, "no answer"))
            if text.startswith("bc"):
                raise ZeroDivisionError("oh")
            return super().encode_prompt(name, text)

    plan = quick_plan(FLOW, placement=APART, priorities={})
    backends = {"a": LetterBackend(), "b": LetterBackend(), "c": Slow()}
    solved, events = solve(plan, backends, Load(2), questions=("cab", "bc", "ab"))
    assert committed(solved) == committed(run_letters(plan, ("cab", "bc", "ab"))[0])
    assert [e.fault for e in events if isinstance(e, Faulted) and e.lost] == ["hung"]
