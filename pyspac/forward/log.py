"""llama.cpp's log: silent unless asked for, but its last errors are kept for our own error messages."""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from typing import Any, Final

from pyspac.forward.libllama import lib

_LEVEL_ERROR: Final = 4  # enum ggml_log_level


class _Log:
    def __init__(self) -> None:
        self.verbose = False
        self.errors: deque[str] = deque(maxlen=3)
        self.callback = lib.llama_log_callback(self._write)  # must outlive every call of llama.cpp
        lib.llama_log_set(self.callback, ctypes.c_void_p(0))

    def _write(self, level: int, text: bytes, _user_data: Any) -> None:
        line = text.decode("utf-8", errors="replace")
        if self.verbose:
            sys.stderr.write(line)
        if level == _LEVEL_ERROR and line.strip():
            self.errors.append(line.strip())

    def take_errors(self) -> str:
        """The last errors in one line, and forget them."""
        text = "; ".join(dict.fromkeys(self.errors))
        self.errors.clear()
        return f" (llama.cpp: {text})" if text else ""


_log = _Log()


def set_verbose(verbose: bool) -> None:
    """Show llama.cpp's own log on stderr, or not."""
    _log.verbose = verbose


def take_errors() -> str:
    """What llama.cpp said of its last errors, to end a message with; "" if nothing."""
    return _log.take_errors()
