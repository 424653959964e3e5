"""RPC servers as devices: "HOST:PORT,HOST:PORT" in, the names of devices that ggml then has out.

ggml keeps them for good, and aborts the process where it cannot connect, so each server is asked first.
"""

from __future__ import annotations

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import psutil

from pyspac.engine.rpc import Greeting, greet, split_endpoint, split_endpoints
from pyspac.errors import PyspacError, UsageError

Place: TypeAlias = tuple[str, int]  # IPv4 address and port


def add_servers(rpc: str, *, is_split: bool) -> list[str]:
    """Register the devices of all servers; their names.

    `is_split`: they have to be of this build. Raises ConfigError for what is no list of servers, UsageError
    for one that is named twice or does not fit, NoAnswerError for one that is not there.
    """
    with ExitStack() as hold:  # all at once, so that one with two addresses is silent at the second
        servers = {place: _ask(place, endpoint, hold) for place, endpoint in places_of(rpc).items()}
    for server in servers.values() if is_split else ():
        server.greeting.check_can_skip()
    _KNOWN.update(servers)
    return [name for server in servers.values() for name in server.device_names()]


def places_of(rpc: str) -> dict[Place, str]:
    """The servers of "HOST:PORT,HOST:PORT" by their place.

    Raises ConfigError if one is none, UsageError if one is named twice: it takes one client at a time, and
    the second of our own connections would wait for the first.
    """
    found: dict[Place, str] = {}
    for endpoint in split_endpoints(rpc):
        place = _place(endpoint)
        if place in found:
            raise UsageError(f"--rpc {rpc} names {endpoint} twice: name each server once")
        found[place] = endpoint
    return found


def servers_that_fail(endpoints: list[str]) -> dict[str, str]:
    """Those that do not answer as servers of this build do, and why.

    All are asked at once, as each may take as long as `greet` waits.
    """

    def why(endpoint: str) -> str:
        try:
            greet(endpoint).check_can_skip()
        except PyspacError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(endpoints)) as pool:
        return {e: reason for e, reason in zip(endpoints, pool.map(why, endpoints), strict=True) if reason}


def _place(endpoint: str) -> Place:
    """The same for all ways to spell it. Raises ConfigError if it is no endpoint."""
    host, port = split_endpoint(endpoint)
    with contextlib.suppress(OSError, UnicodeError):
        host = socket.gethostbyname(host)
    return host, port


@dataclass(slots=True)
class _Server:
    """One that has answered."""

    greeting: Greeting
    names: list[str] = field(default_factory=list)  # of its devices; []: ggml does not know it yet

    def device_names(self) -> list[str]:
        """Of its devices, which ggml keeps; it aborts the process where it cannot connect."""
        from pyspac.engine import engine

        if not self.names:
            n_before = engine.device_count()
            engine.add_rpc(self.greeting.endpoint)
            self.names = [info.name for info in engine.devices()[n_before:]]
        return self.names


_KNOWN: Final[dict[Place, _Server]] = {}


def _ask(place: Place, endpoint: str, hold: ExitStack) -> _Server:
    """Greets it, unless it serves this process just now: it takes no one else meanwhile."""
    known = _KNOWN.get(place)
    if known is not None and _serves_us(place):
        return known
    greeting = greet(endpoint, hold=hold)
    return _Server(greeting) if known is None else replace(known, greeting=greeting)


def _serves_us(place: Place) -> bool:
    connections = psutil.Process().net_connections("tcp4")
    return any(c.raddr == place and c.status == psutil.CONN_ESTABLISHED for c in connections)
