"""Costs: shapes counted from configs, the roofline against published figures, tables, memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost import (
    CostEntry,
    CostOp,
    Costs,
    CostTable,
    Fit,
    ModelShape,
    Origin,
    RooflineCosts,
    TableCosts,
    active_mj,
    cost_model,
    idle_mj,
    shortages,
)
from planner.errors import UserError
from planner.machine import Machine
from planner.workflow import Arithmetic, Numerics, Role, RoleName, Statistics, Workflow

EXAMPLES = Path(__file__).parent.parent / "examples"
DRAFT, PRM, TARGET = RoleName.DRAFT, RoleName.PRM, RoleName.TARGET


def config(
    kind: str, hidden: int, layers: int, heads: int, kv_heads: int, inner: int, words: int, **more: Any
) -> dict[str, Any]:
    raw = {"model_type": kind, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    raw |= {"num_key_value_heads": kv_heads, "intermediate_size": inner, "vocab_size": words}
    return raw | more


QWEN_05B = config("qwen2", 896, 24, 14, 2, 4864, 151936, tie_word_embeddings=True)
QWEN_7B = config("qwen2", 3584, 28, 28, 4, 18944, 152064, tie_word_embeddings=False)
PRM_7B = QWEN_7B | {"architectures": ["Qwen2ForProcessRewardModel"]}
QWEN3_06B = config("qwen3", 1024, 28, 16, 8, 3072, 151936, tie_word_embeddings=True, head_dim=128)
LLAMA_1B = config("llama", 2048, 16, 32, 8, 8192, 128256, tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("raw", "parameters", "kv_numbers"),
    [
        (QWEN_05B, 494_032_768, 2 * 24 * 2 * 64),
        (QWEN_7B, 7_615_616_512, 2 * 28 * 4 * 128),
        (QWEN3_06B, 596_049_920, 2 * 28 * 8 * 128),
        (LLAMA_1B, 1_235_814_400, 2 * 16 * 8 * 64),
    ],
)
def test_parameters_are_those_that_the_makers_publish(raw: dict[str, Any], parameters: int, kv_numbers: int) -> None:
    for arithmetic, each in ((Arithmetic.INT8, 1), (Arithmetic.BFLOAT16, 2), (Arithmetic.FLOAT32, 4)):
        shape = ModelShape.from_config(raw, arithmetic)
        assert shape.weight_bytes == parameters * each
        assert shape.kv_bytes_per_token == kv_numbers * each
        assert 0.9 * parameters < shape.flops_per_token / 2 <= parameters


def test_a_reward_model_has_no_head_of_words() -> None:
    whole, reward = (ModelShape.from_config(raw, Arithmetic.INT8) for raw in (QWEN_7B, PRM_7B))
    assert whole.weight_bytes - reward.weight_bytes == pytest.approx(152064 * 3584 - 3584**2, rel=1e-3)


def test_flags_of_the_config_count() -> None:
    plain = ModelShape.from_config(LLAMA_1B, Arithmetic.INT8).weight_bytes
    biased = ModelShape.from_config(LLAMA_1B | {"attention_bias": True, "mlp_bias": True}, Arithmetic.INT8).weight_bytes
    assert biased - plain == 16 * (2048 + 512 + 512 + 2048 + 8192 + 8192 + 2048)
    heads = {"num_key_value_heads": None, "head_dim": None}
    assert ModelShape.from_config(LLAMA_1B | heads, Arithmetic.INT8).kv_bytes_per_token == 2 * 16 * 2048


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden_size": None}, "c.json: hidden_size is missing; copy config.json"),
        ({"num_hidden_layers": "24"}, "c.json: num_hidden_layers is '24'; use a whole number above 0"),
        ({"vocab_size": 0}, "c.json: vocab_size is 0; use a whole number above 0"),
        ({"num_attention_heads": True}, "c.json: num_attention_heads is True; use a whole number"),
        ({"model_type": "qwen4"}, "c.json: model_type is qwen4; did you mean qwen"),
        ({"model_type": None}, "c.json: model_type is None; use one of qwen2, qwen3, llama, mistral"),
    ],
)
def test_a_config_that_cannot_be_counted(change: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as error:
        ModelShape.from_config(QWEN_05B | change, Arithmetic.INT8, "c.json")
    assert str(error.value).startswith(text)


@cache
def roofline(machine: str = "u280-2x3090", row_block: int = 64) -> RooflineCosts:
    block = Numerics(Arithmetic.BFLOAT16, row_block, 2048)
    shapes = {
        DRAFT: ModelShape.from_config(QWEN_05B, Arithmetic.INT8),
        TARGET: ModelShape.from_config(QWEN_7B, Arithmetic.BFLOAT16),
    }
    return RooflineCosts(Machine.load(machine), shapes, {DRAFT: Numerics(Arithmetic.INT8), TARGET: block})


def test_a_7b_on_a_3090_is_near_the_published_times() -> None:
    """arXiv 2609.28717: 19.4 ms a written token, 0.245 ms a read one."""
    assert roofline().decode_us(TARGET, "gpu0", 100, 200) / 100 == pytest.approx(19_400, rel=0.03)
    assert roofline(row_block=128).prefill_us(TARGET, "gpu0", 512, 0) / 512 == pytest.approx(245, rel=0.1)


def test_the_arithmetic_of_the_roofline() -> None:
    machine = Machine.load("1x3090")
    device = replace(machine.devices[0], memory_efficiency=1.0, compute_efficiency=1.0, bandwidth_bytes_per_s=1e9)
    device = replace(device, overhead_us=7.0, per_token_overhead_us=3.0, ops_per_s=dict.fromkeys(Arithmetic, 1e9))
    shape = ModelShape(weight_bytes=1000, kv_bytes_per_token=10, flops_per_token=100)
    roles = {DRAFT: Numerics(Arithmetic.INT8, 8, 64), TARGET: Numerics(Arithmetic.FLOAT32, 8, 64)}
    costs = RooflineCosts(replace(machine, devices=(device,)), {DRAFT: shape, TARGET: shape}, roles)
    # float: 1000 + 64 * 10 bytes take 1.64 us, 8 * 100 operations 0.8 us, in every pass
    assert costs.decode_us(TARGET, "gpu0", 10, 0) == round(7 + 10 * (1.64 + 3))
    assert costs.prefill_us(TARGET, "gpu0", 9, 0) == round(7 + 2 * (1.64 + 3))
    # integers: 20 tokens of context and 5 of its own on average, one row
    assert costs.decode_us(DRAFT, "gpu0", 10, 20) == round(7 + 10 * (1.25 + 3))
    assert costs.prefill_us(DRAFT, "gpu0", 8, 20) == round(7 + 1.24 + 3)


def test_an_fpga_prefills_row_by_row() -> None:
    costs = roofline()
    assert costs.prefill_us(DRAFT, "fpga0", 80, 0) == costs.decode_us(DRAFT, "fpga0", 80, 0)
    assert costs.prefill_us(DRAFT, "gpu0", 80, 0) < costs.decode_us(DRAFT, "gpu0", 80, 0) / 4


tokens = st.integers(0, 4000)


@settings(deadline=None)
@given(st.sampled_from([(DRAFT, "fpga0"), (DRAFT, "gpu1"), (TARGET, "gpu0")]), tokens, tokens, tokens)
def test_more_tokens_never_cost_less(place: tuple[RoleName, str], few: int, more: int, context: int) -> None:
    costs, (few, more) = roofline(), sorted((few, more))
    for cost in (costs.prefill_us, costs.decode_us):
        assert 1 <= cost(*place, few, context) <= cost(*place, more, context)
        assert cost(*place, few, context) <= cost(*place, few, context + 100)


@settings(deadline=None)
@given(st.sampled_from(CostOp), tokens, tokens, tokens, st.tuples(*[st.floats(0, 1e4)] * 3))
def test_the_same_holds_for_entries(
    op: CostOp, few: int, more: int, context: int, us: tuple[float, float, float]
) -> None:
    few, more = sorted((few, more))
    entry = CostEntry(TARGET, "gpu0", op, us[0], "test", us[1], us[2])
    assert 1 <= entry.us(few, context) <= entry.us(more, context)
    assert isinstance(entry.us(few, context), int)


def test_a_role_on_a_device_that_cannot_run_it() -> None:
    with pytest.raises(UserError) as error:
        roofline().decode_us(TARGET, "fpga0", 1, 0)
    assert str(error.value) == (
        "machine u280-2x3090: device fpga0 does not provide bfloat16, which role target needs; "
        "place the role elsewhere or change its numerics"
    )
    with pytest.raises(UserError, match="there is no device gpu7; did you mean"):
        roofline().prefill_us(TARGET, "gpu7", 1, 0)
    with pytest.raises(UserError, match="role prm has no model shape"):
        roofline().prefill_us(PRM, "gpu0", 1, 0)
    with pytest.raises(ValueError, match="-1 tokens"):
        roofline().prefill_us(TARGET, "gpu0", -1, 0)


def test_the_published_table() -> None:
    """The formulas of arXiv 2609.28717: draft, PRM, target."""
    table = CostTable.load(EXAMPLES / "published" / "costs-u280-2x3090-config1.yaml")
    costs: Costs = TableCosts(table, roofline())
    n, k = 30, 200
    assert costs.decode_us(DRAFT, "fpga0", n, k) == pytest.approx(5740 * n + 2.4 * (n - 1) * (2 * k + n) / 2, rel=0.01)
    assert costs.prefill_us(PRM, "gpu0", n, k) == pytest.approx(14_420 + 194.9 * (n + k), abs=1)
    assert costs.prefill_us(TARGET, "gpu1", n, k) == 245 * n
    assert costs.decode_us(TARGET, "gpu1", 1, k) == 19_400 + 84
    assert costs.origin(TARGET, "gpu1", CostOp.DECODE) == Origin.PUBLISHED
    assert costs.decode_us(DRAFT, "gpu0", n, k) == 3800 * n
    assert costs.origin(DRAFT, "fpga0", CostOp.PREFILL) == Origin.ROOFLINE == "modelled (roofline)"
    assert costs.prefill_us(DRAFT, "fpga0", n, k) == roofline().prefill_us(DRAFT, "fpga0", n, k)
    assert CostTable.from_mapping(table.to_mapping(), "again") == table
    assert CostTable.from_mapping(table.to_mapping(), "again").hash == table.hash


def test_measured_goes_before_fitted_before_published() -> None:
    def entry(origin: Origin) -> CostEntry:
        return CostEntry(TARGET, "gpu0", CostOp.DECODE, 1, "a test", origin=origin)

    rising = [Origin.PUBLISHED, Origin.FITTED, Origin.MEASURED]
    for count in (1, 2, 3):
        found = CostTable(tuple(map(entry, rising[:count]))).find(TARGET, "gpu0", CostOp.DECODE)
        assert found == entry(rising[count - 1])


ENTRY = {"role": "target", "device": "gpu0", "op": "decode", "per_token_us": "19.4 ms", "source": "a test"}


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ({"entries": []}, "entries is []; give at least one entry"),
        ({"entries": [ENTRY | {"op": "verify"}]}, 'entries[0].op is "verify"; use one of prefill, decode'),
        ({"entries": [ENTRY | {"role": "judge"}]}, 'entries[0].role is "judge"; use one of draft, prm, target'),
        ({"entries": [ENTRY | {"base_us": -1}]}, "entries[0].base_us is -1.0; use a number from 0"),
        (
            {"entries": [ENTRY | {"per_token_us": "1 W"}]},
            'entries[0].per_token_us is "1 W"; use one of the units us, ns',
        ),
        ({"entries": [ENTRY | {"source": ""}]}, 'entries[0].source is ""; say where the figures come from'),
        ({"entries": [ENTRY | {"origin": "guessed"}]}, 'entries[0].origin is "guessed"; use one of measured, fitted'),
        ({"entries": [ENTRY | {"origin": "modelled (roofline)"}]}, "use measured, fitted or published"),
        ({"entries": [ENTRY, ENTRY]}, 'entries[1] is "measured decode of target on gpu0"; keep one entry for each'),
    ],
)
def test_a_wrong_table_is_named_with_value_and_mend(raw: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as error:
        CostTable.from_mapping(raw, "costs.yaml")
    said = str(error.value)
    assert said.startswith("costs.yaml: ")
    assert text in said


def workflow() -> Workflow:
    numerics = Numerics(Arithmetic.BFLOAT16, 64, 2048)
    roles = {PRM: Role("prm", numerics), TARGET: Role("target", numerics), DRAFT: Role("d", Numerics(Arithmetic.INT8))}
    return Workflow("w", "sums", roles)


SHAPES = {
    DRAFT: ModelShape.from_config(QWEN_05B, Arithmetic.INT8),
    PRM: ModelShape.from_config(PRM_7B, Arithmetic.BFLOAT16),
    TARGET: ModelShape.from_config(QWEN_7B, Arithmetic.BFLOAT16),
}


def test_a_table_must_fit_its_machine() -> None:
    machine = Machine.load("u280-2x3090")
    assert isinstance(cost_model(machine, workflow(), SHAPES), RooflineCosts)
    good = CostTable.load(EXAMPLES / "published" / "costs-u280-2x3090-config1.yaml")
    assert cost_model(machine, workflow(), SHAPES, good).shapes == SHAPES
    for device, text in (("gpu5", "there is no device gpu5; did you mean"), ("fpga0", "does not provide bfloat16")):
        table = CostTable.from_mapping({"entries": [ENTRY | {"device": device}]}, "costs.yaml")
        with pytest.raises(UserError, match=text):
            cost_model(machine, workflow(), SHAPES, table)


def test_memory_that_is_wanting() -> None:
    machine = Machine.load("u280-2x3090")
    costs = cost_model(machine, workflow(), SHAPES)
    assert shortages(machine, {DRAFT: "fpga0", PRM: "gpu0", TARGET: "gpu1"}, workflow(), costs) == []
    (short,) = shortages(machine, {DRAFT: "fpga0", PRM: "gpu1", TARGET: "gpu1"}, workflow(), costs)
    weights = SHAPES[PRM].weight_bytes + SHAPES[TARGET].weight_bytes
    assert short.needed_bytes == weights + 2 * 2 * 2048 * 57_344
    assert short.missing_bytes == short.needed_bytes - 24 * 10**9
    assert str(short) == "gpu1 has 24 GB and prm and target need 29.9 GB"


def test_a_role_that_speculates_holds_its_draft_as_well() -> None:
    machine = Machine.load("u280-2x3090")
    draft = ModelShape.from_config(QWEN_05B, Arithmetic.BFLOAT16)
    shapes = SHAPES | {TARGET: replace(SHAPES[TARGET], draft=draft)}
    needed = []
    for chosen in (SHAPES, shapes):
        costs = cost_model(machine, workflow(), chosen)
        (short,) = shortages(machine, {DRAFT: "fpga0", PRM: "gpu1", TARGET: "gpu1"}, workflow(), costs)
        needed.append(short.needed_bytes)
    assert needed[1] - needed[0] == draft.weight_bytes + 2 * 2048 * draft.kv_bytes_per_token
    # Devices that hold a model together have a part of it each, but all of its draft.
    assert shapes[TARGET].held_bytes(100, 2) - SHAPES[TARGET].held_bytes(100, 2) == draft.held_bytes(100)


def test_energy() -> None:
    gpu = Machine.load("1x3090").devices[0]
    assert active_mj(gpu, 1000) == 350
    assert idle_mj(gpu, 2000) == 50


def test_a_table_over_another_keeps_what_only_the_other_has() -> None:
    def entry(role: RoleName, op: CostOp, us: float, origin: Origin) -> CostEntry:
        return CostEntry(role, "a", op, us, "here", origin=origin)

    fitted = entry(RoleName.DRAFT, CostOp.DECODE, 3, Origin.FITTED)
    profiled = entry(RoleName.DRAFT, CostOp.DECODE, 2, Origin.MEASURED)
    other = entry(RoleName.PRM, CostOp.PREFILL, 5, Origin.MEASURED)
    below = CostTable((profiled, other), "profiled", fits=(Fit(RoleName.PRM, "a", 9, 0, 0.1, 0.0),), dispatch_us=300)
    over = CostTable((fitted,), "fitted", Statistics(accept=0.5)).over(below)
    assert over.entries == (fitted, other)
    assert (over.statistics, over.fits, over.dispatch_us) == (Statistics(accept=0.5), below.fits, 300)
    assert replace(over, dispatch_us=0.0).over(below).dispatch_us == 0
    assert CostTable.from_mapping(over.to_mapping(), "here") == over
