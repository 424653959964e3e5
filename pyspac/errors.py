"""Exceptions a user may see: what failed, with which value, and what to do about it.

Everything derives from PyspacError, so that a command line can print just the text and exit with
`exit_code`. A broken invariant of our own is an AssertionError instead: it is a bug, and its traceback is
wanted.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any, Final

EXIT_INTERRUPTED: Final = 130  # of a command that Ctrl-C ended


class PyspacError(Exception):
    """Base of all errors meant for users. `exit_code` is what a command exits with."""

    exit_code = 1


class ConfigError(PyspacError):
    """A setting is out of range or of the wrong kind."""

    exit_code = 2

    def __init__(self, field: str, value: Any, wanted: str) -> None:
        """Name the setting, the value it had, and what to give instead: the end of "give ..."."""
        shown = str(value) if isinstance(value, PurePath) else value
        super().__init__(f"{field} cannot be {shown!r}: give {wanted}")


class UsageError(ConfigError):
    """Settings do not go together, or one is missing: there is no single value to name."""

    def __init__(self, text: str) -> None:
        """Take the whole sentence."""
        PyspacError.__init__(self, text)


class NoProcessError(PyspacError):
    """The system lets us have no more processes or threads."""

    def __init__(self, what: str, log: str = "") -> None:
        """`what` failed; `log`: lines about it."""
        super().__init__(
            f"{what}, as there are no more processes or threads to be had: end other programs, or raise the "
            f"limit (ulimit -u, TasksMax of a service, the pids limit of a container){log}"
        )


class ModelError(PyspacError):
    """A model file cannot be used: not a GGUF, truncated, dense, an unsupported type."""

    exit_code = 2


# spac_status values that the caller's own input causes; the others are failures of the machine or of pyspac
_INPUT_STATUS = frozenset({1, 2, 3})


class EngineError(PyspacError):
    """libspac returned a status other than success; `text` is its spac_last_error()."""

    def __init__(self, status: int, text: str) -> None:
        """Keep the spac_status and its text; the text already says what to do."""
        super().__init__(text or f"libspac failed with status {status} and left no text")
        self.status = status
        self.text = text
        self.exit_code = 2 if status in _INPUT_STATUS else 1
