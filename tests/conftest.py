"""Lets test files import the helper modules beside them. No property has a deadline: a slow computer is no fault."""

import sys
from pathlib import Path

from hypothesis import settings

settings.register_profile("house", deadline=None)
settings.load_profile("house")

sys.path.insert(0, str(Path(__file__).parent))
