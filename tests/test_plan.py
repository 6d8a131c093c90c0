"""Plans: their file, their hash, what is refused, and the presets."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import DRAFT, MIXED, MODELS, PRM, SEEDS, TARGET, THREE, LinearCosts, plan_for, workflow, workflows

from planner.choose import CHOICE_SEED, Options, auto, solved
from planner.errors import UserError
from planner.graph import Op, from_text, to_text
from planner.lower import lower
from planner.passes import DraftAhead, PrefetchRefine, run_passes
from planner.plan import Plan, Solver, priorities_of, priority_key
from planner.presets import PRESETS, preset
from planner.schedule.heft import list_schedule
from planner.schedule.instance import build
from planner.simulate import simulate
from planner.workflow import Policy, Workflow

PLAN = plan_for(workflow(), "overlapped", MIXED)


# --- the file ---


@given(workflows(), st.sampled_from(sorted(PRESETS)), SEEDS)
@settings(max_examples=15, deadline=None)
def test_json_round_trips(flow: Workflow, name: str, seed: int) -> None:
    made = replace(plan_for(flow, name, MIXED), objective_us=seed / 7)
    again = Plan.from_mapping(json.loads(made.to_json()), "here")
    assert again == made
    assert again.hash == made.hash
    assert again.to_json() == made.to_json()


def test_a_file_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    assert Plan.load(path) == PLAN
    assert json.loads(path.read_text())["schema"] == "heteroreason.plan/1"


def test_the_hash_leaves_out_how_long_the_solver_took() -> None:
    assert replace(PLAN, solver=Solver("cp-sat", 12.5)).hash == PLAN.hash


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"draft_ahead": 2},
        {"prefetch_refine": False},
        {"chunk_tokens": 9},
        {"placement": {**PLAN.placement, DRAFT: "gpu0"}},
        {"priorities": {}},
        {"objective_us": 1.0},
        {"models": dict.fromkeys(PLAN.models, "11")},
        {"workflow": workflow(accept=0.1)},
        {"timeline": ()},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_hash_covers_everything_else(change: dict[str, Any]) -> None:
    assert replace(PLAN, **change).hash != PLAN.hash


# --- what is refused ---


def edited(change: Callable[[dict[str, Any]], object], honest: bool = False) -> str:
    """The file's text after an edit; `honest` gives it the hash that it then has."""
    raw = json.loads(PLAN.to_json())
    change(raw)
    if honest:
        try:
            Plan.from_mapping(raw, "")
        except UserError as error:
            if "set hash to" in error.mend:
                raw["hash"] = error.mend.split("'")[1]
    return json.dumps(raw)


def setting(*keys: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(raw: Any) -> None:
        for key in keys[:-1]:
            raw = raw[key]
        raw[keys[-1]] = to

    return change


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "is no plan: it has no key schema; make one with `heteroreason plan`"),
        ("3", "is no plan"),
        ("{}", "is no plan"),
        (edited(setting("schema", to="heteroreason.plan/9")), "schema is 'heteroreason.plan/9' and this version reads"),
        (edited(setting("schema", to=[1])), "schema is [1]"),
        (edited(setting("colour", to="red")), "colour is not a known key"),
        (edited(setting("machine", "devices", 0, "colour", to=1)), "machine.devices[0].colour is not a known key"),
        (edited(lambda raw: raw.pop("graph")), "graph is missing"),
        (edited(setting("draft_ahead", to="2")), 'draft_ahead is "2"; use a whole number'),
        (edited(setting("objective_us", to=float("nan"))), "objective_us is NaN; use a finite number"),
        (edited(lambda raw: raw.pop("hash")), "hash does not match its content"),
        (edited(setting("draft_ahead", to=3)), "hash does not match its content; make it anew, or set hash to"),
        (edited(setting("draft_ahead", to=-1), True), "draft_ahead or chunk_tokens is too small"),
        (edited(setting("chunk_tokens", to=0), True), "draft_ahead or chunk_tokens is too small"),
        (edited(lambda raw: raw["placement"].pop("prm"), True), "placement.prm is missing"),
        (
            edited(setting("placement", "prm", to="fpga"), True),
            "placement.prm is 'fpga', which does not compute float32",
        ),
        (edited(setting("placement", "prm", to="gpu7"), True), "machine test: there is no device gpu7"),
        (edited(setting("priorities", "gpu7", to=[]), True), "there is no device gpu7"),
        (edited(setting("graph", to="window rounds=1\nx"), True), "graph, line 2: cannot read 'x'"),
        (
            edited(setting("workflow", "policy", "accept", to=7.0), True),
            "policy.accept is 7.0; use a number from 0 to 1",
        ),
        (edited(setting("machine", "devices", 0, "active_w", to=-1.0), True), "devices[0].active_w is -1.0"),
        (edited(setting("machine", "links", to=[]), True), "links has no way from"),
        (edited(lambda raw: raw["workflow"]["roles"].pop("prm"), True), "roles.prm is missing"),
    ],
)
def test_a_file_that_is_wrong_gives_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        Plan.load(path)
    assert says in str(error.value)
    assert str(error.value).count("\n") == 0
    assert error.value.mend


