"""Bad input through the command line: one sentence on the error stream, exit code 2, no traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.checkpoint import model_folder
from planner.cli import main

EXAMPLES = Path(__file__).parent.parent / "examples"


def fail(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Run the command, expect it to refuse, and give its sentence."""
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    printed = capsys.readouterr()
    assert stop.value.code == 2, printed
    sentence = printed.err.strip()
    assert sentence.startswith("error: ") and "\n" not in sentence, sentence
    assert "Traceback" not in printed.out + printed.err
    return sentence


def changed(folder: Path, source: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a YAML file with something changed."""
    data = yaml.safe_load(source.read_text())
    change(data)
    path = folder / source.name
    path.write_text(yaml.safe_dump(data))
    return path


def at(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    """Set a dotted key; a number is an index."""

    def change(data: Any) -> None:
        *path, last = [int(k) if k.isdigit() else k for k in key.split(".")]
        for k in path:
            data = data.setdefault(k, {}) if isinstance(k, str) else data[k]
        data[last] = value

    return change


def without(key: str) -> Callable[[dict[str, Any]], None]:
    """Remove a top-level key."""
    return lambda data: data.pop(key)


WORKFLOW = [
    (at("polcy", {}), ["polcy", "policy"]),
    (at("policy.kind", "rds"), ["policy.kind", "rds", "rsd"]),
    (at("policy.accept", 1.5), ["policy.accept", "1.5"]),
    (at("policy.accept", "high"), ["policy.accept", "high"]),
    (at("policy.accept_refined", -0.1), ["policy.accept_refined", "-0.1"]),
    (at("policy.max_backtracks", -1), ["policy.max_backtracks", "-1"]),
    (at("sampling.temperature", -1.0), ["sampling.temperature"]),
    (at("sampling.temperature", float("nan")), ["sampling.temperature"]),
    (at("sampling.seed", -3), ["sampling.seed"]),
    (at("budget.steps", 0), ["budget.steps"]),
    (at("budget.tokens", "many"), ["budget.tokens", "many"]),
    (at("budget.step_tokens", -5), ["budget.step_tokens"]),
    (at("statistics.accept", 2), ["statistics.accept"]),
    (at("roles.target.numerics.row_block", 0), ["row_block"]),
    (at("roles.target.numerics.cache_tokens", 12), ["cache_tokens"]),
    (at("roles.target.numerics.arithmetic", "float8"), ["arithmetic", "float8"]),
    (at("roles.target.model", "zoo/targte"), ["zoo/targte", "zoo/target"]),
    (at("roles.target.model", "no/such/folder"), ["no/such/folder"]),
    (at("roles.critic", {"model": "zoo/prm"}), ["critic"]),
    (without("roles"), ["roles"]),
    (without("name"), ["name"]),
    (at("problems", "riddles"), ["riddles", "countdown"]),
    (at("roles", {"draft": {"model": "zoo/draft"}}), ["roles.", "backtrack"]),
]


@pytest.mark.parametrize(("change", "told"), WORKFLOW)
def test_workflow(change, told, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sentence = fail(capsys, "plan", changed(tmp_path, EXAMPLES / "sums.yaml", change))
    assert all(word in sentence for word in told), sentence


MACHINE = [
    (at("devices.0.memory_bytes", -1), ["devices[0].memory_bytes"]),
    (at("devices.0.memory_bytes", "lots"), ["devices[0].memory_bytes", "lots"]),
    (at("devices.0.kind", "tpu"), ["devices[0].kind", "tpu"]),
    (at("devices.0.backend", "cuda"), ["cuda", "jax"]),
    (at("devices.0.colour", "red"), ["colour"]),
    (at("devices.0.ops_per_s", {}), ["ops_per_s"]),
    (at("devices.1.name", "cpu0"), ["devices[1].name", "cpu0"]),
    (at("devices.0.transport", "emulate"), ["transport"]),
    (at("devices.0.memory_bytes", 1000), ["fit"]),
    (at("devices", []), ["devices"]),
    (at("devices.0.active_w", "nan"), ["active_w"]),
    (at("links.0.a", "gpu7"), ["gpu7"]),
]


@pytest.mark.parametrize(("change", "told"), MACHINE)
def test_machine(change, told, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Path(__file__).parent.parent / "planner" / "machines" / "this-computer.yaml"

    def both(data: dict[str, Any]) -> None:
        change(data)
        if "fit" in told:
            data["devices"][1]["memory_bytes"] = 1000

    machine = changed(tmp_path, source, both)
    verb = "run" if "cuda" in told else "plan"
    sentence = fail(capsys, verb, EXAMPLES / "sums.yaml", "--machine", machine, *(["-n", "1"] if verb == "run" else []))
    assert all(word in sentence for word in told), sentence


FILES = [
    (["plan", "{tmp}/missing.yaml"], ["missing.yaml"]),
    (["plan", "{tmp}"], []),
    (["plan", "{broken}"], ["broken.yaml", "line"]),
    (["plan", "{empty}"], ["empty"]),
    (["plan", "{list}"], ["mapping"]),
    (["plan", "{bytes}"], ["bytes.yaml"]),
    (["plan", "{sums}", "-m", "9x3090"], ["9x3090", "3x3090"]),
    (["plan", "{sums}", "-m", "{tmp}/missing.yaml"], ["missing.yaml"]),
    (["plan", "{sums}", "-o", "{tmp}/no/folder/plan.json"], ["plan.json"]),
    (["plan", "{sums}", "--costs", "{broken}"], ["broken.yaml"]),
    (["run", "{tmp}/missing.json"], ["missing.json"]),
    (["run", "{notjson}"], ["notjson.json", "JSON"]),
    (["run", "{noplan}"], ["schema"]),
    (["run", "{sums}", ""], ["empty"]),
    (["run", "{sums}", "two plus two"], ["two plus two"]),
    (["run", "{sums}", "123456+1"], ["123456"]),
    (["run", "{sums}", "1+"], ["1+"]),
    (["run", "{sums}", "1+2", "--file", "{questions}"], ["--file"]),
    (["run", "{sums}", "--file", "{tmp}/missing.jsonl"], ["missing.jsonl"]),
    (["run", "{sums}", "--file", "{questions}"], ["questions.jsonl", "2"]),
    (["run", "{sums}", "--clock", "solar"], ["--clock", "solar"]),
    (["run", "{sums}", "-n", "0"], ["--problems"]),
    (["run", "{sums}", "--out", "{sums}"], ["sums.yaml"]),
    (["run", "{countdown}", "1 2 -> 99"], ["3 or 4"]),
    (["run", "{countdown}", "1 1 1 -> 98"], ["98"]),
    (["export", "{sums}", "-f", "pdf"], ["pdf", "svg"]),
    (["export", "{tmp}/missing.jsonl"], ["missing.jsonl"]),
    (["export", "{badtrace}"], ["badtrace.jsonl", "line 1"]),
    (["machines", "9x3090"], ["9x3090"]),
    (["frobnicate"], ["frobnicate"]),
    (["run"], ["what"]),
    (["plan", "{sums}", "--rounds", "99"], ["--rounds"]),
    (["plan", "{sums}", "--limit", "soon"], ["--limit"]),
]


@pytest.mark.parametrize(("words", "told"), FILES)
def test_files_and_words(words, told, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {
        "broken.yaml": "name: [unclosed\nproblems: }",
        "empty.yaml": "",
        "list.yaml": "- a\n- b\n",
        "notjson.json": "{",
        "noplan.json": "{}",
        "questions.jsonl": '{"question": "1+2", "answer": "3"}\n{"question": 7}\n',
        "badtrace.jsonl": "nonsense\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00name")
    paths = {name.split(".")[0]: tmp_path / name for name in [*texts, "bytes.yaml"]}
    paths |= {"tmp": tmp_path, "sums": EXAMPLES / "sums.yaml", "countdown": EXAMPLES / "countdown.yaml"}
    sentence = fail(capsys, *(word.format(**paths) for word in words))
    assert all(word in sentence for word in told), sentence


def a_plan(folder: Path, **options: str) -> Path:
    """A plan file of the serial preset."""
    path = folder / "plan.json"
    with pytest.raises(SystemExit) as stop:
        main(["plan", str(EXAMPLES / "sums.yaml"), "--kind", "serial", "-o", str(path)])
    assert stop.value.code == 0
    return path


PLAN = [
    (lambda p: p.update(schema="heteroreason.plan/0"), ["schema", "heteroreason.plan/0"]),
    (lambda p: p.update(draft_ahead=3), ["hash"]),
    (lambda p: p.update(mood="good"), ["mood"]),
    (lambda p: p.pop("placement"), ["placement"]),
    (lambda p: p.update(timeline="soon"), ["timeline"]),
    (lambda p: p["placement"].update(draft="cpu7"), ["hash"]),
]


@pytest.mark.parametrize(("change", "told"), PLAN)
def test_plan_file(change, told, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = a_plan(tmp_path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    capsys.readouterr()
    sentence = fail(capsys, "run", path, "1+2")
    assert all(word in sentence for word in told), sentence


CHECKPOINT = [
    ("model.safetensors", lambda b: b[: len(b) // 2], ["model.safetensors"]),
    ("model.safetensors", lambda b: b"", ["model.safetensors"]),
    ("model.safetensors", None, ["model.safetensors"]),
    ("config.json", lambda b: b[:-20], ["config.json"]),
    ("config.json", lambda b: b.replace(b'"hidden_size"', b'"hiden_size"'), ["hidden_size"]),
    ("config.json", lambda b: b.replace(b'"llama"', b'"mamba"'), ["mamba"]),
    ("config.json", None, ["config.json"]),
    ("tokenizer.json", lambda b: b"{}", ["tokenizer.json"]),
    ("tokenizer.json", None, ["tokenizer.json"]),
]


@pytest.mark.parametrize(("name", "damage", "told"), CHECKPOINT)
def test_checkpoint(name, damage, told, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "target"
    shutil.copytree(model_folder("zoo/target"), folder)
    if damage is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(damage((folder / name).read_bytes()))

    def only_target(data: dict[str, Any]) -> None:
        data["policy"]["kind"] = "target_only"
        data["roles"]["target"]["model"] = str(folder)

    workflow = changed(tmp_path, EXAMPLES / "sums.yaml", only_target)
    sentence = fail(capsys, "run", workflow, "1+2", "--clock", "virtual", "--plan", "serial")
    assert all(word in sentence for word in told), sentence


def test_the_plan_of_another_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = a_plan(tmp_path)
    data = json.loads(path.read_text())
    data["models"]["target"] = "0" * 16
    from planner.plan import Plan
    from planner.yaml_file import from_mapping

    plan = from_mapping(Plan, {k: v for k, v in data.items() if k not in ("schema", "hash")}, "test")
    plan.save(path)
    capsys.readouterr()
    assert "zoo/target" in fail(capsys, "run", path, "1+2")
