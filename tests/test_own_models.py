"""The worked example of docs/how-to/models.md: its memory, and a run on random models of the same families."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import chat_models
import numpy as np
import pytest
import tiny_models

import planner
from models_jax.config import ModelConfig, RewardHead
from models_jax.loading import save_checkpoint
from models_jax.tokenizer import Tokenizer
from planner.problems import problem_set
from planner.shape import ModelShape
from planner.trace import Chunk
from planner.workflow import Arithmetic, Budget, Numerics, RoleName, Sampling, WeightKind, Workflow

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "qwen-math.yaml"
PAGE = ROOT / "docs" / "how-to" / "models.md"
QUESTION = "Ann has 12 apples and eats 5. How many are left?"

SMALL = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
LARGE = SMALL | {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
PUBLISHED = {
    RoleName.DRAFT: SMALL,
    RoleName.PRM: LARGE | {"architectures": ["Qwen2ForProcessRewardModel"]},
    RoleName.TARGET: LARGE,
}
"""Their config.json, as far as it matters."""


def test_the_page_tells_the_memory_that_the_planner_counts():
    """`| role | weights in bfloat16 | in int8 | two caches |` in GB."""
    workflow, page = Workflow.load(EXAMPLE), PAGE.read_text(encoding="utf-8")
    for role, raw in PUBLISHED.items():
        wide, near = (ModelShape.from_config(raw, Arithmetic.BFLOAT16, weights=kind) for kind in WeightKind)
        caches = 2 * workflow.roles[role].numerics.cache_tokens * wide.kv_bytes_per_token
        row = re.search(rf"^\| `{role}` \|.*$", page, re.MULTILINE)
        assert row, role
        found = [float(cell) for cell in re.findall(r"\| ([\d.]+) GB ", row[0])]
        assert found == [round(size / 1e9, 2) for size in (wide.weight_bytes, near.weight_bytes, caches)]


def write_family(folder: Path, role: RoleName) -> None:
    """A random model as its published counterpart is built: tied or not, padded vocabulary, chat, reward head."""
    raw = PUBLISHED[role]
    tokens = len(chat_models.vocabulary()) + len(chat_models.SPECIAL) + 1
    shape = tiny_models.config(
        "qwen2",
        tied=bool(raw["tie_word_embeddings"]),
        reward=role is RoleName.PRM,
        vocab_size=tokens + 16,
        max_position_embeddings=512,
    )
    tiny_models.write(folder, shape, seed=len(role))
    extra = (chat_models.SEPARATOR,) if role is RoleName.PRM else ()
    chat_models.write_tokenizer(folder, *extra)
    assert ModelConfig.from_folder(folder).reward_head == (RewardHead.TWO_CLASS if extra else None)


@pytest.fixture(scope="module")
def workflow(tmp_path_factory) -> Workflow:
    """The example with random models in place of the published ones, small caches, and float32 for CPUs."""
    example = Workflow.load(EXAMPLE)
    roles = {}
    for name, role in example.roles.items():
        folder = tmp_path_factory.mktemp(name)
        write_family(folder, name)
        weights = WeightKind.INT8 if name is RoleName.TARGET else WeightKind.SAME
        roles[name] = replace(role, model=str(folder), numerics=Numerics(Arithmetic.FLOAT32, 8, 256, weights))
    policy = replace(example.policy, accept=0.5, accept_refined=0.5)
    return replace(example, roles=roles, policy=policy, budget=Budget(steps=6, tokens=100, step_tokens=20))


def test_the_example_runs_on_models_of_the_same_families(workflow):
    steps = {}
    for kind in ("serial", "overlapped"):
        plan = planner.plan(workflow, "this-computer", kind)
        run = planner.run(plan, QUESTION, "virtual")
        (solved,) = run.solved
        assert 1 <= len(solved.steps) <= 6
        prompts = {e.role: e.tokens_in for e in reversed(run.trace) if isinstance(e, Chunk) and not e.context}
        steps[kind] = solved.steps
        assert prompts[RoleName.DRAFT] > len(QUESTION)
    assert steps["serial"] == steps["overlapped"]


def write_short_of_words(folder: Path, role: RoleName, seed: int) -> None:
    """A random model whose vocabulary has no blank line. A writer chooses among "1", " t" and a line break."""
    merges = [pair for pair in chat_models.MERGES if pair != ("Ċ", "Ċ")]
    tokens = len(chat_models.vocabulary(merges)) + len(chat_models.SPECIAL) + 1
    reward = role is RoleName.PRM
    shape = tiny_models.config("qwen2", reward=reward, vocab_size=tokens, max_position_embeddings=512)
    model = tiny_models.random_model(shape, seed)
    made = chat_models.write_tokenizer(folder, *([chat_models.SEPARATOR] if reward else []), merges=merges)
    if model.lm_head is not None:
        likely = [made.token_to_id(token) for token in ("1", "Ġt", "Ċ")]
        model.lm_head.kernel[...] *= 30 * np.isin(np.arange(tokens), likely)
    save_checkpoint(folder, shape, model)


def test_a_delimiter_of_several_tokens_ends_steps(workflow, tmp_path):
    roles = {}
    for seed, (name, role) in enumerate(workflow.roles.items()):
        write_short_of_words(tmp_path / name, name, seed)
        roles[name] = replace(role, model=str(tmp_path / name))
    assert len(Tokenizer(tmp_path / "target").encode("\n\n")) == 2
    workflow = replace(workflow, roles=roles, sampling=Sampling(temperature=2.0, seed=3))
    found = {}
    for kind in ("serial", "overlapped"):
        run = planner.run(planner.plan(workflow, "this-computer", kind), QUESTION, "virtual")
        (found[kind],) = (solved.steps for solved in run.solved)
    assert found["serial"] == found["overlapped"]
    tokenizer, steps = Tokenizer(tmp_path / "target"), found["serial"]
    assert not any("\n\n" in step for step in steps)
    # No end of a text is likely, so a step that is shorter than the budget ended with the delimiter.
    assert sum(len(tokenizer.encode(step)) < workflow.budget.step_tokens - 2 for step in steps) >= 2


def test_roles_read_the_prompt_as_chat(workflow):
    """The PRM has its own system message and its separator; draft and target exchange token ids, the PRM reads text."""
    from models_jax.backend import JaxBackend

    backend, problems = JaxBackend({"platform": "cpu"}), problem_set("text")
    infos = {name: backend.load(name, role, problems.delimiter) for name, role in workflow.roles.items()}
    prompt = problems.prompt(problems.parse(QUESTION))
    texts = {}
    for name in workflow.roles:
        texts[name] = backend.decode(name, backend.encode_prompt(name, prompt))
    assert texts[RoleName.DRAFT] == texts[RoleName.TARGET] == f"system\nBe helpful.\nuser\n{QUESTION}\nassistant\n"
    assert "boxed" in texts[RoleName.PRM] and QUESTION in texts[RoleName.PRM]
    assert infos[RoleName.DRAFT].tokenizer_hash == infos[RoleName.TARGET].tokenizer_hash
    assert infos[RoleName.DRAFT].tokenizer_hash != infos[RoleName.PRM].tokenizer_hash
    step = backend.encode(RoleName.PRM, "7 are left.\n\n")
    assert backend.decode(RoleName.PRM, step) == "7 are left."
    backend.close()
