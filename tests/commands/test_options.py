"""The options of all commands together: one meaning each, quick to show, and none too long to read."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from pyspac.cli import app
from pyspac.commands import options
from pyspac.commands.common import read_prompt
from pyspac.errors import UsageError

# what one flag means in several commands, where that is not the same
DIFFERENT = {
    "--ctx-size",  # train-head: of a text that the model writes
    "--draft-max",  # demo: fixed, so that both of its runs draft alike
    "--file",  # profile: a text to measure on, not a prompt
    "--json",  # top: a switch
    "--lossy",  # quality: several, one row each
    "--k",  # lab sweep: a list
    "--n-predict",  # bench: 2 or more, as speeds need
    "--output",  # of trace, lab sweep and lab report: each writes something else
    "--policy",  # lab: a named combination of its own
    "--predict",  # attach: only those of a scheduler; lab: recorded
    "--ram",  # inspect: the same text, but it only predicts, and takes several to compare
    "--vram",  # fit: one size; inspect: several
    "--rpc",  # doctor: only looks at it
}
MAX_LINES = 60


def commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


GROUP: Any = typer.main.get_command(app)
COMMANDS = dict(commands(GROUP))


def is_for_researchers(name: str) -> bool:
    return getattr(GROUP.commands[name.split()[0]], "rich_help_panel", None) == options.MORE


def test_a_flag_has_one_meaning() -> None:
    meanings: dict[str, set[tuple[Any, ...]]] = defaultdict(set)
    for command in COMMANDS.values():
        for option in command.params:
            if option.param_type_name == "option":
                long = next(flag for flag in option.opts if flag.startswith("--"))
                meanings[long].add((tuple(option.opts), option.metavar, option.help))
    assert {flag for flag, found in meanings.items() if len(found) > 1} == DIFFERENT


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_can_be_read_at_once(name: str) -> None:
    lines, _ = inspect.getsourcelines(inspect.unwrap(COMMANDS[name].callback))
    assert len(lines) <= MAX_LINES


def test_help_needs_no_native_library() -> None:
    code = "import sys, pyspac.cli; print([name for name in sys.modules if '_native' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_command_loads_what_it_needs() -> None:
    """No other command; numpy and the scheduler only once its server loads its model."""
    code = (
        "import sys, pyspac.cli as cli; cli.make_app(['run']); import pyspac.talk.own_server; "
        "print(sorted({'numpy', 'yaml', 'pyspac.commands.serve', 'pyspac.lab', 'pyspac.scheduler.scheduler'} "
        "& set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_prompt_is_given_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    file = tmp_path / "prompt"
    file.write_text("text\n")
    assert read_prompt("text", None) == read_prompt(None, file) == "text"
    file.write_bytes(b"\xfft\xc3\xa4xt")  # as a command line has it: "\udcff"
    assert read_prompt("\udcfft\u00e4xt", None) == read_prompt(None, file) == "\ufffdt\u00e4xt"
    with pytest.raises(UsageError, match="give a prompt with -p or -f, or leave both out on a terminal"):
        read_prompt(None, None)
    with pytest.raises(UsageError, match="both -p and -f are given"):
        read_prompt("text", file)


def test_help_is_in_groups() -> None:
    """The everyday options first, each once; the others with --help-all."""
    short, whole = (CliRunner().invoke(app, ["run", flag]).stdout for flag in ("--help", "--help-all"))
    titles = ["Options", *(getattr(options, name) for name in ("EXPERTS", "DRAFTING", "MORE"))]
    places = [whole.index(f"\n{title.split(' (')[0]}") for title in titles]
    assert places[0] == min(places)
    for flag, title in (("-m, --model", 0), ("--cache SIZE", 1), ("--draft-max N", 2), ("--predict", 3)):
        assert whole.count(f"\n  {flag}") == 1
        following = [place for place in places if place > places[title]]
        assert places[title] < whole.index(f"\n  {flag}") < min(following, default=len(whole))
        assert (flag in short) == (title != 3)
    assert "--help-all shows" in short
    assert "--help-all shows" not in whole


EVERYDAY = [name for name, command in COMMANDS.items() if not is_for_researchers(name)]


@pytest.mark.parametrize("name", EVERYDAY)
def test_help_fits_on_a_screen_and_a_half(name: str) -> None:
    lines = CliRunner().invoke(app, [name, "--help"]).stdout.splitlines()  # of 80 columns
    assert len(lines) <= 60


def test_what_researchers_use_is_in_a_group() -> None:
    """`pyspac --help` has the rest, and --help-all everything."""
    assert {"lab run", "trace", "profile", "quality", "train-head", "attach"} <= set(COMMANDS) - set(EVERYDAY)
    short, whole = (CliRunner().invoke(app, [flag]).stdout for flag in ("--help", "--help-all"))
    for text, names in ((short, EVERYDAY), (whole, COMMANDS)):
        shown = {line.split()[0] for line in text.splitlines() if line.startswith("  ") and line.split()}
        assert {name.split()[0] for name in names} - {"list"} <= shown
    assert "\n  profile " not in short
    assert "--help-all shows 6 more" in short
