"""`pyspac chat` on a terminal, and what it shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import ROOT
from terminal import on_terminal
from typer.testing import CliRunner

from pyspac.cli import app
from pyspac.generate.session import Session

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
        terminal.wait_for("self")  # it is answering
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
    """One question a line, answers alone on stdout, and nothing of the line editor's."""
    arguments = ["chat", "-m", str(TARGET), "--temp", "0", "-n", "6", "-t", "1"]
    result = CliRunner().invoke(
        app, arguments, input="def parse(self):\n\n/stats\nimport os", env={"PYSPAC_CACHE_DIR": str(tmp_path)}
    )
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("[-n tokens are reached]") == 2
    assert "answer 1: " in result.stdout
    assert "> " not in result.stdout
    assert "\x1b" not in result.stdout
    assert not (tmp_path / "chat-history").exists()


REFUSES = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role') }}{% endif %}"
    "{{ messages[0]['content'] }}"
)


@pytest.mark.parametrize(
    ("command", "template", "said"),
    [
        (("chat",), "{% for %}", "cannot be used"),
        (("run", "--chat", "-p", "x"), "{% for %}", "cannot be used"),
        (("chat", "-sys", "x"), REFUSES, "takes no system message (No system role): leave it out (-sys"),
    ],
)
def test_a_template_is_checked_before_the_model_is_loaded(
    command: tuple[str, ...], template: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "_open", lambda *arguments: pytest.fail("the model was loaded"))
    (tmp_path / "t.jinja").write_text(template)
    arguments = [*command, "-m", str(TARGET), "--chat-template-file", str(tmp_path / "t.jinja")]
    result = CliRunner().invoke(app, arguments, input="")
    assert result.exit_code == 2, result.output
    assert said in result.stderr


@pytest.mark.model
def test_a_system_message_that_is_refused_does_not_end_the_chat(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(REFUSES)
    arguments = ["chat", "-m", str(TARGET), "--chat-template-file", str(tmp_path / "t.jinja")]
    arguments += ["--temp", "0", "-n", "3", "-t", "1"]
    result = CliRunner().invoke(app, arguments, input="/set system x\nimport os\n")
    assert result.exit_code == 0, result.output
    assert "takes no system message" in result.stdout
    assert "[-n tokens are reached]" in result.stdout


def test_without_a_terminal_run_wants_a_prompt() -> None:
    result = CliRunner().invoke(app, ["run", "-m", str(TARGET)])
    assert result.exit_code == 2
    assert "give a prompt with -p or -f, or leave both out on a terminal to chat" in result.stderr


@pytest.mark.model
def test_run_may_apply_the_template(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}def ")
    arguments = ["run", "-m", str(TARGET), "-p", "x", "-n", "4", "-t", "1", "--json", "-"]
    plain = CliRunner().invoke(app, [*arguments[:4], "# user: x\ndef ", *arguments[5:]])
    chat = CliRunner().invoke(app, [*arguments, "--chat", "--chat-template-file", str(template)])
    assert chat.exit_code == 0, chat.stderr
    found = [json.loads(result.stdout) for result in (plain, chat)]
    assert found[0]["token_ids"] == found[1]["token_ids"]
    assert found[0]["n_prompt"] == found[1]["n_prompt"]
