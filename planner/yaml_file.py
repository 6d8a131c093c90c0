"""From YAML to frozen dataclasses and back, with one clear sentence for whatever is wrong."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import re
from collections.abc import Hashable, Iterable, Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from planner.errors import UserError

LIMIT_BYTES = 1 << 20
"""Longest file that is read."""

Rule = tuple[str, Any, bool, str]
"""What is checked once the types are right: dotted key, value, whether it may stay, how to mend it."""

T = TypeVar("T")


def read_yaml(path: str | Path) -> Any:
    """Plain data of a YAML file: mappings with text keys, lists, text, numbers, booleans, null.

    Words are read as in YAML 1.2: `no` is text, `1e9` a number. Aliases, tags and repeated keys are refused.
    """
    where, text = str(path), _text(Path(path))
    try:
        data = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        raise UserError(_broken(error), where=where, mend="mend the YAML there") from None
    except yaml.YAMLError as error:
        what = f"is not YAML: {' '.join(str(error).split())}"
        raise UserError(what, where=where, mend="take the unreadable characters out") from None
    except RecursionError:
        raise UserError("is nested too deeply", where=where, mend="flatten it") from None
    if data is None:
        raise UserError("is empty", where=where, mend="see the examples folder for files to start from")
    return data


def from_mapping(cls: type[T], raw: Any, where: str) -> T:
    """Build the dataclass `cls`, nested ones included, from plain data that came from the file `where`.

    Unknown keys are refused, text is never taken for a number, nan and infinity are no numbers.
    """
    if not isinstance(raw, Mapping):
        mend = f"use a mapping with the keys {', '.join(_keys(cls))}"
        raise UserError(f"is {_kind(raw)}, not a mapping", where=where, mend=mend)
    try:
        text = json.dumps(raw)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"is no plain data ({error})", where=where, mend="use text, numbers and lists") from None
    try:
        return _adapter(cls).validate_json(text)
    except ValidationError as error:
        raise _first(error, cls, where) from None


def hold(rules: Iterable[Rule], where: str) -> None:
    """Raise UserError for the first rule that is broken."""
    for key, value, right, mend in rules:
        if not right:
            raise UserError(f"{key} is {shown(value)}", where=where, mend=mend)


def to_mapping(obj: Any) -> Any:
    """Plain data of a dataclass: enums become their values, tuples lists. `from_mapping` undoes it."""
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return {field.name: to_mapping(getattr(obj, field.name)) for field in dataclasses.fields(obj)}
    if isinstance(obj, Enum):
        return obj.value
    if isinstance(obj, Mapping):
        return {str(to_mapping(key)): to_mapping(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [to_mapping(value) for value in obj]
    if isinstance(obj, float) and obj.is_integer():
        return int(obj)  # 4 and 4.0 are one number, and have one hash
    return obj


def content_hash(mapping: Any) -> str:
    """16 hex digits of the SHA-256 of the canonical JSON of plain data."""
    text = json.dumps(mapping, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def shown(value: Any) -> str:
    """A value as an error message shows it: one line, not long."""
    text = json.dumps(value, ensure_ascii=not str(value).isprintable(), default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def unknown(what: str, name: str, known: list[str], where: str) -> UserError:
    """The error for a name that is not among the known ones: it suggests the nearest."""
    near = difflib.get_close_matches(name, known, n=1)
    mend = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
    return UserError(what, where=where, mend=mend)


def _text(path: Path) -> str:
    where = str(path)
    try:
        with path.open("rb") as file:
            data = file.read(LIMIT_BYTES + 1)
    except FileNotFoundError:
        raise UserError("there is no such file", where=where, mend="check the path") from None
    except IsADirectoryError:
        raise UserError("is a folder", where=where, mend="name a YAML file in it") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot be read: {reason}", where=where, mend="check the path") from None
    if len(data) > LIMIT_BYTES:
        raise UserError("is longer than 1 MiB", where=where, mend="name a workflow or machine file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"line {line} is not UTF-8", where=where, mend="save the file as UTF-8") from None


class _Loader(yaml.SafeLoader):
    """Plain data only, in the words of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - the shape PyYAML asks for
    yaml_constructors: dict[Any, Any] = {}  # noqa: RUF012  # pyright: ignore[reportIncompatibleVariableOverride]

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases, a few of which can stand for gigabytes, and tags."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _at("an alias (*name) is not read here: write the value out", event)
        if getattr(event, "tag", None) is not None:
            raise _at("a tag (!name) is not read here: leave it out", event)
        node = super().compose_node(parent, index)
        if isinstance(node, yaml.ScalarNode) and any("\ud800" <= letter <= "\udfff" for letter in node.value):
            raise _at("half a character (a surrogate) is no text: leave it out", node)
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        """Refuse keys that repeat or are no text."""
        seen = set()
        for key, _ in node.value:
            name = self.construct_object(key, deep=True)
            if not isinstance(name, str):
                raise _at(f"the key {shown(name)} is not text: put it in quotes", key)
            if name in seen:
                raise _at(f"the key {_word(name)} stands twice", key)
            seen.add(name)
        return super().construct_mapping(node, deep=deep)

    def construct_number(self, node: Any) -> int | float:
        """A number; `.inf` and `.nan` are read, so that a later error can name them."""
        text = node.value.lower()
        if node.tag.endswith(":int"):
            return int(text)
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _at(problem: str, place: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)


