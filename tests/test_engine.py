"""The engine: plans never change answers, order reaches devices, waste is told, faults come out once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from planner_cases import (
    APART,
    DRAFT,
    LETTERS,
    PRM,
    SEEDS,
    TARGET,
    THREE,
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

from planner.errors import UserError
from planner.graph import Op
from planner.plan import Plan
from planner.policy import Node, Request, Result, Status, Step, reason
from planner.problems.base import Problem
from planner.runtime.backend import Output, Work
from planner.runtime.engine import Engine
from planner.runtime.worker import VirtualWorkers, modelled
from planner.simulate import SampledBackend, _drawn, _SampledProblems
from planner.trace import Chunk, Decided, Event, ProblemEnded, ProblemStarted, RunStarted
from planner.workflow import Budget, Policy, Sampling, Workflow

# --- plans never change answers ---


def plans_of(flow: Workflow, seed: int, count: int = 4) -> list[Plan]:
    random = Random(seed)
    return [
        quick_plan(flow, "serial"),
        quick_plan(flow, "overlapped"),
        *(random_plan(random, flow) for _ in range(count)),
    ]


def costs(seed: int) -> LinearCosts:
    random = Random(seed)
    return LinearCosts({(r, d.name): random.randint(1, 90) for r in (DRAFT, PRM, TARGET) for d in THREE.devices})


def reference(flow: Workflow, question: str) -> tuple[str, str | None, tuple[Step, ...]]:
    """What is committed if each request is worked out from the prompt on: no engine, no cache, no plan."""
    problems, made = Letters(), LetterBackend()
    problem = problems.parse(question)

    def ask(request: Request) -> Result:
        path = request.node.path
        feed = made.encode(request.role, problems.prompt(problem)) + tuple(t for s in path for t in s.tokens)
        fresh = LetterBackend()
        if request.op is Op.VERIFY:
            question = made.encode(TARGET, flow.policy.score_prompt) if request.role is TARGET else ()
            return fresh.run(Work(request.role.value, "0", 0, feed, score=(len(feed) - 1,), ask=question)).scores[0]
        limit = min(flow.budget.step_tokens, flow.budget.tokens - sum(len(s.tokens) for s in path))
        key = request.sampling_key(flow.sampling.seed)
        tokens = fresh.run(Work(request.role.value, "0", 0, feed, limit, key=key)).tokens
        return Step(fresh.decode(request.role, tokens).partition(".")[0], tokens, request.role)

    policy = reason(flow, Node(None, None, problem.key), problems.answer, lambda decision: None)
    need = next(policy)
    while True:
        try:
            need = policy.send(ask(need))
        except StopIteration as stop:
            return stop.value.status.value, stop.value.answer, tuple(stop.value.node.path)


def same_by_every_plan(flow: Workflow, seed: int, plans: int, questions: Sequence[str] = ("a", "bc")) -> None:
    expected = [reference(flow, q) for q in questions]
    for plan in plans_of(flow, seed, plans):
        assert committed(run_letters(plan, questions, costs=costs(seed))[0]) == expected


@given(workflows(), SEEDS)
@settings(max_examples=30, deadline=None)
def test_plans_never_change_what_is_committed(flow: Workflow, seed: int) -> None:
    same_by_every_plan(flow, seed, plans=4)


@given(workflows(), SEEDS)
@settings(max_examples=25, deadline=None)
def test_plans_never_change_what_is_drawn(flow: Workflow, seed: int) -> None:
    found = []
    for plan in plans_of(_drawn(flow, seed), seed):
        backend = SampledBackend(flow.statistics)
        workers = VirtualWorkers(modelled(costs(seed)), dict.fromkeys("abc", backend))
        engine = Engine(plan, workers, _SampledProblems(), lambda event: None)
        found.append(committed([engine.solve(Problem("sampled", str(n), "")) for n in range(3)]))
    assert all(f == found[0] for f in found)


@pytest.mark.slow
@given(workflows(), SEEDS)
@settings(max_examples=500, deadline=None)
def test_plans_never_change_what_is_committed_at_length(flow: Workflow, seed: int) -> None:
    same_by_every_plan(flow, seed, plans=8, questions="abc")


class StaleFirst(LetterBackend):
    """Leaves the first token that it should forget in the draft's cache: all plans are wrong in the same way."""

    def cut(self, held: list[int], work: Work) -> None:
        del held[work.keep + (work.role == DRAFT) :]


