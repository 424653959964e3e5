"""What this build's llama-server has that not every build has: a folder of programs in, `BuildExtras` out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyspac.errors import PyspacError

FILE: Final = "pyspac-build.json"  # written by cmake/ServerExtras.cmake

MEND_HTTPS: Final = (
    "install OpenSSL's headers (Debian, Ubuntu: apt install libssl-dev), then run `make configure build`"
)
MEND_UI: Final = "run `PYSPAC_UI=1 make build`, which needs npm and Node.js 20.19 or newer"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildExtras:
    https: bool  # can download from https:// addresses
    ui: bool  # has llama-server's web page


def build_extras(folder: Path) -> BuildExtras:
    """Raises a PyspacError if the build in `folder` is older than this file."""
    try:
        values = json.loads((folder / FILE).read_bytes())
        return BuildExtras(https=bool(values["https"]), ui=bool(values["ui"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PyspacError(f"{folder / FILE} cannot be read ({error}): run `make build` again") from error
