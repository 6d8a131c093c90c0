"""GGUF files, and how much memory loading takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import chat_models
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from flax import nnx

from models_jax.config import ModelConfig
from models_jax.loading import load_checkpoint, save_checkpoint
from models_jax.names import tensors
from models_jax.rope import RopeScaling, inverse_frequencies
from models_jax.text_format import TextFormat
from models_jax.tokenizer import Tokenizer
from planner.checkpoint import model_folder, model_hash
from planner.errors import UserError

gguf = pytest.importorskip("gguf")

VOCABULARY = [*chat_models.vocabulary(), *chat_models.SPECIAL]
LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


def shape(kind: str, **changes) -> ModelConfig:
    sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "vocab_size": len(VOCABULARY)}
    return tiny_models.config(kind, **(sizes | changes))


def write_gguf(path: Path, config: ModelConfig, kind=gguf.GGMLQuantizationType.F32) -> nnx.Module:
    """A random model as llama.cpp's converter writes it: q and k of Llama reordered."""
    model = tiny_models.random_model(config)
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_merges([" ".join(pair) for pair in chat_models.MERGES])
    writer.add_token_types([3 if token in chat_models.SPECIAL else 1 for token in VOCABULARY])
    writer.add_eos_token_id(VOCABULARY.index("<|im_end|>"))
    writer.add_bos_token_id(VOCABULARY.index("<|endoftext|>"))
    writer.add_chat_template(chat_models.TEMPLATE)
    if config.rope_scaling:
        plain, slow = (inverse_frequencies(config.head_dim, config.rope_theta, s) for s in (None, config.rope_scaling))
        writer.add_tensor("rope_freqs.weight", (plain / slow).astype(np.float32))
    for name, value in named(model, config).items():
        if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            value = value.reshape(heads, 2, len(value) // heads // 2, *value.shape[1:]).swapaxes(1, 2)
            value = value.reshape(-1, *value.shape[3:])
        used = kind if value.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name, config), gguf.quants.quantize(value, used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def named(model, config: ModelConfig) -> dict[str, np.ndarray]:
    """Parameters under their Hugging Face names, linear layers (out, in)."""
    state = dict(nnx.to_flat_state(nnx.state(model)))
    found = {}
    for tensor in tensors(config):
        value = np.asarray(state[tensor.path][...], np.float32)
        found[tensor.name] = np.ascontiguousarray(value.T if tensor.transposed else value)
    return found


def gguf_name(name: str, config: ModelConfig) -> str:
    """As llama.cpp calls the tensor; written out here, since the package's own table is what is tested."""
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    stem, _, end = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{parts[stem]}.{end}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{parts[part]}.{end}"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "config",
    [shape("llama", tied=True), shape("llama", rope_scaling=LLAMA3), shape("qwen2"), shape("qwen3", tied=True)],
    ids=lambda c: f"{c.model_type}-{'tied' if c.tie_word_embeddings else 'untied'}",
)
def test_gguf_files_are_read(tmp_path, config):
    model = write_gguf(tmp_path / "model.gguf", config)
    folder = model_folder(str(tmp_path / "model.gguf"))
    found, loaded = load_checkpoint(folder)
    for field in ("head_dim", "rope_theta", "tie_word_embeddings", "attention_bias", "qk_norm", "rope_scaling"):
        assert getattr(found, field) == getattr(config, field), field
    expected, ours = named(model, config), named(loaded, found)
    assert expected.keys() == ours.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


def test_quantised_gguf_files_are_read(tmp_path):
    config = shape("llama", tied=True)
    model = write_gguf(tmp_path / "model.gguf", config, gguf.GGMLQuantizationType.Q8_0)
    found, loaded = load_checkpoint(model_folder(str(tmp_path / "model.gguf")))
    expected, ours = named(model, config), named(loaded, found)
    for name, value in expected.items():
        # A step of Q8_0 is the largest of 32 numbers over 127; the scale is a float16.
        np.testing.assert_allclose(ours[name], value, atol=np.abs(value).max() / 127, err_msg=name)
    assert not np.array_equal(ours["model.embed_tokens.weight"], expected["model.embed_tokens.weight"])


def test_tokenizer_and_template_of_a_gguf_file(tmp_path):
    write_gguf(tmp_path / "model.gguf", shape("qwen2"))
    folder = model_folder(str(tmp_path / "model.gguf"))
    tokens = Tokenizer(folder)
    assert tokens.eos_ids == (VOCABULARY.index("<|im_end|>"),)
    assert tokens.encode("7 to 9.\n\n") == tuple(chat_models.tokenizer().encode("7 to 9.\n\n").ids)
    prompt = tokens.decode(TextFormat(tokens, folder, "\n\n").prompt("12 + 1?"))
    assert "user\n12 + 1?" in prompt and "assistant\n" in prompt


