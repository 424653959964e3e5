"""Faults of connections: sockets on which no request is ever finished."""

from __future__ import annotations

import contextlib
import socket
import urllib.request
from typing import Final

from tools.served import HOST
from tools.soak.faults.fault import Fault, FaultError

HALVES: Final = (b"", b"GET /hea", b"POST /v1/chat/completions HTTP/1.1\r\nContent-Le")
ANSWER_S: Final = 30.0  # for another's request meanwhile, on a busy machine


class HalfOpen(Fault):
    name, resource = "half-open", "connections"
    what = "opens connections that send half a request and stay; others must be answered meanwhile"

    def apply(self) -> bool:
        with contextlib.ExitStack() as stack:
            for _ in range(self.rng.choice((4, 16, 60, 200))):
                try:
                    connection = socket.create_connection((HOST, self.site.serve.port), timeout=ANSWER_S)
                except OSError as error:
                    raise FaultError(f"a connection was refused: {error}") from error
                stack.enter_context(contextlib.closing(connection))
                with contextlib.suppress(OSError):  # the server may close it when it likes
                    connection.sendall(self.rng.choice(HALVES))
            self._ask()
            self.site.wait(self.rng.uniform(0.3, 5))
        return True

    def _ask(self) -> None:
        try:
            with urllib.request.urlopen(f"{self.site.serve.url}/health", timeout=ANSWER_S) as response:
                response.read()
        except OSError as error:
            text = f"/health did not answer within {ANSWER_S:.0f} s beside half-open connections"
            raise FaultError(f"{text}: {error}") from error
