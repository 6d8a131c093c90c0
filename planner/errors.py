"""The one error a user is meant to read."""

from __future__ import annotations


class UserError(Exception):
    """Bad input: what is wrong, where it stands, and how to mend it, in one sentence.

    The command line prints it alone, without a traceback, and exits with code 2. Library code raises it for
    anything that a user handed in; a fault of ours stays an ordinary exception.
    """

    def __init__(self, what: str, *, where: str = "", mend: str = "") -> None:
        """`what` is wrong, `where` (file, key), and what would `mend` it."""
        self.what, self.where, self.mend = what, where, mend
        super().__init__(what)

    def __str__(self) -> str:
        """`where: what; mend`, leaving out what is not known."""
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}; {self.mend}" if self.mend else text

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the keyword fields when the error crosses a process border."""
        return (_rebuild, (self.what, self.where, self.mend))


def _rebuild(what: str, where: str, mend: str) -> UserError:
    return UserError(what, where=where, mend=mend)
