"""RPC servers that are none of ours: what they answer is given, what they are sent is kept."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

HOST = "127.0.0.1"
GREETING_BYTES = 1 + 8 + 24


def answer(major: int, minor: int, patch: int) -> bytes:
    """To the greeting."""
    return struct.pack("<Q4B24x", 28, major, minor, patch, 0)


@contextmanager
def fake_server(serve: Callable[[socket.socket], None]) -> Iterator[tuple[str, bytearray]]:
    """Its address, and all that clients sent. One at a time: it reads the greeting, and calls `serve`."""
    received = bytearray()
    with socket.create_server((HOST, 0)) as listener:

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    with client, contextlib.suppress(OSError):
                        received.extend(client.recv(GREETING_BYTES, socket.MSG_WAITALL))
                        serve(client)
                        while data := client.recv(1 << 16):
                            received.extend(data)

        threading.Thread(target=run, daemon=True).start()
        yield f"{HOST}:{listener.getsockname()[1]}", received


def says(major: int, minor: int, patch: int) -> Callable[[socket.socket], None]:
    """`serve` of a server that says it is of this version."""
    return lambda client: client.sendall(answer(major, minor, patch))
