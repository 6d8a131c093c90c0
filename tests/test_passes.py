"""From workflows to graphs, and what passes make speculative."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import TARGET, graphs, workflow, workflows

from planner.errors import UserError
from planner.graph import Op, Task, TaskGraph, from_text, holds, to_text, verify
from planner.lower import lower
from planner.passes import (
    BatchVerify,
    DisaggregatePrefill,
    DraftAhead,
    EarlyNext,
    OneAtATime,
    Pass,
    PrefetchAhead,
    PrefetchAlternative,
    PrefetchRefine,
    Prune,
    ShadowSync,
    run_passes,
)
from planner.workflow import NEEDED_ROLES, Policy, RoleName, Statistics, Workflow

FLOW = workflow(statistics=Statistics(0.8, 0.7, prompt_tokens=24, draft_step_tokens=10, target_step_tokens=12))

DRAFT_ONLY = """\
window rounds=2
prefill.draft = PREFILL draft round=0 in=24 out=0 context=0
draft = DRAFT draft round=0 in=0 out=10 context=24 from prefill.draft
draft.A = DRAFT draft round=1 in=0 out=10 context=34 from prefill.draft, draft
"""
TARGET_ONLY = """\
window rounds=2
prefill.target = PREFILL target round=0 in=24 out=0 context=0
refine = REFINE target round=0 in=0 out=12 context=24 from prefill.target
refine.R = REFINE target round=1 in=0 out=12 context=36 from prefill.target, refine
"""
PREFILLS = """\
window rounds=2
prefill.draft = PREFILL draft round=0 in=24 out=0 context=0
prefill.prm = PREFILL prm round=0 in=24 out=0 context=0
prefill.target = PREFILL target round=0 in=24 out=0 context=0
draft = DRAFT draft round=0 in=0 out=10 context=24 from prefill.draft
verify = VERIFY prm round=0 in=10 out=0 context=24 accept=0.8 from prefill.prm, draft
refine = REFINE target round=0 in=0 out=12 context=24 from prefill.target if !verify
draft.A = DRAFT draft round=1 in=0 out=10 context=34 from prefill.draft, draft if verify
"""
AFTER_A_REFINED = """\
draft.R = DRAFT draft round=1 in=12 out=10 context=24 from prefill.draft, refine if !verify
"""


def lowered(kind: Policy, rounds: int = 2) -> TaskGraph:
    return lower(replace(FLOW, policy=replace(FLOW.policy, kind=kind)), rounds)


def line(graph: TaskGraph, task: str) -> str:
    return next(row for row in to_text(graph).splitlines() if row.startswith(f"{task} = "))


@pytest.mark.parametrize(
    ("kind", "text"), [(Policy.DRAFT_ONLY, DRAFT_ONLY), (Policy.TARGET_ONLY, TARGET_ONLY)], ids=["draft", "target"]
)
def test_one_role_alone_is_a_chain(kind: Policy, text: str) -> None:
    assert to_text(lowered(kind)) == text
    assert len(lowered(kind).outcomes) == 1


SPECREASON = """\
window rounds=2
prefill.draft = PREFILL draft round=0 in=24 out=0 context=0
prefill.target = PREFILL target round=0 in=24 out=0 context=0
draft = DRAFT draft round=0 in=0 out=10 context=24 from prefill.draft
verify = VERIFY target round=0 in=11 out=0 context=24 accept=0.8 from prefill.target, draft
refine = REFINE target round=0 in=0 out=12 context=24 from prefill.target if !verify
draft.A = DRAFT draft round=1 in=0 out=10 context=34 from prefill.draft, draft if verify
verify.A = VERIFY target round=1 in=11 out=0 context=34 accept=0.8 from prefill.target, draft.A if verify
refine.A = REFINE target round=1 in=0 out=12 context=34 from prefill.target, draft if verify & !verify.A
draft.R = DRAFT draft round=1 in=12 out=10 context=24 from prefill.draft, refine if !verify
verify.R = VERIFY target round=1 in=11 out=0 context=36 accept=0.8 from prefill.target, draft.R if !verify
refine.R = REFINE target round=1 in=0 out=12 context=36 from prefill.target, refine if !verify & !verify.R
"""
"""A check reads the step and a token of the score prompt; the target never has to catch up on what it has judged."""


def test_with_specreason_the_target_verifies() -> None:
    assert to_text(lowered(Policy.SPECREASON)) == SPECREASON


def with_options(kind: Policy, rounds: int, **options: int) -> TaskGraph:
    return lower(replace(FLOW, policy=replace(FLOW.policy, kind=kind, **options)), rounds)


def test_the_first_steps_are_refines_that_the_others_catch_up_on() -> None:
    graph = with_options(Policy.BACKTRACK, 4, first_target_steps=2)
    assert [t.op for t in graph.tasks[3:5]] == [Op.REFINE, Op.REFINE]
    assert graph.by_id["draft.RR"].tokens_in == 24 and graph.by_id["verify.RR"].tokens_in == 24 + 10
    assert "reverify.RR" not in graph.by_id, "there is nothing to go back to"
    assert "reverify.RRA" in graph.by_id
    assert graph.by_id["draft.RRR"].tokens_in == 12


def test_a_further_alternative_may_follow_a_refined_step() -> None:
    assert "reverify.R" not in with_options(Policy.BACKTRACK, 2).by_id
    assert "reverify.R" in with_options(Policy.BACKTRACK, 2, resample_alternatives=1).by_id


def test_several_drafts_are_one_longer_task() -> None:
    graph = with_options(Policy.RSD, 1, drafts=3)
    assert graph.by_id["draft"].tokens_out == graph.by_id["verify"].tokens_in == 30
    assert graph.by_id["verify"].accept == pytest.approx(1 - 0.2**3)


def test_rsd_reads_a_refined_step_with_the_next_draft() -> None:
    graph = lowered(Policy.RSD)
    assert to_text(graph).startswith(PREFILLS)
    assert AFTER_A_REFINED.strip() == line(graph, "draft.R")
    assert {t.op for t in graph.tasks} == {Op.PREFILL, Op.DRAFT, Op.VERIFY, Op.REFINE}
    # After a refined step that nobody scored the verifier reads both steps.
    assert (graph.by_id["verify.R"].tokens_in, graph.by_id["verify.R"].context) == (22, 24)
    assert (graph.by_id["verify.A"].tokens_in, graph.by_id["verify.A"].context) == (10, 34)
    # The target reads all that was accepted since it wrote.
    assert (graph.by_id["refine.A"].tokens_in, graph.by_id["refine.A"].context) == (10, 24)
    longer = lowered(Policy.RSD, 3)
    assert (longer.by_id["refine.AA"].tokens_in, longer.by_id["refine.AA"].context) == (20, 24)
    assert (longer.by_id["refine.RA"].tokens_in, longer.by_id["refine.RA"].context) == (10, 36)
    assert len(graph.outcomes) == 4


def test_backtrack_scores_a_refined_step_only_where_it_can_go_back() -> None:
    graph = lowered(Policy.BACKTRACK)
    assert to_text(graph).startswith(PREFILLS)
    names = [t.id for t in graph.tasks]
    assert [n for n in names if n.startswith(("reverify", "backtrack", "recheck"))] == [
        "reverify.A",
        "backtrack.A",
        "recheck.A",
    ]
    assert line(graph, "reverify.A") == (
        "reverify.A = VERIFY prm round=1 in=12 out=0 context=34 accept=0.7 from prefill.prm, refine.A"
        " if verify & !verify.A"
    )
    assert line(graph, "backtrack.A") == (
        "backtrack.A = BACKTRACK target round=1 in=0 out=12 context=34 from prefill.target, refine.A"
        " if verify & !verify.A & !reverify.A"
    )
    assert graph.by_id["recheck.A"].accept is None
    assert sum(p for o, p in graph.outcomes if "reverify.A" in o) == pytest.approx(0.8 * 0.2)


def test_a_window_of_three_rounds_counts_its_outcomes() -> None:
    assert len(lowered(Policy.RSD, 3).outcomes) == 8
    # AAA AAR AAB ARA ARR ARB AB RAA RAR RAB RRA RRR, where B is backtracked and ends the window
    assert len(lowered(Policy.BACKTRACK, 3).outcomes) == 12


@given(workflows(), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_a_lowered_window_is_legal_and_not_speculative(flow: Workflow, rounds: int) -> None:
    graph = lower(flow, rounds)
    assert verify(graph) is graph
    assert not any(t.speculative for t in graph.tasks)
    assert {t.role for t in graph.tasks} == set(NEEDED_ROLES[flow.policy.kind])
    for task in graph.tasks:
        assert task.op is Op.PREFILL or len(task.id.partition(".")[2]) == task.round


# --- passes ---

SPECULATE: list[Pass] = [
    DraftAhead(1),
    DraftAhead(2),
    PrefetchRefine(),
    PrefetchAhead(1),
    PrefetchAlternative(),
    BatchVerify(),
    EarlyNext(),
]
PASSES: list[Pass] = [DraftAhead(1), DraftAhead(2), PrefetchRefine(), OneAtATime()]


def meaning(graph: TaskGraph) -> list[tuple[object, ...]]:
    """Each outcome, its probability and the tasks whose results are used in it."""
    return [
        (sorted(outcome.items()), p, [replace(t, ahead=0, joins="") for t in graph.tasks if holds(t.guard, outcome)])
        for outcome, p in graph.outcomes
    ]


@given(graphs() | workflows().map(lambda w: lower(w, 3)), st.lists(st.sampled_from(SPECULATE), max_size=5))
@settings(max_examples=40, deadline=None)
def test_passes_keep_outcomes_and_what_is_used_in_each(graph: TaskGraph, passes: list[Pass]) -> None:
    changed = run_passes(graph, passes)
    assert meaning(changed) == meaning(graph)
    assert changed.edges == graph.edges
    for before, after in zip(graph.tasks, changed.tasks, strict=True):
        assert before.ahead <= after.ahead


@given(graphs(), st.sampled_from(SPECULATE[:-1]))
@settings(max_examples=40, deadline=None)
def test_passes_are_idempotent(graph: TaskGraph, change: Pass) -> None:
    once = run_passes(graph, [change])
    assert change(once) == once


@given(workflows(), st.permutations(PASSES))
@settings(max_examples=25, deadline=None)
def test_the_order_of_passes_does_not_matter(flow: Workflow, passes: list[Pass]) -> None:
    graph = lower(flow, 3)
    assert run_passes(graph, passes) == run_passes(graph, PASSES)
    assert meaning(run_passes(graph, passes)) == meaning(graph)


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_draft_ahead_runs_ahead_of_accepts_at_the_end_of_a_guard(depth: int) -> None:
    graph = run_passes(lowered(Policy.BACKTRACK, 3), [DraftAhead(depth)])
    ahead = {t.id: t.ahead for t in graph.tasks if t.op in (Op.DRAFT, Op.VERIFY)}
    for task in ("draft", "verify"):
        assert ahead[task] == 0
        assert ahead[f"{task}.A"] == min(depth, 1)
        assert ahead[f"{task}.AA"] == min(depth, 2)
        assert ahead[f"{task}.R"] == 0
        assert ahead[f"{task}.RA"] == min(depth, 1)
        # The accept at the end of this guard is that of a refined step.
        assert ahead[f"{task}.AR"] == 0
    assert ahead["reverify.A"] == ahead["recheck.A"] == ahead["reverify.AA"] == 0
    assert not any(t.ahead for t in graph.tasks if t.op not in (Op.DRAFT, Op.VERIFY))


def test_prefetch_refine_runs_ahead_of_its_reject_alone() -> None:
    graph = run_passes(lowered(Policy.BACKTRACK, 3), [PrefetchRefine()])
    assert {t.op for t in graph.tasks if t.ahead} == {Op.REFINE}
    assert all(t.ahead == 1 for t in graph.tasks if t.op is Op.REFINE)
    assert " if verify & ?!verify.A" in line(graph, "refine.A")
    chain = run_passes(lowered(Policy.TARGET_ONLY), [PrefetchRefine()])
    assert chain == lowered(Policy.TARGET_ONLY)


def test_the_further_passes_run_ahead_of_what_they_say() -> None:
    base = lowered(Policy.BACKTRACK, 3)
    graph = run_passes(base, [DraftAhead(1), PrefetchRefine(), PrefetchAhead(1), PrefetchAlternative(), EarlyNext()])
    ahead = {t.id: t.ahead for t in graph.tasks}
    assert (ahead["refine"], ahead["refine.A"], ahead["refine.AA"], ahead["refine.R"]) == (1, 2, 2, 1)
    assert ahead["backtrack.A"] == ahead["backtrack.AA"] == 1
    assert ahead["recheck.A"] == ahead["reverify.A"] == 0
    # After a refined step that is scored: on from it, before its own verdict.
    assert (ahead["draft.AR"], ahead["verify.AR"], ahead["refine.AR"]) == (1, 1, 2)
    assert ahead["draft.RR"] == 0
    assert not any(t.ahead for t in run_passes(base, [PrefetchAhead(2)]).tasks)


def test_one_at_a_time_chains_the_prefills() -> None:
    graph = run_passes(lowered(Policy.RSD), [OneAtATime()])
    assert line(graph, "prefill.prm").endswith("context=0 from prefill.draft")
    assert line(graph, "prefill.target").endswith("context=0 from prefill.prm")
    assert line(graph, "draft").endswith("from prefill.draft, prefill.target")
    assert OneAtATime()(graph) == graph


def test_the_graph_is_verified_after_each_pass() -> None:
    @dataclass(frozen=True)
    class Breaks:
        def __call__(self, graph: TaskGraph) -> TaskGraph:
            return replace(graph, tasks=(*graph.tasks, Task("x", Op.DRAFT, TARGET, 0, tokens_out=1)))

    @dataclass(frozen=True)
    class Mends:
        def __call__(self, graph: TaskGraph) -> TaskGraph:
            return replace(graph, tasks=graph.tasks[:-1])

    with pytest.raises(UserError, match="task x: breaks the rule 'role'"):
        run_passes(lowered(Policy.RSD), [Breaks(), Mends()])


# --- passes that add tasks, or leave some out ---

BRIEF = replace(FLOW, policy=replace(FLOW.policy, kind=Policy.RSD), statistics=replace(FLOW.statistics, steps=1))
WHOLE: list[Pass] = [*SPECULATE, ShadowSync(), DisaggregatePrefill()]


def results(graph: TaskGraph) -> list[tuple[object, ...]]:
    """Each outcome, its probability, what is written and judged in it, and how many tokens each role then holds."""
    found = []
    for outcome, p in graph.outcomes:
        used = [t for t in graph.tasks if holds(t.guard, outcome)]
        steps = [(t.id, t.op, t.role, t.round, t.tokens_out, t.accept) for t in used if t.op not in HOUSEKEEPING]
        held = {role: max((t.context + t.tokens_in + t.tokens_out for t in used if t.role == role), default=0)
                for role in RoleName}  # fmt: skip
        found.append((sorted(outcome.items()), p, steps, held))
    return found


HOUSEKEEPING = (Op.PREFILL, Op.SYNC, Op.TRANSFER)


@given(workflows(), st.integers(1, 3), st.booleans(), st.lists(st.sampled_from(WHOLE), max_size=6))
@settings(max_examples=25, deadline=None)
def test_each_pass_on_or_off_leaves_the_outcomes_unchanged(
    flow: Workflow, rounds: int, steady: bool, passes: list[Pass]
) -> None:
    graph = lower(flow, rounds, steady)
    changed = run_passes(graph, passes)
    assert results(changed) == results(graph)
    assert from_text(to_text(changed)) == changed
    for each in passes:
        if not isinstance(each, EarlyNext):
            assert run_passes(changed, [each]) == run_passes(changed, [each, each])


SYNCED = """\
window rounds=1 steady
draft = DRAFT draft round=0 in=0 out=10 context=24
verify = VERIFY prm round=0 in=10 out=0 context=24 accept=0.8 from draft
refine = REFINE target round=0 in=0 out=12 context=24 if !verify
draft.A = DRAFT draft round=1 in=0 out=10 context=34 from draft if verify
sync.draft.refine = SYNC draft round=0 in=12 out=0 context=24 from ~refine if !verify
draft.R = DRAFT draft round=1 in=0 out=10 context=36 from refine, sync.draft.refine if !verify
"""
RESCORED = """\
sync.prm.refine.A = SYNC prm round=1 in=12 out=0 context=34 from prefill.prm, ~refine.A if verify & !verify.A
reverify.A = VERIFY prm round=1 in=1 out=0 context=45 accept=0.7 from prefill.prm, refine.A, sync.prm.refine.A\
 if verify & !verify.A
