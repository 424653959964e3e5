"""Requests that name a slot of the server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from serving import HOST, ONE_THREAD, Serve, post

from pyspac.server.health import get_json
from tools.served import wait_for


def ask(serve: Serve, prompt: str, n_predict: int) -> list[int]:
    body = {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "ignore_eos": True, "id_slot": 0}
    answer: dict[str, Any] = post(serve.port, "/completion", body | {"return_tokens": True})
    return [int(token) for token in answer["tokens"]]


def n_written(serve: Serve) -> int:
    """Tokens that slot 0 has answered with so far, while it is at work."""
    _, slots = get_json(HOST, serve.port, "/slots")
    return int(slots[0]["next_token"][0]["n_decoded"]) if slots[0]["is_processing"] else 0


def test_a_busy_slot_is_left_alone(tmp_path: Path) -> None:
    """Two texts for one slot: the second one waits, and the prompt cache does not touch the first one's."""
    long, short = "def parse(self, text):\n", "import os\nimport sys\n\n\nclass Reader:\n"
    with Serve(tmp_path, "-c", "2048", passed=("-np", "2", *ONE_THREAD), draft=False) as serve:
        serve.wait_ready()
        alone, after = ask(serve, long, 400), ask(serve, short, 20)
        with ThreadPoolExecutor() as pool:
            first = pool.submit(ask, serve, long, 400)
            wait_for("the first answer to begin", lambda: n_written(serve) > 3)
            second = pool.submit(ask, serve, short, 20)
            assert first.result() == alone
            assert second.result() == after
