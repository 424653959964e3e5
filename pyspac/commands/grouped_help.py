"""A command with many options: `--help` in groups, the everyday ones first, and numbers that are none."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from pyspac.commands.model_word import WORD, place_model
from pyspac.errors import UsageError

EVERYDAY: Final = "Options"  # of those that name no group
MORE: Final = "More, for measurements and special machines"  # a group that only --help-all shows
HELP_ALL: Final = "--help-all"
_ALL: Final = "pyspac.help_all"
# how Typer begins what it says of text that is no number, and what to give instead
_NUMBERS: Final = {
    "Input should be a valid integer": "a whole number, such as 8",
    "Input should be a valid number": "a number, such as 0.8",
}
_TOO_MANY: Final = "Got unexpected extra argument(s) "  # of words that nothing takes


class GroupedCommands(TyperGroup):
    """Commands in groups, as a command's options are."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As Typer."""
        _show_all(ctx, args[:1])
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """As Typer's, which has one group; click calls it."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            if not command.hidden:
                text = str(command.help or "").partition("\n")[0]
                groups.setdefault(getattr(command, "rich_help_panel", None) or "Commands", []).append(
                    (name, text)
                )
        _write_groups(ctx, formatter, groups)


class GroupedCommand(TyperCommand):
    """A command whose options are shown by `rich_help_panel`, groups in the order of their first one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As Typer; the model may be a word. What is no number is named with the text that was given."""
        given = list(args)
        _show_all(ctx, args)
        try:
            left = super().parse_args(ctx, args)
            place_model(ctx.params)
        except UsageError as error:
            _refuse(str(error), error)
        except Exception as error:
            said = getattr(error, "message", "")
            if said.startswith(_TOO_MANY) and any(one.name == WORD for one in self.params):
                words = said[len(_TOO_MANY) :].removeprefix("(").removesuffix(")")
                takes_prompt = any("-p" in one.opts for one in self.params)
                advice = "; a prompt goes behind -p" if takes_prompt else ""
                _refuse(f"one model is enough; too many words: {words}{advice}", error)
            wanted = next((n for text, n in _NUMBERS.items() if text in said), None)
            parameter = getattr(error, "param", None)
            if wanted is None or parameter is None:
                raise
            option, value = _find_value(given, parameter.opts)
            if not value and (name := getattr(parameter, "envvar", None)):
                option, value = name, os.environ.get(name, "")
            _refuse(f"{option} cannot be {value!r}: give {wanted}", error)
        return left

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """As Typer's, which has one group; click calls it."""
        groups: dict[str, list[tuple[str, str]]] = {EVERYDAY: []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                name = record[0] if parameter.param_type_name == "option" else str(parameter.metavar)
                group = getattr(parameter, "rich_help_panel", None) or EVERYDAY
                groups.setdefault(group, []).append((name, record[1]))
        _write_groups(ctx, formatter, groups)


def _show_all(ctx: Any, args: Sequence[str]) -> None:
    """Help with all groups, if it is asked for, and the end."""
    if HELP_ALL in args:
        ctx.meta[_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


def _write_groups(ctx: Any, formatter: Any, groups: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    for title, records in groups.items():
        if records and (title != MORE or ctx.meta.get(_ALL)):
            with formatter.section(title):
                formatter.write_dl(records)
    if (n := len(groups.get(MORE, ()))) and not ctx.meta.get(_ALL):
        formatter.write_paragraph()
        formatter.write_text(f"{HELP_ALL} shows {n} more, for measurements and special machines.")


def _refuse(text: str, error: Exception) -> NoReturn:
    typer.echo(f"pyspac: error: {text}", err=True)
    raise typer.Exit(UsageError.exit_code) from error


def _find_value(arguments: Sequence[str], options: Sequence[str]) -> tuple[str, str]:
    """An option as it was given last, by one of its names, and its text."""
    for i in reversed(range(len(arguments))):
        option, equals, value = arguments[i].partition("=")
        if option in options:
            return option, value if equals else " ".join(arguments[i + 1 : i + 2])
        if option[:2] in options:
            return option[:2], arguments[i][2:]
    return options[-1], ""
