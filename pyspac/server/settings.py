"""AttachOptions as JSON and back: how `pyspac serve` gives its settings to the scheduler's process."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from pyspac.errors import UsageError
from pyspac.scheduler.config import SchedulerConfig
from pyspac.server.options import AttachOptions

STDIN: Final = "-"


def to_json(options: AttachOptions) -> str:
    """Every field; sets as sorted lists, paths as text."""
    return json.dumps(asdict(options), default=_plain)


def from_json(text: str) -> AttachOptions:
    """What `to_json` wrote; a field that is left out has its default. Raises ConfigError."""
    try:
        fields = json.loads(text)
        fields["scheduler"] = SchedulerConfig(**fields["scheduler"])
        fields["model"] = None if fields["model"] is None else Path(fields["model"])
        return AttachOptions(**fields)
    except KeyError as error:
        raise UsageError(
            f"the scheduler's settings lack {error}: `pyspac serve` writes all of them"
        ) from error
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        raise UsageError(
            f"the scheduler's settings are not the JSON that `pyspac serve` of this version writes: {error}"
        ) from error


def read_settings(source: str) -> AttachOptions:
    """From a file, or from stdin for "-". Raises ConfigError."""
    if source == STDIN and sys.stdin is None:  # started with its stdin closed
        raise UsageError("there are no settings on stdin, which is closed: give a file")
    try:
        text = sys.stdin.read() if source == STDIN else Path(source).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the settings in {source} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the settings in {source} are no JSON: they are not UTF-8") from error
    return from_json(text)


def _plain(value: Any) -> str | list[str]:
    """What JSON has no word for."""
    return sorted(value) if isinstance(value, frozenset) else str(value)
