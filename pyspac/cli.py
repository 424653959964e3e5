"""The command line: `pyspac COMMAND`. Each command lives in a file of `pyspac.commands`."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import pyspac
from pyspac.commands.attach import attach
from pyspac.commands.bench import bench
from pyspac.commands.chat import chat
from pyspac.commands.demo import demo
from pyspac.commands.doctor import doctor
from pyspac.commands.fit import fit
from pyspac.commands.grouped_help import MORE, GroupedCommand, GroupedCommands
from pyspac.commands.inspect import inspect
from pyspac.commands.lab import app as lab
from pyspac.commands.model_word import looks_like_model
from pyspac.commands.models import models, pull
from pyspac.commands.passing import ServerCommand
from pyspac.commands.profile import profile
from pyspac.commands.quality import quality
from pyspac.commands.run import run
from pyspac.commands.serve import serve
from pyspac.commands.short_options import ModelCommand
from pyspac.commands.top import top
from pyspac.commands.trace import trace
from pyspac.commands.train_head import train_head
from pyspac.errors import ConfigError

app = typer.Typer(
    name="pyspac",
    cls=GroupedCommands,
    help="Mixture-of-Experts models that are larger than a GPU's memory, or than all memory; without a GPU "
    "any model. To begin: pyspac chat MODEL.gguf, or pyspac chat USER/MODEL (of Hugging Face)",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command(cls=ServerCommand)(chat)
app.command(cls=ServerCommand)(run)
app.command(cls=ServerCommand)(serve)
app.command(cls=GroupedCommand)(top)
app.command(cls=GroupedCommand)(pull)
app.command(cls=GroupedCommand)(models)
app.command("list", cls=GroupedCommand, hidden=True)(models)
app.command(cls=GroupedCommand)(fit)
app.command(cls=ModelCommand)(inspect)
app.command(cls=ServerCommand)(bench)
app.command(cls=ModelCommand)(doctor)
app.command(cls=GroupedCommand)(demo)
app.command(cls=ModelCommand, rich_help_panel=MORE)(profile)
app.command(cls=ModelCommand, rich_help_panel=MORE)(quality)
app.command(cls=ServerCommand, rich_help_panel=MORE)(trace)
app.add_typer(lab, rich_help_panel=MORE)
app.command(cls=ModelCommand, rich_help_panel=MORE)(train_head)
app.command(cls=GroupedCommand, rich_help_panel=MORE)(attach)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pyspac {pyspac.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; `pyspac.__main__` is the entry point."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed, as by >&-
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what is not UTF-8 becomes "?" instead of an error
    if text := misplaced_model(sys.argv[1:]):
        typer.echo(f"pyspac: error: {text}", err=True)
        raise SystemExit(ConfigError.exit_code)
    app()


def misplaced_model(arguments: list[str]) -> str | None:
    """What to say of a model in a command's place; None: there is none."""
    if arguments and looks_like_model(arguments[0]):
        return f"the first word is a command: try pyspac chat {arguments[0]} (or run, serve, inspect)"
    return None
