"""Requests that name a slot of the server."""

from __future__ import annotations

import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
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


@pytest.mark.parametrize("draft", [False, True])
def test_a_slot_is_saved_whole_or_not_at_all(tmp_path: Path, draft: bool) -> None:
    """On a full disk what was saved before stays, and nothing broken beside it."""
    folder = tmp_path / "slots"
    folder.mkdir()
    passed = ("-np", "1", "--slot-save-path", str(folder), *ONE_THREAD)
    with Serve(tmp_path, "-c", "1024", passed=passed, draft=draft) as serve:
        serve.wait_ready()
        ask(serve, "def parse(self, text):\n", 40)
        n_saved = post(serve.port, "/slots/0?action=save", {"filename": "a"})["n_saved"]
        saved = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert set(saved) == ({"a", "a.dft"} if draft else {"a"})
        ask(serve, "import os\nimport sys\n", 40)
        for name in saved:
            (folder / f"{name}.tmp").symlink_to("/dev/full")
            with pytest.raises(urllib.error.HTTPError) as refused:
                post(serve.port, "/slots/0?action=save", {"filename": "a"})
            assert "is the disk full?" in refused.value.read().decode()
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == saved
        assert post(serve.port, "/slots/0?action=restore", {"filename": "a"})["n_restored"] == n_saved


@pytest.mark.parametrize("draft", [False, True])
def test_a_saved_slot_that_ends_early_is_refused(tmp_path: Path, draft: bool) -> None:
    """Wherever it ends; the server goes on, and takes a whole one."""
    folder = tmp_path / "slots"
    folder.mkdir()
    passed = ("-np", "1", "--slot-save-path", str(folder), *ONE_THREAD)
    with Serve(tmp_path, "-c", "1024", passed=passed, draft=draft) as serve:
        serve.wait_ready()
        tokens = ask(serve, "def parse(self, text):\n", 40)
        n_saved = post(serve.port, "/slots/0?action=save", {"filename": "a"})["n_saved"]
        whole = {path: path.read_bytes() for path in folder.iterdir()}
        for path, content in whole.items():
            for n_bytes in (0, 8, 12, 100, len(content) // 2, len(content) - 1):
                path.write_bytes(content[:n_bytes])
                with pytest.raises(urllib.error.HTTPError) as refused:
                    post(serve.port, "/slots/0?action=restore", {"filename": "a"})
                assert refused.value.code == 400
                assert ask(serve, "def parse(self, text):\n", 40) == tokens
            path.write_bytes(content)
        assert post(serve.port, "/slots/0?action=restore", {"filename": "a"})["n_restored"] == n_saved


def n_deferred(serve: Serve) -> int:
    """Requests that wait for a slot."""
    with urllib.request.urlopen(f"http://{HOST}:{serve.port}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return int(next(line for line in lines if line.startswith("llamacpp:requests_deferred ")).split()[1])


def test_who_waits_behind_a_request_that_is_refused_is_answered(tmp_path: Path) -> None:
    """No slot is released for it."""
    with Serve(tmp_path, "-c", "1024", passed=("-np", "1", *ONE_THREAD), draft=False) as serve:
        serve.wait_ready()
        with ThreadPoolExecutor() as pool:
            first = pool.submit(ask, serve, "import os", 900)
            wait_for("the first answer to begin", lambda: n_written(serve) > 3)
            wrong = pool.submit(post, serve.port, "/completion", {"prompt": "x", "grammar": "root ::= ("})
            wait_for("the wrong one", lambda: n_deferred(serve) == 1)
            third = pool.submit(post, serve.port, "/completion", {"prompt": "import re", "n_predict": 4})
            wait_for("the one behind", lambda: n_deferred(serve) == 2)
            assert len(first.result()) == 900
            wait_for("its answer", third.done, 30)
            assert isinstance(wrong.exception(), urllib.error.HTTPError)
