"""Flags of llama-server in a command of pyspac: a command line in, what is whose out.

A command knows a dozen flags of its own; all others go to llama-server as they are, which has its own error
for what it does not know. What follows `--` is llama-server's whatever it is called.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any, Final

from pyspac.commands.grouped_help import HELP_ALL, GroupedCommand
from pyspac.commands.model_word import looks_like_model
from pyspac.commands.short_options import check_short_options

END: Final = "--"
_NUMBER: Final = re.compile(r"-\.?\d")
HELP: Final = (
    "All other flags are llama-server's, such as --temp, --grammar-file, --lora: llama-server --help."
)


def is_flag(text: str) -> bool:
    """Whether it looks like a flag: a number below 0, and "-" for stdin, are values."""
    return text.startswith("-") and text != "-" and not _NUMBER.match(text)


def split_arguments(
    arguments: Sequence[str], flags: Collection[str], with_value: Collection[str]
) -> tuple[list[str], list[str]]:
    """The command's own arguments, and llama-server's.

    `flags`: the command's; `with_value`: those after which one value follows. What follows a flag of
    llama-server's, up to the next flag, is its value; but for a model behind a value.
    """
    own: list[str] = []
    passed: list[str] = []
    target, is_value = own, False
    for i, text in enumerate(arguments):
        if is_value:  # of one of ours: it may be anything
            own.append(text)
            is_value = False
        elif text == END:
            return own, [*passed, *arguments[i + 1 :]]
        elif is_flag(text):
            name, equals, _ = text.partition("=")
            if text[:2] in with_value and text[2:3].isdecimal():  # -n5, which is no flag of llama-server's
                name, equals = text[:2], "="
            target = own if name in flags else passed
            is_value = name in with_value and not equals
            target.append(text)
        elif target is passed and not is_flag(passed[-1]) and looks_like_model(text):
            own.append(text)  # a flag has one value
        else:
            target.append(text)
            target = target if target is passed else own
    return own, passed


class ServerCommand(GroupedCommand):
    """A command that runs a llama-server: what is not its own is passed on, in `context.args`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As Typer, without the flags of llama-server."""
        flags = {name for one in self.get_params(ctx) for name in (*one.opts, *one.secondary_opts)}
        with_value = {name for one in self.params if not getattr(one, "is_flag", False) for name in one.opts}
        own, passed = split_arguments(args, flags, with_value)
        check_short_options(own, self.params)
        super().parse_args(ctx, [*own, *(text for text in passed if text == HELP_ALL)])
        ctx.args = passed
        return passed
