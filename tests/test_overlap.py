"""Overlap that a trace must show: the shadow cache and its swap, and a prompt that is read on another device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from planner_cases import (
    APART,
    DRAFT,
    PRM,
    SEEDS,
    TARGET,
    LetterBackend,
    Letters,
    LinearCosts,
    committed,
    device,
    install_backend,
    machine,
    quick_plan,
    run_letters,
    workflow,
    workflows,
)

from planner.graph import Op
from planner.machine import Machine
from planner.plan import Plan
from planner.policy import Event as Turn
from planner.runtime.backend import Work, perform
from planner.runtime.caches import Caches, Reading
from planner.runtime.engine import Engine
from planner.runtime.process import ProcessWorkers
from planner.runtime.worker import VirtualWorkers, modelled
from planner.trace import Chunk, Decided, Event, Faulted, ProblemEnded, ProblemStarted
from planner.workflow import Budget, Policy, Workflow

# --- what caches hold ---


@given(SEEDS)
@settings(max_examples=100, deadline=None)
def test_caches_are_what_is_believed_of_them(seed: int) -> None:
    """Whatever is read beside whatever, the device holds what the engine believes, and never less than `keep`."""
    random, made = Random(seed), LetterBackend()
    caches, words = Caches("7"), [[random.randrange(3) for _ in range(random.randint(1, 9))] for _ in range(6)]

    def follow(reading: Reading, wanted: Sequence[int]) -> None:
        assert [*wanted[: reading.keep], *reading.feed] == list(wanted)
        perform(made, Work("draft", **vars(reading)))
        assert made.held["draft", reading.sequence] == list(wanted)

    main: list[int] = []
    for _ in range(40):
        wanted = main[: random.randint(0, len(main))] + random.choice(words)
        turn = random.random()
        if turn < 0.4 and DRAFT in caches:
            before = {key: list(held) for key, held in made.held.items()}
            reading = caches.read_beside(DRAFT, wanted)
            follow(reading, wanted)
            others = {key: held for key, held in made.held.items() if key[1] != reading.sequence}
            assert others == {key: held for key, held in before.items() if key in others}
        elif turn < 0.9:
            best = max((_alike(held, wanted) for held in made.held.values()), default=0) if DRAFT in caches else 0
            reading = caches.read(DRAFT, wanted)
            assert reading.keep == best and not reading.copy_of
            follow(reading, wanted)
            caches.append(DRAFT, reading.sequence, (1, 2))
            made.held["draft", reading.sequence] += (1, 2)
            main = [*wanted, 1, 2]
            assert caches.hold(DRAFT, main) and caches.hold(DRAFT, main[:-1]) and not caches.hold(DRAFT, [*main, 9])
        elif turn < 0.95:
            caches.forget(DRAFT)
            made.held.clear()
            main = []
            assert DRAFT not in caches
    assert {sequence for _, sequence in made.held} <= {"7", "7.shadow"}


def _alike(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# --- streaming shadow sync ---

CHUNK = 3
SYNCED = ("PREFILL@0", "VERIFY@0", "DRAFT@0", "SYNC@0", "REFINE@0", "VERIFY@1", "DRAFT@1", "BACKTRACK@0")
FLOW = workflow(accept=0.7, accept_refined=0.3, budget=Budget(8, 120, 24))


def streaming(flow: Workflow, **more: object) -> Plan:
    fields: dict[str, object] = {
        "placement": APART,
        "draft_ahead": 1,
        "prefetch_refine": True,
        "shadow_sync": True,
        "sync_ahead": True,
        "chunk_tokens": CHUNK,
        "priorities": dict.fromkeys("abc", SYNCED),
    }
    return quick_plan(flow, **fields | more)


def unread_at_commits(events: Sequence[Event]) -> list[int]:
    """For each step of the target that was committed: the tokens that the draft still had to read from then on."""
    found = []
    for at, event in enumerate(events):
        if not isinstance(event, Decided) or event.event not in (Turn.REFINED, Turn.KEPT_WEAK):
            continue
        later = [e for e in events[at:] if isinstance(e, Chunk | ProblemEnded) and e.problem == event.problem]
        drafts = [e for e in later if isinstance(e, Chunk) and e.role == DRAFT and e.start_us >= event.at_us]
        until = next((i for i, chunk in enumerate(drafts) if chunk.tokens_out), None)
        if until is not None:
            found.append(sum(chunk.tokens_in for chunk in drafts[: until + 1]))
    return found


SLOW_TARGET = LinearCosts({(TARGET, d): 50 for d in "abc"}, otherwise_us=5)


def test_a_step_that_the_target_began_ahead_goes_on_where_it_was() -> None:
    flow = replace(FLOW, policy=replace(FLOW.policy, kind=Policy.RSD))
    questions = ["abc"[n % 3] * (n + 1) for n in range(12)]
    solved, events = run_letters(streaming(flow, shadow_sync=False, sync_ahead=False), questions, costs=SLOW_TARGET)
    path = {(e.problem, name) for e in events if isinstance(e, ProblemEnded) for name in e.path}
    wrote: dict[tuple[str, str], list[Chunk]] = {}
    for chunk in (e for e in events if isinstance(e, Chunk) and e.op == Op.REFINE):
        wrote.setdefault((chunk.problem, chunk.request), []).append(chunk)
    steps = [chunks for step, chunks in wrote.items() if step in path]
    assert sum(chunks[0].speculative and not chunks[-1].speculative for chunks in steps) > 3
    # No token is written twice.
    lengths = [len(step.tokens) for s in solved for step in s.outcome.node.path if step.source == TARGET]
    assert sorted(sum(chunk.tokens_out for chunk in chunks) for chunks in steps) == sorted(lengths)


@pytest.mark.parametrize("kind", [Policy.RSD, Policy.BACKTRACK])
def test_after_a_commit_the_draft_reads_at_most_one_chunk(kind: Policy) -> None:
    flow = replace(FLOW, policy=replace(FLOW.policy, kind=kind))
    questions = ["abc"[n % 3] * (n + 1) for n in range(12)]
    _, events = run_letters(streaming(flow), questions, costs=SLOW_TARGET)
    unread = unread_at_commits(events)
    assert len(unread) > 10 and max(unread) <= CHUNK
    # Without the stream the draft reads whole steps, and with one that waits for the verdict it may.
    _, events = run_letters(streaming(flow, shadow_sync=False), questions, costs=SLOW_TARGET)
    assert max(unread_at_commits(events)) > CHUNK


def test_the_shadow_reads_before_the_verdict_and_leaves_the_main_cache_alone() -> None:
    """While the verdict is out the draft writes ahead in one cache and reads the target's step in another."""
    made: list[LetterBackend] = []

    def make() -> LetterBackend:
        made.append(LetterBackend())
        return made[-1]

    slow_prm = LinearCosts({(PRM, "b"): 90, (TARGET, "c"): 12}, otherwise_us=5)
    plan = streaming(FLOW, draft_ahead=2)
    run_letters(plan, ["abc"[n % 3] * (n + 1) for n in range(12)], make, slow_prm)
    log = made[0].log
    copies = [work for work in log if work.copy_of]
    assert copies and all(work.sequence != work.copy_of for work in copies)
    # The draft's next chunk after a read of the shadow goes on where it was, with nothing to read again.
    follows = [(a, b) for a, b in pairwise(log) if a.label.startswith("SYNC") and b.max_new]
    beside = [b for a, b in follows if b.sequence != a.sequence]
    assert sum(not b.feed for b in beside) > 3
    # Both names are main at some time: caches swap.
    assert {work.sequence for work in log if work.max_new} == {"0", "0.shadow"}


