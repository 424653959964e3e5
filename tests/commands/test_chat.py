"""`pyspac chat` on a terminal, and what it shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import input_models
import pytest
from conftest import ROOT
from terminal import on_terminal
from typer.testing import CliRunner

from pyspac.cli import app
from pyspac.errors import UsageError
from pyspac.server.options import ServeOptions

TARGET = ROOT / "pyspac/models/demo-moe.gguf"
DRAFT = ROOT / "pyspac/models/demo-draft.gguf"
ENTER, NEW_LINE, CTRL_C, CTRL_D = "\r", "\x1b\r", "\x03", "\x04"
PROMPT = "\x1b[?2004h"  # bracketed paste is switched on as a line is asked for


@pytest.mark.model
@pytest.mark.parametrize("command", ["chat", "run"])
def test_three_turns(command: str, tmp_path: Path) -> None:
    """Of the second and the third only new tokens are processed; Ctrl-C ends an answer, not the program."""
    arguments = (command, "-m", str(TARGET), "-md", str(DRAFT), "--temp", "0", "-n", "12", "-t", "1")
    with on_terminal(*arguments, variables={"PYSPAC_CACHE_DIR": str(tmp_path)}) as terminal:
        terminal.wait_for(PROMPT)
        for question in ("def parse(self):", f"class Reader:{NEW_LINE}    x = 1", "import os"):
            terminal.press(question)
            terminal.wait_for(question[-5:])
            terminal.press(ENTER)
            terminal.wait_for("[-n tokens are reached]")
            terminal.wait_for(PROMPT)
        terminal.press("/stats" + ENTER)
        lines = terminal.wait_for("context: ").splitlines()
        kept = [int(line.split("processed, ")[1].split()[0]) for line in lines if "answer " in line]
        new = [int(line.split(": ")[1].split()[0]) for line in lines if "answer " in line]
        assert kept[0] == 0
        for i in (1, 2):
            assert kept[i] == kept[i - 1] + new[i - 1] + 12 - 1  # the answer's last token was not computed
            assert new[i] < 30
        terminal.wait_for(PROMPT)
        terminal.press("/nothing" + ENTER)
        terminal.wait_for("there is no /nothing: /help lists the commands")
        terminal.wait_for(PROMPT)
        terminal.press(CTRL_C)  # clears the line
        terminal.wait_for(PROMPT)
        terminal.press(CTRL_D)
        assert terminal.exit_code() == 0
    history = (tmp_path / "chat-history").read_text()
    assert "class Reader" in history


@pytest.mark.model
def test_ctrl_c_ends_the_answer_and_not_the_program(tmp_path: Path) -> None:
    arguments = ("chat", "-m", str(TARGET), "--temp", "0.8", "-s", "1", "-t", "1", "-c", "1000")
    with on_terminal(*arguments, variables={"PYSPAC_CACHE_DIR": str(tmp_path)}) as terminal:
        terminal.wait_for(PROMPT)
        terminal.press("class Reader:" + ENTER)
        terminal.wait_for("\n")
        terminal.wait_for("\n")  # a line of the answer
        terminal.press(CTRL_C)
        terminal.wait_for("[")  # stopped, unless the context was full before
        terminal.wait_for(PROMPT)
        terminal.press("/set temp 0" + ENTER)
        terminal.wait_for(PROMPT)
        terminal.press("/set" + ENTER)
        terminal.wait_for("temp 0  top_k 40")
        terminal.wait_for(PROMPT)
        terminal.press("/exit" + ENTER)
        assert terminal.exit_code() == 0


@pytest.mark.model
def test_a_pipe_is_read_line_by_line(tmp_path: Path) -> None:
    """One question a line, only answers on stdout, and nothing of the line editor's."""
    arguments = ["chat", "-m", str(TARGET), "--temp", "0", "-n", "6", "-t", "1"]
    result = CliRunner().invoke(
        app, arguments, input="def parse(self):\n\n/stats\nimport os", env={"PYSPAC_CACHE_DIR": str(tmp_path)}
    )
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("[-n tokens are reached]") == 2
    assert "answer 1: " in result.stdout
    assert "drafted" not in result.stdout
    assert "> " not in result.stdout
    assert "\x1b" not in result.stdout
    assert not (tmp_path / "chat-history").exists()


@pytest.mark.model
def test_stats_say_what_was_drafted(tmp_path: Path) -> None:
    drafts = ["--spec-type", "ngram", "--draft-max", "2"]
    arguments = ["chat", "-m", str(TARGET), "--temp", "0", "-n", "30", "-t", "1", *drafts]
    environment = {"PYSPAC_CACHE_DIR": str(tmp_path)}
    result = CliRunner().invoke(app, arguments, input="a = 1\n/stats\n", env=environment)
    assert result.exit_code == 0, result.stderr
    assert re.search(r"; \d+ drafted, \d+ of them accepted", " ".join(result.stdout.split()))


