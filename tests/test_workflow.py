"""Workflow files: the ones that ship, what is refused and how it is said."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.errors import UserError
from planner.workflow import Arithmetic, Policy, RoleName, Workflow

EXAMPLES = Path(__file__).parent.parent / "examples"
SHIPPED = ["sums", "countdown", "sums-sampled"]


def base() -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / "sums.yaml").read_text())


@pytest.mark.parametrize("name", SHIPPED)
def test_the_examples_load_and_come_back(name: str) -> None:
    workflow = Workflow.load(EXAMPLES / f"{name}.yaml")
    assert workflow.name == name
    assert workflow.policy.kind == Policy.BACKTRACK
    assert workflow.roles[RoleName.DRAFT].numerics.arithmetic == Arithmetic.INT8
    assert Workflow.from_mapping(workflow.to_mapping(), "again") == workflow


def test_the_hash_tells_workflows_apart() -> None:
    hashes = {Workflow.load(EXAMPLES / f"{name}.yaml").hash for name in SHIPPED}
    assert len(hashes) == len(SHIPPED)
    short = {"name": "x", "problems": "sums", "roles": base()["roles"]}
    long = short | {"policy": {"accept": 0.7}, "budget": {}}
    assert Workflow.from_mapping(short, "a").hash == Workflow.from_mapping(long, "b").hash


def changed(key: str, value: Any) -> dict[str, Any]:
    """The example with one dotted key set, or taken out if the value is `...`."""
    raw = copy.deepcopy(base())
    *path, last = key.split(".")
    at = raw
    for part in path:
        at = at[part]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return raw


SHARE, COUNT = "use a number from 0 to 1", "use a whole number from 1 to 1000000"
DRAFT, TARGET = "roles.draft.numerics", "roles.target.numerics"


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("name", "", 'name is ""; use one line of 1 to 80 characters'),
        ("name", "a\nb", 'name is "a\\nb"; use one line'),
        ("name", ..., "name is missing; add it"),
        ("problems", " ", 'problems is " "; name a problem set, e.g. sums'),
        ("roles", ..., "roles is missing; add it"),
        (
            "roles",
            {},
            "roles.draft is missing and policy backtrack needs it; add the role or choose another policy.kind",
        ),
        ("roles.prm", ..., "roles.prm is missing and policy backtrack needs it"),
        ("roles.judge", {"model": "x"}, "roles.judge is not a known key; use one of draft, prm, target"),
        ("roles.draft.model", "", 'roles.draft.model is ""; name a model, e.g. zoo/draft, or a folder'),
        (
            f"{DRAFT}.arithmetic",
            "int4",
            f'{DRAFT}.arithmetic is "int4"; use one of float32, bfloat16, int8; did you me',
        ),
        (f"{TARGET}.row_block", 0, f"{TARGET}.row_block is 0; use a whole number from 1 to 256"),
        (f"{TARGET}.row_block", 257, f"{TARGET}.row_block is 257; use a whole number from 1 to 256"),
        (f"{TARGET}.cache_tokens", 0, f"{TARGET}.cache_tokens is 0; {COUNT}"),
        (f"{TARGET}.cache_tokens", 255, f"{TARGET}.cache_tokens is 255; use a multiple of row_block, which is 8"),
        (f"{TARGET}.cache_tokens", 192, f"{TARGET}.cache_tokens is 192; use at least 200 (budget.tokens)"),
        (f"{TARGET}.weights", "int4", f'{TARGET}.weights is "int4"; use one of same, int8'),
        (f"{DRAFT}.weights", "int8", f'{DRAFT}.weights is "int8"; leave the key out: the weights of the integer model'),
        (f"{TARGET}.processor", "", f'{TARGET}.processor is ""; name a processor of the machine file'),
        (
            "policy.kind",
            "rdc",
            'policy.kind is "rdc"; use one of target_only, draft_only, rsd, backtrack, specreason; di',
        ),
        ("policy.accept", 1.7, f"policy.accept is 1.7; {SHARE}"),
        ("policy.accept", -0.1, f"policy.accept is -0.1; {SHARE}"),
        ("policy.accept", "0.5", 'policy.accept is "0.5"; use a number'),
        ("policy.accept_refined", 2, f"policy.accept_refined is 2.0; {SHARE}"),
        ("policy.accept_refind", 0.5, "policy.accept_refind is not a known key; did you mean accept_refined?"),
        ("policy.max_backtracks", -1, "policy.max_backtracks is -1; use a whole number from 0 to 1000000"),
        ("policy.max_ancestors", 0.5, "policy.max_ancestors is 0.5; use a whole number"),
        ("policy", None, "policy is empty; use a mapping with the keys kind, accept,"),
        ("policy.first_target_steps", -1, "policy.first_target_steps is -1; use a whole number from 0 to 1000000"),
        ("policy.drafts", 0, "policy.drafts is 0; use a whole number from 1 to 16"),
        ("policy.drafts", 2, "policy.drafts is 2; set sampling.draft_temperature above 0, or use 1: greedy drafts"),
        ("policy.vote", 17, "policy.vote is 17; use a whole number from 1 to 16"),
        ("policy.vote", 3, "policy.vote is 3; set a temperature in sampling above 0, or use 1: greedy runs"),
        ("policy.resample_alternatives", 17, "policy.resample_alternatives is 17; use a whole number from 0 to 16"),
        ("policy.alternative_temperature", 0, "policy.alternative_temperature is 0.0; use a number above 0, to 5"),
        ("policy.score_prompt", "", 'policy.score_prompt is ""; write what asks for a digit, e.g. ?'),
        ("policy.self_score", "mean", 'policy.self_score is "mean"; use one of expectation, digit'),
        ("sampling.draft_temperature", 6, "sampling.draft_temperature is 6.0; use a number from 0 (greedy) to 5"),
        ("sampling.temperature", -1, "sampling.temperature is -1.0; use a number from 0 (greedy) to 5"),
        ("sampling.temperature", 5.1, "sampling.temperature is 5.1; use a number from 0 (greedy) to 5"),
        ("sampling.temperature", float("inf"), "sampling.temperature is Infinity; use a finite number"),
        ("sampling.top_k", -1, "sampling.top_k is -1; use a whole number from 0 to 1000000"),
        ("sampling.top_k", 40, f'{DRAFT}.arithmetic is "int8"; take top_k, top_p and min_p out of sampling'),
        ("sampling.top_p", 0, "sampling.top_p is 0.0; use a number above 0, up to 1 (all tokens)"),
        ("sampling.top_p", 1.5, "sampling.top_p is 1.5; use a number above 0"),
        ("sampling.top_p", 0.9, f'{DRAFT}.arithmetic is "int8"; take top_k'),
        ("sampling.min_p", -0.5, f"sampling.min_p is -0.5; {SHARE}"),
        ("sampling.min_p", 0.5, f'{DRAFT}.arithmetic is "int8"; take top_k'),
        ("sampling.seed", -1, "sampling.seed is -1; use a whole number from 0 to"),
        ("sampling.seed", 2**63, "sampling.seed is 9223372036854775808; use a whole number from 0 to"),
        ("budget.steps", 0, f"budget.steps is 0; {COUNT}"),
        ("budget.tokens", -5, f"budget.tokens is -5; {COUNT}"),
        ("budget.step_tokens", 10**7, f"budget.step_tokens is 10000000; {COUNT}"),
        ("statistics.accept", 1.01, f"statistics.accept is 1.01; {SHARE}"),
        ("statistics.draft_step_tokens", 0, f"statistics.draft_step_tokens is 0; {COUNT}"),
    ],
)
def test_a_wrong_key_is_named_with_value_and_mend(key: str, value: Any, text: str) -> None:
    with pytest.raises(UserError) as error:
        Workflow.from_mapping(changed(key, value), "wf.yaml")
    said = str(error.value)
    assert said.startswith(f"wf.yaml: {text}")
    assert "\n" not in said


@pytest.mark.parametrize(("policy", "role"), [("target_only", "target"), ("draft_only", "draft")])
def test_a_policy_asks_only_for_the_roles_that_it_needs(policy: str, role: str) -> None:
    raw = base() | {"policy": {"kind": policy}, "roles": {role: {"model": "zoo/x"}}}
    assert set(Workflow.from_mapping(raw, "wf.yaml").roles) == {RoleName(role)}
    with pytest.raises(UserError, match=f"roles.{role} is missing and policy {policy}"):
        Workflow.from_mapping(raw | {"roles": {"prm": {"model": "zoo/x"}}}, "wf.yaml")


def test_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("name: x\nproblems: sums\nroles: {}\nbudget: {steps: 1e3}\n")
    with pytest.raises(UserError) as error:
        Workflow.load(path)
    assert str(error.value) == f"{path}: budget.steps is 1000.0; use a whole number"


@pytest.mark.parametrize(
    ("kind", "drafts", "vote", "temperature", "draft_temperature", "right"),
    [
        ("rsd", 3, 1, 0.0, 0.7, True),
        ("rsd", 3, 1, 0.7, None, True),
        ("rsd", 3, 1, 0.7, 0.0, False),
        ("target_only", 3, 1, 0.0, None, True),  # it drafts nothing, so the number tells nothing
        ("specreason", 1, 3, 0.0, 0.7, True),
        ("target_only", 1, 3, 0.0, 0.7, False),
        ("target_only", 1, 3, 0.7, None, True),
        ("draft_only", 1, 3, 0.0, 0.7, True),
        ("draft_only", 1, 3, 0.7, 0.0, False),
    ],
)
def test_several_tries_need_something_to_differ_in(
    kind: str, drafts: int, vote: int, temperature: float, draft_temperature: float | None, right: bool
) -> None:
    raw = base() | {
        "policy": {"kind": kind, "drafts": drafts, "vote": vote},
        "sampling": {"temperature": temperature, "draft_temperature": draft_temperature},
    }
    if right:
        assert Workflow.from_mapping(raw, "wf.yaml").policy.drafts == drafts
        return
    with pytest.raises(UserError, match="greedy"):
        Workflow.from_mapping(raw, "wf.yaml")


def test_specreason_needs_no_reward_model() -> None:
    raw = base() | {"policy": {"kind": "specreason"}}
    del raw["roles"]["prm"]
    assert Workflow.from_mapping(raw, "wf.yaml").policy.kind is Policy.SPECREASON
