"""The transport `rtl`: the backend contract, and the tokens of the emulator."""

import shutil
from dataclasses import replace
from pathlib import Path

import backend_contract
import numpy as np
import pytest
import tiny_models

from fpga_backend.backend import FpgaBackend
from fpga_backend.driver import CoreError
from models_jax.integer import files, quantise
from models_jax.zoo import folder as zoo
from planner.api import as_workflow, open_workers, plan
from planner.errors import UserError
from planner.problems import problem_set
from planner.report import report
from planner.runtime.backend import Work
from planner.runtime.engine import Engine
from planner.trace import ClockKind
from planner.workflow import Arithmetic, Numerics, Role, Sampling

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the RTL simulation is built with g++")

TEXT = "12 + 30 = 42\n4 2 = 6"
EXAMPLES = Path(__file__).parent.parent / "examples"
INT8 = Numerics(Arithmetic.INT8, cache_tokens=96)


def simulated():
    return FpgaBackend({"transport": "rtl"})


@pytest.fixture(scope="module", params=[8, 4], ids=["W8A8", "W4A8"])
def folder(request, tmp_path_factory):
    made = tmp_path_factory.mktemp("draft")
    tiny_models.write(made, tiny_models.config(tied=False))
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, len(tiny_models.TOKENS), 40) for _ in range(4)]
    quantise.quantise_folder(made, sequences, weight_bits=request.param)
    return made


def make_subject(factory, folder):
    role = Role(str(folder), INT8)
    return backend_contract.Subject(factory, "draft", role, tiny_models.DELIMITER, TEXT, "x 1")


@pytest.fixture(scope="module")
def subject(folder):
    made = make_subject(simulated, folder)
    yield made
    made.backend.close()


@pytest.mark.parametrize("check", backend_contract.WRITING, ids=backend_contract.name)
def test_contract(check, subject):
    check(subject)


def test_random_work_gives_what_the_emulator_gives(subject, folder):
    emulated = make_subject(lambda: FpgaBackend({"transport": "emulate"}), folder)
    rng, length = np.random.default_rng(5), 0
    for _ in range(40):
        keep = int(rng.integers(0, length + 1)) if rng.random() < 0.5 else length
        feed = tuple(rng.integers(0, len(tiny_models.TOKENS), min(96 - keep, int(rng.integers(0, 6)))).tolist())
        length = keep + len(feed)
        most = int(rng.integers(0, 8)) if 0 < length < 96 else 0
        more = {"key": int(rng.integers(1 << 62)), "temperature": float(rng.choice([0.0, 1.0, 3.0]))}
        work = Work("draft", "random", keep, feed, most, **more)
        found, wanted = subject.backend.run(work), emulated.backend.run(work)
        assert (found.tokens, found.complete, found.ended) == (wanted.tokens, wanted.complete, wanted.ended)
        assert (found.cycles > 0) == bool(feed or found.tokens) and wanted.cycles == 0
        length += len(found.tokens)
    emulated.backend.close()


def test_failed_chunk_does_not_spoil_the_sequence(subject, monkeypatch):
    expected = subject.write("fail", 12)
    subject.run("fail", 0, subject.prompt)
    driver = subject.backend._runner("draft")._driver
    with monkeypatch.context() as patch:
        patch.setattr(driver._device, "wait", lambda most_cycles: False)
        with pytest.raises(CoreError, match="did not end its run: "):
            subject.run("fail", len(subject.prompt), (), 4)
    driver._device.wait(1_000_000)
    assert subject.go_on("fail", len(subject.prompt), 12, 12) == expected


def test_bad_temperature_is_refused_before_anything_changes(subject):
    subject.run("hot", 0, subject.prompt)
    with pytest.raises(UserError, match="temperature 9"):
        subject.run("hot", 3, (), 4, temperature=9.0)
    assert subject.run("hot", len(subject.prompt)).tokens == ()


def test_closed_model_does_not_run(folder):
    made = simulated()
    made.load("draft", Role(str(folder), INT8), "\n")
    held = made._runner("draft")
    made.close()
    with pytest.raises(RuntimeError, match="closed"):
        held.run(Work("draft", "a", 0, (1,)))


@pytest.mark.skipif(
    not (zoo() / "draft" / files.FILE_NAME).is_file(), reason="the models that ship are not trained yet"
)
@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
def test_the_shipped_workflow_takes_the_same_steps_as_emulated(temperature):
    """Whole runs, with the draft on the RTL and on the emulator; simulated cycles end up in the trace."""
    problems, found = problem_set("sums").generate(1, seed=8), {}
    for machine in ("this-computer-rtl", "u280-2x3090"):
        flow = replace(as_workflow(EXAMPLES / "sums.yaml"), sampling=Sampling(temperature, seed=5))
        made = plan(flow, machine, "serial")
        assert made.placement["draft"] == "fpga0"
        events = []
        with open_workers(made, ClockKind.VIRTUAL) as workers:
            steps = [Engine(made, workers, problem_set("sums"), events.append).solve(p).steps for p in problems]
        use = next(d for d in report(made, events).devices if d.device == "fpga0")
        found[machine] = steps, use.cycles_per_token
    (simulated_steps, cycles), (emulated_steps, none) = found.values()
    assert simulated_steps == emulated_steps and none is None
    assert 1000 < cycles < 20_000


def test_a_prompt_that_the_twin_reads_is_gone_on_from_by_the_core(subject, folder):
    """Keys and values are the same bytes on every device of the integer model, whichever way they go."""
    emulated = make_subject(lambda: FpgaBackend({"transport": "emulate"}), folder)
    for giver, taker in ((emulated, subject), (subject, emulated)):
        whole = giver.write("there", 12, key=3, temperature=1.0)
        giver.run("there", 0, giver.prompt)
        handed = giver.backend.hand_over("draft", "there")
        taker.run("here", 0, taker.prompt)
        assert taker.backend.hand_over("draft", "here") == handed
        taker.run("here", 0, taker.prompt[::-1])
        taker.backend.take_over("draft", "here", handed)
        assert taker.go_on("here", len(taker.prompt), 12, 4, key=3, temperature=1.0) == whole
    emulated.backend.close()
