"""Running servers in tests: what tools/served.py has, and that nothing of it stays."""

from __future__ import annotations

import psutil

from pyspac.server import board_file
from pyspac.server.health import choose_port
from tools.served import (
    DRAFT,
    HOST,
    JSON_HEADER,
    ONE_THREAD,
    ROOT,
    TARGET,
    Serve,
    complete,
    environment,
    free_port,
    llama_server,
    post,
    run_pyspac,
    wait_for,
)

__all__ = [
    "DRAFT",
    "HOST",
    "JSON_HEADER",
    "ONE_THREAD",
    "ROOT",
    "TARGET",
    "Serve",
    "assert_nothing_left",
    "complete",
    "environment",
    "free_port",
    "llama_server",
    "post",
    "run_pyspac",
    "wait_for",
]


def has_ended(pid: int) -> bool:
    """Whether no process of this id runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def assert_nothing_left(serve: Serve) -> None:
    """No child, no board, no listener of a `pyspac serve` that ended."""
    started = [event["pid"] for event in serve.events if event.get("event") == "scheduler_started"]
    servers = [event["server_pid"] for event in serve.events if event.get("event") == "ready"]
    for pid in started + servers:
        wait_for(f"the end of process {pid}", lambda pid=pid: has_ended(pid), 10)
    for event in serve.events:
        if event.get("event") == "ready":
            assert not board_file.path_of(event["board"]).exists()
            assert choose_port(HOST, int(event["url"].rpartition(":")[2]))
