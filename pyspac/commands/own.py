"""The server that `run` and `chat` talk to: one of their own, or one that runs already (`--server URL`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from pyspac.commands.common import error_console
from pyspac.commands.saved_defaults import find_saved, say_not_used, say_used
from pyspac.commands.server_options import own_options
from pyspac.errors import ConfigError, ModelError, UsageError
from pyspac.server import log
from pyspac.server.options import ServeOptions
from pyspac.talk.client import Client, LostError
from pyspac.talk.interrupt import Interrupt

if TYPE_CHECKING:
    from pyspac.talk.own_server import OwnServer

MODEL_FIELDS = ("model", "hf_repo", "model_draft", "hf_repo_draft", "mtp")


@dataclass(frozen=True, slots=True)
class Connection:
    """A server that answers. `own` is None where it ran already."""

    client: Client
    own: OwnServer | None = None
    defaults: str | None = None  # flags that were saved for the model, and are used


@contextmanager
def connected(command: typer.Context, interrupt: Interrupt) -> Iterator[Connection]:
    """By the parameters of `command`, and what it passes on. Raises a PyspacError."""
    given = command.params
    if given.get("server") is not None:
        _check_theirs(given, command.args)
        client = Client(given["server"])
        with interrupt.ends(client):
            client.get("/health")
        yield Connection(client)
        return
    log.set_up(command.info_name or "run", as_json=False, is_quiet=not given["verbose"])
    own, defaults = _open(command, interrupt)
    with own:
        try:
            yield Connection(own.client, own, defaults)
        except LostError as error:
            raise own.explain(error) from error


def _open(command: typer.Context, interrupt: Interrupt) -> tuple[OwnServer, str | None]:
    """By the defaults that are saved for its model, which are said, if they still work; else without."""
    is_verbose = command.params["verbose"]
    if saved := find_saved(command):
        try:
            own = open_server(saved.options, interrupt, verbose=is_verbose)
        except (ConfigError, ModelError) as error:
            say_not_used(error)
        else:
            say_used(saved)
            return own, saved.flags
    return open_server(own_options(command.params, command.args), interrupt, verbose=is_verbose), None


def open_server(options: ServeOptions, interrupt: Interrupt, *, verbose: bool = False) -> OwnServer:
    """With a progress bar on stderr while it loads."""
    from pyspac.talk.own_server import OwnServer  # loads the engine

    with loading_bar() as on_progress:
        return OwnServer(options, interrupt, on_progress, verbose=verbose)


@contextmanager
def loading_bar() -> Iterator[Callable[[int, int], None]]:
    """On a terminal: bytes, speed and the time that is left."""
    console = error_console()
    parts = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    columns = (TextColumn("loading model"), *parts)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("model", total=None)

        def update(n_bytes: int, total: int) -> None:
            bar.update(task, completed=n_bytes, total=total)

        yield update


def _check_theirs(given: dict[str, Any], passed: list[str]) -> None:
    """Raise UsageError for what a server that runs already cannot be told."""
    flags = [f"--{name.replace('_', '-')}" for name in MODEL_FIELDS if given.get(name) is not None] + passed
    if flags:
        raise UsageError(
            f"{flags[0]} cannot be given with --server {given['server']}, which runs already: leave it out, "
            "or give it where that server is started"
        )
