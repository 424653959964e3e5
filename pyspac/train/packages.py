"""Which packages of the extra `train` are missing, as a sentence; imports none of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable


def missing_packages(names: Iterable[str]) -> str:
    """What is not installed of `names`, and how it is installed; empty where nothing is missing."""
    *others, last = [name for name in names if importlib.util.find_spec(name) is None] or [""]
    if not last:
        return ""
    listed = f"{', '.join(others)} and {last} are" if others else f"{last} is"
    return f"{listed} not installed; install the extra `train`, in a clone: pip install -e '.[train]'"
