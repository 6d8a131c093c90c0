"""Small trained models that ship: `zoo/draft`, `zoo/prm` and `zoo/target`."""

from pathlib import Path


def folder() -> Path:
    """Where the models lie, one folder each."""
    return Path(__file__).parent
