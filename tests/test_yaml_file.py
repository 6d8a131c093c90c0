"""Reading YAML and building dataclasses from it: every fault gives one line with file, key and mend."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import UserError
from planner.yaml_file import LIMIT_BYTES, content_hash, from_mapping, hold, read_yaml, to_mapping


class Colour(StrEnum):
    RED = "red"
    GREEN = "green"


@dataclass(frozen=True)
class Leaf:
    size: float
    count: int = 1
    colour: Colour = Colour.RED
    note: str | None = None


@dataclass(frozen=True)
class Tree:
    name: str
    leaves: tuple[Leaf, ...] = ()
    by_colour: dict[Colour, Leaf] = field(default_factory=dict)
    best: Leaf | None = None
    ripe: bool = False


def written(folder: Path, content: bytes | str) -> Path:
    path = folder / "wf.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def message(error: pytest.ExceptionInfo[UserError], *parts: str) -> str:
    text = str(error.value)
    assert "\n" not in text
    for part in parts:
        assert part in text
    return text


def test_reads_plain_data_in_yaml_1_2(tmp_path: Path) -> None:
    text = "a: no\nb: 1e9\nc: 1_000\nd: 2020-01-01\ne: ~\nf: [1, -2.5]\ng: true\nh: '1'\ni: 1:30\nj: 0\n"
    assert read_yaml(written(tmp_path, text)) == {
        "a": "no",
        "b": 1e9,
        "c": "1_000",
        "d": "2020-01-01",
        "e": None,
        "f": [1, -2.5],
        "g": True,
        "h": "1",
        "i": "1:30",
        "j": 0,
    }
    assert read_yaml(written(tmp_path, b"\xef\xbb\xbfa: 1")) == {"a": 1}


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("", "is empty; see the examples"),
        ("# only a comment\n", "is empty"),
        ("a: [1", "broken YAML at line 1, column 6"),
        ("a: 1\nb: c: d", "broken YAML at line 2, column 5"),
        ("\ta: 1", "broken YAML at line 1, column 1"),
        ("a: 1\na: 2", "line 2, column 1: the key a stands twice"),
        ("a: {b: 1, b: 2}", "the key b stands twice"),
        ("a: &x 1\nb: *x", "line 2, column 4: an alias"),
        ("a: &x [*x]", "an alias"),
        ("a: !!python/object:os.system x", "a tag"),
        ("a: !!int x", "a tag"),
        ("1: a", "the key 1 is not text: put it in quotes"),
        ("[1, 2]: a", "the key [1, 2] is not text"),
        ("a: 1\n---\nb: 2", "another document"),
        ('a: "\\ud800"', "half a character"),
        (b"a: 1\nb: \xff\n", "line 2 is not UTF-8; save the file as UTF-8"),
        (b"a: \x00", "is not YAML"),
        ("[" * 600, "is nested too deeply"),
        ("a" * (LIMIT_BYTES + 1), "is longer than 1 MiB"),
    ],
)
def test_a_broken_file_is_named_with_its_fault(tmp_path: Path, content: bytes | str, what: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(UserError) as error:
        read_yaml(path)
    message(error, f"{path}: ", what, "; ")


def test_a_path_that_cannot_be_read(tmp_path: Path) -> None:
    for path, what in (
        (tmp_path / "none.yaml", "there is no such file"),
        (tmp_path, "is a folder; name a YAML file in it"),
        (written(tmp_path, "a: 1") / "below", "cannot be read"),
        ("a\0b", "cannot be read"),
    ):
        with pytest.raises(UserError) as error:
            read_yaml(path)
        message(error, f"{path}: {what}")


LEAF = {"size": 1.5}


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ([1], "t.yaml: is a list, not a mapping; use a mapping with the keys name, leaves, by_colour, best, ripe"),
        (None, "t.yaml: is empty, not a mapping; use a mapping with the keys"),
        ({}, "t.yaml: name is missing; add it"),
        ({"name": 3}, "t.yaml: name is 3; use text (in quotes if need be)"),
        ({"name": None}, "t.yaml: name is empty; use text"),
        ({"name": "x", "nmae": "y"}, "t.yaml: nmae is not a known key; did you mean name?"),
        ({"nmae": "y"}, "t.yaml: nmae is not a known key; did you mean name?"),
        ({"name": "x", "zzz": 1}, "t.yaml: zzz is not a known key; use one of name, leaves, by_colour, best, ripe"),
        ({"name": "x", "ripe": 1}, "t.yaml: ripe is 1; use true or false"),
        ({"name": "x", "ripe": "yes"}, 't.yaml: ripe is "yes"; use true or false'),
        ({"name": "x", "leaves": LEAF}, 't.yaml: leaves is {"size": 1.5}; use a list'),
        ({"name": "x", "leaves": [LEAF, {}]}, "t.yaml: leaves[1].size is missing; add it"),
        ({"name": "x", "leaves": [LEAF, 7]}, "t.yaml: leaves[1] is 7; use a mapping with the keys size, count,"),
        ({"name": "x", "leaves": [{"size": "2"}]}, 't.yaml: leaves[0].size is "2"; use a number'),
        ({"name": "x", "leaves": [{"size": True}]}, "t.yaml: leaves[0].size is true; use a number"),
        ({"name": "x", "leaves": [{"size": float("nan")}]}, "t.yaml: leaves[0].size is NaN; use a finite number"),
        ({"name": "x", "leaves": [{"size": float("-inf")}]}, "leaves[0].size is -Infinity; use a finite number"),
        ({"name": "x", "leaves": [{"size": 1, "count": 2.0}]}, "leaves[0].count is 2.0; use a whole number"),
        (
            {"name": "x", "leaves": [{"size": 1, "color": "red"}]},
            "leaves[0].color is not a known key; did you mean col",
        ),
        ({"name": "x", "best": {"size": 1, "colour": "rde"}}, 'best.colour is "rde"; use one of red, green; did you m'),
        ({"name": "x", "best": {"size": 1, "colour": 4}}, "t.yaml: best.colour is 4; use one of red, green"),
        ({"name": "x", "best": {"size": 1, "siez": 4}}, "t.yaml: best.siez is not a known key; did you mean size?"),
        ({"name": "x", "by_colour": {"gren": LEAF}}, "t.yaml: by_colour.gren is not a known key; did you mean green?"),
        ({"name": "x", "by_colour": {"red": {}}}, "t.yaml: by_colour.red.size is missing; add it"),
        ({"name": "x", "by_colour": {"red": {"size": 1, "x": 1}}}, "by_colour.red.x is not a known key; use one of si"),
        ({"name": "x", "by_colour": []}, "t.yaml: by_colour is []; use a mapping"),
        ({"name": "x", "ripe": {1, 2}}, "t.yaml: is no plain data"),
        ({"name": "x\ud800"}, "t.yaml: cannot be read"),
    ],
)
def test_a_wrong_value_is_named_with_its_mend(raw: Any, text: str) -> None:
    with pytest.raises(UserError) as error:
        from_mapping(Tree, raw, "t.yaml")
    assert message(error, text).startswith("t.yaml: ")


def test_long_and_odd_values_stay_on_one_short_line() -> None:
    with pytest.raises(UserError) as error:
        from_mapping(Tree, {"name": "x", "ripe": "line\none\u2028" + "y" * 500}, "t.yaml")
    assert len(message(error)) < 120
    with pytest.raises(UserError) as error:
        from_mapping(Tree, {"name": "x", "line\none" + "y" * 500: 1}, "t.yaml")
    assert len(message(error)) < 160


def test_rules_are_held_in_order() -> None:
    hold([("a", 1, True, "no")], "f.yaml")
    with pytest.raises(UserError, match=r"^f.yaml: b is 2; mend it$"):
        hold([("a", 1, True, "no"), ("b", 2, False, "mend it"), ("c", 3, False, "no")], "f.yaml")


finite = st.floats(allow_nan=False, allow_infinity=False)
leaves = st.builds(
    Leaf, finite, st.integers(), st.sampled_from(Colour), st.none() | st.text(st.characters(codec="utf-8"))
)
trees = st.builds(
    Tree,
    st.text(st.characters(codec="utf-8")),
    st.lists(leaves, max_size=3).map(tuple),
    st.dictionaries(st.sampled_from(Colour), leaves),
    st.none() | leaves,
    st.booleans(),
)


@settings(deadline=None)
@given(trees)
def test_there_and_back(tree: Tree) -> None:
    mapping = to_mapping(tree)
    again = from_mapping(Tree, mapping, "t.yaml")
    assert again == tree
    assert content_hash(to_mapping(again)) == content_hash(mapping)


def test_the_hash_depends_on_content_alone() -> None:
    assert content_hash({"a": 1, "b": [2]}) == content_hash({"b": [2], "a": 1})
    assert content_hash({"a": 1}) != content_hash({"a": 2})
    assert len(content_hash({})) == 16
    written_out = {"name": "x", "leaves": [{"size": 1, "count": 1, "colour": "red", "note": None}]}
    one, two = (from_mapping(Tree, raw, "t") for raw in ({"name": "x", "leaves": [{"size": 1.0}]}, written_out))
    assert content_hash(to_mapping(one)) == content_hash(to_mapping(two))


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_give_data_or_one_line(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = written(tmp_path_factory.getbasetemp(), content)
    try:
        read_yaml(path)
    except UserError as error:
        assert "\n" not in str(error)