class StaleLast(LetterBackend):
    """Leaves the last token that it should forget in the draft's cache: how far a plan runs ahead shows."""

    def cut(self, held: list[int], work: Work) -> None:
        held[work.keep :] = held[-1:] if work.role == DRAFT and len(held) > work.keep else []


LIVELY = workflow(accept=0.6, accept_refined=0.5, budget=Budget(6, 60, 12))


@pytest.mark.parametrize("broken", [StaleFirst, StaleLast])
def test_one_stale_token_in_one_cache_is_found_out(broken: type[LetterBackend]) -> None:
    wrong = differs = 0
    for seed in range(8):
        flow = replace(LIVELY, sampling=Sampling(1.0, seed))
        # A cache that moves is looked at on its way: one that stays is not.
        plans = [replace(plan, prefill_on={}) for plan in plans_of(flow, seed)]
        found = [committed(run_letters(p, make=broken)[0]) for p in plans]
        wrong += found[0] != [reference(flow, q) for q in ("a", "bc")]
        differs += any(f != found[0] for f in found)
    assert wrong >= 4
    assert broken is StaleFirst or differs >= 4


def test_the_seed_changes_what_is_committed() -> None:
    runs = [committed(run_letters(quick_plan(replace(LIVELY, sampling=Sampling(1.0, s))))[0]) for s in range(6)]
    assert len({str(r) for r in runs}) > 3


def test_one_problem_does_not_depend_on_the_ones_before() -> None:
    plan = quick_plan(LIVELY, "overlapped")
    together = committed(run_letters(plan, ("a", "bc", "ccc", "a"))[0])
    apart = [committed(run_letters(plan, (q,))[0])[0] for q in ("a", "bc", "ccc", "a")]
    assert together == apart


def test_every_turn_of_the_policy_is_met() -> None:
    """The cases above would say little if nothing was ever refused."""
    turns = set()
    for seed in range(12):
        flow = replace(LIVELY, sampling=Sampling(1.0, seed))
        turns |= {e.event for e in run_letters(quick_plan(flow, "overlapped"))[1] if isinstance(e, Decided)}
    assert turns == {"accepted", "refined", "kept weak", "backtracked"}


# --- order reaches the devices ---


def test_other_priorities_are_another_order_of_chunks_and_the_same_answer() -> None:
    together = dict.fromkeys(APART, "a")
    kinds = ("PREFILL@0", "DRAFT@0", "VERIFY@0", "REFINE@0", "DRAFT@1", "VERIFY@1")
    orders = [kinds, kinds[::-1], ("REFINE@0", *kinds), ()]
    seen, answers, events = [], [], []
    for order in orders:
        plan = quick_plan(
            LIVELY, placement=together, draft_ahead=1, prefetch_refine=True, priorities={"a": order}, chunk_tokens=4
        )
        solved, events = run_letters(plan, ("bc",))
        seen.append([(c.op, c.round) for c in chunks(events)])
        answers.append(committed(solved))
    assert all(a == answers[0] for a in answers)
    assert len({str(s) for s in seen}) == len(orders)
    # The target's prefetch listed first is what the device does first.
    assert seen[2][0] == ("REFINE", 0)
    assert not any(c.speculative for c in chunks(events))


def test_a_device_does_one_thing_at_a_time() -> None:
    for seed in range(6):
        _, events = run_letters(random_plan(Random(seed), LIVELY), costs=costs(seed))
        for name in "abc":
            mine = sorted((c.start_us, c.end_us) for c in chunks(events) if c.device == name)
            assert all(a[1] <= b[0] for a, b in pairwise(mine))


