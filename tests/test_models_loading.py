"""Checkpoints: what is written is read, and what is wrong is named."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny_models
from flax import nnx
from safetensors.numpy import load_file, save_file

from models_jax.config import ModelConfig, RewardHead
from models_jax.int8_weights import quantise
from models_jax.loading import load_checkpoint
from models_jax.names import tensors
from models_jax.tokenizer import Tokenizer
from models_jax.transformer import Decoder
from planner.checkpoint import model_hash
from planner.errors import UserError
from planner.shape import ModelShape
from planner.workflow import Arithmetic, WeightKind

VARIANTS = [(kind, tied, reward) for kind in tiny_models.KINDS for tied, reward in ((1, 0), (0, 0), (0, 1))]


@pytest.fixture
def folder(tmp_path):
    tiny_models.write(tmp_path, tiny_models.config())
    return tmp_path


def leaves(model):
    return {path: np.asarray(value[...]) for path, value in nnx.to_flat_state(nnx.state(model))}


def change(folder, edit):
    """Rewrite the weights with `edit` applied to the mapping of tensors."""
    path = folder / "model.safetensors"
    values = load_file(path)
    edit(values)
    save_file(values, path)


@pytest.mark.parametrize(("kind", "tied", "reward"), VARIANTS)
def test_round_trip(tmp_path, kind, tied, reward):
    config = tiny_models.config(kind, tied=bool(tied), reward=bool(reward))
    model = tiny_models.write(tmp_path, config)
    read, loaded = load_checkpoint(tmp_path)
    assert read == config
    expected, found = leaves(model), leaves(loaded)
    assert expected.keys() == found.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=str(path))


@pytest.mark.parametrize(("kind", "tied", "reward"), VARIANTS)
def test_table_names_every_parameter_once(kind, tied, reward):
    config = tiny_models.config(kind, tied=bool(tied), reward=bool(reward))
    shapes = {
        path: value.shape
        for path, value in nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))))
    }
    table = tensors(config)
    assert len({tensor.name for tensor in table}) == len(table)
    assert {t.path: t.shape[::-1] if t.transposed else t.shape for t in table} == shapes


def test_names_are_those_of_hugging_face():
    names = {tensor.name for tensor in tensors(tiny_models.config("qwen3", tied=False))}
    assert "model.layers.1.self_attn.q_norm.weight" in names
    assert "lm_head.weight" in names
    biased = {tensor.name for tensor in tensors(tiny_models.config("qwen2", reward=True))}
    assert "model.layers.0.self_attn.q_proj.bias" in biased
    assert "model.layers.0.self_attn.o_proj.bias" not in biased
    assert {"score.0.weight", "score.0.bias", "score.2.weight", "score.2.bias"} < biased


def test_weights_are_cast(folder):
    _, model = load_checkpoint(folder, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_files_are_read(folder, dtype):
    exact = load_checkpoint(folder)[1]
    change(folder, lambda values: values.update({k: v.astype(dtype) for k, v in values.items()}))
    half = load_checkpoint(folder)[1]
    for path, value in leaves(exact).items():
        np.testing.assert_array_equal(leaves(half)[path], value.astype(dtype).astype(np.float32))


def test_shards_are_read(folder):
    values = load_file(folder / "model.safetensors")
    whole = leaves(load_checkpoint(folder)[1])
    (folder / "model.safetensors").unlink()
    places = {name: f"model-{i % 2 + 1}-of-2.safetensors" for i, name in enumerate(values)}
    for shard in set(places.values()):
        save_file({name: values[name] for name, place in places.items() if place == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    found = leaves(load_checkpoint(folder)[1])
    assert all((found[path] == value).all() for path, value in whole.items())
    (folder / "model-2-of-2.safetensors").unlink()
    with pytest.raises(UserError, match=r"no model-2-of-2\.safetensors"):
        load_checkpoint(folder)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {"a": "../b.safetensors"}}'])
def test_wrong_index_is_named(folder, content):
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UserError, match=r"index\.json"):
        load_checkpoint(folder)


def test_missing_tensor_is_named(folder):
    change(folder, lambda values: values.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(UserError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing \(1 in all\)"):
        load_checkpoint(folder)


def test_extra_tensor_is_named(folder):
    change(folder, lambda values: values.update({"model.layers.7.more": np.zeros(2, np.float32)}))
    with pytest.raises(UserError, match=r"tensor model\.layers\.7\.more has no place"):
        load_checkpoint(folder)


def test_head_of_a_tied_model_is_left_alone(tmp_path):
    model = tiny_models.write(tmp_path, tiny_models.config(tied=True))
    change(tmp_path, lambda v: v.update({"lm_head.weight": v["model.embed_tokens.weight"].copy()}))
    np.testing.assert_array_equal(load_checkpoint(tmp_path)[1].norm.weight[...], model.norm.weight[...])


def test_misshapen_tensor_is_named(folder):
    change(folder, lambda values: values.update({"model.norm.weight": np.zeros(3, np.float32)}))
    with pytest.raises(UserError, match=r"model\.norm\.weight has shape \(3,\), config\.json asks for \(32,\)"):
        load_checkpoint(folder)


def test_quantised_tensor_is_named(folder):
    change(folder, lambda values: values.update({"model.norm.weight": np.zeros(32, np.int8)}))
    with pytest.raises(UserError, match=r"model\.norm\.weight is I8"):
        load_checkpoint(folder)


@pytest.mark.parametrize("keep", [0, 5, 1000, -1])
def test_truncated_file_is_named(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"model\.safetensors: the file is damaged"):
        load_checkpoint(folder)


def test_missing_weights_are_named(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        load_checkpoint(folder)


REFUSED = [
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ({"mlp_bias": True}, "mlp_bias True"),
    ({"use_sliding_window": True}, "use_sliding_window True"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
    ({"model_type": "gemma2"}, "model_type 'gemma2' is not supported; use one of llama, mistral, qwen2, qwen3"),
    ({"rope_parameters": {"rope_type": "yarn"}}, r"rope_parameters\.rope_type is 'yarn'"),
    ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, r"rope_scaling\.rope_type is 'dynamic'"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor is 0\.5"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "key 'low_freq_factor' is missing"),
    ({"architectures": ["Qwen2ForRewardModel"]}, "architectures names 'Qwen2ForRewardModel'"),
    ({"reward_tokens": [1]}, "a value has the wrong type"),
    ({"num_hidden_layers": None}, "a value has the wrong type"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_variants_that_would_be_computed_wrongly_are_refused(change, message):
    raw = tiny_models.config().to_dict() | change
    with pytest.raises(UserError, match=message) as caught:
        ModelConfig.from_dict(raw, "config.json")
    assert caught.value.where == "config.json" and caught.value.mend


def test_a_window_of_mistral_limits_the_context():
    raw = tiny_models.config("mistral", max_position_embeddings=96).to_dict()
    for window, context in ((None, 96), (200, 96), (40, 40)):
        assert ModelConfig.from_dict(raw | {"sliding_window": window}, "c").max_position_embeddings == context


@pytest.mark.parametrize("head", [None, *RewardHead])
def test_reward_heads_are_told_from_the_config(head):
    made = tiny_models.config("qwen2")
    made = replace(made, reward_head=head, reward_tokens=(3, 4) if head is RewardHead.TOKENS else None)
    assert ModelConfig.from_dict(made.to_dict(), "config.json") == made


@pytest.mark.parametrize("kind", [*tiny_models.KINDS, "mistral"])
@pytest.mark.parametrize("head", [None, RewardHead.TWO_CLASS, RewardHead.SCALAR])
@pytest.mark.parametrize("weights", list(WeightKind))
def test_the_planner_counts_the_bytes_that_are_loaded(kind, head, weights):
    for tied in (True, False):
        config = replace(tiny_models.config(kind, tied=tied), reward_head=head)
        raw = config.to_dict()
        config = replace(config, int8_weights=weights is WeightKind.INT8)
        made = nnx.state(nnx.eval_shape(lambda c=config: Decoder(c, nnx.Rngs(0))))
        loaded = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(made))
        assert ModelShape.from_config(raw, Arithmetic.FLOAT32, weights=weights).weight_bytes == loaded


def test_rounding_is_to_the_nearest_of_255_levels():
    rows = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32)
    rows[3] = 0
    whole, scale = quantise(rows)
    assert whole.dtype == np.int8 and (np.abs(whole).max(axis=1)[[0, 1, 2, 4]] == 127).all()
    assert (np.abs(whole * scale[:, None] - rows) <= scale[:, None] / 2 * (1 + 1e-5)).all()


@pytest.mark.parametrize("tied", [True, False])
def test_rounded_weights_are_loaded_as_they_are_rounded(tmp_path, tied):
    shape = tiny_models.config("qwen2", tied=tied)
    exact, rounded = leaves(tiny_models.write(tmp_path, shape)), leaves(load_checkpoint(tmp_path, int8_weights=True)[1])
    for tensor in tensors(shape):
        value = exact[tensor.path]
        if tensor.matrix:
            whole, scale = quantise(value.T if tensor.transposed else value)
            np.testing.assert_array_equal(rounded[tensor.path], whole)
            np.testing.assert_array_equal(rounded[tensor.scale_path], scale)
        else:
            np.testing.assert_array_equal(rounded[tensor.path], value)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"]
)
def test_the_hash_covers_all_that_changes_answers(folder, name):
    before = model_hash(folder)
    (folder / name).write_text("other")
    assert model_hash(folder) != before


class TestTokenizer:
    @pytest.fixture
    def tokens(self, folder):
        return Tokenizer(folder)

    def test_round_trip(self, tokens):
        text = "12 + 3 = 15\n"
        assert tokens.decode(tokens.encode(text)) == text
        assert tokens.encode("") == ()

    def test_unreadable_character_is_named(self, tokens):
        with pytest.raises(UserError, match=r"no character '√' \(at position 3 of '1 \+√2'\)"):
            tokens.encode("1 +√2")

    def test_end_of_text_is_left_out(self, tokens):
        assert tokens.eos_ids == (1,)
        assert tokens.decode((*tokens.encode("7"), 1, 0)) == "7"

    def test_token_bytes_are_what_a_token_adds(self, tokens):
        assert tokens.token_bytes() == [word.encode() for word in tiny_models.TOKENS]

    def test_equal_files_have_equal_hashes(self, tokens, tmp_path_factory):
        other = tmp_path_factory.mktemp("other")
        tiny_models.write(other, seed=5)
        assert Tokenizer(other).hash == tokens.hash

    def test_several_ends_of_text(self, folder):
        (folder / "generation_config.json").write_text('{"eos_token_id": [1, 0]}')
        assert Tokenizer(folder).eos_ids == (1, 0)
        (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
        with pytest.raises(UserError, match="eos_token_id 'x'"):
            Tokenizer(folder)

    def test_end_of_text_from_the_config(self, folder):
        (folder / "generation_config.json").unlink()
        assert Tokenizer(folder).eos_ids == ()
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw | {"eos_token_id": 1}))
        assert Tokenizer(folder).eos_ids == (1,)

    @pytest.mark.parametrize("content", [None, "{", "{}"])
    def test_broken_file_is_named(self, folder, content):
        path = folder / "tokenizer.json"
        path.unlink() if content is None else path.write_text(content)
        with pytest.raises(UserError, match=r"tokenizer\.json"):
            Tokenizer(folder)

    def test_byte_level_vocabulary(self, tmp_path):
        from tokenizers import Tokenizer as Fast
        from tokenizers import decoders, models, pre_tokenizers

        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {letter: i for i, letter in enumerate(letters)} | {"Ċ" * 2: 256, ".Ċ": 257, ".ĊĊ": 258}
        made = Fast(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ"), (".", "Ċ"), (".Ċ", "Ċ")]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
        made.save(str(tmp_path / "tokenizer.json"))
        tokens = Tokenizer(tmp_path)
        found = tokens.token_bytes()
        assert (found[256], found[258]) == (b"\n\n", b".\n\n")
        assert sorted(found[:256]) == [bytes([i]) for i in range(256)]
        assert tokens.decode(tokens.encode("naïve √2.\n\n")) == "naïve √2.\n\n"
