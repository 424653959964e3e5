"""Models by name: -m FILE or -hf USER/MODEL in, files out; and the models that llama.cpp's cache has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspac.commands.model_word import HUB_NAME, WORD, place_model
from pyspac.errors import ConfigError, ModelError, PyspacError, UsageError
from pyspac.server.child import run_to_end
from pyspac.server.options import ServeOptions


@dataclass(frozen=True, slots=True)
class CachedModel:
    """`name` is what -hf takes; without a `path` its file is gone, and `error` says so."""

    name: str
    path: Path | None
    error: str | None = None


def hub_arguments(model: str | None, draft: str | None) -> tuple[str, ...]:
    """-hf and -hfd as llama.cpp's programs take them. Raises ConfigError for what is no name."""
    for flag, name in (("-hf", model), ("-hfd", draft)):
        if name is not None and not HUB_NAME.fullmatch(name):
            raise ConfigError(flag, name, "USER/MODEL or USER/MODEL:QUANT, as Hugging Face shows it")
    return (*(("-hf", model) if model else ()), *(("-hfd", draft) if draft else ()))


def find_files(
    model: Path | None,
    hf: str | None,
    draft: Path | None = None,
    hfd: str | None = None,
    passed: Sequence[str] = (),
) -> tuple[Path, Path | None]:
    """The model's file and the draft model's; what is not on this machine is fetched into llama.cpp's cache.

    `passed`: for llama-server, such as --offline, which fetches nothing.
    Raises ConfigError if there is no model, or two; ModelError if one cannot be fetched.
    """
    if model is not None and hf is None and hfd is None:
        return model, draft
    options = ServeOptions(model=model, draft=draft, passed=(*hub_arguments(hf, hfd), *passed))
    from pyspac._native import bin_dir  # loaded here: files need no programs
    from pyspac.server.download import find_models

    files = find_models(options, bin_dir(), is_stopped=lambda: False)
    return files.model, files.draft


def find_file(word: str) -> Path:
    """The file that a word means, fetched if it is not here. Raises UsageError, ModelError."""
    params: dict[str, Any] = {WORD: word, "model": None, "hf_repo": None}
    place_model(params)
    return find_files(params["model"], params["hf_repo"])[0]


def cached_models() -> Iterator[CachedModel]:
    """What was fetched before, as llama.cpp lists it. Raises PyspacError if its programs are missing."""
    for name in sorted(_cached_names()):
        yield _find_cached(name)


def _find_cached(name: str) -> CachedModel:
    from pyspac._native import bin_dir
    from pyspac.server.download import find_models

    options = ServeOptions(passed=("-hf", name, "--offline"))
    try:
        return CachedModel(name, find_models(options, bin_dir(), lambda: False, reads=False).model)
    except ModelError:
        return CachedModel(name, None, f"its file in the cache is gone: pyspac run -hf {name} fetches it")


def _cached_names() -> list[str]:
    """USER/MODEL:QUANT, from the lines " 1. NAME" of llama-server --cache-list."""
    from pyspac._native import bin_dir

    argv = [str(bin_dir() / "llama-server"), "--cache-list"]
    try:
        done = run_to_end("llama-server", argv)
    except OSError as error:
        raise PyspacError(_not_listed(argv[0], error)) from error
    _, failed, why = done.stderr.partition("filesystem error: ")  # as C++ says it
    if failed:
        raise UsageError(
            f"the models that were fetched cannot be listed ({why.splitlines()[0]}): check that folder and "
            "its permissions, or name another one with LLAMA_CACHE"
        )
    if done.exit_code != 0:
        raise PyspacError(_not_listed(argv[0], f"exit code {done.exit_code}"))
    parts = [line.strip().partition(". ") for line in done.stdout.splitlines()]
    return [name for number, _, name in parts if number.isdecimal() and name]


def _not_listed(program: str, why: object) -> str:
    return f"{program} did not list its cache ({why}): run `make build` (or `pip install .`) again"
