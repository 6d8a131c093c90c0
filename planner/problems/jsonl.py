"""Problems in plain text, read from a JSONL file with `question` and `answer` on each line."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.errors import UserError
from planner.problems.base import Problem

_ANSWER_LINE = re.compile(r"^\s*(?:final )?answer\s*:\s*(.+?)\s*$", re.IGNORECASE | re.MULTILINE)
MOST_ERRORS = 20
_EXAMPLE = 'write {"question": "...", "answer": "..."}'


@dataclass(frozen=True)
class Text:
    """Problems for a language model: steps are paragraphs, the answer is boxed or stands on a line of its own."""

    name = "text"
    delimiter = "\n\n"

    def generate(self, count: int, seed: int) -> list[Problem]:
        """There is nothing to generate from: always a UserError."""
        raise UserError(
            "the problem set text generates no problems",
            where="problems",
            mend="give a JSONL file of problems, or use sums or countdown",
        )

    def parse(self, question: str) -> Problem:
        """The question as it is. Its answer is not known, so no run of it is graded as right."""
        if not question.strip():
            raise UserError("the question is empty", where="text", mend="write the question")
        return Problem("text", _of_whole_characters(question.strip(), "text"), "")

    def prompt(self, problem: Problem) -> str:
        """The question as a paragraph."""
        return problem.question + self.delimiter

    def readable(self, step: str) -> str:
        """The step itself."""
        return step

    def answer(self, step: str) -> str | None:
        r"""What the last `\\boxed{...}` holds, else what follows `answer:` on the last such line."""
        boxed = _last_boxed(step)
        if boxed is not None:
            return boxed.strip()
        lines = _ANSWER_LINE.findall(step)
        return lines[-1] if lines else None

    def grade(self, problem: Problem, steps: Sequence[str]) -> bool:
        """Whether the last step's answer is the reference answer, letter by letter."""
        found = self.answer(steps[-1]) if steps else None
        return found is not None and bool(problem.answer) and found == problem.answer.strip()


def _of_whole_characters(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        what = "the text holds half of a character that is written in two"
        raise UserError(what, where=where, mend="write whole characters, in UTF-8") from None
    return text


def _last_boxed(text: str) -> str | None:
    r"""The content of the last `\\boxed{...}`, braces inside it paired."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i]
    return None


def read_jsonl(path: str | Path) -> list[Problem]:
    """The problems of a JSONL file; blank lines are skipped.

    One UserError tells of the bad lines, a sentence each, of the first `MOST_ERRORS` of them.
    """
    try:
        # Only line feeds end a line: JSON lets a text hold the other separators of Unicode as they are.
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except OSError as bad:
        raise UserError(f"cannot be read ({bad.strerror})", where=str(path), mend="name a JSONL file") from None
    except UnicodeDecodeError:
        raise UserError("not UTF-8 text", where=str(path), mend="save the file as UTF-8") from None
    problems: list[Problem] = []
    errors: list[UserError] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            problems.append(_read_line(line, f"{path}:{number}"))
        except UserError as bad:
            errors.append(bad)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        more = [f"and {len(errors) - MOST_ERRORS} more lines like these"] if len(errors) > MOST_ERRORS else []
        raise UserError("\n".join([*(str(bad) for bad in errors[:MOST_ERRORS]), *more]))
    if not problems:
        raise UserError("no problems in the file", where=str(path), mend=f"on each line {_EXAMPLE}")
    return problems


def _read_line(line: str, where: str) -> Problem:
    try:
        raw = json.loads(line)
    except json.JSONDecodeError as bad:
        raise UserError(f"not valid JSON ({bad.msg})", where=where, mend=_EXAMPLE) from None
    except (ValueError, RecursionError) as bad:
        raise UserError(f"not JSON that can be read ({bad})", where=where, mend=_EXAMPLE) from None
    if not isinstance(raw, dict):
        raise UserError("not a JSON object", where=where, mend=_EXAMPLE)
    fields = []
    for key in ("question", "answer"):
        value = raw.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or not value.strip():
            what = f"key {key!r} is missing" if key not in raw else f"key {key!r} holds {value!r}"
            raise UserError(what, where=where, mend=f"give {key} as text")
        fields.append(_of_whole_characters(value.strip(), where))
    return Problem("text", fields[0], fields[1])
