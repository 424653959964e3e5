"""Prints which of cmake and ninja have to come from the package index: this machine has none, or too old."""

from __future__ import annotations

import re
import shutil
import subprocess

CMAKE_MINIMUM = (3, 21)  # presets of version 3


def has_cmake() -> bool:
    if shutil.which("cmake") is None:
        return False
    text = subprocess.run(["cmake", "--version"], capture_output=True, text=True).stdout
    found = re.search(r"version (\d+)\.(\d+)", text)
    return found is not None and (int(found[1]), int(found[2])) >= CMAKE_MINIMUM


missing = [] if has_cmake() else ["cmake>=3.21"]
if shutil.which("ninja") is None:
    missing.append("ninja")
print(" ".join(missing))
