"""What was given instead of a GGUF model, and what to do about it: the end of an error message each.

In: a path, and what its file begins with or is called. Out: "this is ...; do ...".
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from pyspac.errors import ModelError

CONVERT: Final = (
    "look for a repository whose name ends in -GGUF (pyspac run -hf USER/MODEL-GGUF), or convert it with "
    "llama.cpp's convert_hf_to_gguf.py"
)
# what files begin with that are taken for models
_BEGINNINGS: Final = (
    (b"version https://git-lfs", "this is a pointer of git-lfs, not the model; run git lfs pull beside it"),
    (b"<!doctype html", "this is a web page, not the model; download the file itself, or use -hf USER/MODEL"),
    (b"<html", "this is a web page, not the model; download the file itself, or use -hf USER/MODEL"),
    (b"PK\x03\x04", f"this is a PyTorch or zip file, not a GGUF file; {CONVERT}"),
    (b"\x1f\x8b", "this is compressed; unpack it first (gunzip, tar xf)"),
    (b"lmgg", "this is in the old GGML format; download the model again as a GGUF file"),
    (b"fmgg", "this is in the old GGML format; download the model again as a GGUF file"),
    (b"tjgg", "this is in the old GGML format; download the model again as a GGUF file"),
)
_REPOSITORY: Final = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
# general.type of files that are parts of a model, and what each is
_PARTS: Final = {
    "adapter": "a LoRA adapter, not a model; give the model that it was trained on",
    "mmproj": "the image or audio part of a model; give the file of the language model beside it",
    "imatrix": "an importance matrix, not a model; give the model's own file",
}


def check_is_file(path: Path) -> None:
    """Raise ModelError unless there is such a file."""
    if path.is_dir():
        raise ModelError(f"{path}: {_describe_folder(path)}")
    if not path.exists():
        raise ModelError(f"{path}: {_describe_missing(str(path))}")
    if not path.is_file():
        raise ModelError(f"{path}: this is not a file; give the path of a GGUF file")


def _describe_missing(text: str) -> str:
    if re.match(r"https?:/", text):
        return "this is an address, not a file; give the model's name on Hugging Face with -hf USER/MODEL"
    if _REPOSITORY.fullmatch(text) and not text.endswith(".gguf"):
        return f"there is no such file; check the path, or give a name on Hugging Face with -hf {text}"
    return "there is no such file; check the path"


def _describe_folder(path: Path) -> str:
    models = sorted(path.glob("*.gguf"))
    if models:
        more = f" (there are {len(models)})" if len(models) > 1 else ""
        return f"this is a folder; give the GGUF file in it, such as {models[0]}{more}"
    if (path / "config.json").is_file() or any(path.glob("*.safetensors")):
        return f"this is a folder of a Hugging Face model, without a GGUF file; {CONVERT}"
    return "this is a folder, without a GGUF file in it; give the path of a GGUF file"


def describe_content(path: Path, head: bytes) -> str:
    """Of a file that does not begin as a GGUF file does; `head`: its first bytes, 64 or all there are."""
    if not head:
        return "this file is empty; download it again, and look whether there is space on the disk"
    for beginning, text in _BEGINNINGS:
        if head.lower().startswith(beginning.lower()):
            return text
    is_safetensors = path.suffix == ".safetensors" or head[8:9] == b"{"  # after the header's length
    if is_safetensors:
        return f"this is a safetensors file, not a GGUF file; {CONVERT}"
    return (
        f"this is not a GGUF file (it begins with {head[:4]!r}, not b'GGUF'); download it again, or convert "
        "the model with llama.cpp's convert_hf_to_gguf.py"
    )


def check_is_model(path: Path, metadata: dict[str, Any]) -> None:
    """Raise ModelError for a GGUF file that holds something else."""
    kind = str(metadata.get("general.type", "model"))
    if metadata.get("general.architecture") == "clip":
        kind = "mmproj"
    if "pyspac.mtp.n_masks" in metadata:
        raise ModelError(
            f"{path}: this is an adapter with mask tokens, not a model; give it with --mtp, and with -m the "
            "model that it was trained on"
        )
    if kind in _PARTS:
        raise ModelError(f"{path}: this is {_PARTS[kind]}")
