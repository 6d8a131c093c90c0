"""Text that goes into pictures and files: what must be escaped, how wide it is, how it is cut to fit."""

from __future__ import annotations

import re
import unicodedata

_ILLEGAL = re.compile("[^\\t\\n\\x20-\\x7e\\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 cannot hold even when it is escaped, and what some readers take for the end of a line."""
_NARROW = dict.fromkeys("fijlrtI.,:;'|!()[]/\\ ·", 0.40)
_BROAD = dict.fromkeys("mwMW@%", 0.98)
_WIDTHS = _NARROW | _BROAD


def clean(text: str) -> str:
    r"""The text with characters that no XML can hold written out, such as `\x00`."""
    return _ILLEGAL.sub(lambda found: _written_out(ord(found[0])), text)


def _written_out(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def xml(text: str) -> str:
    """Fit to stand between tags and between double quotes of XML."""
    escaped = clean(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
    return escaped.replace("\n", "&#10;").replace("\t", "&#9;")


def one_line(text: str) -> str:
    """The text with every run of white space as one blank."""
    return " ".join(clean(text).split())


def width(text: str, size: float) -> float:
    """About how wide a line is in a sans serif font of this size; rather too wide than too narrow."""
    return size * sum(_width_of(letter) for letter in text)


def _width_of(letter: str) -> float:
    if letter in _WIDTHS:
        return _WIDTHS[letter]
    if unicodedata.east_asian_width(letter) in "WF":
        return 1.05
    return 0.70 if letter.isupper() or not letter.isascii() else 0.63


def fitted(text: str, size: float, room: float) -> str:
    """The text, cut with an ellipsis where it is wider than `room`; empty where not even one letter fits."""
    text = one_line(text)
    if width(text, size) <= room:
        return text
    while text and width(text + "…", size) > room:
        text = text[:-1]
    return text + "…" if text else ""


def number(value: float) -> str:
    """A coordinate: one digit after the point, none where it is zero."""
    text = f"{value:.1f}"
    text = text.removesuffix(".0")
    return "0" if text == "-0" else text


def duration(us: float) -> str:
    """Microseconds as people read them."""
    for unit, factor in (("s", 1e6), ("ms", 1e3)):
        if abs(us) >= factor:
            return f"{us / factor:.3g} {unit}" if abs(us) < 1000 * factor else f"{us / factor:.0f} {unit}"
    return f"{us:.3g} µs"


def tokens(read: int, written: int) -> str:
    """What a task reads and writes."""
    parts = [f"{verb} {count}" for verb, count in (("reads", read), ("writes", written)) if count]
    return ", ".join(parts) or "no tokens"