def test_what_the_shadow_read_in_vain_is_waste() -> None:
    flow = replace(FLOW, policy=replace(FLOW.policy, accept=0.0))
    slow_prm = LinearCosts({(PRM, "b"): 90}, otherwise_us=5)
    _, events = run_letters(streaming(flow), ("a", "bc", "cab"), costs=slow_prm)
    used = {name for e in events if isinstance(e, ProblemEnded) for name in e.used}
    reads = [e.request for e in events if isinstance(e, Chunk) and e.op == Op.SYNC]
    assert reads and not used & set(reads)


# --- the prompt on another device ---


@given(workflows(), SEEDS)
@settings(max_examples=30, deadline=None)
def test_the_draft_s_device_reads_no_prompt_that_is_read_elsewhere(flow: Workflow, seed: int) -> None:
    here = streaming(flow) if flow.policy.kind in (Policy.RSD, Policy.BACKTRACK) else quick_plan(flow)
    if DRAFT not in here.placement:
        return
    here = replace(here, placement={r: APART[r] for r in here.placement})
    there = replace(here, prefill_on={DRAFT: "c"})
    questions = ("abcab", "bcbcbc")
    expected, _ = run_letters(here, questions)
    found, events = run_letters(there, questions)
    assert committed(found) == committed(expected)
    no_prompt_on(events, "a", "c", [len(q) + 1 for q in questions])


