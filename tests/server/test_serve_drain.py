"""SIGTERM: what was begun is answered, what comes then is refused, and the wait has an end."""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from serving import HOST, ONE_THREAD, Serve, assert_nothing_left, complete, post, wait_for

from pyspac.server.health import get_json

N_LONG = 480  # about all that the demo model has room for
LONG = {"prompt": "def parse(", "n_predict": N_LONG, "temperature": 0, "ignore_eos": True, "stream": True}
ALONE = ("-np", "1", *ONE_THREAD)


class Answer(threading.Thread):
    """A streamed answer of many tokens, read in a thread."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.port = port
        self.events: list[dict[str, Any]] = []
        self.has_begun = threading.Event()
        self.start()

    def run(self) -> None:
        with closing(http.client.HTTPConnection(HOST, self.port, timeout=120)) as connection:
            connection.request("POST", "/completion", json.dumps(LONG))
            try:
                for line in connection.getresponse():
                    if line.startswith(b"data: "):
                        self.events.append(json.loads(line.removeprefix(b"data: ")))
                        self.has_begun.set()
            except http.client.HTTPException:
                pass  # cut off

    @property
    def is_whole(self) -> bool:
        return bool(self.events) and bool(self.events[-1].get("stop"))


def begin(serve: Serve) -> Answer:
    answer = Answer(serve.wait_ready().port)
    assert answer.has_begun.wait(60)
    return answer


def test_answers_under_way_are_finished_and_new_requests_refused(tmp_path: Path) -> None:
    with Serve(tmp_path, "--drain", "120", passed=ALONE, draft=False) as serve:
        answers = [begin(serve)]
        answers += [Answer(serve.port) for _ in range(7)]  # they wait for the one server slot
        wait_for("them", lambda: "requests_deferred 7" in metrics(serve.port))
        serve.process.send_signal(signal.SIGTERM)
        wait_for("the drain", lambda: get_json(HOST, serve.port, "/health")[0] == 503)
        assert post(serve.port, "/tokenize", {"content": "x"})["tokens"]  # routers first have to see it
        wait_for("the end of requests", lambda: refused(serve.port))
        assert not answers[-1].is_whole  # so all of this happened meanwhile
        assert serve.wait(120) == 0
        for answer in answers:
            answer.join(10)
            assert answer.is_whole
            assert answer.events[-1]["tokens_predicted"] == N_LONG
        assert_nothing_left(serve)


def metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=10) as response:
        return str(response.read().decode())


def refused(port: int) -> bool:
    """Whether the server has an answer to a request that says it takes none."""
    try:
        post(port, "/tokenize", {"content": "x"})
    except urllib.error.HTTPError as error:
        return error.code == 503
    return False


@pytest.mark.slow
def test_ctrl_c_waits_for_no_answer(tmp_path: Path) -> None:
    with Serve(tmp_path, passed=ALONE, draft=False) as serve:
        answer = begin(serve)
        assert serve.stop(signal.SIGINT) == 130
        answer.join(10)
        assert not answer.is_whole
        assert serve.event("draining") is None


@pytest.mark.parametrize("seconds", [0.3, 600])
def test_the_wait_has_an_end(tmp_path: Path, seconds: float) -> None:
    """Its own, or a second signal."""
    with Serve(tmp_path, "--drain", str(seconds), passed=ALONE, draft=False) as serve:
        answer = begin(serve)
        serve.process.send_signal(signal.SIGTERM)
        wait_for("the drain", lambda: serve.event("draining"))
        if seconds > 1:
            serve.process.send_signal(signal.SIGTERM)
        wait_for("its end", lambda: any("cut off" in event["message"] for event in serve.events))
        time.sleep(0.5)
        if serve.process.poll() is None:  # llama-server may hang with an answer under way: kill it at once
            serve.process.send_signal(signal.SIGTERM)
        assert serve.wait() == 0
        answer.join(10)
        assert not answer.is_whole


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