@pytest.mark.parametrize(
    ("command", "source", "said"),
    [
        (("chat",), "{% for %}", "chat template is not supported"),
        (("run", "--chat", "-p", "x"), "{% for %}", "chat template is not supported"),
        (("chat",), None, "failed to open file"),
    ],
)
def test_a_template_that_is_none_says_so(
    command: tuple[str, ...], source: str | None, said: str, tmp_path: Path
) -> None:
    """In llama-server's words."""
    if source is not None:
        (tmp_path / "t.jinja").write_text(source)
    arguments = [*command, "-m", str(TARGET), "--chat-template-file", str(tmp_path / "t.jinja")]
    result = CliRunner().invoke(app, arguments, input="")
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.model
def test_commands_answer(tmp_path: Path) -> None:
    lines = (
        *("/set temp 0.5", "/set\ttop_k 7", "/set seed 123456789", "/set", "/set temp -1", "/set top_k -1"),
        *("/set seed x", "/set system be brief", "/clear", "//comment", "/quit now", "never read"),
    )
    arguments = ["chat", "-m", str(TARGET), "--temp", "0", "-n", "2", "-t", "1"]
    result = CliRunner().invoke(
        app, arguments, input="\n".join(lines), env={"PYSPAC_CACHE_DIR": str(tmp_path)}
    )
    assert result.exit_code == 0, result.output
    said = result.stdout
    assert "[temp is 0.5]\n[top_k is 7]\n[seed is 123456789]\ntemp 0.5  top_k 7  " in said
    assert "temp cannot be -1.0: give a number from 0 to 100" in said
    assert "top_k cannot be -1: give a whole number" in said
    assert "seed needs a whole number: /set seed 123456789" in said
    assert "[system is be brief, and a new chat begins]\n[a new chat begins]\n" in said
    assert said.count("[-n tokens are reached]") == 1


def test_stock_and_layout_of_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    """--stock is llama.cpp as it is run by default: repacked, unless --no-repack is given."""
    found: list[tuple[bool, bool, str | None]] = []

    def open_server(options: ServeOptions, *_: object, **__: object) -> None:
        found.append((options.stock, "--no-repack" not in options.passed, options.cpu_range))
        raise UsageError("enough")

    monkeypatch.setattr("pyspac.commands.own.open_server", open_server)
    for flags in ([], ["--stock"], ["--stock", "--no-repack", "-Cr", "0-0"]):
        assert CliRunner().invoke(app, ["chat", "-m", str(TARGET), *flags]).exit_code == 2
    assert found == [(False, True, None), (True, True, None), (True, False, "0-0")]


@pytest.mark.model
@pytest.mark.parametrize("kind", ["folder", "full"])
def test_a_history_that_cannot_be_kept_does_not_stop_the_chat(kind: str, tmp_path: Path) -> None:
    if kind == "folder":
        (tmp_path / "chat-history").mkdir()
    elif Path("/dev/full").exists():
        (tmp_path / "chat-history").symlink_to("/dev/full")
    arguments = ("chat", "-m", str(TARGET), "--temp", "0", "-n", "2", "-t", "1")
    with on_terminal(*arguments, variables={"PYSPAC_CACHE_DIR": str(tmp_path)}) as terminal:
        terminal.wait_for(PROMPT)
        terminal.press("/help" + ENTER)
        terminal.wait_for("Ctrl-C ends an answer")
        terminal.wait_for(PROMPT)
        terminal.press(CTRL_D)
        assert terminal.exit_code() == 0


@pytest.mark.model
def test_the_prompt_may_come_through_a_pipe() -> None:
    arguments = ["run", "-m", str(TARGET), "-n", "4", "-t", "1", "--temp", "0", "--json", "-"]
    runs = [
        CliRunner().invoke(app, [*arguments, "-p", "def parse(self):\n    x"]),
        CliRunner().invoke(app, arguments, input="def parse(self):\n    x\n"),
        CliRunner().invoke(app, [*arguments, "-f", "-"], input="def parse(self):\n    x\n"),
    ]
    found = [json.loads(run.stdout) for run in runs]
    assert [row["n_prompt"] for row in found] == [found[0]["n_prompt"]] * 3
    assert [row["token_ids"] for row in found] == [found[0]["token_ids"]] * 3


def test_without_a_terminal_run_wants_a_prompt() -> None:
    result = CliRunner().invoke(app, ["run", "-m", str(TARGET)])
    assert result.exit_code == 2
    assert "give a prompt with -p or -f, or leave both out on a terminal to chat" in result.stderr


@pytest.mark.model
def test_run_may_apply_the_template(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}def ")
    arguments = ["run", "-m", str(TARGET), "-p", "x", "-n", "4", "-t", "1", "--temp", "0", "--json", "-"]
    plain = CliRunner().invoke(app, [*arguments[:4], "# user: x\ndef ", *arguments[5:]])
    chat = CliRunner().invoke(app, [*arguments, "--chat", "--chat-template-file", str(template)])
    assert chat.exit_code == 0, chat.stderr
    found = [json.loads(result.stdout) for result in (plain, chat)]
    assert found[0]["token_ids"] == found[1]["token_ids"]
    assert found[0]["n_prompt"] == found[1]["n_prompt"]


@pytest.mark.model
def test_run_with_the_template_has_one_bos(tmp_path: Path) -> None:
    """Of a model that adds one itself, and a template that begins with it."""
    model = input_models.write_target(tmp_path / "target.gguf")
    (tmp_path / "t.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    arguments = ["run", "-m", str(model), "-p", "import os", "-n", "1", "-t", "1", "--json", "-"]
    template = ["--chat-template-file", str(tmp_path / "t.jinja")]
    plain, chat = (CliRunner().invoke(app, [*arguments, *flags]) for flags in ([], template))
    assert chat.exit_code == 0, chat.stderr
    assert json.loads(chat.stdout)["n_prompt"] == json.loads(plain.stdout)["n_prompt"]
