"""What is passed on to llama-server, by flags and by its variables: checked before anything is started.

It parses its flags itself; what it would go on without, or fail with later, is looked for here.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Final

from pyspac.errors import ConfigError, UsageError
from pyspac.model.geometry import MoeGeometry
from pyspac.model.gguf_header import read_header
from pyspac.server.child import run_to_end
from pyspac.server.options import ServeOptions

# what llama-server would take from the environment, past every check, and the flag to give instead
_VARIABLES: Final = {
    "LLAMA_ARG_TENSOR_SPLIT": "-ts", "LLAMA_ARG_SPLIT_MODE": "-sm", "LLAMA_ARG_LAZY_MODE": "--ram",
    "LLAMA_ARG_HF_REPO": "-hf", "LLAMA_ARG_MODEL_URL": "-mu", "LLAMA_ARG_DOCKER_REPO": "-dr",
    "LLAMA_ARG_SPEC_TYPE": "--spec-type", "LLAMA_ARG_SPEC_DRAFT_MODEL": "-md",
    "LLAMA_ARG_SPEC_DRAFT_HF_REPO": "-hfd", "LLAMA_ARG_SPEC_DRAFT_N_MAX": "--draft-max",
}  # fmt: skip
_PARSE_TIMEOUT_S: Final = 20.0
_CONTROL_VECTOR: Final = "--control-vector"  # FILE,FILE
_SCALED_VECTOR: Final = "--control-vector-scaled"  # FILE:SCALE,FILE:SCALE
_SCALED: Final = (_SCALED_VECTOR, "--lora-scaled")
_NO_SOCKET: Final = "/dev/null/none.sock"  # where no server can listen: it ends at once
# common/sampling.cpp; its warning of another name is not always written before a program ends
_SAMPLERS: Final = (
    *("adaptive_p", "dry", "infill", "min_p", "nucleus", "penalties", "temp", "temperature", "top_k"),
    *("top_n_sigma", "top_p", "typ", "typ_p", "xtc"),
)
_SAMPLER_LETTERS: Final = "adeikmpstxy"
_SPELLINGS: Final = {name.replace("_", other) for name in _SAMPLERS for other in ("_", "-", "")}


def check_environment(environ: Mapping[str, str]) -> None:
    """Raise UsageError for what llama-server would take from there, past every check."""
    for name, flag in _VARIABLES.items():
        if environ.get(name):
            raise UsageError(
                f"{name}={environ[name]} in the environment cannot be checked: unset it, and give {flag}, if "
                "it is needed"
            )


def check_passed(
    folder: Path, passed: Sequence[str], env: Mapping[str, str | None] = MappingProxyType({})
) -> None:
    """Raise UsageError if llama-server refuses what is passed on to it; it only parses it here.

    `env`: as of run_to_end, for its variables.
    """
    if not passed and not any(name.startswith("LLAMA_ARG_") and name not in env for name in os.environ):
        return
    if why := _why_incomplete(folder, passed, env) or _refusal(folder, [*passed, "--version"], env):
        raise UsageError(f"llama-server refuses what is passed on to it: {why}{_hint(why)}")


def check_values(options: ServeOptions) -> None:
    """Raise UsageError for values that llama-server would drop without a word, or take as they are."""
    for flag, value in pairwise(options.passed):
        if flag == "--samplers":
            _check_samplers(value)
        if flag in ("--sampler-seq", "--sampling-seq") and (wrong := set(value) - set(_SAMPLER_LETTERS)):
            raise UsageError(f"{flag} {value}: no sampler is {min(wrong)!r}; give some of {_SAMPLER_LETTERS}")
        if flag in _SCALED:
            _check_scales(flag, value)
    log = options.given_value("LLAMA_ARG_LOG_FILE", "--log-file")
    if log and not _can_write(Path(log)):
        raise ConfigError("--log-file", log, "a file in a folder that can be written to")
    _check_control_vectors(options)


def _check_samplers(value: str) -> None:
    for name in filter(None, value.split(";")):
        if name.lower() not in _SPELLINGS:
            raise UsageError(f"--samplers: there is no {name!r}; give some of {', '.join(_SAMPLERS)}")


def _check_scales(flag: str, value: str) -> None:
    for text in value.split(","):
        with suppress(ValueError):  # no number at all: llama-server refuses it
            if not math.isfinite(float(text.rpartition(":")[2])):
                raise UsageError(f"{flag} {text}: the scale is no number; give one such as 0.5")


def _can_write(path: Path) -> bool:
    return os.access(path if path.exists() else path.absolute().parent, os.W_OK) and not path.is_dir()


def check_overrides(passed: Sequence[str], geometry: MoeGeometry) -> None:
    """Raise ConfigError for more experts per token than there are, at which llama-server aborts."""
    key = f"{geometry.architecture}.expert_used_count=int:"
    for flag, value in pairwise(passed):
        for text in value.split(",") if flag == "--override-kv" and geometry.is_moe else ():
            n = text.removeprefix(key)
            if n != text and not (n.isdecimal() and 1 <= int(n) <= geometry.n_expert):
                raise ConfigError(flag, text, f"1 to {geometry.n_expert}, the experts of a layer, as {key}N")


def _check_control_vectors(options: ServeOptions) -> None:
    """llama-server goes on without those that it cannot read."""
    for flag, value in pairwise(options.passed):  # it may come several times
        if flag not in (_CONTROL_VECTOR, _SCALED_VECTOR):
            continue
        for text in value.split(","):
            name = text.rpartition(":")[0] if flag == _SCALED_VECTOR else text
            if not any(tensor.name.startswith("direction.") for tensor in read_header(name).tensors):
                raise UsageError(f"{name}: this is no control vector, as it has no directions; give one")


def _why_incomplete(folder: Path, passed: Sequence[str], env: Mapping[str, str | None]) -> str | None:
    """Why the last flag needs a value; None: it needs none, or is one itself, such as -1."""
    if not passed or not passed[-1].startswith("-"):
        return None
    why = _refusal(folder, ["--host", _NO_SOCKET, passed[-1]], env)
    is_value = why is not None and _refusal(folder, ["--host", _NO_SOCKET, *passed[-2:]], env) is None
    return None if is_value else why


def _refusal(folder: Path, arguments: Sequence[str], env: Mapping[str, str | None]) -> str | None:
    """Why llama-server takes none of them; None: it does, or its start will say why."""
    argv = [str(folder / "llama-server"), *arguments]
    try:
        done = run_to_end("llama-server", argv, env=env, timeout_s=_PARSE_TIMEOUT_S)
    except OSError:  # TimeoutError is one
        return None
    lines = [line.strip() for line in done.stderr.splitlines()]
    errors = [line for line in lines if line.startswith("error") and re.search("argument|variable", line)]
    return errors[0].removeprefix("error: ") if done.exit_code == 1 and errors else None


def _hint(why: str) -> str:
    """What to do about it."""
    if variable := re.search(r'environment variable "(\w+)"', why):
        return f"; unset {variable[1]}, or correct it"
    flag = why.rpartition(" ")[2]
    if flag.startswith("--") and "=" in flag:
        return "; a flag of llama-server's takes its value after a space"
    if re.fullmatch(r"-[a-z][a-z-]{3,}", flag):  # shorter ones are often meant
        return f"; long flags begin with two dashes: -{flag}"
    return "; --help-all lists pyspac's own flags, build/*/bin/llama-server --help the others"
