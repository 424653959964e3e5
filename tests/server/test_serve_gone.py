"""Clients that go away: nothing more is computed for them, however busy the server is with others."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from serving import HOST, JSON_HEADER, ONE_THREAD, Serve, assert_nothing_left, llama_server, wait_for

from pyspac.server.health import get_json

# the server asks once a second whether a client is there; a step and this machine's other work come on top
GONE_S = 4.0
LONG = {"prompt": "def parse(", "n_predict": 3000, "ignore_eos": True}  # far longer than that
TWO_SLOTS = ("-np", "2", "--metrics", *ONE_THREAD)
LONGER = (
    "-c",
    "8192",
    "--override-kv",
    "qwen3moe.context_length=int:4096",
)  # than the model was trained with


@contextmanager
def asked(port: int, body: dict[str, Any]) -> Iterator[None]:
    """A request whose client closes its connection at the end of the block."""
    data = json.dumps(body).encode()
    head = "POST /completion HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection((HOST, port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        yield


def ask_and_go(port: int, body: dict[str, Any]) -> None:
    """A request whose client closes its connection at once."""
    with asked(port, body):
        time.sleep(0.05)  # it is read


def read_stream(port: int) -> tuple[int, dict[str, Any]]:
    """A long answer, read as it comes: tokens that came, and its last event."""
    with closing(http.client.HTTPConnection(HOST, port, timeout=120)) as connection:
        connection.request("POST", "/completion", json.dumps({**LONG, "stream": True}), JSON_HEADER)
        lines = [line for line in connection.getresponse() if line.startswith(b"data: ")]
    events = [json.loads(line[len("data: ") :]) for line in lines]
    return sum(len(event["tokens"]) for event in events if not event["stop"]), events[-1]


def n_at_work(port: int) -> int:
    """Slots that compute."""
    return sum(slot["is_processing"] for slot in get_json(HOST, port, "/slots")[1])


def n_deferred(port: int) -> int:
    """Requests that wait for a slot."""
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return int(next(line for line in lines if line.startswith("llamacpp:requests_deferred ")).split()[1])


@contextmanager
def while_another_reads(port: int) -> Iterator[None]:
    """Its answer is under way from the first to the last moment, and whole."""
    with ThreadPoolExecutor() as pool:
        reader = pool.submit(read_stream, port)
        wait_for("an answer to begin", lambda: n_at_work(port) == 1)
        yield
        assert not reader.done()
        n_tokens, last = reader.result()
        assert last["stop"]
        assert last["tokens_predicted"] == LONG["n_predict"] == n_tokens


def test_its_slot_is_free_and_none_waits_for_one(bin_dir: Path, tmp_path: Path) -> None:
    with llama_server(bin_dir, tmp_path, *LONGER, *TWO_SLOTS, draft=False) as port, while_another_reads(port):
        for _ in range(6):
            ask_and_go(port, LONG)
        wait_for("a free slot", lambda: n_deferred(port) == 0 and n_at_work(port) == 1, GONE_S)


def test_who_streams_is_gone_before_a_slot_is_free(bin_dir: Path, tmp_path: Path) -> None:
    one_slot = ("-np", "1", *TWO_SLOTS[2:])
    with llama_server(bin_dir, tmp_path, *LONGER, *one_slot, draft=False) as port, while_another_reads(port):
        for _ in range(6):
            ask_and_go(port, {**LONG, "stream": True})
        wait_for("an empty queue", lambda: n_deferred(port) == 0, GONE_S)


def test_many_short_answers_to_one_request_end_as_well(bin_dir: Path, tmp_path: Path) -> None:
    """They come faster than the server looks for the client."""
    with llama_server(bin_dir, tmp_path, *LONGER, *TWO_SLOTS, draft=False) as port:
        with asked(port, {**LONG, "prompt": ["import os"] * 400, "n_predict": 20}):
            wait_for("answers", lambda: n_deferred(port) > 0)
        wait_for("their end", lambda: n_deferred(port) == n_at_work(port) == 0, GONE_S)


def test_a_drain_does_not_wait_for_them(tmp_path: Path) -> None:
    with Serve(tmp_path, "--drain", "120", "-c", "2048", passed=TWO_SLOTS, draft=False) as serve:
        port = serve.wait_ready().port
        ask_and_go(port, {**LONG, "prompt": ["import os"] * 400, "n_predict": 200})
        serve.process.send_signal(signal.SIGTERM)
        begin_s = time.monotonic()
        assert serve.wait() == 0
        assert time.monotonic() - begin_s < 10
        assert_nothing_left(serve)
