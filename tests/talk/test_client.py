"""The client against a small server on a UNIX socket: whole answers, streams, refusals, cut-offs."""

from __future__ import annotations

import json
import os
import signal
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from pyspac.errors import ConfigError
from pyspac.talk.answer import Answer, complete
from pyspac.talk.client import KEY_VARIABLE, UNIX, Client, LostError, RefusedError
from pyspac.talk.conversation import n_ctx_of
from pyspac.talk.interrupt import Interrupt

seen: list[tuple[str, str | None]] = []  # path and key of each request


class Handler(BaseHTTPRequestHandler):
    """Each path answers in its own way."""

    def do_GET(self) -> None:
        seen.append((self.path, self.headers.get("Authorization")))
        if self.path == "/hang":
            time.sleep(20)
        self._json(200, {"path": self.path})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        match self.path:
            case "/echo":
                self._json(200, body)
            case "/refuse":
                error = {"code": 400, "message": "too long", "type": "exceed_context_size_error"}
                self._json(400, {"error": error})
            case "/plain":
                self.send_error(500)
            case _:
                self._stream(self.path)

    def _json(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, path: str) -> None:
        self.send_response(200)
        self.end_headers()
        self._event({"content": "a", "stop": False})
        match path:
            case "/stop":
                self._event({"content": "", "stop": True})
            case "/list":
                self._event([1])
            case "/deep":
                self.wfile.write(b"data: " + b"[" * 100_000 + b"\n\n")
            case "/done":
                self.wfile.write(b"data: [DONE]\n\n")
            case "/error":
                self._event({"error": {"message": "broken", "type": "server_error"}})
            case "/slow":
                time.sleep(20)

    def _event(self, event: object) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def log_message(self, *_arguments: object) -> None:
        pass

    def address_string(self) -> str:
        return "unix"


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    path = tmp_path_factory.mktemp("talk") / "s.sock"
    with Server(str(path), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Client(f"{UNIX}{path}")
        server.shutdown()


def test_tokens_that_come_at_once_have_no_time_each() -> None:
    """As of a text that ends before its first character is whole."""
    answer = Answer()
    answer.mark(3)
    assert (answer.n_tokens, answer.tpot_ms, answer.tps) == (3, None, None)


def test_whole_answers(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    assert client.get("/health") == {"path": "/health"}
    assert seen[-1] == ("/health", None)  # its own socket is the key
    assert client.post("/echo", {"a": "ä"}) == {"a": "ä"}


def test_the_first_of_several_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the server takes them."""
    monkeypatch.setenv(KEY_VARIABLE, "one,two\n")
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        Client(f"http://127.0.0.1:{server.server_address[1]}").get("/health")
        server.shutdown()
    assert seen[-1] == ("/health", "Bearer one")


def test_refusals_say_what_the_server_said(client: Client) -> None:
    with pytest.raises(RefusedError, match="too long") as refused:
        client.post("/refuse", {})
    assert (refused.value.status, refused.value.kind) == (400, "exceed_context_size_error")
    assert refused.value.exit_code == 2
    with pytest.raises(RefusedError, match="HTTP 500") as failed:
        client.post("/plain", {})
    assert failed.value.exit_code == 1


@pytest.mark.parametrize("path", ["/stop", "/done"])
def test_a_stream_ends_as_it_says(client: Client, path: str) -> None:
    events = list(client.stream(path, {}))
    assert events[0] == {"content": "a", "stop": False}
    assert len(events) == (2 if path == "/stop" else 1)


def test_a_stream_that_is_cut_off_is_an_error(client: Client) -> None:
    with pytest.raises(LostError, match="middle of an answer"):
        list(client.stream("/cut", {}))
    with pytest.raises(RefusedError, match="broken"):
        list(client.stream("/error", {}))


def test_a_server_that_is_no_llama_server(client: Client) -> None:
    with pytest.raises(LostError, match="does not answer as a llama-server does"):
        list(client.stream("/list", {}))
    with pytest.raises(LostError, match="recursion"):
        list(client.stream("/deep", {}))
    with pytest.raises(LostError, match="IndexError"), client.understood():
        _ = client.post("/echo", {"events": []})["events"][0]
    with pytest.raises(LostError, match="KeyError"):
        complete(_Elsewhere(client.address, "/done"), "x", lambda text: None, Interrupt())
    with pytest.raises(LostError, match="KeyError"):
        n_ctx_of(client)


class _Elsewhere(Client):
    """Whatever is asked for, one path answers."""

    def __init__(self, address: str, path: str) -> None:
        super().__init__(address)
        self._path = path

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        return super().stream(self._path, body)


def test_ctrl_c_ends_a_question_that_is_no_answer(client: Client) -> None:
    interrupt = Interrupt()
    threading.Timer(0.2, lambda: interrupt._handle(2, None)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), interrupt.ends(client):
        client.get("/hang")
    assert time.monotonic() - start < 10
    with pytest.raises(KeyboardInterrupt), interrupt.ends(client):
        pass


def test_cancel_ends_a_stream_quietly_and_at_once(client: Client) -> None:
    start = time.monotonic()
    events = []
    for event in client.stream("/slow", {}):
        events.append(event)
        threading.Timer(0.1, client.cancel).start()
    assert len(events) == 1
    assert time.monotonic() - start < 10
    client.resume()


def test_a_cancel_just_before_a_request_ends_it(client: Client) -> None:
    """Ctrl-C between the beginning of a wait and its request."""
    client.cancel()
    with pytest.raises(LostError, match="cancelled"):
        client.get("/hang")
    assert list(client.stream("/slow", {})) == []
    client.resume()
    assert client.get("/health") == {"path": "/health"}


def test_ctrl_c_before_it_connects() -> None:
    """A busy machine takes its time from the request's beginning to there: nothing is waited for."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = Client(f"https://127.0.0.1:{server.getsockname()[1]}")
        client.cancel()
        with pytest.raises(LostError, match="cancelled"):
            client.get("/health")


def test_ctrl_c_while_it_connects() -> None:
    """To a port that takes connections and says nothing: TLS waits there."""
    with socket.create_server(("127.0.0.1", 0)) as server, Interrupt.watch() as interrupt:
        client = Client(f"https://127.0.0.1:{server.getsockname()[1]}")
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt), interrupt.ends(client):
            client.get("/health")
    assert time.monotonic() - start < 5


def test_cancel_where_the_server_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = Client(f"http://127.0.0.1:{server.getsockname()[1]}")

        def reset() -> None:
            theirs, _ = server.accept()
            theirs.recv(4096)
            theirs.sendall(b"HTTP/1.1 200 OK\r\n\r\ndata: {}\n\n")
            is_read.wait(5)
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            theirs.close()

        is_read, thread = threading.Event(), threading.Thread(target=reset)
        thread.start()
        for _ in client.stream("/", {}):
            is_read.set()
            thread.join()
            client.cancel()


def test_nobody_answers(tmp_path: Path) -> None:
    nobody = Client(f"{UNIX}{tmp_path / 'none.sock'}")
    with pytest.raises(LostError, match="does not answer"):
        nobody.get("/health")
    with pytest.raises(LostError, match="does not answer"):
        list(nobody.stream("/completion", {}))


@pytest.mark.parametrize(
    "address", ["http://h:99999", "http://[::1", "", "localhost:8080", "ftp://host", "http://"]
)
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(ConfigError, match="--server"):
        Client(address)
