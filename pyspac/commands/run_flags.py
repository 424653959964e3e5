"""Flags of `pyspac run` as text in, the command's parameters out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from pyspac.commands.passing import ServerCommand
from pyspac.commands.run import run


def parse_run(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The parameters by their names, and what is for llama-server. Exits with 2 for bad ones."""
    app = typer.Typer()
    app.command(cls=ServerCommand)(run)
    context = typer.main.get_command(app).make_context("run", list(arguments))
    return context.params, context.args