def test_the_folder_of_a_gguf_file_is_made_once(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, shape("qwen2"))
    first = model_folder(str(path))
    before = (first / "config.json").stat().st_mtime_ns
    assert model_folder(str(path)) == first and (first / "config.json").stat().st_mtime_ns == before
    digest = model_hash(first)
    path.unlink()
    write_gguf(path, shape("qwen2", num_hidden_layers=1))
    assert model_folder(str(path)) != first
    assert model_hash(model_folder(str(path))) != digest


def test_a_wrong_gguf_file_is_named(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(UserError, match=r"model\.gguf: "):
        model_folder(str(tmp_path / "model.gguf"))
    with pytest.raises(UserError, match=r"there is no file .*other"):
        model_folder(str(tmp_path / "other.gguf"))


def test_other_divisors_of_rope_are_refused(tmp_path):
    odd = RopeScaling("llama3", 8.0, 2.0, 3.0, 1024)
    write_gguf(tmp_path / "model.gguf", shape("llama", rope_scaling=odd))
    with pytest.raises(UserError, match=r"rope_freqs\.weight is not the scaling"):
        model_folder(str(tmp_path / "model.gguf"))


# --- memory -------------------------------------------------------------------------------------------------------

MEASURE = """
import json, re, sys
from pathlib import Path
import jax, jax.numpy as jnp
from models_jax.loading import load_checkpoint

def status(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

load_checkpoint(Path(sys.argv[1]), jnp.dtype(sys.argv[3]), int8_weights=sys.argv[4] == "int8")
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
config, model = load_checkpoint(Path(sys.argv[2]), jnp.dtype(sys.argv[3]), int8_weights=sys.argv[4] == "int8")
weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
print(json.dumps([status("VmHWM") - before, weights]))
"""


@pytest.fixture(scope="module")
def two_sizes(tmp_path_factory):
    """Folders of a small and of a large model, both in float32."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 4}
    shapes = (tiny_models.config(), tiny_models.config(vocab_size=20_000, head_dim=64, **sizes))
    folders = [tmp_path_factory.mktemp("size") for _ in shapes]
    for folder, made in zip(folders, shapes, strict=True):
        save_checkpoint(folder, made, tiny_models.random_model(made))
    return folders


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize(
    ("dtype", "weights"),
    [("float32", "same"), pytest.param("bfloat16", "same", marks=pytest.mark.slow), ("bfloat16", "int8")],
)
def test_loading_takes_little_more_memory_than_the_weights(two_sizes, dtype, weights):
    """What the process maps of the files counts too."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", MEASURE, *map(str, two_sizes), dtype, weights]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    peak, size = json.loads(done.stdout)
    assert size > 50e6
    assert peak < 1.3 * size


# --- SmolLM2 ------------------------------------------------------------------------------------------------------

SMOLLM2 = os.environ.get("HETEROREASON_SMOLLM2")


def smollm2_in_torch(path: Path):
    """transformers' own model with the file's weights, put there name by name."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    model.tie_weights()
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    shape = ModelConfig.from_dict(config.to_dict(), "config.json")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = stored[gguf_name(name, shape)]
            value = gguf.dequantize(tensor.data, tensor.tensor_type)
            if "q_proj" in name or "k_proj" in name:
                value = value.reshape(-1, shape.head_dim // 2, 2, shape.hidden_size).swapaxes(1, 2)
            parameter.copy_(torch.from_numpy(value.reshape(parameter.shape).copy()))
    return model


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not SMOLLM2, reason="HETEROREASON_SMOLLM2 names no GGUF file of SmolLM2-135M-Instruct")
def test_smollm2_is_that_of_transformers():
    pytest.importorskip("torch")
    import torch_models
    from test_parity import write_greedily
    from transformers import AutoTokenizer

    assert SMOLLM2
    path = Path(SMOLLM2)
    folder = model_folder(SMOLLM2)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    question = "What is the capital of France?"
    prompt = list(TextFormat(Tokenizer(folder), folder, "\n\n").prompt(question))
    messages = [{"role": "user", "content": question}]
    assert prompt == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    reference = smollm2_in_torch(path)
    config, model = load_checkpoint(folder)
    found = np.asarray(model.logits(tiny_models.full_hidden(model, jnp.asarray(prompt))))
    expected = torch_models.logits(reference, prompt)
    print(f"largest difference of a logit {np.abs(found - expected).max():.2e}, of {np.abs(expected).max():.1f}")
    np.testing.assert_allclose(found, expected, atol=2e-4)
    np.testing.assert_array_equal(found.argmax(-1), expected.argmax(-1))
    text = torch_models.greedy(reference, prompt, 16)
    print(repr(Tokenizer(folder).decode(text)))
    assert "Paris" in Tokenizer(folder).decode(text)
    assert write_greedily(config, model, prompt, len(text)) == text
