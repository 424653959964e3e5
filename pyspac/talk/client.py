"""HTTP to one llama-server: an address in, JSON and streams of JSON out.

An address is `unix:PATH`, or a URL as of `--server`. One request at a time; `cancel` ends it from a signal
handler, and the server stops computing it.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final
from urllib.parse import urlsplit

from pyspac.errors import ConfigError, PyspacError

UNIX: Final = "unix:"
KEY_VARIABLE: Final = "LLAMA_API_KEY"  # llama-server's own
_CONNECT_S: Final = 10.0
_DATA: Final = b"data: "
_DONE: Final = b"[DONE]"
TOO_LONG: Final = "exceed_context_size_error"


class RefusedError(PyspacError):
    """The server answered with an error. `status`: HTTP's; `kind`: llama-server's name of the error."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind
        self.exit_code = 2 if status == http.client.BAD_REQUEST else 1


class LostError(PyspacError):
    """The server does not answer, or ended in the middle of an answer."""


class _CancelledError(http.client.HTTPException):
    """`cancel` came while it connected; no OSError, after which the next address would be tried."""


# of a server that is gone, or none
_BROKEN: Final = (OSError, http.client.HTTPException, ValueError, RecursionError)


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a UNIX socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self._path)


class Client:
    """One server; a connection for each request."""

    def __init__(self, address: str) -> None:
        """Raises ConfigError for an address that is none."""
        self.address = address
        self._prefix = ""
        self._sock: socket.socket | None = None  # of the request under way
        self._is_connecting = False
        self._is_cancelled = False
        self.is_own = address.startswith(UNIX)  # which asks for no key
        if not self.is_own:
            try:
                url = urlsplit(address)
                _ = url.port
            except ValueError:
                url = urlsplit("")
            if url.scheme not in ("http", "https") or not url.hostname:
                raise ConfigError("--server", address, "a URL such as http://127.0.0.1:8080")
            self._prefix = url.path.rstrip("/").removesuffix("/v1")

    def _connect(self) -> http.client.HTTPConnection:
        if self.is_own:
            return _UnixConnection(self.address.removeprefix(UNIX))
        url = urlsplit(self.address)
        assert url.hostname is not None
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        return kind(url.hostname, url.port, timeout=_CONNECT_S)

    def get(self, path: str) -> Any:
        """The JSON of a GET. Raises RefusedError or LostError."""
        return self._whole("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON of a POST. Raises RefusedError or LostError."""
        return self._whole("POST", path, body)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a POST with `stream`, as they come; it just ends after `cancel`.

        Raises RefusedError, or LostError if the server is gone before it has ended the answer.
        """
        connection = self._connect()
        try:
            response = self._send(connection, "POST", path, body)
            while line := response.readline():
                if not line.startswith(_DATA):
                    continue
                data = line.removeprefix(_DATA).strip()
                if data == _DONE:
                    return
                event = json.loads(data)
                if not isinstance(event, dict):
                    raise self.misunderstood(data.decode(errors="replace"))
                if "error" in event:
                    raise _refused(response.status, event)
                yield event
                if event.get("stop") is True:
                    return
            if not self._is_cancelled:
                raise self._lost("it ended in the middle of an answer")
        except _BROKEN as error:
            if not self._is_cancelled:
                raise self._lost(str(error)) from error
        finally:
            self._sock = None
            connection.close()

    def cancel(self) -> None:
        """End the request under way, or the next one, until `resume`; from a signal handler, too."""
        self._is_cancelled = True
        if self._is_connecting:
            self._is_connecting = False
            raise _CancelledError("cancelled")
        sock, self._sock = self._sock, None
        if sock is not None:
            with suppress(OSError):  # the server is gone, too
                sock.shutdown(socket.SHUT_RDWR)

    def resume(self) -> None:
        """Requests may follow after `cancel`."""
        self._is_cancelled = False

    def _whole(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        connection = self._connect()
        try:
            return json.loads(self._send(connection, method, path, body).read() or b"null")
        except _BROKEN as error:
            raise self._lost(str(error)) from error
        finally:
            self._sock = None
            connection.close()

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any] | None
    ) -> http.client.HTTPResponse:
        self._is_connecting = True
        try:
            if self._is_cancelled:  # before that: nothing was there to be ended
                raise _CancelledError("cancelled")
            connection.connect()
        finally:
            self._is_connecting = False
        connection.sock.settimeout(None)
        self._sock = connection.sock
        if self._is_cancelled:
            raise _CancelledError("cancelled")
        headers = {} if body is None else {"Content-Type": "application/json"}
        if not self.is_own and (key := os.environ.get(KEY_VARIABLE)):
            headers["Authorization"] = f"Bearer {key.split(',')[0].strip()}"  # llama-server takes a list
        connection.request(method, self._prefix + path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise _refused(response.status, _json_or_none(response.read()))
        return response

    @contextmanager
    def understood(self) -> Iterator[None]:
        """Inside the block an answer is taken apart; LostError where it is none of llama-server's."""
        try:
            yield
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise self.misunderstood(repr(error)) from error

    def misunderstood(self, what: str) -> LostError:
        return LostError(f"the server at {self.address} does not answer as a llama-server does ({what})")

    def _lost(self, why: str) -> LostError:
        return LostError(f"the server at {self.address} does not answer ({why})")


def _json_or_none(text: bytes) -> Any:
    try:
        return json.loads(text)
    except _BROKEN:
        return None


def _refused(status: int, body: Any) -> RefusedError:
    error = body.get("error", {}) if isinstance(body, dict) else {}
    if not isinstance(error, dict):
        error = {"message": str(error)}
    kind = str(error.get("type", ""))
    message = str(error.get("message") or f"the server refused the request (HTTP {status})")
    if status == http.client.UNAUTHORIZED:
        message += f": set {KEY_VARIABLE} to the server's key"
    return RefusedError(status, kind, f"{message} (-c), or shorten the text" if kind == TOO_LONG else message)
