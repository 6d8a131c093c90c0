"""The folder of this user for files that can always be made again."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache(part: str) -> Path:
    """`$XDG_CACHE_HOME/heteroreason/PART`, by default below `~/.cache`. It need not be there yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "heteroreason" / part
