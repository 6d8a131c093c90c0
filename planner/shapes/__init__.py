"""Sizes of well-known models, without weights: enough to plan with, by the names `shapes/NAME`. They cannot run."""

from pathlib import Path


def folder() -> Path:
    """Where the configurations are."""
    return Path(__file__).parent