def _set_up(loader: type[_Loader]) -> None:
    """YAML 1.2 core words, without its octal and hexadecimal numbers."""
    number = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
    for tag, words, first in (
        ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
        ("int", r"[-+]?(0|[1-9][0-9]{0,99})", "-+0123456789"),
        ("float", number, "-+.0123456789"),
        ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ):
        loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{words})$"), list(first))
    for tag, construct in (
        ("null", loader.construct_yaml_null),
        ("bool", loader.construct_yaml_bool),
        ("int", loader.construct_number),
        ("float", loader.construct_number),
        ("str", loader.construct_yaml_str),
        ("seq", loader.construct_yaml_seq),
        ("map", loader.construct_yaml_map),
    ):
        loader.add_constructor(f"tag:yaml.org,2002:{tag}", construct)


_set_up(_Loader)


def _broken(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return f"broken YAML{place}: {' '.join((error.problem or error.context or 'unknown fault').split())}"


@cache
def _adapter(cls: type[T]) -> TypeAdapter[T]:
    """Strict, and read as JSON, where strict still takes lists for tuples and text for enums.

    Pydantic refuses a config beside a bare dataclass, but hands one given beside a union down to all within.
    """
    return TypeAdapter(cls | None, config=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))  # type: ignore[return-value]


def _first(error: ValidationError, cls: type, where: str) -> UserError:
    """One error as a sentence. An unknown key goes first: it often explains why another is missing."""
    errors = error.errors(include_url=False)
    chosen: Any = min(errors, key=lambda e: e["type"] != "unexpected_keyword_argument")
    place = tuple(part for part in chosen["loc"] if part != "[key]")
    key, kind, value = _dotted(place), chosen["type"], chosen["input"]
    if kind == "unexpected_keyword_argument":
        return unknown(f"{key} is not a known key", str(place[-1]), _keys(_type_at(cls, place[:-1])), where)
    if kind == "missing":
        return UserError(f"{key} is missing", where=where, mend="add it")
    if kind == "json_invalid":
        return UserError(f"cannot be read: {chosen['msg']}", where=where, mend="take the odd characters out")
    if "[key]" in chosen["loc"]:
        return unknown(f"{key} is not a known key", str(place[-1]), _choices(chosen), where)
    mend = _mend(chosen, _type_at(cls, place))
    return UserError(f"{key} is empty" if value is None else f"{key} is {shown(value)}", where=where, mend=mend)


def _mend(error: Any, wanted: Any) -> str:
    kind = error["type"]
    if kind == "value_error":
        return str(error["ctx"]["error"])
    if kind in ("enum", "literal_error"):
        near = difflib.get_close_matches(str(error["input"]), _choices(error), n=1)
        return f"use one of {', '.join(_choices(error))}" + (f"; did you mean {near[0]}?" if near else "")
    if dataclasses.is_dataclass(wanted):
        return f"use a mapping with the keys {', '.join(_keys(wanted))}"
    return MENDS.get(kind.split("_")[0], str(error["msg"]))


MENDS = {
    "int": "use a whole number",
    "float": "use a number",
    "finite": "use a finite number",
    "string": "use text (in quotes if need be)",
    "bool": "use true or false",
    "dict": "use a mapping",
    "tuple": "use a list",
    "list": "use a list",
}
"""Mend by the first word of pydantic's kind of error."""


def _choices(error: Any) -> list[str]:
    return re.findall(r"'([^']*)'", error["ctx"]["expected"])


def _kind(value: Any) -> str:
    return "empty" if value is None else "a list" if isinstance(value, list) else f"{shown(value)}"


def _dotted(place: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{_word(part)}" for part in place)
    return text.removeprefix(".")


def _word(key: str) -> str:
    """A key as it stands, unless it would break the line."""
    return key if key.isprintable() and len(key) <= 40 else shown(key)


def _keys(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []


def _type_at(cls: Any, place: tuple[int | str, ...]) -> Any:
    """The type that is wanted at a place within `cls`."""
    for part in place:
        if dataclasses.is_dataclass(cls):
            cls = get_type_hints(cls).get(str(part))
        else:
            inner = [arg for arg in get_args(cls) if arg is not Ellipsis]
            cls = inner[-1] if inner else None
        if get_origin(cls) in (Union, UnionType):
            cls = next(arg for arg in get_args(cls) if arg is not NoneType)
    return cls
