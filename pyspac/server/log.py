"""The log of `serve` and `attach`: one line per event on stderr, or one JSON object per line on stdout.

llama-server's own log goes to stderr as it is, so that with JSON the two can be told apart.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final

NAME: Final = "pyspac"


class JsonFormatter(logging.Formatter):
    """time, level, source and message, and the fields of `event`."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = getattr(record, "fields", {})
        line = {"time": time, "level": record.levelname.lower(), "source": self.source}
        return json.dumps({**line, "message": record.getMessage(), **fields}, default=str)


def set_up(source: str, *, as_json: bool, is_quiet: bool = False) -> None:
    """Send pyspac's log where it belongs; `source` is the command; `is_quiet`: warnings only."""
    handler = logging.StreamHandler(sys.stdout if as_json else sys.stderr)
    handler.setFormatter(
        JsonFormatter(source) if as_json else logging.Formatter(f"pyspac {source}: %(message)s")
    )
    logger = logging.getLogger(NAME)
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.WARNING if is_quiet else logging.INFO)


def event(message: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Say that something happened; `fields` are only for the JSON."""
    logging.getLogger(NAME).log(level, message, extra={"fields": fields})


def warning(message: str, **fields: Any) -> None:
    """As `event`, for what should not be."""
    event(message, level=logging.WARNING, **fields)
