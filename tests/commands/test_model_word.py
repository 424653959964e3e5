"""The model as a word: which words are files, and which names of a hub; in every command that takes -m."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from test_options import COMMANDS

from pyspac.commands.model_word import WORD, is_hub_name, place_model
from pyspac.errors import UsageError


@pytest.mark.parametrize(
    ("word", "is_name"),
    [
        ("me/model", True),
        ("me/model:Q4_K_M", True),
        ("Me.2/Model-3_GGUF:UD-Q4", True),
        ("model.gguf", False),
        ("me/model.gguf", False),
        ("./me/model", False),
        ("../model", False),
        ("/me/model", False),
        ("a/b/c", False),
        ("model", False),
        ("https://huggingface.co/me/model", False),
    ],
)
def test_names_of_a_hub(word: str, is_name: bool) -> None:
    assert is_hub_name(word) == is_name


def test_what_is_there_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "me").mkdir()
    (tmp_path / "me/model").touch()
    (tmp_path / "model").touch()
    monkeypatch.chdir(tmp_path)
    for word in ("me/model", "model"):
        assert place({WORD: word, "model": None, "hf_repo": None})["model"] == Path(word)


def place(params: dict[str, Any]) -> dict[str, Any]:
    place_model(params)
    return params


def test_a_word_is_what_the_flag_would_be() -> None:
    none = {"model": None, "hf_repo": None}
    assert place({WORD: "me/model", **none})["hf_repo"] == "me/model"
    assert place({WORD: "m.gguf", **none})["model"] == Path("m.gguf")
    assert place({WORD: None, **none}) == {WORD: None, **none}
    with pytest.raises(UsageError, match=r"two models are given, m\.gguf and -m n\.gguf: give one"):
        place({WORD: "m.gguf", **none, "model": Path("n.gguf")})


TAKES_MODEL = [
    name
    for name, command in COMMANDS.items()
    if any("-m" in option.opts for option in command.params) and name != "attach"  # its word is a board
]


NEEDED = {
    "train-head": ["-o", "h.gguf"],
    "trace": ["-o", "t.parquet"],
    "quality": ["-f", "t.txt", "--lossy", "drop:2"],
}


def test_commands_that_take_a_model() -> None:
    assert TAKES_MODEL == [
        "chat", "run", "serve", "inspect", "bench", "doctor", "profile", "quality", "trace", "train-head"
    ]  # fmt: skip


@pytest.mark.parametrize("name", TAKES_MODEL)
def test_every_command_takes_the_word(name: str) -> None:
    """Wherever it stands among the options."""
    needed = NEEDED.get(name, [])
    command: typer.core.TyperCommand = COMMANDS[name]
    flag, value = ("-t", "threads") if name == "doctor" else ("-c", "ctx_size")
    for arguments in (["me/model", flag, "9"], [flag, "9", "me/model"]):
        context = command.make_context(name, [*needed, *arguments])
        assert (context.params["hf_repo"], context.params[value]) == ("me/model", 9)
    context = command.make_context(name, [*needed, "m.gguf"])
    assert context.params["model"] == Path("m.gguf")
