"""The `fpga` backend with its emulator, and integer roles of the `jax` backend, against the contract."""

import backend_contract
import numpy as np
import pytest
import tiny_models

from fpga_backend.backend import FpgaBackend
from models_jax.backend import JaxBackend
from models_jax.integer import decode, files, gumbel, quantise, runner
from models_jax.integer.reference import Cache, Reference
from planner.errors import UserError
from planner.runtime.backend import Work
from planner.workflow import Arithmetic, Numerics, Role

TEXT = "12 + 30 = 42\n4 2 = 6"
INT8 = Numerics(Arithmetic.INT8, cache_tokens=96)


def emulated():
    return FpgaBackend({"transport": "emulate"})


@pytest.fixture(scope="module", params=[8, 4], ids=["W8A8", "W4A8"])
def folder(request, tmp_path_factory):
    made = tmp_path_factory.mktemp("draft")
    tiny_models.write(made, tiny_models.config(tied=False))
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, len(tiny_models.TOKENS), 40) for _ in range(4)]
    quantise.quantise_folder(made, sequences, weight_bits=request.param)
    return made


@pytest.fixture(scope="module", params=[JaxBackend, emulated], ids=["jax", "fpga"])
def subject(request, folder):
    role = Role(str(folder), INT8)
    made = backend_contract.Subject(request.param, "draft", role, tiny_models.DELIMITER, TEXT, "x 1")
    yield made
    made.backend.close()


@pytest.mark.parametrize("check", backend_contract.WRITING, ids=backend_contract.name)
def test_contract(check, subject):
    check(subject)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.5])
def test_tokens_are_those_of_the_reference(subject, folder, temperature):
    reference = Reference.load(folder / files.FILE_NAME)
    cache, tokens, logits = Cache.empty(reference.shape), list(subject.prompt), np.zeros(0, np.int32)
    for i, token in enumerate(tokens):
        logits = reference.step(token, i, cache)
    for _ in range(20):
        tokens.append(gumbel.choose(logits, len(tokens), 99, temperature))
        logits = reference.step(tokens[-1], len(tokens) - 1, cache)
    written = subject.write("reference", 20, 7, key=99, temperature=temperature)
    assert list(written) == tokens[len(subject.prompt) :]


def test_nothing_compiles_after_loading(subject):
    before = decode.advance._cache_size()
    subject.write("steady", 30, 7)
    subject.write("steady", 5, key=3, temperature=0.7)
    assert decode.advance._cache_size() == before


def test_info_counts_bytes_of_the_device(subject, folder):
    model = files.read(folder / files.FILE_NAME)
    whole = sum(t.nbytes for t in model.tensors.values())
    layers = sum(t.nbytes for name, t in model.tensors.items() if name.startswith("layers") and ".weight" in name)
    assert subject.info.weight_bytes == whole - (layers // 2 if model.shape.weight_bits == 4 else 0)
    assert subject.info.kv_bytes_per_token == 2 * 2 * 2 * 8


def test_failed_chunk_does_not_spoil_the_sequence(subject, monkeypatch):
    expected = subject.write("fail", 12)
    subject.run("fail", 0, subject.prompt)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "advance", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            subject.run("fail", len(subject.prompt), (), 4)
    assert subject.go_on("fail", len(subject.prompt), 12, 12) == expected


def test_bad_temperature_is_refused_before_anything_changes(subject):
    subject.run("hot", 0, subject.prompt)
    with pytest.raises(UserError, match="temperature 9"):
        subject.run("hot", 3, (), 4, temperature=9.0)
    assert subject.run("hot", len(subject.prompt)).tokens == ()


def test_model_that_is_not_quantised_is_refused(tmp_path):
    tiny_models.write(tmp_path)
    for made in (JaxBackend(), emulated()):
        with pytest.raises(UserError, match=r"models_jax.integer.quantise"):
            made.load("draft", Role(str(tmp_path), INT8), "\n")


@pytest.mark.parametrize(
    ("numerics", "delimiter", "message"),
    [
        (Numerics(Arithmetic.INT8, cache_tokens=97), "\n", "integer model reads 96"),
        (INT8, "\nx", "delimiter"),
    ],
)
def test_unfit_roles_are_refused(folder, numerics, delimiter, message):
    with pytest.raises(UserError, match=message):
        emulated().load("draft", Role(str(folder), numerics), delimiter)


def test_an_fpga_takes_integer_drafts_only(folder):
    with pytest.raises(UserError, match="integer roles only, role 'draft' has arithmetic float32"):
        emulated().load("draft", Role(str(folder)), "\n")
    with pytest.raises(UserError, match="role draft only, not 'target'"):
        emulated().load("target", Role(str(folder), INT8), "\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (None, "no transport"),
        ({}, "no transport.*set transport to emulate or rtl"),
        ({"transport": "usb"}, "unknown transport 'usb'; use one of emulate, rtl, board"),
        ({"transport": "emulate", "speed": "1"}, "unknown option 'speed'"),
    ],
)
def test_transports_are_chosen_by_name(options, message):
    with pytest.raises(UserError, match=message):
        FpgaBackend(options)


def test_closed_model_does_not_run(folder):
    made = emulated()
    made.load("draft", Role(str(folder), INT8), "\n")
    held = made._runner("draft")
    made.close()
    with pytest.raises(RuntimeError, match="closed"):
        held.run(Work("draft", "a", 0, (1,)))
    with pytest.raises(ValueError, match="not loaded"):
        made.run(Work("draft", "a", 0, (1,)))