def chunks(events: Sequence[Event]) -> list[Chunk]:
    return [e for e in events if isinstance(e, Chunk)]


# --- the trace tells what happened ---


def test_a_trace_by_hand() -> None:
    plan = quick_plan(workflow(Policy.DRAFT_ONLY, budget=Budget(2, 50, 6)), placement={DRAFT: "a"}, chunk_tokens=4)
    (solved,), events = run_letters(plan, ("abc",), costs=LinearCosts(otherwise_us=10))
    assert isinstance(events[0], RunStarted) and events[0].plan == plan.hash
    assert isinstance(events[1], ProblemStarted) and events[1].question == "abc"
    assert isinstance(events[-1], ProblemEnded)
    assert events[-1].steps == solved.steps == tuple(s.text.upper() for s in solved.outcome.node.path)
    assert events[-1].at_us - events[1].at_us == solved.latency_us
    first = chunks(events)[0]
    assert (first.tokens_in, first.context, first.start_us) == (4, 0, 0)
    assert first.end_us == 10 * 4 // 10 + 10 * first.tokens_out
    written = sum(len(s.tokens) for s in solved.outcome.node.path)
    assert sum(c.tokens_out for c in chunks(events)) == written
    assert not any(c.speculative for c in chunks(events))
    assert all(c.tokens_out <= 4 for c in chunks(events))


def test_serial_wastes_nothing_but_what_the_policy_refused() -> None:
    for name, wastes in (("serial", False), ("overlapped", True)):
        _, events = run_letters(quick_plan(LIVELY, name), ("a", "bc", "c"))
        used = {(e.problem, u) for e in events if isinstance(e, ProblemEnded) for u in e.used}
        wasted = [c for c in chunks(events) if (c.problem, c.request) not in used]
        assert bool(wasted) is wastes
        assert all(c.speculative for c in wasted)


def test_a_cache_catches_up_from_the_common_prefix() -> None:
    plan = quick_plan(LIVELY, placement=APART)
    backends = {d: LetterBackend() for d in "abc"}
    engine = Engine(plan, VirtualWorkers(modelled(LinearCosts()), backends), Letters(), lambda event: None)
    solved = engine.solve(Letters().parse("bc"))
    path = [t for s in solved.outcome.node.path for t in s.tokens]
    whole = [*LetterBackend().encode("draft", "bc."), *path]
    for role, name in APART.items():
        log, held = backends[name].log, backends[name].held[role, "0"]
        assert log[0].keep == 0 and log[0].feed[:3] == tuple(whole[:3])
        # Nothing is read again that is there: later feeds never begin with the prompt.
        assert all(w.keep >= 3 for w in log[1:])
        common = [a == b for a, b in zip(held, whole, strict=False)]
        assert common[:3] == [True] * 3
    # The verifier reads each drafted step once.
    fed = sum(len(w.feed) for w in backends["b"].log)
    assert fed >= len(whole) - len(path)


@given(workflows(), SEEDS)
@settings(max_examples=30, deadline=None)
def test_budgets_are_kept(flow: Workflow, seed: int) -> None:
    solved, _ = run_letters(random_plan(Random(seed), flow), ("a",))
    path = solved[0].outcome.node.path
    assert 1 <= len(path) <= flow.budget.steps
    assert sum(len(s.tokens) for s in path) <= flow.budget.tokens
    assert all(1 <= len(s.tokens) <= flow.budget.step_tokens for s in path)
    assert all(s.tokens.count(LETTERS.index(".")) <= 1 and "." not in s.text for s in path)


def test_statuses_are_met() -> None:
    found = set()
    for seed in range(30):
        flow = replace(LIVELY, sampling=Sampling(1.0, seed), budget=Budget(4, 12 + seed, 12))
        found |= {s.outcome.status for s in run_letters(quick_plan(flow, "overlapped"))[0]}
    assert found >= {Status.ANSWER, Status.STEPS, Status.TOKENS, Status.REPEAT}


