"""The command line: `pyspac COMMAND`. Each command lives in a file of `pyspac.commands`."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Final

import typer

import pyspac
from pyspac.commands.grouped_help import MORE, GroupedCommand, GroupedCommands
from pyspac.commands.model_word import looks_like_model
from pyspac.commands.passing import ServerCommand
from pyspac.commands.short_options import ModelCommand
from pyspac.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Command:
    """A command, which is imported when it is wanted: most of what the others need takes half a second."""

    cls: type[GroupedCommand] | None  # None: a group of commands
    file: str = ""  # of `pyspac.commands`; "": its name
    is_more: bool = False
    is_hidden: bool = False

    def add_to(self, app: typer.Typer, name: str) -> None:
        panel = MORE if self.is_more else None
        word = name.replace("-", "_")
        module = import_module(f"pyspac.commands.{self.file or word}")
        if self.cls is None:
            app.add_typer(module.app, rich_help_panel=panel)
        else:
            function = getattr(module, self.file if self.is_hidden else word)
            app.command(name, cls=self.cls, rich_help_panel=panel, hidden=self.is_hidden)(function)


# in the order of --help
COMMANDS: Final = {
    "chat": Command(ServerCommand),
    "run": Command(ServerCommand),
    "serve": Command(ServerCommand),
    "top": Command(GroupedCommand),
    "pull": Command(GroupedCommand, file="models"),
    "models": Command(GroupedCommand),
    "list": Command(GroupedCommand, file="models", is_hidden=True),
    "fit": Command(GroupedCommand),
    "inspect": Command(ModelCommand),
    "bench": Command(ServerCommand),
    "doctor": Command(ModelCommand),
    "demo": Command(GroupedCommand),
    "profile": Command(ModelCommand, is_more=True),
    "quality": Command(ModelCommand, is_more=True),
    "trace": Command(ServerCommand, is_more=True),
    "lab": Command(None, is_more=True),
    "train-head": Command(ModelCommand, is_more=True),
    "attach": Command(GroupedCommand, is_more=True),
}


def make_app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """The command line with these commands."""
    app = typer.Typer(
        name="pyspac",
        cls=GroupedCommands,
        help="Run Mixture-of-Experts models that are larger than a GPU's memory, or than all memory; without "
        "a GPU, any model. To begin: pyspac chat MODEL.gguf, or pyspac chat USER/MODEL (of Hugging Face)",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(_options)
    for name in names:
        COMMANDS[name].add_to(app, name)
    return app


def __getattr__(name: str) -> typer.Typer:
    """`app`, with all commands (PEP 562)."""
    if name != "app":
        raise AttributeError(f"module 'pyspac.cli' has no attribute {name!r}")
    return make_app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pyspac {pyspac.__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


def app_of(arguments: list[str]) -> typer.Typer:
    """With the command that they begin with; else with all, to show or to suggest."""
    wanted = arguments[:1]
    return make_app(wanted if wanted and wanted[0] in COMMANDS else COMMANDS)


def main(app: typer.Typer) -> None:
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
    try:
        raise SystemExit(app(standalone_mode=False))
    except typer.Abort:
        raise SystemExit(1) from None
    except OSError as error:  # of --version and --help: commands say it themselves
        from pyspac.commands.common import unwritten

        if (ended := unwritten(error)) is None:
            raise
        raise SystemExit(ended.exit_code) from None
    except Exception as error:
        if not hasattr(error, "show"):  # not Typer's of a command line that it cannot read
            raise
        said = io.StringIO()
        error.show(said)
        typer.echo(said.getvalue().replace("Error: ", "pyspac: error: ", 1), nl=False, err=True)
        raise SystemExit(error.exit_code) from None  # type: ignore[attr-defined]


def misplaced_model(arguments: list[str]) -> str | None:
    """What to say of a model in a command's place; None: there is none."""
    if arguments and looks_like_model(arguments[0]):
        return f"the first word is a command: try pyspac chat {arguments[0]} (or run, serve, inspect)"
    return None
