"""SIGTERM: what was begun is answered, what comes then is refused, and the wait has an end."""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
import urllib.error
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from serving import HOST, ONE_THREAD, Serve, assert_nothing_left, complete, wait_for

from pyspac.server.health import get_json

LONG = {"prompt": "def parse(", "n_predict": 600, "temperature": 0, "ignore_eos": True}
ALONE = ("-np", "1", *ONE_THREAD)


class Answer(threading.Thread):
    """A streamed answer of many tokens, read in a thread."""

    def __init__(self, port: int, n_predict: int = 600) -> None:
        super().__init__(daemon=True)
        self.port = port
        self.body = LONG | {"n_predict": n_predict, "stream": True}
        self.events: list[dict[str, Any]] = []
        self.has_begun = threading.Event()
        self.start()

    def run(self) -> None:
        with closing(http.client.HTTPConnection(HOST, self.port, timeout=120)) as connection:
            connection.request("POST", "/completion", json.dumps(self.body))
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


def begin(serve: Serve, n_predict: int = 600) -> Answer:
    answer = Answer(serve.wait_ready().port, n_predict)
    assert answer.has_begun.wait(60)
    return answer


def test_answers_under_way_are_finished_and_new_requests_refused(tmp_path: Path) -> None:
    with Serve(tmp_path, passed=ALONE, draft=False) as serve:
        answer = begin(serve)
        serve.process.send_signal(signal.SIGTERM)
        wait_for("the drain", lambda: serve.event("draining"))
        wait_for("the server to hear of it", lambda: get_json(HOST, serve.port, "/health")[0] == 503)
        with pytest.raises(urllib.error.HTTPError) as refused:
            complete(serve.port, 1)
        assert refused.value.code == 503
        assert not answer.is_whole  # so all of this happened meanwhile
        assert serve.wait() == 0
        answer.join(10)
        assert answer.is_whole
        assert answer.events[-1]["tokens_predicted"] == 600
        assert_nothing_left(serve)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_cuts_answers_off(tmp_path: Path, number: int) -> None:
    """Ctrl-C, and SIGTERM with no time for them."""
    with Serve(tmp_path, "--drain", "0", passed=ALONE, draft=False) as serve:
        answer = begin(serve)
        assert serve.stop(number) == (130 if number == signal.SIGINT else 0)
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
        assert serve.wait() == 0
        answer.join(10)
        assert not answer.is_whole
        assert any("1 connections are cut off" in event.get("message", "") for event in serve.events)


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
