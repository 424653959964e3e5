"""Keys that were given on the command line: they leave it, as `ps` shows everybody's to everybody.

In: the process's command line. Out: the same process without them, with llama-server's variables for them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final

API_KEY_VARIABLE: Final = "LLAMA_API_KEY"
_VARIABLES: Final = {"--api-key": API_KEY_VARIABLE, "-hft": "HF_TOKEN", "--hf-token": "HF_TOKEN"}
_TEXT_FLAGS: Final = ("-p", "--prompt", "-sys", "--system-prompt")  # what follows may look like anything


def take_secrets(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The command line without keys, and variables for them; an API key is one more beside those there."""
    kept: list[str] = []
    found: dict[str, str] = {}
    texts = iter(argv)
    for text in texts:
        flag, has_value, value = text.partition("=")
        name = _VARIABLES.get(flag.replace("_", "-") if flag.startswith("--") else flag)
        if name is None or (kept and kept[-1] in _TEXT_FLAGS):
            kept.append(text)
            continue
        key = value if has_value else next(texts, None)
        if key is None:
            kept.append(text)  # llama-server says what is missing
            continue
        others = found.get(name) or environ.get(name)
        found[name] = f"{others},{key}" if others and name == API_KEY_VARIABLE else key
    return kept, found


def leave_command_line() -> None:
    """Begin this process anew, without its keys, if it was given any."""
    kept, found = take_secrets(sys.orig_argv[1:], os.environ)
    if found:
        os.execve(sys.executable, [sys.executable, *kept], {**os.environ, **found})
