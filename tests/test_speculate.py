"""Token-level speculation: the tokens and the caches of the model alone, to the bit, with fewer passes."""

from __future__ import annotations

import backend_contract
import jax
import numpy as np
import pytest
import tiny_models

from models_jax.backend import JaxBackend
from models_jax.transformer import Cache
from planner.api import costs_of
from planner.errors import UserError
from planner.machine import Machine
from planner.workflow import (
    Arithmetic,
    Budget,
    Numerics,
    Policy,
    PolicyOptions,
    Role,
    RoleName,
    Speculate,
    Workflow,
)

TEXT = "12 + 30 = 42\n4 2 = 6"
MANNERS = ({}, backend_contract.SAMPLED, {"key": 5, "temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.02})


def subject(target, speculate=None, arithmetic=Arithmetic.FLOAT32, delimiter=tiny_models.DELIMITER):
    role = Role(str(target), Numerics(arithmetic, 8, 96), speculate)
    return backend_contract.Subject(JaxBackend, "target", role, delimiter, TEXT, "x 1")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, a copy of it, a stranger, and strangers with larger and smaller vocabularies."""
    base = len(tiny_models.TOKENS)
    shapes = {
        "target": tiny_models.config("qwen3", vocab_size=base + 2),
        "copy": tiny_models.config("qwen3", vocab_size=base + 2),
        "larger": tiny_models.config("llama", vocab_size=base + 5, num_hidden_layers=1),
        "smaller": tiny_models.config("llama", vocab_size=base, num_hidden_layers=1),
    }
    made = {}
    for name, shape in shapes.items():
        made[name] = tmp_path_factory.mktemp(name)
        tiny_models.write(made[name], shape, seed=0 if name in ("target", "copy") else 7)
    return made


@pytest.fixture(scope="module")
def alone(folders):
    made = subject(folders["target"])
    yield made
    made.backend.close()


@pytest.fixture(scope="module", params=["copy", "larger", "smaller"])
def speculating(request, folders):
    made = subject(
        folders["target"], Speculate(str(folders[request.param]), {"copy": 7, "larger": 3}.get(request.param, 1))
    )
    made.draft = request.param
    yield made
    made.backend.close()


def test_the_planner_counts_what_a_role_and_its_draft_hold(speculating):
    flow = Workflow(
        "alone",
        "sums",
        {RoleName.TARGET: speculating.role},
        PolicyOptions(Policy.TARGET_ONLY),
        budget=Budget(tokens=90),
    )
    shape = costs_of(flow, Machine.load("this-computer")).shapes[RoleName.TARGET]
    assert shape.draft is not None
    assert shape.held_bytes(0) == speculating.info.weight_bytes
    # The draft keeps keys and values of its own.
    drafter = speculating.backend._runner(speculating.name)._drafter
    cache = jax.eval_shape(lambda: Cache.empty(drafter.config, 96))
    held = sum(part.size * part.dtype.itemsize for part in (*cache.k, *cache.v))
    assert shape.draft.held_bytes(96) - shape.draft.weight_bytes == held


def cache_bits(s, sequence, count):
    cache = s.backend._runner(s.name)._caches.peek(sequence)
    return [np.asarray(part)[:, :, :count].tobytes() for part in (*cache.k, *cache.v)]


@pytest.mark.parametrize("manner", MANNERS, ids=["greedy", "sampled", "narrow"])
def test_tokens_and_cache_are_those_of_the_model_alone(alone, speculating, manner):
    expected = alone.write("a", 60, **manner)
    held = len(alone.prompt) + 59
    for chunk in (60, 1, 4, 9):
        assert speculating.write("a", 60, chunk, **manner) == expected, chunk
        assert cache_bits(speculating, "a", held) == cache_bits(alone, "a", held)


def test_steps_end_alike(alone, speculating):
    for key in range(20):
        outs = []
        for s in (alone, speculating):
            s.run("step", 0, s.prompt)
            outs.append(s.run("step", len(s.prompt), (), 30, key=key, temperature=2.0))
        assert outs[0] == outs[1]


@pytest.mark.parametrize(
    "check",
    [
        backend_contract.rewound_sequence_goes_on_as_before,
        backend_contract.sequences_do_not_mix,
        backend_contract.fork_is_a_copy,
        backend_contract.steps_end_alike_in_chunks,
        backend_contract.fed_tokens_count_as_generated_ones,
        backend_contract.context_is_a_limit,
    ],
    ids=backend_contract.name,
)
def test_contract(check, speculating):
    check(speculating)


def test_good_proposals_save_passes(speculating):
    drafter = speculating.backend._runner("target")._drafter
    drafter.passes = drafter.written = 0
    speculating.write("a", 60, **backend_contract.SAMPLED)
    if speculating.draft == "copy":
        assert drafter.passes <= 16
    else:
        assert 60 / (1 + drafter.count) <= drafter.passes <= drafter.written


def test_another_tokenizer_is_refused(folders, tmp_path):
    tiny_models.write(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    with pytest.raises(UserError, match="another tokenizer"):
        subject(folders["target"], Speculate(str(tmp_path)))


def test_a_reward_model_is_no_draft(folders, tmp_path):
    tiny_models.write(tmp_path, tiny_models.config("qwen2", reward=True))
    with pytest.raises(UserError, match="writes no tokens"):
        subject(folders["target"], Speculate(str(tmp_path)))


def test_memory_counts_both(folders, alone, speculating):
    assert speculating.info.weight_bytes > alone.info.weight_bytes
    assert speculating.info.model_hash == alone.info.model_hash


@pytest.mark.parametrize(
    ("role", "value", "message"),
    [
        ("target", {"model": "zoo/draft", "tokens": 8}, "tokens is 8; use a whole number from 1 to 7"),
        ("target", {"model": "zoo/draft", "tokens": 0}, "tokens is 0; use a whole number from 1 to 7"),
        ("target", {"model": " "}, "roles.target.speculate.model is"),
        ("prm", {"model": "zoo/draft"}, "only a float role that writes"),
        ("draft", {"model": "zoo/draft"}, "only a float role that writes"),
    ],
)
def test_workflow_rules(role, value, message):
    roles = {name.value: {"model": "zoo/x"} for name in RoleName}
    roles["draft"]["numerics"] = {"arithmetic": "int8"}
    roles[role]["speculate"] = value
    with pytest.raises(UserError, match=message):
        Workflow.from_mapping({"name": "x", "problems": "sums", "roles": roles}, "wf.yaml")
