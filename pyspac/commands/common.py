"""What the commands share: consoles, the funnel for errors, reading prompts, the progress bar."""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, ParamSpec

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from pyspac.commands.json_file import STDOUT, can_write
from pyspac.errors import EXIT_INTERRUPTED, ConfigError, NoProcessError, PyspacError, UsageError
from pyspac.model.gguf_header import is_gguf

P = ParamSpec("P")
TABLE_WIDTH: Final = 80
STDIN: Final = "-"
_PATH: Final = "the path, and the permissions of its folders"
_NO_THREAD: Final = "can't start new thread"  # all that Python says


def error_console() -> Console:
    """Notes, tables and errors: stderr, so that stdout holds only the text or the JSON."""
    return Console(file=sys.stderr, highlight=False, width=None if sys.stderr.isatty() else TABLE_WIDTH)


def output_console() -> Console:
    """What a command was asked to show: stdout."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else TABLE_WIDTH)


def reports_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Turn a PyspacError into one line on stderr and its exit code, Ctrl-C into 130."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except PyspacError as error:
            raise _said(error) from error
        except RuntimeError as error:
            if str(error) != _NO_THREAD:
                raise
            raise _said(NoProcessError("a thread cannot be started")) from error
        except KeyboardInterrupt as error:
            typer.echo("pyspac: interrupted", err=True)
            raise typer.Exit(EXIT_INTERRUPTED) from error
        except BrokenPipeError as error:  # as in `pyspac run ... | head`
            _drop_stdout()
            raise typer.Exit(1) from error
        except OSError as error:
            if error.filename is not None and error.errno in (errno.EACCES, errno.ENAMETOOLONG):
                raise _said(UsageError(f"{error.filename}: {error.strerror}; check {_PATH}")) from error
            if (ended := unwritten(error)) is None:
                raise
            raise ended from error

    return wrapper


def _said(error: PyspacError) -> typer.Exit:
    typer.echo(f"pyspac: error: {error}", err=True)
    return typer.Exit(error.exit_code)


def unwritten(error: OSError) -> typer.Exit | None:
    """Say that the output cannot be written; None: it is another error, and nothing is said."""
    if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return None
    _drop_stdout()
    return _said(PyspacError(f"the output cannot be written ({error.strerror})"))


def _drop_stdout() -> None:
    """What is still to be written has nowhere to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The text of -p, or the contents of -f without one final newline, or of a pipe. Raises ConfigError."""
    if (prompt is None) == (file is None):
        if file is not None:
            raise UsageError("both -p and -f are given: give the prompt once")
        if sys.stdin.isatty() or not (text := _read_stdin()):
            raise UsageError("give a prompt with -p or -f, or leave both out on a terminal to chat")
        return text
    if file is None:
        assert prompt is not None
        return os.fsencode(prompt).decode(errors="replace")  # as a file's text: it may be no UTF-8
    try:
        text = (
            _read_stdin()
            if str(file) == STDIN
            else file.read_text(encoding="utf-8", errors="replace").removesuffix("\n")
        )
    except OSError as error:
        raise ConfigError("-f", str(file), f"a text file that can be read ({error.strerror})") from error
    return _checked(text, str(file))


def _read_stdin() -> str:
    return _checked(sys.stdin.buffer.read().decode("utf-8", errors="replace").removesuffix("\n"), STDIN)


def _checked(text: str, file: str) -> str:
    if "\0" in text:
        raise ConfigError("-f", file, "a text file: this one holds zero bytes, as no text does")
    return text


def check_target(flag: str, path: Path, wanted: str = "a file in a folder that can be written to") -> None:
    """Raise ConfigError if no file can be written there; before any work is done."""
    if not can_write(path) or path.is_dir():
        raise ConfigError(flag, str(path), wanted)


def check_png(path: Path | None) -> None:
    """As `check_target`, for --png, which draws nothing else. None: no figure is asked for."""
    if path is None:
        return
    check_target("--png", path)
    if path.suffix.lower() != ".png":
        raise ConfigError("--png", str(path), "a file whose name ends in .png")


def check_json_target(target: str | None) -> None:
    """As `check_target`, for --json."""
    wanted = "a file in a folder that can be written to, or - for stdout"
    if target == "":
        raise ConfigError("--json", target, wanted)
    if target is not None and target != STDOUT:
        check_target("--json", Path(target), wanted)
        if is_gguf(Path(target)):
            raise ConfigError("--json", target, "another file: this one is a model")


@contextmanager
def loading_bar(interrupt: object) -> Iterator[Callable[[str, float], bool]]:
    """A progress bar on stderr for `Runner`'s `progress`; Ctrl-C stops the loading."""
    console = error_console()
    columns = (TextColumn("loading {task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, int] = {}

        def update(what: str, fraction: float) -> bool:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=1.0)
            bar.update(tasks[what], completed=fraction)  # type: ignore[arg-type]
            return not interrupt

        yield update
