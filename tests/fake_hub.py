"""A hub of models on loopback: as much of the Hugging Face hub's API as llama.cpp asks for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from serving import HOST

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Repositories by name, each with files by name; `requests` are the paths that were asked for."""

    daemon_threads = True

    def __init__(self, repos: Mapping[str, Mapping[str, Path]], is_stuck: bool = False) -> None:
        super().__init__((HOST, 0), Handler)
        self.repos = repos
        self.requests: list[str] = []
        self.is_stuck = is_stuck  # files never come
        self.is_damaging = False  # one byte of each file is another
        self.status = 404  # of what is not there
        self.file_status = 200  # of a model's file
        self.page: bytes | None = None  # what is answered to everything
        self.is_over = threading.Event()

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    def answer(self, path: str) -> bytes | None:
        """None: not found."""
        for repo, files in self.repos.items():
            if path == f"/api/models/{repo}/refs":
                return json.dumps({"branches": [{"name": "main", "targetCommit": COMMIT}]}).encode()
            if path == f"/api/models/{repo}/tree/{COMMIT}?recursive=true":
                return json.dumps([_entry(name, file) for name, file in files.items()]).encode()
            for name, file in files.items():
                if path == f"/{repo}/resolve/{COMMIT}/{name}":
                    return self._content(file)
        return None

    def _content(self, file: Path) -> bytes:
        content = bytearray(file.read_bytes())
        content[-1] ^= self.is_damaging
        return bytes(content)


def _entry(name: str, file: Path) -> dict[str, Any]:
    content = file.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    return {"type": "file", "path": name, "size": len(content), "lfs": {"oid": digest, "size": len(content)}}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        self._send(is_head=False)

    def do_HEAD(self) -> None:
        self._send(is_head=True)

    def _send(self, is_head: bool) -> None:
        self.server.requests.append(self.path)
        body = self.server.page or self.server.answer(self.path)
        found = self.server.file_status if "/resolve/" in self.path else 200
        self.send_response(self.server.status if body is None else found)
        body = body or b"{}"
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Accept-Ranges", "none")
        self.end_headers()
        if "/resolve/" in self.path and self.server.is_stuck and not is_head:
            self.server.is_over.wait()
        elif not is_head:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def fake_hub(repos: Mapping[str, Mapping[str, Path]], is_stuck: bool = False) -> Iterator[Hub]:
    """A hub that answers meanwhile."""
    hub = Hub(repos, is_stuck)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.is_over.set()
        hub.shutdown()
        hub.server_close()
        thread.join()
