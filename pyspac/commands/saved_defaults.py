"""A model's defaults, as `pyspac bench --profile` found them: flags of `pyspac run`, unless others are given.

One small JSON file per model in the cache folder, named by the model's content.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import typer

from pyspac.commands.common import error_console
from pyspac.commands.grouped_help import HELP_ALL
from pyspac.commands.json_file import can_write, json_text, write_whole
from pyspac.commands.model_names import find_files
from pyspac.commands.server_options import own_options
from pyspac.errors import PyspacError, UsageError
from pyspac.model.checks import check_model_file
from pyspac.server.model_identity import cache_folder, model_hash
from pyspac.server.options import ServeOptions

MODE: Final = 0o600  # it names folders of the user's
_FILES: Final = {"model_draft": "draft model", "mtp": "adapter"}  # parameters that name a file

# parameters of how a model is run: with one of them given, no saved defaults are used
HOW: Final = (
    "stock", "device", "rpc", "cache", "ram", "host_kernels", "model_draft", "hf_repo_draft", "mtp",
    "spec_type", "draft_max", "speculation", "explain", "policy", "predict",
)  # fmt: skip


def folder() -> Path:
    return cache_folder() / "defaults"


def save(model: Path, flags: str) -> Path:
    """Make `flags`, as a user would type them, the defaults of a model. Raises PyspacError."""
    path = _path(model)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json_text({"flags": flags, "model": str(model.absolute())})
        write_whole(path, text.encode(), mode=MODE)
    except OSError as error:
        raise _not_saved(path, error.strerror) from error
    return path


def _path(model: Path) -> Path:
    return folder() / f"{model_hash(model)}.json"


def forget(model: Path) -> str:
    """Run the model as if nothing had been saved for it; returns what to say. Raises PyspacError.

    One that is gone is known by the name under which something was saved.
    """
    path = _path_of_gone(model) or _path(check_model_file(model).path)
    saved = _read(path)
    try:
        path.unlink()
    except FileNotFoundError:
        return f"no defaults are saved for this model ({path})"
    except OSError as error:
        raise PyspacError(f"{path}: the defaults cannot be removed ({error.strerror})") from error
    return f"forgot this model's defaults: {saved['flags'] if saved else 'unreadable ones'} ({path})"


def _path_of_gone(model: Path) -> Path | None:
    name = str(model.absolute())
    saved = [] if model.exists() else all_saved()
    return next((path for path, one in saved if one is not None and one["model"] == name), None)


def all_saved() -> list[tuple[Path, dict[str, str] | None]]:
    """The files of all models that have defaults, with `flags` and `model`; None: it cannot be read."""
    try:
        paths = sorted(folder().glob("*.json"))
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return []
    return [(path, _read(path)) for path in paths]


def find(model: Path) -> str | None:
    """The flags that are saved for a model; None: none, or none that can be read, which is said."""
    try:
        path = _path(model)
        saved, exists = _read(path), path.exists()
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return None
    if exists and saved is None:
        say_not_used(PyspacError(f"{path} cannot be read"))
    return saved["flags"] if saved else None


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


@dataclass(frozen=True, slots=True)
class Saved:
    """The defaults of one model: their flags, and how it is run by them."""

    flags: str
    options: ServeOptions


def find_saved(command: typer.Context) -> Saved | None:
    """What is saved for the model of `command`; None: nothing, or the command line says how to run it.

    Why something cannot be used is said. Raises PyspacError.
    """
    given = dict(command.params)
    is_told = any(_is_given(command, name) for name in HOW if name in given)
    if is_told or (given["model"] is None and given["hf_repo"] is None):
        return None
    given["model"], _ = find_files(given["model"], given["hf_repo"], passed=command.args)
    given["hf_repo"] = None
    flags = find(given["model"]) if given["model"].is_file() else None
    return None if flags is None else _parse(command, given, flags)


def _parse(command: typer.Context, given: dict[str, Any], flags: str) -> Saved | None:
    """As the command takes them; None, which is said: it does not, or a file is gone."""
    try:
        parsed = _parsed(command, given["model"], shlex.split(flags))
        values: dict[str, Any] = {name: parsed[name] for name in HOW if name in given}
        for name, what in _FILES.items():
            file = values.get(name)
            if file is not None and not file.is_file():
                _say(f"the defaults saved for this model want the {what} {file}, which is gone: not used")
                return None
        return Saved(flags, own_options(given | values, command.args))
    except Exception as error:  # of another version, or edited by hand; typer's errors have no base
        say_not_used(error)
        return None


def _parsed(command: typer.Context, model: Path, flags: list[str]) -> dict[str, Any]:
    """What a command line with these flags says. Raises UsageError for those that are never saved."""
    help_flags = {*command.command.get_help_option_names(command), HELP_ALL}
    if shown := next((flag for flag in flags if flag in help_flags), None):
        raise UsageError(f"{shown} is no flag that can be saved")
    context: Any = command.command.make_context(command.info_name, ["-m", str(model), *flags])
    other = (one for one in command.command.params if one.name not in (*HOW, "model"))
    others = [one.opts[0] for one in other if _is_given(context, str(one.name))]
    if others or context.args:
        raise UsageError(
            f"{' '.join([*others, *context.args])}: only flags of how a model is run can be saved"
        )
    return dict(context.params)


def say_used(saved: Saved) -> None:
    _say(
        f"using the defaults that `pyspac bench --profile` saved for this model: {saved.flags} (your own "
        "flags, such as --stock or --device, replace them; `pyspac bench --forget` with the model forgets "
        "them)"
    )


def say_not_used(error: Exception) -> None:
    """A device or a file is not what it was."""
    _say(
        f"the defaults saved for this model cannot be used ({getattr(error, 'message', error)}): not used; "
        "`pyspac bench --profile` saves new ones"
    )


def _is_given(command: typer.Context, name: str) -> bool:
    source = command.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _read(path: Path) -> dict[str, str] | None:
    """`flags` and `model`; None: nothing that this version can read."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        found = {name: saved[name] for name in ("flags", "model")}
        return found if all(isinstance(value, str) for value in found.values()) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _say(text: str) -> None:
    error_console().print(text, style="dim", markup=False, soft_wrap=True)
