"""The README's and the guides' commands are there, and the first screen says what a new user needs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from conftest import ROOT

from pyspac.cli import app

README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDES = sorted((ROOT / "docs/guides").glob("*.md"))


def commands(text: str) -> list[list[str]]:
    """The lines of indented blocks that run pyspac, as words without their comments."""
    lines = re.findall(r"(?m)^    (?:[A-Z_]+=\S+ )*(pyspac .*)$", text)
    return [shlex.split(line.partition("  #")[0].replace("...", "")) for line in lines]


@pytest.mark.parametrize("path", [ROOT / "README.md", *GUIDES], ids=lambda path: path.name)
def test_the_commands_exist(path: Path) -> None:
    """With their options; what llama-server takes is its own."""
    group: typer.core.TyperGroup = typer.main.get_command(app)  # type: ignore[assignment]
    found = commands(path.read_text(encoding="utf-8"))
    assert found or path.name == "troubleshooting.md"
    for _, name, *arguments in found:
        command = group.commands[name]
        context = command.make_context(name, arguments)
        words = [argument for argument in arguments if argument.endswith(".gguf") or "/" in argument]
        model, hub = context.params.get("model"), context.params.get("hf_repo")
        assert not words or model is not None or hub is not None or "--rpc" in arguments


def test_the_readme_begins_with_what_works() -> None:
    """A reader of the first screen knows what it is, what was never run, and what to type."""
    first = README.partition("## Use")[0]
    assert len(README.split()) < 900
    for text in ("No GPU has run it yet", "make demo", "pyspac chat", "docs/chat.svg", "mmap gives 0."):
        assert text in first
