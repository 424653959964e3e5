"""`--help` of a command with many options: in groups, the everyday ones first."""

from __future__ import annotations

from typing import Any, Final

from typer.core import TyperCommand

EVERYDAY: Final = "Options"  # of those that name no group


class GroupedCommand(TyperCommand):
    """A command whose options are shown by `rich_help_panel`, groups in the order of their first one."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """As Typer's, which has one group; click calls it."""
        groups: dict[str, list[tuple[str, str]]] = {EVERYDAY: []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or EVERYDAY, []).append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
