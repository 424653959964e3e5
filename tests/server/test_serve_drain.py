"""SIGTERM: what was begun is answered, what comes then is refused, and the wait has an end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import time
import urllib.error
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest
from serving import (
    HOST,
    JSON_HEADER,
    ONE_THREAD,
    Serve,
    assert_nothing_left,
    complete,
    llama_server,
    post,
    wait_for,
)

from pyspac.server.health import get_json

# with the odds of so many tokens it has some megabytes: more than fits between the server and a client
LONG = {"prompt": "def parse(", "n_predict": 400, "n_probs": 300, "stream": True, "ignore_eos": True}
ALONE = ("-np", "1", *ONE_THREAD)


class Answer:
    """An answer that has begun, and stays under way until `finish` reads it."""

    def __init__(self, port: int, n_predict: int = 400) -> None:
        self.connection = http.client.HTTPConnection(HOST, port, timeout=120)
        self.connection.sock = socket.socket()
        self.connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # the smallest
        self.connection.sock.settimeout(120)
        self.connection.sock.connect((HOST, port))
        self.connection.request(
            "POST", "/completion", json.dumps({**LONG, "n_predict": n_predict}), JSON_HEADER
        )
        self.response = self.connection.getresponse()
        assert self.response.readline().startswith(b"data: ")

    def finish(self) -> bool:
        """Read the rest; whether it is whole."""
        with contextlib.suppress(http.client.HTTPException, ConnectionError):
            return b'"stop":true' in self.last_line()
        return False

    def last_line(self) -> bytes:
        """Read the rest; its last event."""
        with closing(self.connection):
            return [line for line in self.response if line.startswith(b"data: ")][-1]


def is_refused(port: int) -> bool:
    """Whether the server has an answer to a request that says it takes none."""
    try:
        post(port, "/tokenize", {"content": "x"})
    except urllib.error.HTTPError as error:
        return error.code == 503
    return False


def test_answers_under_way_are_finished_and_new_requests_refused(tmp_path: Path) -> None:
    with Serve(tmp_path, "--drain", "120", passed=ALONE, draft=False) as serve:
        answer = Answer(serve.wait_ready().port)
        serve.process.send_signal(signal.SIGTERM)
        wait_for("the drain", lambda: get_json(HOST, serve.port, "/health")[0] == 503)
        wait_for("the end of requests", lambda: is_refused(serve.port))
        assert serve.process.poll() is None
        assert answer.finish()
        assert serve.wait() == 0
        assert_nothing_left(serve)


def test_requests_are_answered_until_routers_have_heard(bin_dir: Path, tmp_path: Path) -> None:
    """The server's own part: one SIGUSR1 is for /health, the second one for all."""
    with llama_server(bin_dir, tmp_path, *ALONE, draft=False) as port:
        pid = next(c.pid for c in psutil.net_connections("tcp") if c.laddr.port == port and c.pid)
        os.kill(pid, signal.SIGUSR1)
        wait_for("the first", lambda: get_json(HOST, port, "/health")[0] == 503)
        wait_for("ours alone", lambda: get_json(HOST, port, "/health")[1]["error"]["n_connections"] == 1)
        assert not is_refused(port)
        os.kill(pid, signal.SIGUSR1)
        wait_for("the second", lambda: is_refused(port))


def test_sigterm_ends_llama_server_while_it_answers(bin_dir: Path, tmp_path: Path) -> None:
    """With several clients that read; each is told why its answer ends."""
    with llama_server(bin_dir, tmp_path, "-np", "4", *ONE_THREAD, draft=False) as port:
        pid = next(c.pid for c in psutil.net_connections("tcp") if c.laddr.port == port and c.pid)
        process = psutil.Process(pid)
        with ExitStack() as stack:
            connections = [stack.enter_context(closing(begin(port))) for _ in range(4)]
            answers = [connection.getresponse() for connection in connections]
            process.terminate()
            last = [[line for line in answer if line.strip()][-1] for answer in answers]
            process.wait(5)
        assert all(b"Shutting down" in line for line in last), last


