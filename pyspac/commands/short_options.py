"""Options with one dash that a parser would read as something else: what to give instead."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import typer

from pyspac.commands.grouped_help import GroupedCommand
from pyspac.errors import UsageError


def find_short_with_equals(arguments: Sequence[str], with_value: Collection[str]) -> str | None:
    """The first `-p=TEXT`, whose value would begin with the sign; None: there is none."""
    for i, text in enumerate(arguments):
        if text == "--":
            break
        is_value = i > 0 and arguments[i - 1] in with_value
        if not is_value and text[:2] in with_value and text[2:3] == "=":
            return text
    return None


def find_single_dash(
    arguments: Sequence[str], known: Collection[str], with_value: Collection[str]
) -> str | None:
    """The first long option with one dash, such as -temp, which would be read as `-t emp`; None: no such."""
    for i, text in enumerate(arguments):
        if text == "--":
            break
        flag = text.split("=", 1)[0]
        is_value = i > 0 and arguments[i - 1] in with_value
        if not is_value and flag not in known and f"-{flag}" in known:
            return flag
    return None


def check_short_options(arguments: Sequence[str], parameters: Sequence[Any]) -> None:
    """Say what to give instead of `-p=TEXT` and exit with 2, if there is one such."""
    if (text := find_short_with_equals(arguments, flags_with_value(parameters))) is None:
        return
    flag, value = text[:2], text[3:]
    long = [name for one in parameters if flag in one.opts for name in one.opts if name.startswith("--")]
    ways = " or ".join([f'{flag} "{value}"', *(f'{name}="{value}"' for name in long[:1])])
    typer.echo(
        f"pyspac: error: {text}: after a short option comes its value, without =: give {ways}", err=True
    )
    raise typer.Exit(UsageError.exit_code)


def flags_with_value(parameters: Sequence[Any]) -> set[str]:
    """The flags of a command after which a value follows."""
    return {name for one in parameters for name in one.opts if not getattr(one, "is_flag", False)}


class ModelCommand(GroupedCommand):
    """A command that opens a model, to which flags of llama.cpp are given by habit."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As Typer, after a look at the flags."""
        known = {name for one in self.params for name in (*one.opts, *one.secondary_opts)}
        if text := find_single_dash(args, known, flags_with_value(self.params)):
            typer.echo(f"pyspac: error: {self.name} has no option {text}: give -{text}", err=True)
            raise typer.Exit(UsageError.exit_code)
        check_short_options(args, self.params)
        return super().parse_args(ctx, args)
