"""The house around the code: what README and the documentation say is so."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import typer.main

from planner.cli import app
from planner.cost import CostTable
from planner.machine import Machine, catalogue
from planner.workflow import Workflow

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ZOO = ROOT / "models_jax" / "zoo"
WEIGHTS = [ZOO / "draft" / "integer.safetensors", *(ZOO / r / "model.safetensors" for r in ("draft", "target", "prm"))]
TEXT = {".md", ".py", ".toml", ".yaml", ".yml", ".json", ".jsonl", ".svg", ".cfg", ".sh", ".txt", ""}
NOT_OURS = {".venv", ".venv-pynq4", ".git", "out", "site", "build", "dist", "shared", "__pycache__"}
CODE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
HOMES = re.compile(r"(?<![\w.])/(?:home|Users|root|work)/[\w.-]+")

needs_zoo = pytest.mark.skipif(
    not all(path.is_file() for path in WEIGHTS), reason="the models that ship are not trained yet: run `make zoo`"
)


def blocks(page: Path, language: str) -> list[str]:
    return [code for _, found, code in CODE.findall(page.read_text(encoding="utf-8")) if found == language]


def prose(page: Path) -> str:
    return CODE.sub("", page.read_text(encoding="utf-8"))


def name_of(path: object) -> str:
    return str(path.relative_to(ROOT)) if isinstance(path, Path) else str(path)


def our_files() -> Iterator[Path]:
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        hidden = any(p.startswith(".") and p not in (".github", ".ci") for p in parts[:-1])
        if path.is_file() and not hidden and not NOT_OURS & set(parts) and path.suffix in TEXT:
            yield path


def invocations(page: Path) -> list[list[str]]:
    """The words of each `heteroreason ...` line in the page's code blocks."""
    lines = [line for code in blocks(page, "console") + blocks(page, "") for line in code.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("heteroreason ")]


# --- README -------------------------------------------------------------------------------------------------------


@needs_zoo
def test_python_example_of_readme_runs_as_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = blocks(ROOT / "README.md", "python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    monkeypatch.chdir(ROOT)
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert "6 7 2 9 -> 24 |" in printed
    assert "modelled" in printed


def test_readme_names_the_two_commands() -> None:
    shown = "\n".join(blocks(ROOT / "README.md", "console"))
    targets = re.findall(r"^([a-z0-9-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"make demo", "make test"} <= set(shown.splitlines())
    assert {"help", "demo", "test", "check", "bench", "zoo", "docs"} <= set(targets)


def test_make_targets_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = set(re.findall(r"`make ([a-z0-9-]+)`|^make ([a-z0-9-]+)$", text, re.MULTILINE))
        assert {a or b for a, b in named} <= targets, page


def added_commands() -> dict[str, object]:
    """Groups of commands that our packages add, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = {}
    for name, place in project["entry-points"]["heteroreason.commands"].items():
        module, _, attribute = place.partition(":")
        found[name] = typer.main.get_group(getattr(importlib.import_module(module), attribute))
    return found


# --- command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_that_a_page_names_exist(page: Path) -> None:
    commands = {**typer.main.get_command(app).commands, **added_commands()}  # type: ignore[attr-defined]
    inline = re.findall(r"`heteroreason ([a-z-]+)[^`]*`", prose(page))
    assert set(inline) <= commands.keys()
    for words in invocations(page):
        assert words[1] in commands, words
        command = commands[words[1]]
        if words[1] in added_commands():
            assert words[2] in command.commands, words  # type: ignore[attr-defined]
            command = command.commands[words[2]]  # type: ignore[attr-defined]
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        used = {word.partition("=")[0] for word in words[2:] if word.startswith("-") and not word[1:].isdigit()}
        assert used - {"--help", "->"} <= known, words


def test_reference_names_every_command_and_option() -> None:
    text = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    commands = {**typer.main.get_command(app).commands, **added_commands()}  # type: ignore[attr-defined]
    for name, command in commands.items():
        assert f"\n## {name}\n" in text, name
        inside = getattr(command, "commands", {"": command}).values()
        for parameter in (p for c in inside for p in c.params):
            long = [option for option in parameter.opts if option.startswith("--")]
            assert all(f"`{option}`" in text for option in long if option != "--help"), (name, long)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_commands_of_a_page_read_exist(page: Path) -> None:
    for words in invocations(page):
        for word in words[2:]:
            if word.startswith(("examples/", "planner/")):
                assert (ROOT / word).is_file(), words


# --- documentation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        assert file.is_relative_to(ROOT), f"{page.name} links out of the repository: {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_page_is_in_the_table_of_contents() -> None:
    contents = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r": ([\w/-]+\.md)$", contents, re.MULTILINE))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_of_a_page_is_python(page: Path) -> None:
    for code in blocks(page, "python"):
        ast.parse(code)


def test_changelog_has_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    heads = re.findall(r"^## \[(.+?)\](?: - (\S+))?", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert heads, "CHANGELOG.md has no version"
    newest, after = heads[0]
    assert version == (after if newest == "Unreleased" else newest)


def test_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


# --- examples -----------------------------------------------------------------------------------------------------

EXAMPLES = sorted((ROOT / "examples").iterdir())


@pytest.mark.parametrize("path", [p for p in EXAMPLES if p.suffix == ".yaml"], ids=name_of)
def test_example_loads(path: Path) -> None:
    if path.name.startswith("costs-"):
        machine = Machine.load(path.stem.removeprefix("costs-"))
        assert {e.device for e in CostTable.load(path).entries} <= {d.name for d in machine.devices}
    else:
        assert Workflow.load(path).name == path.stem


@pytest.mark.parametrize("path", [p for p in EXAMPLES if p.suffix == ".py"], ids=name_of)
def test_script_is_importable_and_says_what_it_does(path: Path) -> None:
    code = path.read_text(encoding="utf-8")
    space: dict[str, object] = {"__name__": "example", "__file__": str(path)}
    exec(compile(code, str(path), "exec"), space)
    assert space["__doc__"]
    assert callable(space["main"])


def test_machines_that_pages_name_are_in_the_catalogue() -> None:
    known = {*catalogue(), "my-machine.yaml"}
    for page in PAGES:
        for words in invocations(page):
            named = [after for word, after in pairwise(words) if word in ("-m", "--machine")]
            assert set(named) <= known, words


# --- everywhere ---------------------------------------------------------------------------------------------------


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in our_files()
        if path != Path(__file__)
        for match in HOMES.finditer(path.read_text(encoding="utf-8", errors="replace"))
    ]
    assert not found, found


# --- benchmarks ---------------------------------------------------------------------------------------------------


BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("path", [p for p in BENCHMARKS if "argparse" in p.read_text("utf-8")], ids=name_of)
def test_benchmarks_need_no_arguments(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make bench` gives them none."""

    class Parsed(Exception):
        pass

    def parse_only(parser: argparse.ArgumentParser) -> None:
        parser.parse_known_args()
        raise Parsed

    monkeypatch.setattr(sys, "argv", [str(path)])
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    with pytest.raises(Parsed):
        runpy.run_path(str(path), run_name="__main__")
