"""What a new user does first, in the README's order; the demo's model stands for theirs.

`PYSPAC_WALK=BIN/pyspac pytest tests/test_user_walk.py` walks with an installed pyspac, as `make check-wheel`
does; else it is that of the checkout.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from serving import HOST, TARGET, environment, free_port, post, wait_for
from terminal import on_terminal

from pyspac.server.health import is_healthy

LIMIT_S: Final = 300.0  # of each step, on a busy machine; all together take less than ten minutes
ENTER, CTRL_D = "\r", "\x04"
LINE_WANTED: Final = "\x1b[?2004h"  # a line is asked for
QUESTIONS: Final = ("def parse(self, text):", "class Reader:")
LONG: Final = "    if line.startswith('#'):\n        continue\n" * 20
INSTALLED: Final = os.environ.get("PYSPAC_WALK")
PYSPAC: Final = [INSTALLED] if INSTALLED else [sys.executable, "-m", "pyspac"]


def variables(folder: Path) -> dict[str, str]:
    """An installed pyspac gets nothing of a checkout."""
    if INSTALLED:
        return {"PATH": str(Path(INSTALLED).parent), "HOME": str(folder), "LANG": "C.UTF-8", "TERM": "xterm"}
    return environment(folder) | {"HOME": str(folder)}


def pyspac(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [*PYSPAC, *arguments], env=variables(folder), cwd=folder, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.model
@pytest.mark.timeout(900)
def test_the_walk(tmp_path: Path, record_property: Any) -> None:
    """Demo, two answers, a server, clients, `top`, `fit`, stop, start again: the prompt is still there."""
    steps: dict[str, float] = {}
    with timed("demo", steps):
        pyspac(tmp_path, "demo")
    with timed("chat", steps):
        talk(tmp_path)
    port = free_port()
    with timed("server, client, top", steps), served(port, tmp_path):
        first = ask(port)
        ask_as_agents(port)
        board = json.loads(pyspac(tmp_path, "top", f"server-{port}", "--once", "--json"))["board"]
        assert board == f"server-{port}"
        n_long = n_processed(port, LONG)
        assert n_long > 100
    with timed("fit", steps):
        models = json.loads(pyspac(tmp_path, "fit", str(TARGET), "--ram", "4G", "--json", "-"))["models"]
        assert models[0]["place"] == "memory"
        assert models[0]["decode_tps"] > 0.0
    with timed("start again", steps), served(port, tmp_path):
        assert n_processed(port, LONG) < n_long / 10
        assert ask(port) == first
    record_property("seconds", {name: round(seconds, 1) for name, seconds in steps.items()})
    print(", ".join(f"{name} {seconds:.1f} s" for name, seconds in steps.items()))
    assert sum(steps.values()) < 600


@contextmanager
def timed(name: str, steps: dict[str, float]) -> Iterator[None]:
    start_s = time.monotonic()
    yield
    steps[name] = time.monotonic() - start_s


def talk(folder: Path) -> None:
    """Two questions on a terminal."""
    argv = ("chat", str(TARGET), "-n", "24", "--ignore-eos")
    with on_terminal(*argv, variables=variables(folder), program=PYSPAC) as terminal:
        for question in QUESTIONS:
            terminal.wait_for(LINE_WANTED)
            terminal.press(question)
            terminal.wait_for(question[-5:])
            terminal.press(ENTER)
            assert len(terminal.wait_for("tokens are reached]")) > 20
        terminal.wait_for(LINE_WANTED)
        terminal.press(CTRL_D)
        assert terminal.exit_code() == 0


@contextmanager
def served(port: int, folder: Path) -> Iterator[None]:
    """A server that keeps prompts, which ends by SIGTERM, with everything finished."""
    argv = [*PYSPAC, "serve", str(TARGET), "--port", str(port), "--keep", str(folder / "kept")]
    with (
        (folder / "log").open("a") as log,
        subprocess.Popen(argv, env=variables(folder), cwd=folder, stderr=log) as process,
    ):
        try:
            wait_for("the server", lambda: is_healthy(HOST, port), LIMIT_S)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT_S) == 0


def n_processed(port: int, prompt: str) -> int:
    """Tokens that the server computed of a prompt, by its own count."""

    def n_so_far() -> int:
        with urllib.request.urlopen(f"http://{HOST}:{port}/metrics") as answer:
            text = answer.read().decode()
        found = re.search(r"(?m)^llamacpp:prompt_tokens_total (\d+)", text)
        assert found, text
        return int(found[1])

    before = n_so_far()
    post(port, "/v1/completions", {"prompt": prompt, "max_tokens": 4, "temperature": 0})
    return n_so_far() - before


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