def test_a_float_role_may_not_change_its_kind_of_processor() -> None:
    # Two kinds compute float32 with other last bits: the placement would change answers.
    other = replace(MIXED.devices[2], processor="another")
    mixed = replace(PLAN, machine=replace(MIXED, devices=(*MIXED.devices[:2], other)))
    with pytest.raises(UserError, match="differ in the last bits"):
        Plan.from_mapping(json.loads(mixed.to_json()), "here")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file; make one with"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(UserError, match="cannot be read"):
        Plan.load(tmp_path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not JSON"):
        Plan.load(tmp_path / "binary.json")


# --- what plans hold ---


def test_priorities_are_the_order_of_first_starts() -> None:
    flow = workflow()
    graph = run_passes(lower(flow, 2), [DraftAhead(1), PrefetchRefine()])
    instance = build(graph, flow, THREE, LinearCosts())
    schedule = list_schedule(instance, {DRAFT: "a", PRM: "a", TARGET: "b"})
    order = priorities_of(schedule, to_text(graph))
    assert set(order) == {"a", "b"}
    for device, kinds in order.items():
        starts = [
            min(
                s.start_us
                for s in schedule.slots
                if s.device == device and priority_key(graph.by_id[s.task].op, graph.by_id[s.task].round) == kind
            )
            for kind in kinds
        ]
        assert starts == sorted(starts)
    assert order["b"][0] == "PREFILL@0"
    assert "DRAFT@1" in order["a"] and "REFINE@0" in order["b"]


@pytest.mark.parametrize("kind", list(Policy))
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_plans_that_load(name: str, kind: Policy) -> None:
    made = preset(name, workflow(kind), MIXED, LinearCosts(), MODELS, rounds=2)
    assert Plan.from_mapping(json.loads(made.to_json()), "here") == made
    assert made.objective_us >= made.lower_bound_us
    assert 0 <= made.gap <= 1
    assert {s.task for s in made.timeline} == {t.id for t in from_text(made.graph).tasks}
    if DRAFT in made.roles:
        assert made.placement[DRAFT] == "fpga"
    assert len(set(made.placement.values())) == len(made.placement)


def test_serial_overlaps_nothing() -> None:
    made = plan_for(workflow(), "serial", MIXED)
    assert not any(made.priorities.values())
    graph = from_text(made.graph)
    for outcome, _ in graph.outcomes:
        used = [s for s in made.timeline if all(outcome.get(l.verify) == l.verdict for l in graph.by_id[s.task].guard)]
        used.sort(key=lambda s: s.start_us)
        assert all(a.end_us <= b.start_us for a, b in pairwise(used))


def test_the_solver_s_plan_is_no_worse_than_the_presets_windows() -> None:
    flow, options = workflow(), Options(rounds=2, limit_s=5.0, samples=8)
    made = solved(flow, MIXED, LinearCosts(), MODELS, options)
    assert Plan.from_mapping(json.loads(made.to_json()), "here") == made
    assert made.objective_us <= plan_for(flow, "overlapped", MIXED).objective_us
    assert made.objective_us <= plan_for(flow, "serial", MIXED).objective_us
    assert made.draft_ahead >= 1 and made.prefetch_refine
    assert made.cost_source == "measured"


def test_auto_is_the_best_in_simulation() -> None:
    flow, options = workflow(), Options(rounds=2, limit_s=2.0, samples=8)
    best, judged = auto(flow, MIXED, LinearCosts(), MODELS, options)
    assert set(PRESETS) < set(judged)
    assert best.name == "auto"
    again = simulate(best, LinearCosts(), options.samples, CHOICE_SEED)
    assert again.mean_us == min(r.mean_us for r in judged.values())


def test_a_workflow_that_fits_nowhere_is_refused() -> None:
    small = replace(THREE, devices=tuple(replace(d, memory_bytes=1) for d in THREE.devices))
    for make in (lambda: plan_for(workflow(), on=small), lambda: solved(workflow(), small, LinearCosts(), MODELS)):
        with pytest.raises(UserError, match="the models fit on no placement"):
            make()


def test_kinds_of_work_are_named_by_op_and_round() -> None:
    assert priority_key(Op.DRAFT, 1) == "DRAFT@1"
