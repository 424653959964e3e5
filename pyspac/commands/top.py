"""`pyspac top`: watch a server's experts, live, once, or as a picture."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.table import Table

from pyspac.checks import check_range
from pyspac.commands.common import check_target, output_console, reports_errors
from pyspac.errors import UsageError
from pyspac.server import board_file

if TYPE_CHECKING:
    from pyspac.server.live_view import LiveView
    from pyspac.server.snapshot import BoardWatch, Observation

PICTURE_WIDTH: Final = 132
PICTURE_HEIGHT: Final = (18, 44)  # least and most lines; 10 are beside the layers


@reports_errors
def top(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="The server's board. Default: the only one running."),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Watch for --seconds, print the figures and end.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: one JSON object on stdout.")] = False,
    svg: Annotated[
        Path | None,
        typer.Option(
            "--svg", metavar="FILE", help="Watch for --seconds, save the view as a picture and end."
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds", metavar="S", help="With --once: the period. With --svg: how long to watch."
        ),
    ] = 1.0,
) -> None:
    """Watch a server: experts, thresholds, loads, drafts, speed.

    Draws a heat map of utility and residency by layer. It only reads the server's board.
    """
    _check(once, as_json, svg, seconds)
    name = board_file.find_board(name)
    from pyspac.engine.board import Board
    from pyspac.server.snapshot import BoardWatch

    with Board.open(name) as board:
        watch = BoardWatch(board)
        if once:
            time.sleep(seconds)
            _print(name, watch.look(), as_json)
        else:
            _show(name, watch, svg, seconds)


def _check(once: bool, as_json: bool, svg: Path | None, seconds: float) -> None:
    if as_json and not once:
        raise UsageError("--json needs --once: give both, as the live view is not JSON")
    if once and svg is not None:
        raise UsageError("--svg and --once cannot go together: leave one of them out")
    check_range("--seconds", seconds, 0.05, 3600)
    if svg is not None:
        check_target("--svg", svg)


def _print(name: str, seen: Observation, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"board": name, **seen.to_dict()}))
        return
    from pyspac.server.figures import figures

    table = Table.grid(padding=(0, 2))
    for title, text in figures(seen).items():
        table.add_row(title, text)
    output_console().print(table)


def _show(name: str, watch: BoardWatch, svg: Path | None, seconds: float) -> None:
    from pyspac.server.live_view import LiveView

    found = board_file.look_at(name)
    board = watch.board
    title = (
        f"pyspac top   board {name}   server {found.pid if found else '-'}   "
        f"{board.n_layer} layers x {board.n_expert} experts, {board.n_expert_used} per token   "
        f"{board.n_slots} slots"
    )
    view = LiveView(title, watch, is_there=lambda: found is not None and board_file.look_at(name) == found)
    if svg is not None:
        low, high = PICTURE_HEIGHT
        size = (PICTURE_WIDTH, max(low, min(high, board.n_layer + 10)))
        svg.write_text(asyncio.run(_picture(view, size, seconds)), encoding="utf-8")
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):  # Textual reads the one and draws on the other
        raise UsageError("the live view needs a terminal: give --once, or --svg FILE")
    view.run()
    if view.return_code:
        raise typer.Exit(view.return_code)


async def _picture(view: LiveView, size: tuple[int, int], seconds: float) -> str:
    """The view after some time, without a terminal."""
    async with view.run_test(size=size) as pilot:
        await pilot.pause(seconds)
        picture = view.export_screenshot(title="pyspac top")
    return re.sub(r"@font-face *\{[^}]*\}", "", picture)  # fonts from the network; the viewer has its own
