"""Ports and health of a server on this machine."""

from __future__ import annotations

import errno
import http.client
import json
import socket
import ssl
from contextlib import closing
from typing import Any, Final

from pyspac.errors import ConfigError, UsageError

DEFAULT_PORT: Final = 8080  # llama-server's
_TIMEOUT_S: Final = 2.0
_EVERY_ADDRESS: Final = {"0.0.0.0", "::"}


def choose_port(host: str, port: int | None, field: str = "--port", default: int = DEFAULT_PORT) -> int:
    """Return `port`, or if None the default one; of 0 any free one.

    Raises ConfigError if it is none, UsageError if it cannot be had.
    """
    if port == 0:
        return _any_free(host)
    port = default if port is None else port
    if not 1 <= port <= 65535:
        raise ConfigError(field, port, "a port from 1 to 65535, or 0 for any free one")
    if (error := _why_not(host, port)) is None:
        return port
    if error.errno != errno.EADDRINUSE:
        _any_free(host)  # or it raises: the address is the reason
    reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had ({error.strerror or error})"
    raise UsageError(f"port {port} on {host} {reason}: give another {field}, or 0 for any free one")


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _name, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def _why_not(host: str, port: int) -> OSError | None:
    """None: the port can be listened on."""
    try:
        with closing(_bind(host, port)):
            return None
    except OSError as error:
        return error


def _any_free(host: str) -> int:
    try:
        with closing(_bind(host, 0)) as listener:
            return int(listener.getsockname()[1])
    except OSError as error:
        raise UsageError(
            f"--host {host!r} cannot be listened on ({error}): give an address of this machine"
        ) from error


def overlap(host: str, other: str) -> bool:
    """Whether who listens at one takes the other's ports: the same address by any name, or all of them."""
    one, two = _addresses(host), _addresses(other)
    return bool(one & two or (one | two) & _EVERY_ADDRESS)


def _addresses(host: str) -> set[str]:
    """None, where there is no such host: who listens there says so."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return set()


def reachable_host(host: str) -> str:
    """The address under which this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def get_json(host: str, port: int, path: str, *, is_tls: bool = False) -> tuple[int, Any]:
    """GET a small JSON document; (0, None) without an answer. `is_tls`: with any certificate."""
    connection = http.client.HTTPConnection(reachable_host(host), port, timeout=_TIMEOUT_S)
    if is_tls:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it is a process of our own
        connection = http.client.HTTPSConnection(
            reachable_host(host), port, timeout=_TIMEOUT_S, context=context
        )
    with closing(connection):
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, json.loads(response.read() or b"null")
        except (OSError, http.client.HTTPException, ValueError):
            return 0, None


def is_healthy(host: str, port: int, prefix: str = "", *, is_tls: bool = False) -> bool:
    """Whether a llama-server there has loaded its model."""
    status, _body = get_json(host, port, f"{prefix}/health", is_tls=is_tls)
    return status == 200
