"""A model's defaults, as `pyspac bench --profile` found them: how to run it, unless the user says how.

One small JSON file per model in the cache folder, named by the model's content.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import typer

from pyspac.commands.common import error_console
from pyspac.commands.json_file import can_write, json_text, write_whole
from pyspac.errors import PyspacError
from pyspac.generate.loading import Loading
from pyspac.generate.options import CacheSize, RunOptions
from pyspac.generate.spec_types import parse_spec_type
from pyspac.server.warm_start import cache_folder, model_hash

FIELDS: Final = ("stock", "repack", "n_cpu_moe", "device", "spec_type", "ram")  # of RunOptions
FILES: Final = {"draft": "draft model", "mtp": "adapter"}  # of RunOptions as well, and what they are

MAX_LAYERS: Final = 4096

_TEXT_OR_NONE: Final = (str, type(None))
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "stock": (bool,),
    "repack": (bool,),
    "n_cpu_moe": (int, type(None)),
    "device": (str,),
    "spec_type": _TEXT_OR_NONE,
    "ram": _TEXT_OR_NONE,
    "draft": _TEXT_OR_NONE,
    "mtp": _TEXT_OR_NONE,
    "cache": (str,),
    "flags": (str,),
    "model": _TEXT_OR_NONE,  # the file, for people: its content is the key
}

# flags of how a model is run: whoever gives one of them decides, and nothing that was saved is used
HOW: Final = frozenset({
    "stock", "repack", "device", "rpc", "tensor_split", "cache", "ram", "gpu_layers", "host_kernels",
    "copy_gb_s", "link_gb_s", "model_draft", "hf_repo_draft", "mtp", "spec_type", "draft_max", "draft_p_min",
    "speculation", "explain", "estimator", "threshold", "without", "predict",
})  # fmt: skip


def folder() -> Path:
    return cache_folder() / "defaults"


def save(options: RunOptions, flags: str) -> Path:
    """Make `options` the defaults of its model; `flags`: the same as a user would type it.

    The file names folders of the user's, so it is for their eyes alone.
    """
    fields = {name: getattr(options, name) for name in FIELDS} | {"cache": options.cache.text}
    for name in FILES:
        file = getattr(options, name)
        fields[name] = str(file.absolute()) if file else None
    path = _path(options.model)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json_text(fields | {"flags": flags, "model": str(options.model.absolute())})
        write_whole(path, text.encode(), mode=0o600)
    except OSError as error:
        raise _not_saved(path, error.strerror) from error
    return path


def _path(model: Path) -> Path:
    return folder() / f"{model_hash(model)}.json"


def forget(model: Path) -> str:
    """Run the model as if nothing had been saved for it; returns what to say. Raises PyspacError."""
    path = _path(model)
    saved = _read(path)
    try:
        path.unlink()
    except FileNotFoundError:
        return f"no defaults are saved for this model ({path})"
    except OSError as error:
        raise PyspacError(f"{path}: the defaults cannot be removed ({error.strerror})") from error
    return f"forgot this model's defaults: {saved['flags'] if saved else 'unreadable ones'} ({path})"


def all_saved() -> list[tuple[str, str]]:
    """The models that have defaults, and these as flags."""
    try:
        paths = sorted(folder().glob("*.json"))
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return []
    found = [saved for path in paths if (saved := _read(path))]
    return [(saved["model"] or "a model that was not noted", saved["flags"]) for saved in found]


def check_can_save() -> None:
    """Raise PyspacError if nothing can be saved, before anything is measured for it."""
    path = folder().absolute()
    place = next(one for one in (path, *path.parents) if one.exists())  # the rest can be made there
    if not place.is_dir() or not can_write(place / "model.json"):
        raise _not_saved(place, "nothing can be written there")


def _not_saved(path: Path, why: str | None) -> PyspacError:
    return PyspacError(
        f"{path}: the defaults cannot be saved ({why}); free some space, or let PYSPAC_CACHE_DIR name a "
        "folder that can be written to"
    )


def with_saved(options: RunOptions, command: typer.Context) -> RunOptions:
    """The defaults that were saved for the model, which is said; unless the command line says how to run."""
    if any(_is_given(command, name) for name in HOW & command.params.keys()):
        return options
    saved = find(options.model)
    if saved is None:
        return options
    files = {name: Path(saved[name]) if saved[name] else None for name in FILES}
    for name, file in files.items():
        if file is not None and not file.is_file():
            _say(f"the defaults saved for this model want the {FILES[name]} {file}, which is gone: not used")
            return options
    try:
        result = replace(options, **{**saved["fields"], **files}, profile=saved["flags"])
        Loading.of(result)
    except PyspacError as error:  # a device or a file is not what it was; or of somebody's editor
        _say(
            f"the defaults saved for this model cannot be used ({error}): not used; `pyspac bench --profile` "
            "saves new ones"
        )
        return options
    _say(
        f"using the defaults that `pyspac bench --profile` saved for this model: {saved['flags']} "
        "(your own flags, such as --stock or --device, replace them; `pyspac bench --forget` with the model "
        "forgets them)"
    )
    return result


def _is_given(command: typer.Context, name: str) -> bool:
    source = command.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def find(model: Path) -> dict[str, Any] | None:
    """As `_read`, of the model's file."""
    try:
        return _read(_path(model)) if folder().is_dir() else None
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return None


def _read(path: Path) -> dict[str, Any] | None:
    """`flags`, `model`, `fields` of RunOptions, and FILES; None: nothing that this version can read."""
    try:
        saved = dict.fromkeys(_TYPES) | json.loads(path.read_text(encoding="utf-8"))
        if any(type(saved[name]) not in types for name, types in _TYPES.items()):
            return None
        fields = {name: saved[name] for name in FIELDS}
        if not 0 <= (saved["n_cpu_moe"] or 0) <= MAX_LAYERS:
            return None
        fields["cache"] = CacheSize(text=saved["cache"])
        parse_spec_type(saved["spec_type"])
        return {name: saved[name] for name in (*FILES, "flags", "model")} | {"fields": fields}
    except (OSError, ValueError, KeyError, TypeError, PyspacError):
        return None  # PyspacError: a name or a size that is none


def _say(text: str) -> None:
    error_console().print(text, style="dim", markup=False, soft_wrap=True)
