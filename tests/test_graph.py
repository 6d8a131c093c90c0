"""The task graph: its rules, its outcomes and its text."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import DRAFT, TARGET, graphs, workflow

from planner.errors import UserError
from planner.graph import (
    RULES,
    Edge,
    EdgeKind,
    Literal,
    Op,
    Task,
    TaskGraph,
    Verdict,
    broken_by,
    from_text,
    holds,
    to_text,
    verify,
)
from planner.lower import lower
from planner.passes import DraftAhead, PrefetchRefine, run_passes

ACCEPT, REJECT = Verdict.ACCEPT, Verdict.REJECT

TEXT = """\
window rounds=2
prefill.draft = PREFILL draft round=0 in=24 out=0 context=0
draft = DRAFT draft round=0 in=0 out=20 context=24 from prefill.draft
verify = VERIFY prm round=0 in=20 out=0 context=24 accept=0.75 from ~draft
draft.A = DRAFT draft round=1 in=0 out=20 context=44 from draft if ?verify
verify.A = VERIFY prm round=1 in=20 out=0 context=44 accept=0.5 from draft.A if verify
refine = REFINE target round=0 in=0 out=20 context=24 if ?!verify
refine.A = REFINE target round=1 in=20 out=20 context=44 from draft if verify & ?!verify.A
recheck = VERIFY prm round=1 in=20 out=0 context=44 from refine.A if verify & !verify.A
"""
GRAPH = from_text(TEXT)


def with_task(name: str, **changes: object) -> TaskGraph:
    tasks = tuple(replace(t, **changes) if t.id == name else t for t in GRAPH.tasks)  # type: ignore[arg-type]
    return replace(GRAPH, tasks=tasks)


def with_edge(source: str, target: str) -> TaskGraph:
    return replace(GRAPH, edges=(*GRAPH.edges, Edge(source, target)))


def with_new(task: Task) -> TaskGraph:
    return replace(GRAPH, tasks=(*GRAPH.tasks, task))


def lit(name: str, verdict: Verdict = ACCEPT) -> Literal:
    return Literal(name, verdict)


UNLIKELY = lit("verify.A", REJECT)
BROKEN: dict[str, tuple[str, TaskGraph]] = {
    "id": ("draft, x", with_new(Task("draft, x", Op.SYNC, DRAFT, 0))),
    "role": ("draft.A", with_task("draft.A", role=TARGET)),
    "round": ("draft.A", with_task("draft.A", round=2)),
    "tokens": ("draft.A", with_task("draft.A", context=-1)),
    "writes": ("draft.A", with_task("draft.A", tokens_out=0)),
    "verdict": ("draft.A", with_task("draft.A", accept=0.5)),
    "chance": ("verify.A", with_task("verify.A", accept=1.5)),
    "guard-known": ("x", with_new(Task("x", Op.SYNC, DRAFT, 0, guard=(lit("verify"), UNLIKELY, lit("recheck"))))),
    "guard-once": ("refine", with_task("refine", guard=(lit("verify"), lit("verify", REJECT)))),
    "guard-closed": ("refine", with_task("refine", guard=(lit("verify.A"),))),
    "producer": ("refine", with_edge("draft.A", "refine")),
    "verified": ("verify", replace(GRAPH, edges=tuple(e for e in GRAPH.edges if e.target != "verify"))),
    "ahead": ("draft.A", with_task("draft.A", ahead=2)),
    "joins": ("verify.A", with_task("verify.A", joins="verify", ahead=0)),
    "head": ("draft", replace(GRAPH, steady=True)),
}


def test_every_rule_has_a_graph_that_breaks_it() -> None:
    assert set(BROKEN) == {rule.name for rule in RULES}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_graph_that_breaks_one_rule_is_refused_by_its_name(rule: str) -> None:
    task, graph = BROKEN[rule]
    with pytest.raises(UserError, match=f"^task {re.escape(task)}: breaks the rule '{rule}'; see that"):
        verify(graph)
    broken = {r.name for r in RULES for t in graph.tasks if r.broken(graph, t)}
    assert broken == {rule}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"guard": (lit("nobody"),)}, "guard-known"),
        ({"guard": (lit("verify.A"), lit("verify"))}, "guard-closed"),
        ({"tokens_in": -1}, "tokens"),
        ({"tokens_out": -1}, "tokens"),
        ({"round": -1}, "round"),
        ({"ahead": -1}, "ahead"),
        ({"joins": "verify.A", "ahead": 1}, "joins"),
        ({"joins": "nobody", "ahead": 1}, "joins"),
    ],
)
def test_other_ways_to_break_a_rule(changes: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        verify(with_task("refine.A", **changes))


@pytest.mark.parametrize("name", ["~draft", "!verify", "?verify", "a,b", "two words", "", "#1", "a&b", "a=b"])
def test_an_id_that_the_text_could_not_tell_from_a_mark_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="'id'"):
        verify(TaskGraph(1, (Task(name, Op.PREFILL, DRAFT, 0),), ()))


def test_a_verdict_of_its_own_is_no_guard() -> None:
    with pytest.raises(UserError, match="task verify: breaks the rule 'guard-known'"):
        verify(with_task("verify", guard=(lit("verify"),)))


def test_edges_and_ids_are_checked_first() -> None:
    with pytest.raises(UserError, match="graph: two tasks have the same id; give each"):
        verify(with_new(GRAPH.tasks[0]))
    for edge in (("nobody", "draft"), ("draft", "nobody")):
        with pytest.raises(UserError, match="an edge names the unknown task 'nobody'"):
            verify(with_edge(*edge))


@pytest.mark.parametrize("edge", [("draft", "prefill.draft"), ("draft", "draft"), ("verify", "draft")])
def test_circles_are_refused(edge: tuple[str, str]) -> None:
    with pytest.raises(UserError, match="tasks wait for each other in a circle"):
        verify(with_edge(*edge))


# --- outcomes ---


def test_outcomes_by_hand() -> None:
    found = {tuple(sorted((v, str(x)) for v, x in o.items())): p for o, p in GRAPH.outcomes}
    assert found == {
        (("verify", "accept"), ("verify.A", "accept")): 0.375,
        (("verify", "accept"), ("verify.A", "reject")): 0.375,
        (("verify", "reject"),): 0.25,
    }


@given(graphs())
@settings(max_examples=60, deadline=None)
def test_outcomes_share_one(graph: TaskGraph) -> None:
    assert sum(p for _, p in graph.outcomes) == pytest.approx(1.0, abs=1e-12)
    assert all(p > 0 for _, p in graph.outcomes)
    assert len({tuple(sorted(o.items())) for o, _ in graph.outcomes}) == len(graph.outcomes)


@given(graphs())
@settings(max_examples=60, deadline=None)
def test_an_outcome_has_the_verdicts_that_ran_in_it(graph: TaskGraph) -> None:
    for outcome, _ in graph.outcomes:
        for task in graph.tasks:
            runs = all(outcome.get(l.verify) == l.verdict for l in task.guard)
            assert runs == holds(task.guard, outcome)
            assert (task.id in outcome) == (runs and task.accept is not None)
            # Used, or cancelled by at least one verdict that came: never neither.
            assert runs != bool(broken_by(task.guard, outcome))


@given(graphs())
@settings(max_examples=60, deadline=None)
def test_the_order_follows_producers_and_verdicts(graph: TaskGraph) -> None:
    at = {task: i for i, task in enumerate(graph.order)}
    assert set(at) == set(graph.by_id)
    for edge in graph.edges:
        assert at[edge.source] < at[edge.target]
    for task in graph.tasks:
        assert all(at[l.verify] < at[task.id] for l in task.guard)


# --- text ---


def test_the_text_of_a_graph_by_hand() -> None:
    assert to_text(GRAPH) == TEXT
    assert GRAPH.rounds == 2
    assert GRAPH.edges[1] == Edge("draft", "verify", EdgeKind.STREAM)
    task = GRAPH.by_id["refine.A"]
    assert task.guard == (lit("verify"), lit("verify.A", REJECT))
    assert (task.ahead, task.waits_for, task.speculative) == (1, (lit("verify"),), True)
    assert GRAPH.by_id["recheck"].ahead == 0
    assert [t.id for t in GRAPH.producers("refine.A")] == ["draft"]


@given(graphs(streams=True), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_text_round_trips(graph: TaskGraph, random: object) -> None:
    tasks = list(graph.tasks)
    random.shuffle(tasks)  # type: ignore[attr-defined]
    for one in (graph, replace(graph, tasks=tuple(tasks))):
        again = from_text(to_text(one))
        assert again.tasks == one.tasks
        assert sorted(again.edges, key=str) == sorted(one.edges, key=str)
        assert to_text(again) == to_text(one)


def test_text_of_a_lowered_window_round_trips() -> None:
    graph = run_passes(lower(workflow(), 3), [DraftAhead(2), PrefetchRefine()])
    assert from_text(to_text(graph)).tasks == graph.tasks


def test_blank_lines_and_comments_are_passed_over() -> None:
    spaced = "# a comment\n\n" + TEXT.replace("\n", "\n\n   # more\n  ")
    assert from_text(spaced) == GRAPH


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "graph text: does not begin with a window; begin with `window rounds=N`"),
        ("draft = DRAFT draft", "graph text: does not begin with a window"),
        ("window rounds=x", "graph text: does not begin with a window"),
        (TEXT.replace("= DRAFT", "DRAFT"), "graph text, line 3: cannot read 'draft DRAFT draft"),
        (TEXT.replace("DRAFT", "DREAM"), "graph text, line 3: 'DREAM' is not a valid Op; write a task"),
        (TEXT.replace("prm", "judge"), "graph text, line 4: 'judge' is not a valid RoleName"),
        (TEXT.replace("accept=0.75", "accept=1.5"), "task verify: breaks the rule 'chance'"),
        (TEXT.replace("accept=0.75", "accept=1-2"), "graph text, line 4: could not convert"),
        (TEXT.replace("accept=0.75", "accept=nan"), "graph text, line 4: cannot read"),
        (TEXT.replace("in=24", "in=-24"), "graph text, line 2: cannot read"),
        (TEXT.replace("from ~draft", "from ~drift"), "graph: an edge names the unknown task 'drift'"),
        (TEXT.replace("if ?!verify\n", "if !?verify\n"), "graph text, line 7: cannot read"),
        (
            TEXT.replace("if verify & !v", "if ?verify & !v"),
            "graph text, line 9: a verdict without ? follows",
        ),
    ],
)
def test_text_that_is_wrong_is_refused_with_its_line(text: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        from_text(text)
    assert str(error.value).startswith(says)
    assert "\n" not in str(error.value)
