"""The model as a word (`pyspac run MODEL.gguf`, `pyspac chat USER/MODEL`) in, `-m` or `-hf` out."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Any, Final

from pyspac.errors import UsageError

WORD: Final = "model_word"  # the parameter's name, in every command that takes -m
HUB_NAME: Final = re.compile(r"[\w-][\w.-]*/[\w.-]+(:[\w.-]+)?", re.ASCII)
_SUFFIX: Final = ".gguf"


def is_hub_name(word: str) -> bool:
    """Whether it means a model of a hub: its shape, and no file of that name is there."""
    return bool(HUB_NAME.fullmatch(word)) and not word.endswith(_SUFFIX) and not _is_there(word)


def _is_there(word: str) -> bool:
    """A file or folder, also one in a folder that is closed to this user."""
    try:
        return Path(word).exists()
    except OSError as error:
        return error.errno == errno.EACCES


def looks_like_model(word: str) -> bool:
    """Whether it can be meant as a model and as nothing else."""
    return word.endswith(_SUFFIX) or is_hub_name(word)


def place_model(params: dict[str, Any]) -> None:
    """Make the word in `params` what -m or -hf gives. Raises UsageError for two models, or none."""
    word = params.get(WORD)
    if word is None:
        return
    for name, flag in (("model", "-m"), ("hf_repo", "-hf")):
        if (given := params.get(name)) is not None:
            raise UsageError(f"two models are given, {word} and {flag} {given}: give one")
    if is_hub_name(word) and "hf_repo" in params:
        params["hf_repo"] = word
    elif word.endswith(_SUFFIX) or "/" in word or _is_there(word):
        params["model"] = Path(word)
    else:
        raise UsageError(
            f"{word!r} is no model: there is no such file, and it is no name of Hugging Face; give FILE.gguf "
            "or USER/MODEL[:QUANT]"
        )
