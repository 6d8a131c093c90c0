"""A file of JSON lines that is written as a run goes: each line is whole, or the run stops with one sentence."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from planner.errors import UserError


class LineFile:
    """Appends lines, each handed to the system before the run goes on, so that it survives kill -9."""

    def __init__(self, path: Path, *, new: bool, sync: bool = False, mend: str = "name another folder") -> None:
        """Begin the file anew, or go on at its end. With `sync` each line is on the disk before the run goes on."""
        self._path, self._sync = path, sync
        try:
            # Without a buffer: what could not be written is not tried again when the file is closed.
            self._file = path.open("wb" if new else "ab", buffering=0)
        except OSError as error:
            raise UserError(f"cannot be written ({error.strerror})", where=str(path), mend=mend) from None

    def write(self, record: Mapping[str, Any], **options: Any) -> None:
        """Write one line. Raises UserError if it cannot be written whole, such as on a full disk."""
        self.write_all([record], **options)

    def write_all(self, records: Iterable[Mapping[str, Any]], **options: Any) -> None:
        """Write a line each, all of them or, with a UserError, none."""
        text = "".join(json.dumps(record, allow_nan=False, **options) + "\n" for record in records)
        left = memoryview(text.encode())
        size = len(left)
        try:
            while left:
                left = left[self._file.write(left) :]
            if self._sync:
                os.fsync(self._file.fileno())
        except OSError as error:
            self._take_back(written=size - len(left))
            what = f"cannot be written ({error.strerror})"
            raise UserError(what, where=str(self._path), mend="make room on the disk") from None

    def _take_back(self, written: int) -> None:
        """Take the beginning of a line out again: whoever goes on writes no other behind it."""
        with suppress(OSError):  # it may be no file on a disk
            self._file.truncate(self._file.seek(-written, os.SEEK_END))

    def truncate(self, size: int) -> None:
        """Cut the file to so many bytes."""
        self._file.truncate(size)

    def close(self) -> None:
        """Close the file; calling it twice is harmless."""
        self._file.close()
