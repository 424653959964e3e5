"""Names the machine of a benchmark, as `pyspac bench` does: a flat dict to stand beside every number."""

from __future__ import annotations

import json

from pyspac.commands.machine import REPOSITORY, commit, cpu_model, describe, one_line, pin

__all__ = ["REPOSITORY", "commit", "cpu_model", "describe", "one_line", "pin"]

if __name__ == "__main__":
    print(json.dumps(describe(), indent=2))
