"""llama.cpp's RPC servers on this machine, as devices that are no CPU: for tests and benchmarks."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tools.served import free_port

START_S = 20.0


def wait_until_it_listens(server: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert server.poll() is None, f"the RPC server ended with {server.returncode}"
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError(f"no RPC server on port {port} after {START_S} s")


@contextmanager
def start_rpc_server(port: int, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A fresh one, with further `arguments`, which is stopped by its own process id."""
    from pyspac._native import bin_dir

    command = [
        str(bin_dir() / "ggml-rpc-server"),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--threads",
        "1",
        *arguments,
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_it_listens(server, port)
        yield server
    finally:
        server.terminate()
        server.wait(10)


@contextmanager
def rpc_server() -> Iterator[int]:
    """The port of a fresh server."""
    port = free_port()
    with start_rpc_server(port):
        yield port
