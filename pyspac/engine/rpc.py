"""Asks an RPC server which version it is, before llama.cpp talks to it.

In: "HOST:PORT". Out: a `Greeting`, or an error that names this server. llama.cpp's own client waits for the
answer without end and aborts the process where it does not like it; a server takes one client at a time, so
the connection is closed again at once. Nothing but the greeting of ggml-rpc's protocol is sent.
"""

from __future__ import annotations

import socket
import struct
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from pyspac.errors import ConfigError, UsageError

# Connecting, and the answer. A server that is free answers in the time of a round trip; one that has just
# lost its client first ends what that had asked for, mostly a graph of less than a second.
DEADLINE_S: Final = 10.0

# of ggml-rpc (patches/README.md): | command, 1 byte | size, 8 bytes | data |, and | size, 8 bytes | data |
_HELLO: Final = 14
_CAPABILITIES: Final = bytes(24)  # none, RDMA's among them
_REQUEST: Final = struct.pack("<BQ", _HELLO, len(_CAPABILITIES)) + _CAPABILITIES
_ANSWER: Final = struct.Struct("<Q3Bx24x")  # size; major, minor and patch of the protocol's version
_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER
_WANTED: Final = "HOST:PORT, such as 192.168.1.7:50052; several with commas"
_WANTED_IPV4: Final = (
    "HOST:PORT with an IPv4 address, or a name that has one, as llama.cpp's RPC knows no IPv6; several with "
    "commas"
)
PROTOCOL: Final = (7, 0)  # RPC_PROTO_MAJOR_VERSION and _MINOR_VERSION of ggml-rpc.h
SKIPS_NEGATIVE_IDS: Final = 1  # the patch level from which a server does (patches/upstream/0005)


class NoAnswerError(UsageError):
    """There is no server at an address, or it does not answer: later it may."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a server says of itself, and how long the answer took, in seconds."""

    endpoint: str
    major: int
    minor: int
    patch: int
    seconds: float

    @property
    def version(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"

    @property
    def can_skip(self) -> bool:
        """Whether an expert may be elsewhere; a stock server would be ended by the first such id."""
        return self.patch >= SKIPS_NEGATIVE_IDS

    def check_can_skip(self) -> None:
        """Raise UsageError if a split cannot use this server."""
        if not self.can_skip:
            raise UsageError(
                f"the RPC server at {self.endpoint} is not of this build (protocol {self.version}): it "
                "cannot skip absent experts; start this build's ggml-rpc-server there, or leave it out"
            )


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port. Raises ConfigError if it is not HOST:PORT, or an IPv6 address.

    ggml splits at the first colon, and aborts the process where what is left is no port.
    """
    host, _, port = endpoint.rpartition(":")
    if set(host) & set(":[]"):
        raise ConfigError("--rpc", endpoint, _WANTED_IPV4)
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 65536:
        raise ConfigError("--rpc", endpoint, _WANTED)
    return host, int(port)


def split_endpoints(rpc: str) -> list[str]:
    """The servers of "HOST:PORT,HOST:PORT". Raises ConfigError if one is none."""
    endpoints = [endpoint.strip() for endpoint in rpc.split(",")]
    for endpoint in endpoints:
        split_endpoint(endpoint)
    return endpoints


def greet(endpoint: str, deadline_s: float = DEADLINE_S, *, hold: ExitStack | None = None) -> Greeting:
    """Ask the server for its version.

    `hold`: who closes the connection; until then the server is silent to all others. Raises NoAnswerError
    without an answer within `deadline_s` seconds, UsageError where it is not that of a server of this
    protocol.
    """
    host, port = split_endpoint(endpoint)
    start_s = time.monotonic()
    try:
        address = socket.gethostbyname(host)  # IPv4, as ggml does
        with ExitStack() as own:
            connection = (hold or own).enter_context(socket.create_connection((address, port), deadline_s))
            answer = _ask(connection, endpoint, start_s + deadline_s)
    except TimeoutError:
        raise _silent(endpoint, deadline_s) from None
    except (OSError, UnicodeError) as error:
        raise NoAnswerError(
            f"--rpc cannot be {endpoint!r}: give the address of a running ggml-rpc-server (connecting "
            f"failed: {error})"
        ) from error
    return _read(answer, endpoint, time.monotonic() - start_s)


def _ask(connection: socket.socket, endpoint: str, end_s: float) -> bytes:
    """The answer. Raises TimeoutError after `end_s`, NoAnswerError where the server ends the connection."""
    answer = b""
    try:
        connection.sendall(_REQUEST)
        while len(answer) < _ANSWER.size:
            connection.settimeout(max(1e-3, end_s - time.monotonic()))
            piece = connection.recv(_ANSWER.size - len(answer))
            if not piece:
                raise NoAnswerError(_no_server(endpoint, "it closed the connection"))
            answer += piece
    except TimeoutError:
        # reset: a stock server that comes to this connection later would be ended by answering it
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        raise
    except ConnectionError as error:
        raise NoAnswerError(_no_server(endpoint, str(error))) from error
    return answer


def _read(answer: bytes, endpoint: str, seconds: float) -> Greeting:
    size, major, minor, patch = _ANSWER.unpack(answer)
    if size != _ANSWER.size - 8:
        raise UsageError(_no_server(endpoint, f"its answer has {size} bytes"))
    found = Greeting(endpoint, major, minor, patch, seconds)
    if major != PROTOCOL[0] or minor > PROTOCOL[1]:
        raise UsageError(
            f"the RPC server at {endpoint} speaks version {found.version} of the protocol, and this build "
            f"{PROTOCOL[0]}.{PROTOCOL[1]}: start this build's ggml-rpc-server there, or leave it out of --rpc"
        )
    return found


def _silent(endpoint: str, deadline_s: float) -> NoAnswerError:
    return NoAnswerError(
        f"the RPC server at {endpoint} does not answer ({deadline_s:.0f} s): it serves another client, as "
        "it takes one at a time (perhaps this one, by another of its addresses), or it hangs, or the machine "
        "cannot be reached; wait for the other client's end, start the server again, or leave it out of --rpc"
    )


def _no_server(endpoint: str, why: str) -> str:
    return (
        f"what listens at {endpoint} is no ggml-rpc-server of this protocol ({why}): start this build's "
        "there, or leave it out of --rpc"
    )
