"""What a server says of itself is asked before anything else is sent, within a deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from fake_rpc import HOST, fake_server, says

from pyspac.engine import devices, engine, rpc, rpc_servers
from pyspac.errors import ConfigError, UsageError
from tools.rpc_servers import rpc_server, start_rpc_server
from tools.served import free_port

STOPPED_S = 3.0


def test_a_server_of_this_build() -> None:
    with rpc_server() as port:
        greeting = rpc.greet(f"{HOST}:{port}")
    assert (greeting.major, greeting.minor) == rpc.PROTOCOL
    assert greeting.can_skip
    greeting.check_can_skip()
    assert 0 < greeting.seconds < rpc.DEADLINE_S


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ((6, 0, 0), "speaks version 6.0.0 of the protocol, and this build 7.0"),
        ((8, 0, 1), "speaks version 8.0.1"),
        ((7, 1, 0), "speaks version 7.1.0"),
        ((7, 0, 0), "is not of this build"),
    ],
)
def test_another_version_is_refused_and_nothing_is_sent(version: tuple[int, int, int], why: str) -> None:
    with fake_server(says(*version)) as (endpoint, received):
        with pytest.raises(UsageError, match=why) as caught:
            devices.choose_device("auto", endpoint)
        assert endpoint in str(caught.value)
    assert received == rpc._REQUEST


def test_without_a_split_a_stock_server_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not asked for what only a split needs. ggml does not connect here: this one cannot compute."""
    added: list[str] = []
    monkeypatch.setattr(engine, "add_rpc", added.append)
    monkeypatch.setattr(rpc_servers, "_KNOWN", {})
    with fake_server(says(7, 0, 0)) as (endpoint, _):
        with pytest.raises(UsageError, match="cannot skip absent experts"):
            devices.choose_device("auto", endpoint)
        assert added == []
        assert list(rpc_servers.servers_that_fail([endpoint])) == [endpoint]
        devices.choose_device("auto", endpoint, is_split=False)
        assert added == [endpoint]


@pytest.mark.parametrize(
    ("serve", "why"),
    [
        (lambda client: client.shutdown(socket.SHUT_RDWR), "it closed the connection"),
        (lambda client: client.sendall(b"HTTP/1.1 400 Bad Request\r\n" + bytes(40)), "its answer has"),
        (lambda client: client.sendall(struct.pack("<Q28x", 27)), "its answer has 27 bytes"),
    ],
)
def test_no_server_of_this_protocol(serve: Callable[[socket.socket], None], why: str) -> None:
    with fake_server(serve) as (endpoint, _), pytest.raises(UsageError, match=why) as caught:
        rpc.greet(endpoint)
    assert f"{endpoint} is no ggml-rpc-server" in str(caught.value)


def test_one_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at once nor bit by bit: the deadline is that of all of it."""

    def drip(client: socket.socket) -> None:
        for _ in range(40):
            client.sendall(b"\0")
            time.sleep(0.1)

    for serve in (lambda client: None, drip):
        with fake_server(serve) as (endpoint, _):
            start = time.monotonic()
            with pytest.raises(UsageError, match="does not answer") as caught:
                rpc.greet(endpoint, 0.5)
            assert 0.4 < time.monotonic() - start < 2
        text = str(caught.value)
        assert endpoint in text
        assert "serves another client" in text
        assert "hangs" in text


def test_servers_that_are_stopped_are_those_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP: the kernel takes the connection, nobody answers. Two are asked in the time of one."""
    monkeypatch.setattr(rpc_servers, "greet", lambda endpoint: rpc.greet(endpoint, STOPPED_S))
    with rpc_server() as port, ExitStack() as stack:
        ports = [free_port() for _ in range(2)]
        stopped = [stack.enter_context(start_rpc_server(port)) for port in ports]
        good, bad = f"{HOST}:{port}", [f"{HOST}:{port}" for port in ports]
        for server in stopped:
            os.kill(server.pid, signal.SIGSTOP)
            stack.callback(os.kill, server.pid, signal.SIGCONT)
        with pytest.raises(rpc.NoAnswerError) as caught:
            rpc.greet(bad[0], 0.5)
        start = time.monotonic()
        failing = rpc_servers.servers_that_fail([bad[0], good, bad[1]])
        assert STOPPED_S <= time.monotonic() - start < 1.7 * STOPPED_S
    assert bad[0] in str(caught.value)
    assert list(failing) == bad
    assert all(endpoint in why for endpoint, why in failing.items())


def test_a_server_that_serves_another_client() -> None:
    with rpc_server() as port, socket.create_connection((HOST, port)) as busy:
        busy.sendall(rpc._REQUEST)
        assert busy.recv(36, socket.MSG_WAITALL)
        with pytest.raises(UsageError, match="serves another client"):
            rpc.greet(f"{HOST}:{port}", 0.5)
        busy.close()
        assert rpc.greet(f"{HOST}:{port}").can_skip  # it lives, and the one that gave up did no harm