def no_prompt_on(events: Sequence[Event], draft: str, reader: str, prompts: Sequence[int]) -> None:
    """The draft's device takes each prompt's cache over, and reads nothing of it."""
    labels = [e.problem for e in events if isinstance(e, ProblemStarted)]
    for label, size in zip(labels, prompts, strict=True):
        chunks = [e for e in events if isinstance(e, Chunk) and e.problem == label and e.role == DRAFT]
        read, moved = ([c for c in chunks if c.op == op] for op in (Op.PREFILL, Op.TRANSFER))
        others = [c for c in chunks if c.op not in (Op.PREFILL, Op.TRANSFER)]
        if not others:  # no draft was wanted
            continue
        assert [(c.device, c.tokens_in) for c in read] == [(reader, size)]
        assert [(c.device, c.tokens_in, c.context) for c in moved] == [(draft, 0, size)]
        assert moved[0].start_us >= read[0].end_us
        assert all(c.device == draft and c.context >= size and c.start_us >= moved[0].end_us for c in others)


def test_the_transfer_takes_the_time_of_the_link() -> None:
    class Weighty(LetterBackend):
        def load(self, name, role, delimiter):
            return replace(super().load(name, role, delimiter), kv_bytes_per_token=1000)

        def hand_over(self, name, sequence):
            handed = super().hand_over(name, sequence)
            return replace(handed, rows=bytes(handed.rows) * 1000)

        def take_over(self, name, sequence, handed):
            super().take_over(name, sequence, replace(handed, rows=handed.rows[: len(handed.tokens)]))

    plan = streaming(FLOW, prefill_on={DRAFT: "c"})
    link = plan.machine.links[0]
    _, events = run_letters(plan, ("abcab",), Weighty)
    moved = next(e for e in events if isinstance(e, Chunk) and e.op == Op.TRANSFER)
    least = link.latency_us + 1e6 * 6 * 1000 / link.bandwidth_bytes_per_s
    assert least <= moved.end_us - moved.start_us <= 4 * least + 10


# --- real processes ---

