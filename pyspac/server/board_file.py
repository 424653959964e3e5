"""Boards as files: which ones exist, which process each belongs to, and removing those of dead processes.

In: a board's name. Out: a `BoardFile`. What is in it is for `pyspac.engine.board.Board`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pyspac.engine.values import check_value
from pyspac.errors import ConfigError, PyspacError, UsageError

FOLDER: Final = Path("/dev/shm")  # where Linux keeps POSIX shared memory
PREFIX: Final = "pyspac."


def check_name(name: str) -> str:
    """Return the name; UsageError unless a board may have it."""
    from pyspac._native import ffi, lib  # loaded here: the command line comes up without it

    check_value(lib.spac_board_owner(os.fsencode(name), ffi.new("int32_t *")))
    return name


@dataclass(frozen=True, slots=True)
class BoardFile:
    """A board's file as it was when it was looked at. Two are equal if they are the same file."""

    name: str
    inode: int
    is_board: bool = field(compare=False)  # False: something else of that name
    pid: int = field(compare=False)  # of the engine's process, in its own numbering; 0: it is gone

    @property
    def is_alive(self) -> bool:
        """Whether the engine's process runs; its lock on the file says so, in any PID namespace."""
        return self.pid > 0


def path_of(name: str) -> Path:
    """Where the board called `name` is."""
    return FOLDER / f"{PREFIX}{name}"


def look_at(name: str) -> BoardFile | None:
    """Return the board called `name`; None if there is none that this user may read."""
    from pyspac._native import ffi, lib

    try:
        inode = path_of(name).stat().st_ino
    except OSError:
        return None
    pid = ffi.new("int32_t *")
    is_board = lib.spac_board_owner(os.fsencode(name), pid) == lib.SPAC_STATUS_SUCCESS
    return BoardFile(name, inode, is_board, int(pid[0]) if is_board else 0)


def list_boards() -> list[BoardFile]:
    """Return the boards whose engine runs, by name."""
    names = sorted(path.name.removeprefix(PREFIX) for path in FOLDER.glob(f"{PREFIX}*"))
    found = [look_at(name) for name in names]
    return [board for board in found if board is not None and board.is_alive]


def find_board(name: str | None) -> str:
    """Return `name`, or the only running board's if it is None. Raises a PyspacError that lists them."""
    running = [board.name for board in list_boards()]
    if name is None and len(running) == 1:
        return running[0]
    if name is None and running:
        raise UsageError(f"several servers are running; name one: {', '.join(running)}")
    if name is None:
        raise PyspacError("no server with a board is running; start one with `pyspac serve`")
    board = look_at(check_name(name))
    if board is None or (board.is_board and not board.is_alive):
        raise PyspacError(
            f'no running server has the board "{name}"; boards in use: {", ".join(running) or "none"}'
        )
    return name


def check_free(name: str) -> None:
    """Raise ConfigError if a running server has a board of this name."""
    board = look_at(check_name(name))
    if board is not None and board.is_alive:
        raise ConfigError(
            "--board", name, f"a name that is not in use, or stop the process that has it, {board.pid}"
        )


def remove_stale(name: str) -> None:
    """Remove the board that a killed process left behind, if one did; a running engine's stays."""
    from pyspac._native import lib

    lib.spac_board_remove(name.encode())