# --- text between roles ---

OTHER = (".", "c", "b", "a", "ab", "c.")
"""The same letters by other ids, some in pairs."""


class TwoVocabularies(LetterBackend):
    """The target has a tokenizer of its own."""

    def __init__(self) -> None:
        super().__init__({DRAFT: LETTERS, PRM: LETTERS, TARGET: OTHER})


@given(SEEDS)
@settings(max_examples=15, deadline=None)
def test_roles_with_other_tokenizers_exchange_text(seed: int) -> None:
    flow = replace(LIVELY, sampling=Sampling(1.0, seed))
    found = [committed(run_letters(p, make=TwoVocabularies)[0]) for p in plans_of(flow, seed, 3)]
    assert all(f == found[0] for f in found)


def test_what_a_role_reads_is_the_text_in_its_own_tokens() -> None:
    plan = quick_plan(LIVELY, placement=APART)
    backends = {d: TwoVocabularies() for d in "abc"}
    engine = Engine(plan, VirtualWorkers(modelled(LinearCosts()), backends), Letters(), lambda event: None)
    found = 0
    for question in ("a", "bc", "cab"):
        solved = engine.solve(Letters().parse(question))
        path = solved.outcome.node.path
        for role, name in APART.items():
            text = backends[name].decode(role, backends[name].held[role, "0"])
            assert text.startswith(question + ".")
        found += sum(s.source is TARGET for s in path)
        assert all(s.text.isalpha() or not s.text for s in path)
    assert found


# --- faults ---


