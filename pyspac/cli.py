"""The command line: `pyspac COMMAND`. Each command lives in a file of `pyspac.commands`."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

import pyspac
from pyspac.commands.attach import attach
from pyspac.commands.bench import bench
from pyspac.commands.chat import chat
from pyspac.commands.demo import demo
from pyspac.commands.doctor import doctor
from pyspac.commands.fit import fit
from pyspac.commands.grouped_help import GroupedCommand
from pyspac.commands.inspect import inspect
from pyspac.commands.lab import app as lab
from pyspac.commands.models import models
from pyspac.commands.passing import ServerCommand
from pyspac.commands.profile import profile
from pyspac.commands.run import run
from pyspac.commands.serve import serve
from pyspac.commands.short_options import ModelCommand
from pyspac.commands.top import top
from pyspac.commands.trace import trace
from pyspac.commands.train_head import train_head
from pyspac.errors import ConfigError

MODEL_COMMANDS: Final = ("run", "chat", "serve", "bench", "profile", "trace")  # that take it with -m

app = typer.Typer(
    name="pyspac",
    help="Mixture-of-Experts models, split expert by expert between a device and the host while they run; "
    "without a GPU the engine's own CPU kernels run any model. To begin: pyspac chat -m MODEL.gguf",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command(cls=ServerCommand)(run)
app.command(cls=ServerCommand)(chat)
app.command(cls=GroupedCommand)(demo)
app.command(cls=ServerCommand)(bench)
app.command(cls=ModelCommand)(profile)
app.command(cls=ModelCommand)(inspect)
app.command(cls=GroupedCommand)(fit)
app.command(cls=GroupedCommand)(models)
app.command(cls=ModelCommand)(doctor)
app.command(cls=ServerCommand)(serve)
app.command(cls=GroupedCommand)(attach)
app.command(cls=GroupedCommand)(top)
app.command(cls=ServerCommand)(trace)
app.command(cls=ModelCommand)(train_head)
app.add_typer(lab)


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
    """What to say of a model's file without its flag, or in a command's place; None: there is none such."""
    for i, text in enumerate(arguments[:2]):
        if i == 0 and text.endswith(".gguf"):
            return f"the first word is a command: try pyspac run -m {text} (or chat, serve, inspect)"
        if i == 1 and text.endswith(".gguf") and arguments[0] in MODEL_COMMANDS:
            return f"give the model with its flag: pyspac {arguments[0]} -m {text}"
    return None