"""


def test_shadow_sync_reads_the_target_s_step_while_it_is_written() -> None:
    assert to_text(run_passes(lower(BRIEF, 1, steady=True), [ShadowSync()])) == SYNCED
    graph = run_passes(lowered(Policy.BACKTRACK), [ShadowSync()])
    assert "\n".join(line(graph, t) for t in ("sync.prm.refine.A", "reverify.A")) + "\n" == RESCORED
    # An unscored step is read by the verifier before the draft after it.
    later = run_passes(lowered(Policy.RSD), [ShadowSync()])
    assert (later.by_id["verify.R"].tokens_in, later.by_id["verify.R"].context) == (10, 36)
    assert run_passes(lowered(Policy.TARGET_ONLY), [ShadowSync()]) == lowered(Policy.TARGET_ONLY)
    one = run_passes(lowered(Policy.RSD), [ShadowSync((RoleName.DRAFT,))])
    assert {t.id for t in one.tasks if t.op is Op.SYNC} == {"sync.draft.refine"}


def test_batch_verify_lets_a_pass_score_the_draft_after_too() -> None:
    graph = run_passes(lowered(Policy.BACKTRACK, 3), [DraftAhead(2), BatchVerify()])
    assert line(graph, "verify.A").endswith(" if ?verify with verify")
    assert {t.id: t.joins for t in graph.tasks if t.joins} == {
        "verify.A": "verify",
        "verify.AA": "verify.A",
        "verify.RA": "verify.R",
    }
    # What waits for the verdict cannot share its pass.
    assert run_passes(lowered(Policy.RSD), [BatchVerify()]) == lowered(Policy.RSD)


MOVED = """\
window rounds=1
prefill.draft = PREFILL draft round=0 in=24 out=0 context=0
transfer.draft = TRANSFER draft round=0 in=24 out=0 context=0 from prefill.draft
draft = DRAFT draft round=0 in=0 out=10 context=24 from transfer.draft
"""


def test_disaggregate_prefill_moves_the_prompt_s_cache() -> None:
    flow = replace(FLOW, policy=replace(FLOW.policy, kind=Policy.DRAFT_ONLY))
    assert to_text(run_passes(lower(flow, 1), [DisaggregatePrefill()])) == MOVED
    steady = lower(flow, 1, steady=True)
    assert run_passes(steady, [DisaggregatePrefill()]) == steady


PRUNED = """\
window rounds=2 steady cut=0.2
draft = DRAFT draft round=0 in=0 out=10 context=24
verify = VERIFY prm round=0 in=10 out=0 context=24 accept=0.8 from draft
refine = REFINE target round=0 in=0 out=12 context=24 if !verify
draft.A = DRAFT draft round=1 in=0 out=10 context=34 from draft if verify
verify.A = VERIFY prm round=1 in=10 out=0 context=34 accept=0.8 from draft.A if verify
refine.A = REFINE target round=1 in=10 out=12 context=24 from draft if verify & !verify.A
draft.AA = DRAFT draft round=2 in=0 out=10 context=44 from draft.A if verify & verify.A
draft.AR = DRAFT draft round=2 in=12 out=10 context=34 from refine.A if verify & !verify.A
draft.R = DRAFT draft round=1 in=12 out=10 context=24 from refine if !verify
"""


def test_prune_ends_the_window_early_where_it_is_unlikely_and_says_so() -> None:
    graph = run_passes(lower(BRIEF, 2, steady=True), [Prune(0.25)])
    assert to_text(graph).replace("cut=0.19999999999999996", "cut=0.2") == PRUNED
    cold = run_passes(lower(BRIEF, 2), [Prune(0.25)])
    assert "draft.R" not in cold.by_id and "refine" in cold.by_id


@given(workflows(), st.integers(1, 4), st.booleans(), st.floats(0.0, 0.6))
@settings(max_examples=40, deadline=None)
def test_prune_keeps_all_of_the_probability(flow: Workflow, rounds: int, steady: bool, below: float) -> None:
    graph = lower(flow, rounds, steady)
    pruned = run_passes(graph, [Prune(below)])
    assert sum(p for _, p in pruned.outcomes) == pytest.approx(1.0)
    assert set(pruned.by_id) <= set(graph.by_id)
    assert 0 <= pruned.cut <= 1 + 1e-9
    for task in pruned.tasks:
        likely = graph.chance(task.guard) >= below
        assert likely or task.round == 0 or steady or task.op not in (Op.DRAFT,)
    assert run_passes(graph, [Prune(0.0)]) == graph