BACKEND = '''
"""Letters that take their time, so that the order of events is that of a slow target."""
import sys, time
sys.path.insert(0, {tests!r})
from planner_cases import LetterBackend


class Backend(LetterBackend):
    def __init__(self, options):
        super().__init__()

    def run(self, work):
        time.sleep({{"target": 0.06, "prm": 0.01, "draft": 0.002}}[work.role])
        return super().run(work)
'''


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine of three devices, each a process with a slow backend that an entry point names."""
    (tmp_path / "letters_of_test.py").write_text(BACKEND.format(tests=str(Path(__file__).parent)))
    install_backend(tmp_path, "letters_of_test")
    monkeypatch.syspath_prepend(str(tmp_path))
    return machine(device("a"), device("b"), device("c"))


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_the_trace_of_a_run_in_processes_shows_both(three: Machine) -> None:
    flow = replace(FLOW, policy=replace(FLOW.policy, kind=Policy.BACKTRACK))
    plan = streaming(flow, machine=three, prefill_on={DRAFT: "c"})
    questions = ["abc"[n % 3] * (n + 1) for n in range(5)]
    events: list[Event] = []
    with closing(ProcessWorkers(three)) as workers:
        engine = Engine(plan, workers, Letters(), events.append)
        found = [engine.solve(Letters().parse(q)) for q in questions]
    assert committed(found) == committed(run_letters(plan, questions)[0])
    unread = unread_at_commits(events)
    assert len(unread) > 3 and max(unread) <= CHUNK
    synced = [e for e in events if isinstance(e, Chunk) and e.op == Op.SYNC and e.role == DRAFT]
    assert sum(e.tokens_in for e in synced) > sum(unread), "the commits left nothing to read, for it was read before"
    no_prompt_on(events, "a", "c", [len(q) + 1 for q in questions])


# --- devices that change ---


class Noting(VirtualWorkers):
    """Notes which models are loaded and unloaded where."""

    def __init__(self, backends: dict[str, LetterBackend]) -> None:
        super().__init__(modelled(LinearCosts()), backends)
        self.noted: list[tuple[str, str, str]] = []

    def load(self, placed, delimiter):
        self.noted += [("load", device, name) for name, (device, _) in placed.items()]
        return super().load(placed, delimiter)

    def unload(self, device, name):
        self.noted.append(("unload", device, name))


def test_a_model_that_was_moved_away_is_unloaded_before_the_next_is_loaded() -> None:
    plan = streaming(FLOW, prefill_on={DRAFT: "c"})
    workers = Noting({d: LetterBackend() for d in "abc"})
    engine = Engine(plan, workers, Letters(), lambda event: None)
    assert sorted(workers.noted) == [
        ("load", "a", DRAFT),
        ("load", "b", PRM),
        ("load", "c", DRAFT),
        ("load", "c", TARGET),
    ]
    expected = committed(run_letters(plan)[0])
    moves = (
        # The draft moves to where its prompt was read: the model is there already.
        ({"placement": {**APART, DRAFT: "c"}, "prefill_on": {}}, [("unload", "a", DRAFT)]),
        # And away from there, where it stays to read prompts.
        ({"placement": {**APART, DRAFT: "b"}}, [("load", "b", DRAFT)]),
        (
            {"placement": APART, "prefill_on": {}},
            [("unload", "b", DRAFT), ("unload", "c", DRAFT), ("load", "a", DRAFT)],
        ),
    )
    for fields, wanted in moves:
        workers.noted.clear()
        # In the midst of a problem too, caches are built again from what is committed.
        solving = engine.solve_all([Letters().parse(q) for q in ("a", "bc")])
        first = next(solving)
        engine.swap(replace(plan, **fields))
        assert committed([first, *solving]) == expected
        assert workers.noted == wanted


def test_the_draft_reads_its_own_prompt_if_the_reader_is_gone_and_nobody_plans() -> None:
    plan = streaming(FLOW, placement={DRAFT: "a", PRM: "b", TARGET: "b"}, prefill_on={DRAFT: "c"})
    events: list[Event] = []
    engine = Engine(plan, Noting({d: LetterBackend() for d in "abc"}), Letters(), events.append)
    engine.remove("c")
    assert committed([engine.solve(Letters().parse(q)) for q in ("a", "bc")]) == committed(run_letters(plan)[0])
    assert not any(isinstance(e, Chunk) and (e.device == "c" or e.op == Op.TRANSFER) for e in events)


def test_a_cache_that_does_not_come_is_a_fault_of_the_reader() -> None:
    class Forgets(LetterBackend):
        fails = 1

        def hand_over(self, name, sequence):
            self.fails -= 1
            return None if self.fails >= 0 else super().hand_over(name, sequence)

    plan = streaming(FLOW, prefill_on={DRAFT: "c"})
    found, events = run_letters(plan, make=Forgets)
    assert committed(found) == committed(run_letters(plan)[0])
    assert [(e.device, e.what) for e in events if isinstance(e, Faulted)] == [
        ("c", "no cache came where one was asked for")
    ]


@pytest.mark.parametrize("step_tokens", [0, 3, 4, 9])
def test_the_text_of_a_step_comes_with_the_chunk_that_ends_it(step_tokens: int) -> None:
    backend, text = LetterBackend(), None
    backend.load("draft", workflow().roles[DRAFT], ".")
    found = perform(backend, Work("draft", "0", 0, backend.encode("draft", "ab"), 1))
    while not (found.complete or len(found.tokens) >= 9):
        assert text is None
        kept = 2 + len(found.tokens)
        more = perform(backend, Work("draft", "0", kept, (), 1, begun=found.tokens, step_tokens=step_tokens))
        found, text = replace(more, tokens=found.tokens + more.tokens), more.text
        if step_tokens and len(found.tokens) >= step_tokens:
            break
    assert text == (backend.decode("draft", found.tokens) if step_tokens else None)