class Fails(LetterBackend):
    """Goes wrong on its third chunk."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def run(self, work: Work) -> Output:
        if len(self.log) == 2:
            raise self.error
        return super().run(work)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (UserError("the fan stopped", mend="clean it"), "raised: the fan stopped; clean it"),
        (ZeroDivisionError("of ours"), "raised: ZeroDivisionError: of ours"),
    ],
)
def test_a_backend_that_goes_on_failing_ends_the_run_with_one_sentence(error: Exception, says: str) -> None:
    with pytest.raises(UserError) as caught:
        run_letters(quick_plan(LIVELY, placement=APART), make=lambda: Fails(error))
    device, role = next((d, r) for r, d in APART.items() if f"device {d} is lost" in str(caught.value))
    assert str(caught.value) == (
        f"machine test: device {device} is lost ({says}), and there is nobody to plan anew for role {role};"
        " mend the device, or plan for another machine"
    )


class Answers(LetterBackend):
    """Gives what no backend may."""

    def __init__(self, output: Output, op: str) -> None:
        super().__init__()
        self.output, self.op = output, op

    def run(self, work: Work) -> Output:
        given = super().run(work)
        return self.output if (self.op == "write") == (work.max_new > 0) else given


@pytest.mark.parametrize(
    ("output", "op", "says"),
    [
        (Output(), "write", "device a is lost (bad output: 0 tokens came where 1 to 8 were asked for)"),
        (Output((1,) * 9), "write", "device a is lost (bad output: 9 tokens came where 1 to 8"),
        (Output((-1,)), "write", "device a is lost (bad output: (-1,) are no token ids)"),
        (Output(), "score", "device b is lost (bad output: 0 scores came where 1 were asked for)"),
        (Output((1,), scores=(0.5,)), "score", "1 tokens came where none were asked for"),
        (Output(scores=(0.5, 0.5)), "score", "2 scores came where 1 were asked for"),
        (Output(scores=(float("nan"),)), "score", "the scores (nan,) are not all from 0 to 1"),
        (Output(scores=(1.5,)), "score", "the scores (1.5,) are not all from 0 to 1"),
    ],
)
def test_a_backend_that_breaks_the_protocol_is_named(output: Output, op: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        run_letters(quick_plan(LIVELY, placement=APART), make=lambda: Answers(output, op))
    assert says in str(caught.value)


def test_a_cache_that_is_too_small_is_refused_before_work_begins() -> None:
    made: list[LetterBackend] = []

    def small() -> LetterBackend:
        made.append(LetterBackend(context_tokens=62))
        return made[-1]

    with pytest.raises(UserError) as error:
        run_letters(quick_plan(LIVELY), ("abc",), make=small)
    assert str(error.value) == (
        "workflow test: prompt and budget need 64 tokens and role draft holds 62;"
        " raise numerics.cache_tokens or lower budget.tokens"
    )
    assert not any(b.log for b in made)
    run_letters(quick_plan(LIVELY), ("a",), make=small)


def test_an_empty_prompt_is_refused() -> None:
    class Silent(Letters):
        def prompt(self, problem: Problem) -> str:
            return ""

    workers = VirtualWorkers(modelled(LinearCosts()), {d: LetterBackend() for d in "abc"})
    engine = Engine(quick_plan(LIVELY), workers, Silent(), lambda event: None)
    with pytest.raises(UserError, match="the prompt is empty; write a question"):
        engine.solve(Letters().parse("a"))


def test_chunks_say_how_much_of_their_step_is_there():
    """A delimiter may begin in one chunk and end in the next."""
    made: list[LetterBackend] = []

    def make() -> LetterBackend:
        made.append(LetterBackend())
        return made[-1]

    plan = replace(quick_plan(workflow(), "serial"), chunk_tokens=2)
    run_letters(plan, ("a", "bc"), make)
    seen: dict[tuple[str, int], int] = {}
    for work in (w for backend in made for w in backend.log if w.max_new):
        step, begun = (work.role, work.key), len(work.begun)
        assert begun == seen.get(step, 0)
        assert begun + work.max_new <= work.step_tokens <= plan.workflow.budget.step_tokens
        seen[step] = begun + 2
    assert max(seen.values()) > 2


@pytest.mark.parametrize("name", ["serial", "overlapped"])
def test_runs_that_vote_read_the_prompt_once(name: str) -> None:
    made: list[LetterBackend] = []

    def make() -> LetterBackend:
        made.append(LetterBackend())
        return made[-1]

    flow = workflow(vote=3, accept=0.6, sampling=Sampling(1.0, 4), budget=Budget(4, 60, 12))
    run_letters(quick_plan(flow, name, placement=APART), ("abcabcab",), make)
    prompt = len("abcabcab" + Letters.delimiter)
    read = Counter(work.role for backend in made for work in backend.log if work.keep < prompt and work.feed)
    assert read == {DRAFT: 1, PRM: 1, TARGET: 1}


@pytest.mark.parametrize("name", ["serial", "overlapped"])
@pytest.mark.parametrize("chunk", [1, 2, 12])
def test_drafts_written_in_one_pass_are_those_written_alone(name: str, chunk: int) -> None:
    flow = workflow(drafts=3, accept=0.6, sampling=Sampling(1.0, 4), budget=Budget(6, 60, 12))
    plan = quick_plan(flow, name, chunk_tokens=chunk)
    alone, _ = run_letters(plan, ("a", "bc", "ccb"), partial(LetterBackend, batches=False))
    together, events = run_letters(plan, ("a", "bc", "ccb"))
    assert committed(together) == committed(alone)
    chunks = [e for e in events if isinstance(e, Chunk) and e.beside]
    assert chunks and all(e.role == DRAFT and len(e.beside) <= 2 for e in chunks)
    lengths: Counter[tuple[str, str]] = Counter()
    for event in (e for e in events if isinstance(e, Chunk) and e.op == Op.DRAFT):
        lengths.update({(event.problem, request): tokens for request, tokens in event.wrote().items()})
    texts = [step.tokens for s in together for step in s.outcome.node.path if step.source == DRAFT]
    path = {(e.problem, name) for e in events if isinstance(e, ProblemEnded) for name in e.path}
    assert sorted(lengths[key] for key in path & lengths.keys()) == sorted(map(len, texts))
