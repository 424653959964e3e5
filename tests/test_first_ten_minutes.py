"""What a new user does first, in the README's order, by its commands; the demo's model stands for theirs."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from conftest import ROOT
from serving import HOST, TARGET, environment, free_port, post, run_pyspac, wait_for
from terminal import on_terminal

from pyspac.cli import app
from pyspac.server.health import is_healthy

README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDES = sorted((ROOT / "docs/guides").glob("*.md"))
LIMIT_S = 300.0  # of each step, on a busy machine; all together take less than ten minutes
ENTER, CTRL_D = "\r", "\x04"
PROMPT = "\x1b[?2004h"  # a line is asked for
QUESTIONS = ("def parse(self, text):", "class Reader:")


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
    for text in ("No GPU has run it yet", "make demo", "pyspac chat", "docs/chat.svg", "mmap gives 0.1"):
        assert text in first


@pytest.mark.model
@pytest.mark.timeout(900)
def test_the_first_ten_minutes(tmp_path: Path, record_property: Any) -> None:
    """Demo, first answer, second question, a server, a client, `top`, stop, start again: all in minutes."""
    steps: dict[str, float] = {}
    with timed("demo", steps):
        done = run_pyspac("demo", cache_dir=tmp_path, timeout_s=LIMIT_S)
        assert done.returncode == 0, done.stderr
    with timed("chat", steps):
        talk(tmp_path)
    port = free_port()
    with timed("server, client, top", steps), served(port, tmp_path):
        first = ask(port)
        ask_as_agents(port)
        look(port, tmp_path)
    with timed("start again", steps), served(port, tmp_path):
        assert ask(port) == first
    record_property("seconds", {name: round(seconds, 1) for name, seconds in steps.items()})
    print(steps)
    assert sum(steps.values()) < 600


@contextmanager
def timed(name: str, steps: dict[str, float]) -> Iterator[None]:
    start_s = time.monotonic()
    yield
    steps[name] = time.monotonic() - start_s


def talk(folder: Path) -> None:
    """Two questions on a terminal."""
    variables = {"PYSPAC_CACHE_DIR": str(folder)}
    with on_terminal("chat", str(TARGET), "-n", "24", "--ignore-eos", variables=variables) as terminal:
        for question in QUESTIONS:
            terminal.wait_for(PROMPT)
            terminal.press(question)
            terminal.wait_for(question[-5:])
            terminal.press(ENTER)
            assert len(terminal.wait_for("tokens are reached]")) > 20
        terminal.wait_for(PROMPT)
        terminal.press(CTRL_D)
        assert terminal.exit_code() == 0


@contextmanager
def served(port: int, folder: Path) -> Iterator[None]:
    """A server as the README starts it, which ends by SIGTERM, with everything finished."""
    argv = [sys.executable, "-m", "pyspac", "serve", str(TARGET), "--port", str(port)]
    with (
        (folder / "log").open("a") as log,
        subprocess.Popen(argv, env=environment(folder), stderr=log) as process,
    ):
        try:
            wait_for("the server", lambda: is_healthy(HOST, port), LIMIT_S)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT_S) == 0


def ask(port: int) -> str:
    """By OpenAI's own client: which models there are, an answer, the same answer as it comes."""
    from openai import OpenAI

    client = OpenAI(base_url=f"http://{HOST}:{port}/v1", api_key="none", max_retries=0, timeout=LIMIT_S)
    (model,) = client.models.list()
    assert model.id == TARGET.stem
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    settings: dict[str, Any] = {"model": model.id, "messages": messages, "max_tokens": 24, "temperature": 0}
    text = client.chat.completions.create(**settings).choices[0].message.content
    parts = client.chat.completions.create(**settings, stream=True)
    assert text == "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text
    return str(text)


def ask_as_agents(port: int) -> None:
    """What Claude Code (messages) and Codex (responses) ask; docs/guides/coding-agents.md has the rest."""
    message = {"role": "user", "content": QUESTIONS[0]}
    answer = post(port, "/v1/messages", {"model": "any", "max_tokens": 8, "messages": [message]})
    assert (answer["model"], answer["stop_reason"]) == (TARGET.stem, "max_tokens")
    assert answer["content"][0]["text"]
    assert post(port, "/v1/messages/count_tokens", {"messages": [message]})["input_tokens"] > 1
    answer = post(port, "/v1/responses", {"model": "any", "input": QUESTIONS[0], "max_output_tokens": 8})
    assert answer["output"][0]["content"][0]["text"]


def look(port: int, folder: Path) -> None:
    done = run_pyspac("top", f"server-{port}", "--once", "--json", cache_dir=folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["board"] == f"server-{port}"
