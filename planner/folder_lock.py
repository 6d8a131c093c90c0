"""One process at a time in the folder of a run."""

from __future__ import annotations

import os
from pathlib import Path

from planner.errors import UserError

try:
    import fcntl
except ImportError:  # where there are no locks, nothing keeps two runs apart
    fcntl = None


class FolderLock:
    """Held from its making until `close`; the system lets go of it when the process ends, however that happens."""

    def __init__(self, folder: Path) -> None:
        """Take the lock, where the system has any. Raises UserError if another run has it."""
        self._descriptor: int | None = None
        if fcntl is None:
            return
        try:
            self._descriptor = os.open(folder, os.O_RDONLY)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            mend = "wait for its end, stop it, or name another folder"
            raise UserError("another run is at work in this folder", where=str(folder), mend=mend) from None
        except OSError:
            pass  # no such folder, or a file system without locks: what is done there next tells

    def close(self) -> None:
        """Let go; calling it twice is harmless."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
