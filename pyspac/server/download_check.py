"""What came from a hub, and what did not: contents compared with the hub's sha256, causes of failures named.

llama.cpp names each file of its cache by the sha256 that the hub gives, and compares nothing.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pyspac.errors import ModelError
from pyspac.server import log
from pyspac.server.model_identity import cache_folder, model_parts

PIECE_BYTES: Final = 16 << 20
ANSWER_S: Final = 10.0
MAX_BYTES: Final = 16 << 20  # of a hub's lists
N_NAMES: Final = 3  # of files, that are shown
_REST: Final = (
    "check the name of the file or of the quantisation (only GGUF files are taken) and the disk's space; "
    "what broke off goes on when it is started again"
)
_SHA256: Final = re.compile("[0-9a-f]{64}")


def check_contents(model: Path, is_stopped: Callable[[], bool]) -> None:
    """Each file once, of those whose hash is known. Raises ModelError, and removes what is damaged."""
    for part in model_parts(model):
        file = part.resolve()
        if _SHA256.fullmatch(file.name) and file.is_file() and not _was_checked(file):
            log.event(f"comparing {part.name} with the hub's sha256, once", event="check", path=str(part))
            found = _sha256(file, is_stopped)
            if found not in ("", file.name):
                file.unlink()
                raise ModelError(
                    f"{part} is damaged: its sha256 is {found}, and the hub's {file.name}; it was removed: "
                    "start again to fetch it anew"
                )
            if found:
                _note_checked(file)


def _sha256(file: Path, is_stopped: Callable[[], bool]) -> str:
    """Empty if it was stopped."""
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while piece := content.read(PIECE_BYTES):
            if is_stopped():
                return ""
            digest.update(piece)
    return digest.hexdigest()


def _stamp(file: Path) -> str:
    """Which content it has, as far as it shows without reading it."""
    found = file.stat()
    return f"{found.st_size} {found.st_mtime_ns}"


def _note(file: Path) -> Path:
    return cache_folder() / "checked" / file.name


def _was_checked(file: Path) -> bool:
    try:
        return _note(file).read_text() == _stamp(file)
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return False


def _note_checked(file: Path) -> None:
    try:
        _note(file).parent.mkdir(parents=True, exist_ok=True)
        _note(file).write_text(_stamp(file))
    except (OSError, RuntimeError) as error:
        log.warning(f"it will be compared again: {error}")


def why_failed(url: str, token: str | None = None) -> str:
    """What `url` answers, with which a download began; `token` is only for the hub."""
    refused, _ = _ask(url, token)
    return refused or f"{url} answers: {_REST}"


def why_hub_failed(hub: str, repo: str, token: str | None) -> str:
    """The same of a repository: its list of names, its list of files, its first model."""
    refs = f"{hub}/api/models/{repo}/refs"
    refused, said = _ask(refs, token, n_bytes=MAX_BYTES)
    if refused:
        return refused
    try:
        commit = json.loads(said)["branches"][0]["targetCommit"]
        _, said = _ask(f"{hub}/api/models/{repo}/tree/{commit}?recursive=true", token, n_bytes=MAX_BYTES)
        names = [entry["path"] for entry in json.loads(said) if entry["path"].endswith(".gguf")]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return f"what {refs} answers is no hub's: check the connection, a proxy, and the address"
    if not names:
        return f"{repo} has no GGUF file: the names of repositories that have them mostly end in -GGUF"
    refused, _ = _ask(f"{hub}/{repo}/resolve/{commit}/{urllib.parse.quote(names[0])}", token, "HEAD")
    return refused or f"{hub}/{repo} answers, and has {_some(names)}: {_REST}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:N_NAMES]) + (f" and {len(names) - N_NAMES} more" if len(names) > N_NAMES else "")


def _ask(url: str, token: str | None, method: str = "GET", n_bytes: int = 0) -> tuple[str, bytes]:
    """Why it is no answer, or empty, and its first bytes."""
    request = urllib.request.Request(url, method=method)
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return "", answer.read(n_bytes)
    except urllib.error.HTTPError as error:
        return _refusal(url, error.code), b""
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        return f"{url} cannot be reached ({reason}): check the connection, a proxy, and the address", b""


def _refusal(url: str, status: int) -> str:
    if status == 404:
        return f"there is no such name ({url} answers 404): most names end in -GGUF"
    if status in (401, 403):
        return f"{url} refuses with status {status}: there is no such name, or HF_TOKEN has to open it"
    return f"{url} answers with status {status}: try again later"
