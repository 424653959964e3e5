"""A command with many options: `--help` in groups, the everyday ones first, and numbers that are none."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

import typer
from typer.core import TyperCommand

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


class GroupedCommand(TyperCommand):
    """A command whose options are shown by `rich_help_panel`, groups in the order of their first one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As Typer; a number that is none is named with the text that was given."""
        given = list(args)
        if HELP_ALL in args:
            ctx.meta[_ALL] = True
            typer.echo(ctx.get_help())
            raise typer.Exit
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            wanted = next((n for text, n in _NUMBERS.items() if text in getattr(error, "message", "")), None)
            parameter = getattr(error, "param", None)
            if wanted is None or parameter is None:
                raise
            option, value = _find_value(given, parameter.opts)
            if not value and (name := getattr(parameter, "envvar", None)):
                option, value = name, os.environ.get(name, "")
            typer.echo(f"pyspac: error: {option} cannot be {value!r}: give {wanted}", err=True)
            raise typer.Exit(UsageError.exit_code) from error

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """As Typer's, which has one group; click calls it."""
        groups: dict[str, list[tuple[str, str]]] = {EVERYDAY: []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or EVERYDAY, []).append(record)
        for title, records in groups.items():
            if records and (title != MORE or ctx.meta.get(_ALL)):
                with formatter.section(title):
                    formatter.write_dl(records)
        if (n := len(groups.get(MORE, ()))) and not ctx.meta.get(_ALL):
            formatter.write_paragraph()
            formatter.write_text(f"{HELP_ALL} shows {n} more, for measurements and special machines.")


def _find_value(arguments: Sequence[str], options: Sequence[str]) -> tuple[str, str]:
    """An option as it was given last, by one of its names, and its text."""
    for i in reversed(range(len(arguments))):
        option, equals, value = arguments[i].partition("=")
        if option in options:
            return option, value if equals else " ".join(arguments[i + 1 : i + 2])
        if option[:2] in options:
            return option[:2], arguments[i][2:]
    return options[-1], ""
