"""Roles on sets of equal devices: which sets there are, what they cost, what they hold, and plans with them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from planner_cases import DRAFT, MODELS, PRM, TARGET, THREE, LinearCosts, device, machine, quick_plan, workflow
from schedule_validator import faults

from planner.api import as_machine
from planner.choose import Options, solved
from planner.cost import cost_model, shortages
from planner.errors import UserError
from planner.lower import lower
from planner.machine import Machine, all_reduce_us, check, members, place_name, transfer_us
from planner.passes import DraftAhead, PrefetchRefine, run_passes
from planner.plan import Plan
from planner.plan import check as check_plan
from planner.presets import PRESETS, preset
from planner.report import report
from planner.schedule.instance import build
from planner.schedule.search import Limit, solve
from planner.shape import ModelShape
from planner.trace import Chunk, ClockKind, ProblemEnded, ProblemStarted, RunStarted
from planner.workflow import Arithmetic, Numerics, Role, Workflow

PAIR = Numerics(Arithmetic.FLOAT32, tensor_parallel=2)
FOUR = machine(*(device(name) for name in "abcd"))
SHAPE = ModelShape(10**9, 10**4, 2 * 10**9, layers=24, hidden=1024)


def pairs(flow: Workflow | None = None) -> Workflow:
    """The target on two devices."""
    flow = flow or workflow()
    return replace(flow, roles={**flow.roles, TARGET: Role("made/up", PAIR)})


def test_the_places_of_a_role_are_the_sets_of_its_degree() -> None:
    assert [d.name for d in FOUR.candidates(PAIR)] == ["+".join(p) for p in combinations("abcd", 2)]
    assert [d.name for d in FOUR.candidates(replace(PAIR, tensor_parallel=4))] == ["a+b+c+d"]
    assert [d.name for d in FOUR.candidates(Numerics())] == list("abcd")
    with pytest.raises(UserError, match="no 5 equal devices provide float32"):
        FOUR.candidates(replace(PAIR, tensor_parallel=5))


def test_only_equal_devices_make_a_set() -> None:
    odd = replace(FOUR, devices=(*FOUR.devices[:3], device("d", memory_bytes=123)))
    assert [d.name for d in odd.candidates(PAIR)] == ["a+b", "a+c", "b+c"]


def test_a_set_is_a_device_with_all_that_its_members_have() -> None:
    both, one = FOUR.device("a+c"), FOUR.device("a")
    assert (both.count, both.memory_bytes, both.active_w) == (2, 2 * one.memory_bytes, 2 * one.active_w)
    assert both.bandwidth_bytes_per_s == 2 * one.bandwidth_bytes_per_s
    assert both.ops_per_s[Arithmetic.FLOAT32] == 2 * one.ops_per_s[Arithmetic.FLOAT32]
    assert FOUR.provides("a+c", PAIR) and not FOUR.provides("a", PAIR) and not FOUR.provides("a+c", Numerics())
    assert members("a+c") == FOUR.members("a+c") == ("a", "c") and members("a") == ("a",)
    assert place_name(["c", "a"], "abcd") == "a+c"
    with pytest.raises(UserError, match="there is no device x"):
        FOUR.device("a+x")


def test_a_device_s_name_has_no_plus_and_no_file_says_count() -> None:
    for wrong in (device("a+b"), device("a", count=2)):
        with pytest.raises(UserError, match=r"devices\[0\]\.(name is .* without \+|count is 2; leave it out)"):
            check(Machine("m", (wrong,), "made up"), "m.yaml")


def test_data_reaches_every_member_and_comes_from_the_nearest() -> None:
    one_hop = transfer_us(FOUR, "a", "b", 10**6)
    assert transfer_us(FOUR, "a", "a+b", 10**6) == one_hop
    assert transfer_us(FOUR, "a+b", "a", 10**6) == 0
    assert transfer_us(FOUR, "a+b", "c+d", 10**6) == one_hop
    # Two links of 1 GB/s and 5 us each way; 2 (n - 1) turns with an n-th of the data.
    assert all_reduce_us(FOUR, "a+b", 10**6) == pytest.approx(2 * (10 + 2 * 500))
    assert all_reduce_us(FOUR, "a+b+c+d", 10**6) == pytest.approx(6 * (10 + 2 * 250))
    assert all_reduce_us(FOUR, "a", 10**6) == 0


def test_the_roofline_splits_the_work_and_adds_the_sums() -> None:
    flow = pairs()
    fast = machine(*(device(n, bandwidth_bytes_per_s=1e11, ops_per_s={Arithmetic.FLOAT32: 1e13, Arithmetic.INT8: 1e13})
                     for n in "abcd"), latency_us=1.0)  # fmt: skip
    shapes = {DRAFT: SHAPE, PRM: SHAPE, TARGET: SHAPE}
    alone = cost_model(fast, workflow(), shapes).decode_us(TARGET, "a", 10, 50)
    both = cost_model(fast, flow, shapes).decode_us(TARGET, "a+b", 10, 50)
    rows, layers = PAIR.row_block, SHAPE.layers
    sums = 10 * 2 * layers * all_reduce_us(fast, "a+b", rows * SHAPE.hidden * 4)
    assert both == pytest.approx(alone / 2 + sums, rel=0.01)
    with pytest.raises(UserError, match="device a does not provide float32"):
        cost_model(fast, flow, shapes).decode_us(TARGET, "a", 10, 50)


def test_memory_is_counted_for_each_member() -> None:
    flow = pairs()
    costs = LinearCosts()  # 1000 + 2 * 256 * 10 bytes a model
    tight = machine(*(device(n, memory_bytes=4000) for n in "ab"))
    placement = {TARGET: "a+b"}
    assert not shortages(tight, placement, flow, costs)
    short = shortages(tight, {TARGET: "a+b", PRM: "b"}, flow, costs)
    assert [(s.device, s.needed_bytes) for s in short] == [("b", 3060 + 6120)]
    with pytest.raises(UserError, match=r"the least is missing where .* GB too much"):
        build(lower(flow, 1), flow, tight, costs)


def test_a_set_keeps_all_of_its_members_busy_in_every_outcome() -> None:
    flow = pairs()
    graph = run_passes(lower(flow, 2, steady=True), [DraftAhead(2), PrefetchRefine()])
    instance = build(graph, flow, THREE, LinearCosts())
    # Three equal devices: a pair, and the other two roles each inside it or outside.
    assert {p[TARGET] for p in instance.placements} <= {"a+b", "a+c", "b+c"}
    assert len(instance.placements) < 3 * 9
    for placement in instance.placements:
        schedule = solve(replace(instance, placements=(placement,)), Limit(0.01))
        assert not list(faults(instance, schedule))


def test_a_plan_may_place_a_role_on_a_set() -> None:
    flow = pairs()
    costs = LinearCosts({(TARGET, pair): 8 for pair in ("a+b", "a+c", "b+c")})
    plan = solved(flow, THREE, costs, dict(MODELS), Options(rounds=1, work=0.01, samples=4))
    assert len(members(plan.placement[TARGET])) == 2
    check_plan(plan, "plan")
    assert Plan.from_mapping({"schema": "heteroreason.plan/1", "hash": plan.hash, **plan.to_mapping()}, "x") == plan
    wrong = replace(plan, placement={**plan.placement, TARGET: "a"})
    with pytest.raises(UserError, match=r"placement\.target is 'a', which does not compute float32"):
        check_plan(wrong, "plan")


@pytest.mark.parametrize("name", list(PRESETS))
def test_fixed_plans_place_a_role_on_a_set_too(name: str) -> None:
    plan = preset(name, pairs(), THREE, LinearCosts(), dict(MODELS))
    assert {role: len(members(place)) for role, place in plan.placement.items()} == {DRAFT: 1, PRM: 1, TARGET: 2}


def test_the_report_counts_each_device_once_however_it_is_used() -> None:
    plan = quick_plan(pairs(), placement={DRAFT: "a", PRM: "a", TARGET: "a+b"})
    head, start = RunStarted(plan.hash, "x", ClockKind.VIRTUAL), ProblemStarted("p", "?", 0, 0)
    both = Chunk("p", "a+b", TARGET, "REFINE", 0, "r", 0, 600, 1, 1, 0, False)
    one = Chunk("p", "a", DRAFT, "DRAFT", 0, "d", 600, 900, 1, 1, 0, False)
    end = ProblemEnded("p", 1000, "answer", "3", True, ("x",), ("r", "d"))
    found = {use.device: use for use in report(plan, [head, start, both, one, end]).devices}
    assert {name: (use.busy_us, use.utilisation) for name, use in found.items()} == {"a": (900, 0.9), "b": (600, 0.6)}
    # 10 W while busy, 1 W else: microseconds times watts are microjoules.
    assert sum(use.energy_mj for use in found.values()) == pytest.approx((1500 * 10 + 500) / 1000)


def test_a_large_model_fits_on_a_set_where_one_card_is_too_small() -> None:
    cards = as_machine("2x3090")
    big = ModelShape(28 * 10**9, 10**5, 28 * 10**9, layers=48, hidden=5120)
    small = ModelShape(10**9, 10**4, 10**9, layers=24, hidden=1024)
    roles = {r: Role("made/up", Numerics(Arithmetic.BFLOAT16)) for r in (DRAFT, PRM)}
    one = replace(workflow(), roles={**roles, TARGET: Role("made/up", Numerics(Arithmetic.BFLOAT16))})
    two = replace(one, roles={**roles, TARGET: Role("made/up", Numerics(Arithmetic.BFLOAT16, tensor_parallel=2))})
    shapes = {DRAFT: small, PRM: small, TARGET: big}
    with pytest.raises(UserError, match=r"gpu\d has 24 GB and target need 28.* GB, 4.* GB too much"):
        build(lower(one, 1), one, cards, cost_model(cards, one, shapes))
    instance = build(lower(two, 1), two, cards, cost_model(cards, two, shapes))
    assert {p[TARGET] for p in instance.placements} == {"gpu0+gpu1"}