def test_a_client_that_goes_while_it_waits_does_not_end_the_server() -> None:
    """It is answered when its turn comes: by SIGPIPE, that was the server's end."""
    with start_rpc_server(port := free_port()) as server, socket.create_connection((HOST, port)) as busy:
        busy.sendall(rpc._REQUEST)
        assert busy.recv(36, socket.MSG_WAITALL)
        for _ in range(2):  # no more may wait
            with socket.create_connection((HOST, port)) as waiting:
                waiting.sendall(rpc._REQUEST)
        busy.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(1)
        assert server.poll() is None
        assert rpc.greet(f"{HOST}:{port}").can_skip


ENDPOINTS = ("host", "host:", "host:0", "host:65536", ":x", "a:b:c", "host:-1", ":5", "host:\u0665", "")
IPV6 = ("[::1]:50052", "::1:50052", "[fe80::1%eth0]:5", "[host]:5", "[::1]", "::1")


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_what_is_no_endpoint(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="give HOST:PORT"):
        rpc.greet(endpoint)


@pytest.mark.parametrize("endpoint", IPV6)
def test_ipv6_is_refused(endpoint: str) -> None:
    """ggml would split it at the first colon, and abort the process."""
    with pytest.raises(ConfigError, match=r"IPv4 address, .* as llama.cpp's RPC knows no IPv6"):
        rpc.split_endpoints(f"{HOST}:1,{endpoint}")


@pytest.fixture
def prefers_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine whose localhost is ::1 first."""
    look_up = socket.getaddrinfo

    def found(host: str, port: int | None, family: int = 0, *args: int, **kwargs: int) -> list[Any]:
        rows = look_up(host, port, family, *args, **kwargs)
        of_ipv6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port or 0, 0, 0))
        return [of_ipv6, *rows] if host == "localhost" and family == 0 else rows

    monkeypatch.setattr(socket, "getaddrinfo", found)


@pytest.mark.usefixtures("prefers_ipv6")
def test_one_server_by_two_names_is_named_twice() -> None:
    with pytest.raises(UsageError, match=f"names {HOST}:5 twice"):
        rpc_servers.places_of(f"localhost:5,{HOST}:5")
    assert len(rpc_servers.places_of(f"localhost:5,{HOST}:6, {HOST}:7")) == 3


@pytest.mark.usefixtures("prefers_ipv6")
@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_who_listens_at_ipv6_alone_is_not_there() -> None:
    """ggml connects by IPv4, and aborts the process where it cannot."""
    with (
        socket.create_server(("::1", 0), family=socket.AF_INET6) as listener,
        pytest.raises(rpc.NoAnswerError, match="connecting failed"),
    ):
        rpc.greet(f"localhost:{listener.getsockname()[1]}", 0.5)


@pytest.mark.parametrize("endpoint", [f"{HOST}:1", "no.such.host.invalid:50052", "a..b:50052"])
def test_nobody_there(endpoint: str) -> None:
    with pytest.raises(rpc.NoAnswerError, match="connecting failed"):
        rpc.greet(endpoint)


def test_whoever_may_come_back_is_told_from_who_is_another_one() -> None:
    """By the error's type: only for the first is it worth to wait."""
    ends = fake_server(lambda client: client.shutdown(socket.SHUT_RDWR))
    with ends as (endpoint, _), pytest.raises(rpc.NoAnswerError):
        rpc.greet(endpoint)
    for serve in (says(6, 0, 0), lambda client: client.sendall(b"HTTP/1.1 400 Bad Request\r\n" + bytes(40))):
        with fake_server(serve) as (endpoint, _), pytest.raises(UsageError) as caught:
            rpc.greet(endpoint)
        assert not isinstance(caught.value, rpc.NoAnswerError)


def test_a_known_server_is_asked_again_unless_it_serves_us(monkeypatch: pytest.MonkeyPatch) -> None:
    # ggml would keep its devices for good, and abort where the next model of this process is loaded
    monkeypatch.setattr(rpc_servers, "_KNOWN", {})
    monkeypatch.setattr(rpc_servers._Server, "device_names", lambda server: [server.greeting.endpoint])
    with rpc_server() as port:
        endpoint = f"{HOST}:{port}"
        names = rpc_servers.add_servers(endpoint, is_split=True)
        with socket.create_connection((HOST, port)):  # our own: a greeting would not be answered
            assert rpc_servers.add_servers(endpoint, is_split=True) == names
        assert rpc_servers.add_servers(endpoint, is_split=True) == names
    with pytest.raises(rpc.NoAnswerError, match=endpoint):
        rpc_servers.add_servers(endpoint, is_split=True)


def test_one_server_by_two_addresses() -> None:
    """It would serve the first connection, and the second would wait for it without end."""
    port = free_port()
    with start_rpc_server(port, "--host", "0.0.0.0"):
        with pytest.raises(rpc.NoAnswerError, match=r"127\.0\.0\.2:.*by another of its addresses"):
            rpc_servers.add_servers(f"127.0.0.1:{port},127.0.0.2:{port}", is_split=True)
        assert rpc.greet(f"127.0.0.2:{port}").can_skip
