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

import pytest
from fake_rpc import HOST, fake_server, says

from pyspac.engine import devices, rpc
from pyspac.errors import ConfigError, UsageError
from tools.rpc_servers import rpc_server, start_rpc_server
from tools.served import free_port


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


def test_without_a_split_a_stock_server_will_do() -> None:
    """It is not asked for what only a split needs."""
    with fake_server(says(7, 0, 0)) as (endpoint, _):
        assert not rpc.greet(endpoint).can_skip
        assert list(devices.servers_that_fail(endpoint)) == [endpoint]


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


def test_a_server_that_is_stopped_is_the_one_that_is_named() -> None:
    """SIGSTOP: the kernel takes the connection, nobody answers. Two are asked in the time of one."""
    with rpc_server() as port, start_rpc_server(stopped_port := free_port()) as stopped:
        good, bad = f"{HOST}:{port}", f"{HOST}:{stopped_port}"
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            with pytest.raises(UsageError) as caught:
                rpc.greet(bad, 0.5)
            failing = devices.servers_that_fail(f"{good},{bad}")
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
    assert bad in str(caught.value)
    assert list(failing) == [bad]


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


ENDPOINTS = ("host", "host:", "host:0", "host:65536", ":x", "a:b:c", "host:-1", ":5")


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_what_is_no_endpoint(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="give HOST:PORT"):
        rpc.greet(endpoint)


@pytest.mark.parametrize("endpoint", [f"{HOST}:1", "no.such.host.invalid:50052", "a..b:50052"])
def test_nobody_there(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="connecting failed"):
        rpc.greet(endpoint)
