"""`pyspac models`: the models in llama.cpp's cache, and fetching one."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from pyspac.commands import options as o
from pyspac.commands.common import check_json_target, output_console, reports_errors
from pyspac.commands.json_file import STDOUT, write_json
from pyspac.commands.model_names import CachedModel, cached_models, find_files
from pyspac.commands.model_word import HUB_NAME
from pyspac.errors import ModelError, UsageError
from pyspac.model.checks import check_model_file
from pyspac.model.geometry import read_geometry
from pyspac.units import GIB, size_text

HubName = Annotated[str, typer.Argument(metavar="USER/MODEL[:QUANT]", help="A name of Hugging Face.")]


@reports_errors
def pull(name: HubName) -> None:
    """Fetch a model, to run it later.

    run, chat and serve do so by themselves.
    """
    if not HUB_NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name of Hugging Face: give USER/MODEL or USER/MODEL:QUANT")
    path, _ = find_files(None, name)
    output_console().print(str(path), markup=False, soft_wrap=True)


@reports_errors
def models(json_file: o.JsonFile = None) -> None:
    """List the models that were fetched.

    They are in llama.cpp's cache ($LLAMA_CACHE, or the Hugging Face hub's own), by their names there.
    """
    check_json_target(json_file)
    rows = [_row(model) for model in cached_models()]
    if json_file is not None:
        write_json(json_file, {"models": rows})
    if json_file != STDOUT:
        _show(rows)


def _row(model: CachedModel) -> dict[str, Any]:
    """A file that cannot be used is listed too, with the reason."""
    row: dict[str, Any] = {"name": model.name, "path": str(model.path) if model.path else None}
    try:
        if model.path is None:
            raise ModelError(str(model.error))
        geometry = read_geometry(check_model_file(model.path))
    except ModelError as error:
        return {**row, "gib": None, "n_expert": None, "n_expert_used": None, "error": str(error)}
    return {
        **row,
        "gib": round(geometry.model_bytes / GIB, 3),
        "n_expert": geometry.n_expert,
        "n_expert_used": geometry.n_expert_used,
        "error": None,
    }


def _show(rows: list[dict[str, Any]]) -> None:
    console = output_console()
    if not rows:
        console.print("No model was fetched yet: pyspac pull USER/MODEL fetches one, as run and chat do.")
        return
    table = Table("name", "size", "experts", box=None, padding=(0, 2, 0, 0))
    for row in rows:
        if row["error"]:
            table.add_row(row["name"], "-", "cannot be used: see pyspac models --json -")
        else:
            experts = f"{row['n_expert']}, {row['n_expert_used']} used" if row["n_expert"] else "none (dense)"
            table.add_row(row["name"], size_text(row["gib"] * GIB), experts)
    console.print(table)
