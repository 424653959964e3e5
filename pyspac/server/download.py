"""Models that llama-server is told to fetch (-hf, -mu, -dr): fetched and checked before it starts.

In: ServeOptions. Out: the files. llama-server then finds them in llama.cpp's cache: the two share the code
that looks for them. Without the file nothing could be checked, the cache's size would be a guess, and a dense
model would be served without a word.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from pyspac.errors import ConfigError, ModelError, PyspacError
from pyspac.server import log
from pyspac.server.build_extras import MEND_HTTPS, build_extras
from pyspac.server.child import run_to_end
from pyspac.server.download_check import check_contents, why_failed, why_hub_failed
from pyspac.server.options import DRAFT_FLAGS, MODEL_FLAGS, ServeOptions

DEFAULT_HUB: Final = "https://huggingface.co/"  # llama.cpp's
_DETAIL_FLAGS: Final = ("-hff", "--hf-file")  # which file of the model's repository


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    model: Path
    draft: Path | None


class StoppedError(PyspacError):
    """A signal came while something was fetched."""


def find_models(
    options: ServeOptions, folder: Path, is_stopped: Callable[[], bool], *, reads: bool = True
) -> ModelFiles:
    """Fetch what is not a file yet; `folder` holds the programs; `reads`: the files, so they are compared.

    Raises ConfigError if this build cannot, ModelError if it fails, StoppedError if `is_stopped` says so.
    """
    model = [] if options.model else _taken(options, (*MODEL_FLAGS, *_DETAIL_FLAGS))
    draft = [] if options.draft else _as_model(_taken(options, DRAFT_FLAGS))
    for source in (model, draft):
        _check_https(source, options, folder)
    files = ModelFiles(
        model=options.model or _fetch(model, options, folder, is_stopped),
        draft=_fetch_draft(draft, options, folder, is_stopped) if draft else options.draft,
    )
    if reads and not options.model:
        check_contents(files.model, is_stopped)
    if reads and not options.draft and files.draft is not None:
        check_contents(files.draft, is_stopped)
    return files


def _fetch_draft(
    source: list[str], options: ServeOptions, folder: Path, is_stopped: Callable[[], bool]
) -> Path | None:
    """None, which is said: the repository has no whole model, but parts for drafting (MTP, EAGLE)."""
    try:
        return _fetch(source, options, folder, is_stopped)
    except ModelError:
        log.warning(f"no whole draft model in {source[1]}: its device memory is not counted")
        return None


def _taken(options: ServeOptions, flags: tuple[str, ...]) -> list[str]:
    """These flags with their values, of those that are passed on."""
    found = [pair for pair in pairwise(options.passed) if pair[0] in flags]
    return [text for pair in found for text in pair]


def _as_model(source: list[str]) -> list[str]:
    return ["-hf", source[1]] if source else []


def _address(source: list[str]) -> str:
    """Where it comes from; the hub as llama.cpp chooses it."""
    flag, name = source[0], source[1]
    if flag in ("-mu", "--model-url"):
        return name
    if flag in ("-dr", "--docker-repo"):
        return "https://registry-1.docker.io/"
    return os.environ.get("MODEL_ENDPOINT") or os.environ.get("HF_ENDPOINT") or DEFAULT_HUB


def _why(source: list[str], options: ServeOptions) -> str:
    """Why it could not be fetched, as far as what llama.cpp asks for first says."""
    address = _address(source)
    if "--offline" in options.passed:
        return "it was not fetched before, and --offline fetches nothing"
    if source[0] in ("-dr", "--docker-repo"):
        return f"check its name, and the connection to {address}"
    if source[0] in ("-mu", "--model-url"):
        return why_failed(address)
    return why_hub_failed(address.rstrip("/"), source[1].partition(":")[0], os.environ.get("HF_TOKEN"))


def _check_https(source: list[str], options: ServeOptions, folder: Path) -> None:
    if not source or "--offline" in options.passed or build_extras(folder).https:
        return
    if _address(source).startswith("https:"):
        raise ConfigError(
            source[0], source[1],
            "a model of this machine (-m FILE, or --offline with one that was fetched before), as "
            f"llama-server was built without HTTPS; to have it, {MEND_HTTPS}",
        )  # fmt: skip


def _fetch(source: list[str], options: ServeOptions, folder: Path, is_stopped: Callable[[], bool]) -> Path:
    name = " ".join(source)
    argv = [str(folder / "llama-download"), *source, "--no-mmproj"]
    if "--offline" in options.passed:
        argv.append("--offline")
    if not Path(argv[0]).is_file():
        raise PyspacError(f"{argv[0]} is missing: run `make build` (or `pip install .`) again")
    log.event(f"looking for {name}", event="fetch", source=name)

    def check() -> None:
        if is_stopped():
            raise StoppedError(f"{name} was not fetched: stopped")

    done = run_to_end("llama-download", argv, on_tick=check, shows_stderr=True)
    lines = done.stdout.splitlines()
    if done.exit_code != 0 or not lines:
        raise ModelError(
            f"{name} could not be fetched: {_why(source, options)} (llama.cpp's messages are above)"
        )
    return Path(lines[0])