def test_a_client_that_is_behind_is_told_as_well(bin_dir: Path, tmp_path: Path) -> None:
    """Its answer's thread waits for it when SIGTERM comes, and the server waits for the thread."""
    with llama_server(bin_dir, tmp_path, *ALONE, draft=False) as port:
        pid = next(c.pid for c in psutil.net_connections("tcp") if c.laddr.port == port and c.pid)
        process = psutil.Process(pid)
        answer = Answer(port, n_predict=3000)
        wait_for("more than a client's buffers hold", lambda: n_decoded(port) > 400)
        process.terminate()
        wait_for("the end of the computing", lambda: takes_none(port))
        assert b"Shutting down" in answer.last_line()
        process.wait(5)


def n_decoded(port: int) -> int:
    """Tokens of the answer under way."""
    (slot,) = get_json(HOST, port, "/slots")[1]
    return int(slot["next_token"][0]["n_decoded"])


def takes_none(port: int) -> bool:
    """Whether a request for a token is refused, or the connection."""
    try:
        post(port, "/completion", {"prompt": "x", "n_predict": 1})
    except urllib.error.HTTPError as error:
        return error.code == 503
    except OSError:
        return True
    return False


def begin(port: int) -> http.client.HTTPConnection:
    """An answer that takes a while."""
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    body = {**LONG, "n_predict": 3000, "n_probs": 0}
    connection.request("POST", "/completion", json.dumps(body), JSON_HEADER)
    return connection


@pytest.mark.usefixtures("hears_hangup")
def test_the_terminal_closes(tmp_path: Path) -> None:
    """SIGHUP ends a server, unless it was started by nohup."""
    with Serve(tmp_path, passed=ONE_THREAD, draft=False, within=("nohup",)) as serve:
        serve.wait_ready()
        serve.process.send_signal(signal.SIGHUP)
        time.sleep(1.0)
        assert complete(serve.port, 4)["tokens_predicted"] == 4
        assert serve.stop() == 0
    with Serve(tmp_path, passed=ONE_THREAD, draft=False) as serve:
        serve.wait_ready()
        assert serve.stop(signal.SIGHUP) == 0


@pytest.mark.slow
def test_ctrl_c_waits_for_no_answer(tmp_path: Path) -> None:
    with Serve(tmp_path, passed=ALONE, draft=False) as serve:
        answer = Answer(serve.wait_ready().port)
        assert serve.stop(signal.SIGINT) == 130
        assert not answer.finish()
        assert serve.event("draining") is None


@pytest.mark.parametrize("is_second", [False, True], ids=["over", "second"])
def test_the_wait_has_an_end(tmp_path: Path, is_second: bool) -> None:
    """Its own, which the environment sets in a container's image, or a second signal."""
    arguments, variables = (["--drain", "600"], {}) if is_second else ([], {"PYSPAC_DRAIN": "0.3"})
    with Serve(tmp_path, *arguments, passed=ALONE, draft=False, variables=variables) as serve:
        answer = Answer(serve.wait_ready().port)
        serve.process.send_signal(signal.SIGTERM)
        wait_for("the drain", lambda: serve.event("draining"))
        if is_second:
            serve.process.send_signal(signal.SIGTERM)
        end = f"that are cut off: 1, as --drain {600 if is_second else 0.3} is over"
        wait_for("its end", lambda: any(end in e["message"] for e in serve.events))
        # llama-server waits for a client that does not read: kill it
        time.sleep(0.5)
        serve.process.send_signal(signal.SIGTERM)
        assert serve.wait() in (0, -signal.SIGTERM)  # it did not hang, and this signal met the last moments
        assert not answer.finish()


def test_nobody_waits_for_a_server_without_requests(tmp_path: Path) -> None:
    with Serve(tmp_path, "--drain", "600", passed=ALONE, draft=False) as serve:
        complete(serve.wait_ready().port, 1)
        start_s = time.monotonic()
        assert serve.stop() == 0
        assert time.monotonic() - start_s < 60


def test_a_negative_wait_is_refused(tmp_path: Path) -> None:
    with Serve(tmp_path, "--drain", "-1") as serve:
        assert serve.wait() == 2
        assert "--drain cannot be -1.0: give a number from 0 to 86400" in serve.log()
