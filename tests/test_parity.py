"""The decoder against transformers and torch: logits, greedy text, rewards."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models

torch = pytest.importorskip("torch")
import torch_models  # noqa: E402 (it needs torch)
from safetensors.torch import save_file  # noqa: E402

from models_jax.config import RewardHead  # noqa: E402
from models_jax.generate import Sampler, advance, rewards, weights_of  # noqa: E402
from models_jax.loading import load_checkpoint  # noqa: E402
from models_jax.stops import Stops  # noqa: E402
from models_jax.transformer import Cache  # noqa: E402

CASES = [
    ("llama", "llama3", 4, {"attention_bias": True}),
    ("qwen2", "default", 8, {"tie_word_embeddings": True}),
    ("qwen3", "linear", 2, {}),
]
MORE_CASES = [
    ("llama", "default", 1, {"tie_word_embeddings": True}),
    ("llama", "linear", 2, {}),
    ("llama", "llama3", 8, {"tie_word_embeddings": True, "rope_parameters": None}),
    ("mistral", "default", 4, {"sliding_window": 128}),
    ("qwen2", "linear", 1, {}),
    ("qwen2", "llama3", 2, {"tie_word_embeddings": True}),
    ("qwen3", "default", 4, {"tie_word_embeddings": True}),
    ("qwen3", "llama3", 8, {"attention_bias": True}),
]
"""The third number is how many query heads share a key head."""
SLOTS, ROWS = 80, 8


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, torch_models.VOCABULARY, count).tolist()


@pytest.fixture(
    params=[*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE_CASES)],
    ids=lambda case: "-".join(map(str, case[:3])),
)
def pair(request, tmp_path):
    """(torch model, configuration, our model) of one random checkpoint."""
    kind, scaling, group, changes = request.param
    older = changes.get("rope_parameters", 0) is None
    made = torch_models.config(kind, scaling, group, **{k: v for k, v in changes.items() if k != "rope_parameters"})
    reference = torch_models.write(tmp_path, made)
    if older:
        write_older_keys(tmp_path)
    return reference, *load_checkpoint(tmp_path)


def write_older_keys(folder) -> None:
    """`rope_theta` and `rope_scaling`, as transformers 4 wrote them."""
    raw = json.loads((folder / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"] = {"type": rope.pop("rope_type")} | rope
    (folder / "config.json").write_text(json.dumps(raw))


def write_greedily(config, model, prompt: list[int], count: int) -> list[int]:
    """The prompt in chunks, some of it rewound and read again; then tokens in chunks, rewound and written again."""
    weights = weights_of(model)
    held = np.zeros(SLOTS, np.int32)
    held[: len(prompt)] = prompt
    none = Sampler(np.zeros(2, np.uint32), np.float32(0), Stops.none(config.vocab_size))

    def run(cache, held, computed, length, limit):
        numbers = (np.int32(n) for n in (computed, length, limit))
        done = advance(weights, cache, held, *numbers, none, config=config, row_block=ROWS)
        return done.cache, np.array(done.tokens), int(done.computed), int(done.length)

    cache = Cache.empty(config, SLOTS)
    cache, held, computed, _ = run(cache, held, 0, 11, 11)
    cache, held, computed, _ = run(cache, held, 7, len(prompt), len(prompt))
    at = len(prompt)
    cache, held, computed, at = run(cache, held, computed - 1, at, at + 5)
    at -= 3
    while at < len(prompt) + count:
        cache, held, computed, at = run(cache, held, min(computed, at - 1), at, min(at + 7, len(prompt) + count))
    return held[len(prompt) : at].tolist()


def test_logits_and_greedy_text_are_those_of_transformers(pair):
    reference, config, model = pair
    prompt = tokens(30)
    found = model.logits(tiny_models.full_hidden(model, jnp.asarray(prompt)))
    expected = torch_models.logits(reference, prompt)
    assert expected.std() > 0.3
    np.testing.assert_allclose(found, expected, atol=2e-4)
    text = torch_models.greedy(reference, prompt, 24)
    assert len(text) > 5
    assert write_greedily(config, model, prompt, len(text)) == text


def test_scaling_matters(tmp_path):
    """Else the cases above would not tell whether it was applied."""
    found = {}
    for scaling in torch_models.SCALINGS:
        reference = torch_models.write(tmp_path / scaling, torch_models.config("llama", scaling))
        found[scaling] = torch_models.logits(reference, tokens(30))
    assert np.abs(found["linear"] - found["default"]).max() > 0.05
    assert np.abs(found["llama3"] - found["default"]).max() > 0.05


# --- padding and int8 weights -------------------------------------------------------------------------------------


def test_padding_of_the_vocabulary_is_never_chosen(tmp_path):
    torch_models.write(tmp_path, torch_models.config("qwen2"))
    config, model = load_checkpoint(tmp_path)
    prompt = tokens(20)
    free = write_greedily(config, model, prompt, 20)
    known = max(free)
    fewer = dataclasses.replace(config, known_tokens=known)
    assert known in free and max(write_greedily(fewer, model, prompt, 20)) < known


@pytest.mark.parametrize("tied", [True, False])
def test_int8_weights_are_near_the_float_ones(tmp_path, tied):
    torch_models.write(tmp_path, torch_models.config("qwen3", tie_word_embeddings=tied, vocab_size=300))
    _, exact = load_checkpoint(tmp_path)
    config, rounded = load_checkpoint(tmp_path, int8_weights=True)
    assert config.int8_weights and rounded.layers[0].mlp.up_proj.kernel[...].dtype == jnp.int8
    prompt = jnp.asarray(tokens(30))
    wide, near = (np.asarray(m.logits(tiny_models.full_hidden(m, prompt))) for m in (exact, rounded))
    error = np.abs(near - wide)
    assert 0 < error.max() < 0.15 * wide.std()
    assert (near.argmax(-1) == wide.argmax(-1)).mean() > 0.9


# --- reward models ------------------------------------------------------------------------------------------------


def write_reward_model(folder, head: RewardHead):
    """A checkpoint in the layout of a published reward model, and its scores by torch as a function of tokens."""
    made = torch_models.config("mistral" if head is RewardHead.TOKENS else "qwen2", vocab_size=torch_models.VOCABULARY)
    trunk = torch_models.write(folder, made)
    state = {name: value.clone() for name, value in trunk.state_dict().items() if name != "lm_head.weight"}
    raw = json.loads((folder / "config.json").read_text())
    if head is RewardHead.TOKENS:
        (folder / "config.json").write_text(json.dumps(raw | {"reward_tokens": [11, 5]}))
        return lambda t: torch.from_numpy(torch_models.logits(trunk, t))[:, [5, 11]].softmax(-1)[:, 1]
    hidden = made.hidden_size
    if head is RewardHead.TWO_CLASS:
        name, prefix = "Qwen2ForProcessRewardModel", "score"
        layers = torch.nn.Sequential(torch.nn.Linear(hidden, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 2))
    else:
        name, prefix = "Qwen2ForPrmModel", "v_head.summary"
        layers = torch.nn.Linear(hidden, 1)
        state["lm_head.weight"] = trunk.lm_head.weight.detach().clone()
    torch_models.randomise(layers, 1)
    state |= {f"{prefix}.{part}": value.detach().clone() for part, value in layers.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw | {"architectures": [name]}))

    @torch.no_grad()
    def scores(t):
        out = layers(torch_models.hidden(trunk, t))
        return out.softmax(-1)[:, 1] if head is RewardHead.TWO_CLASS else out[:, 0].sigmoid()

    return scores


@pytest.mark.parametrize("head", list(RewardHead))
def test_rewards_are_those_of_torch(tmp_path, head):
    scores = write_reward_model(tmp_path, head)
    config, model = load_checkpoint(tmp_path)
    assert config.reward_head is head
    prompt = tokens(30)
    held = np.zeros(40, np.int32)
    held[:30] = prompt
    weights = weights_of(model)
    cache, first = rewards(
        weights, Cache.empty(config, 40), held, np.int32(0), np.int32(13), config=config, row_block=8
    )
    _, second = rewards(weights, cache, held, np.int32(13), np.int32(30), config=config, row_block=8)
    found = np.concatenate([np.asarray(first)[:13], np.asarray(second)[13:30]])
    expected = scores(prompt).numpy()
    assert expected.std() > 0.05
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_weights_of_a_reward_model_stay_float_in_its_head(tmp_path):
    write_reward_model(tmp_path, RewardHead.TWO_CLASS)
    _, model = load_checkpoint(tmp_path, jnp.bfloat16, int8_weights=True)
    assert model.score.inner.kernel[...].dtype == jnp.bfloat16
    assert jax.tree.leaves(model.layers[0].mlp.up_proj)[0].dtype == jnp.int8
