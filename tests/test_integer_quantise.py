"""From a float checkpoint to a file: how near it stays, what the file holds, and what is refused."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from safetensors.numpy import load_file, save_file

from models_jax.integer import files, quantise
from models_jax.integer.checkpoint import Checkpoint
from models_jax.integer.reference import Cache, Reference
from planner.errors import UserError

SHAPE = tiny_models.config()


def sequences(count, seed, vocabulary=SHAPE.vocab_size):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocabulary, rng.integers(20, 60)) for _ in range(count)]


@pytest.fixture(scope="module", params=["tied", "untied"])
def folder(request, tmp_path_factory):
    made = tmp_path_factory.mktemp(request.param)
    tiny_models.write(made, tiny_models.config(tied=request.param == "tied"))
    quantise.quantise_folder(made, sequences(12, 0))
    return made


def test_float_checkpoint_runs_as_the_decoder_does(folder):
    from models_jax.loading import load_checkpoint

    tokens = sequences(1, 1)[0]
    _, model = load_checkpoint(folder)
    order = jnp.arange(len(tokens))
    hidden, _ = model.hidden(jnp.asarray(tokens)[None], order[None], (order[:, None] >= order)[None])
    np.testing.assert_allclose(Checkpoint.read(folder)(tokens), model.logits(hidden)[0], atol=2e-4)


def test_integer_model_is_near_the_float_model(folder):
    found = quantise.agreement(Checkpoint.read(folder), files.read(folder / files.FILE_NAME), sequences(6, 2))
    assert found.argmax > 0.93
    assert found.logit_error < 0.04 * found.logit_spread
    assert "argmax agrees" in str(found)


def test_four_bits_lose_more_and_stay_near(folder, tmp_path):
    path = quantise.quantise_folder(folder, sequences(12, 0), tmp_path / "four.safetensors", 4)
    model, checkpoint = files.read(path), Checkpoint.read(folder)
    assert model.shape.weight_bits == 4 and np.abs(model.tensors["layers.0.q.weight"]).max() == 7
    found, eight = (
        quantise.agreement(checkpoint, m, sequences(6, 2)) for m in (model, files.read(folder / files.FILE_NAME))
    )
    assert eight.logit_error < found.logit_error < 0.4 * found.logit_spread
    with pytest.raises(UserError, match="update heteroreason"):
        files.read(changed(folder, tmp_path, lambda usual: usual | {"spec_version": 3}))


def test_reference_loads_the_file(folder):
    reference = Reference.load(folder / files.FILE_NAME)
    cache = Cache.empty(reference.shape)
    logits = reference.step(3, 0, cache)
    assert logits.dtype == np.int32 and logits.shape == (SHAPE.vocab_size,)
    wanted = Checkpoint.read(folder)(np.array([3]))[0]
    assert np.abs(logits / 4096 - wanted).max() < 0.15 * np.abs(wanted).max()


def test_quantising_repeats(folder, tmp_path):
    again = quantise.quantise_folder(folder, sequences(12, 0), tmp_path / "again.safetensors")
    assert again.read_bytes() == (folder / files.FILE_NAME).read_bytes()


def test_command_line(folder, tmp_path, capsys):
    calibration, out = tmp_path / "tokens.jsonl", tmp_path / "out.safetensors"
    calibration.write_text("\n".join(json.dumps(s.tolist()) for s in sequences(12, 0)))
    assert quantise.main([str(folder), "--calibration", str(calibration), "-o", str(out)]) == 0
    assert files.read(out).shape == files.read(folder / files.FILE_NAME).shape
    said = capsys.readouterr().out
    assert str(out) in said and "calibration:" in said and "held out:" in said


@pytest.mark.parametrize("line", ["1 2", '["a"]', "[[1]]", "{}", "[1.5]", "[16]", "[-1]"])
def test_bad_calibration_lines_are_named(folder, tmp_path, capsys, line):
    calibration = tmp_path / "tokens.jsonl"
    calibration.write_text(f"[1, 2]\n{line}\n")
    assert quantise.main([str(folder), "--calibration", str(calibration), "-o", str(tmp_path / "x")]) == 2
    assert "2" in capsys.readouterr().err


def test_no_calibration_is_refused(folder, tmp_path, capsys):
    with pytest.raises(UserError, match="no calibration tokens"):
        quantise.quantise_folder(folder, [])
    assert quantise.main([str(folder), "--calibration", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "what"),
    [
        (tiny_models.config("qwen2"), "biases"),
        (tiny_models.config("qwen3"), "q/k norms"),
        (tiny_models.config(reward=True), "reward head"),
    ],
)
def test_models_without_integer_operations_are_refused(tmp_path, shape, what):
    tiny_models.write(tmp_path, shape)
    with pytest.raises(UserError, match=what):
        quantise.quantise_folder(tmp_path, sequences(2, 0))


def changed(folder, tmp_path, header=None, **tensors):
    source = folder / files.FILE_NAME
    shape = files.read(source).shape
    held = {name.replace("__", "."): value for name, value in tensors.items()}
    kept = {name: value for name, value in (load_file(source) | held).items() if value is not None}
    usual = {"spec_version": 1, "shape": vars(shape)}
    path = tmp_path / "changed.safetensors"
    save_file(kept, path, {files.METADATA_KEY: json.dumps(usual if header is None else header(usual))})
    return path


@pytest.mark.parametrize(
    ("header", "tensors", "what"),
    [
        (lambda usual: usual | {"spec_version": 3}, {}, "version 3 of the integer model is not known"),
        (lambda usual: usual | {"shape": usual["shape"] | {"weight_bits": 5}}, {}, "weight_bits 5 is neither"),
        (lambda usual: usual | {"shape": usual["shape"] | {"weight_bits": 4}}, {}, "scale is missing"),
        (lambda usual: 7, {}, "not an integer model"),
        (lambda usual: {}, {}, "not an integer model"),
        (lambda usual: usual | {"shape": {}}, {}, "shape in its metadata"),
        (lambda usual: usual | {"shape": 7}, {}, "shape in its metadata"),
        (None, {"norm__gain": None}, "norm.gain is missing"),
        (None, {"extra": np.zeros(1, np.int8)}, "extra is unknown"),
        (None, {"norm__gain": np.zeros(3, np.int16)}, "norm.gain is int16"),
        (None, {"norm__epsilon": np.array(3, np.int32)}, "outside 4"),
        (None, {"layers__0__q__shift": np.full(32, 3, np.int8)}, "outside 5"),
        (None, {"layers__0__q__multiplier": np.full(32, 5, np.int16)}, "multiplier in 1"),
    ],
)
def test_bad_files_are_refused(folder, tmp_path, header, tensors, what):
    with pytest.raises(UserError, match=what) as caught:
        files.read(changed(folder, tmp_path, header, **tensors))
    assert "changed.safetensors" in str(caught.value) and "quantise" in str(caught.value)


def test_files_that_are_none_are_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"nothing")
    for name in ("x", "missing"):
        with pytest.raises(UserError, match=name):
            files.read(tmp_path / name)


@pytest.mark.parametrize(("name", "value"), [("context_tokens", 4096), ("head_dim", 7), ("hidden_size", 9000)])
def test_shapes_that_integer_models_cannot_have_are_refused(name, value):
    usual = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    usual |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "context_tokens": 64}
    with pytest.raises(UserError, match=name):
        files.Shape(**(usual | {name: value}), tied=True).check("here")
