"""`pyspac serve --predict token`: the server tells what it samples and drafts, and the scheduler hears it."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

import pytest
from serving import HOST, ONE_THREAD, Serve, complete, wait_for

from pyspac.engine.board import Board

PROMPT = "def parse(self, text):\n    for part in text:\n"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(
        tmp_path_factory.mktemp("serve"), "--draft-max", "3", "--predict", "token",
        "--cpu-share", "1", "--metrics-port", "0", passed=ONE_THREAD,
    ) as serve:  # fmt: skip
        yield serve.wait_ready()


def metrics(serve: Serve) -> dict[str, float]:
    port = int(serve.event("metrics")["port"])
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return {line.split("{")[0]: float(line.split()[-1]) for line in lines if 'predictor="token"' in line}


def test_upcoming_tokens_are_told_and_learned_from(served: Serve) -> None:
    with Board.open(served.board) as board:
        wait_for("a scheduler that looks ahead", lambda: int(board.looks_ahead[0]) == 1, 20)
        before = int(board.n_looks[0])
        text = complete(served.port, 60, PROMPT)["content"]
        assert complete(served.port, 60, PROMPT)["content"] == text
        told = board.read_upcoming()
        assert told is not None
        assert 1 <= len(told) <= 4
        assert all(0 <= token < 5000 for token in told)
        n_looks = int(board.n_looks[0]) - before
        assert n_looks % 2 == 0
        assert n_looks >= 2 * 2 * (int(board.n_records[0]) - 2)  # before each draft, and with it
    wait_for("predictions", lambda: metrics(served).get("pyspac_predictor_recall", 0) > 0.3, 20)
    figures = metrics(served)
    assert figures["pyspac_predictor_tokens_total"] > 60
    assert 0 < figures["pyspac_predictor_known"] <= 1
    assert figures["pyspac_predictor_seconds_total"] > 0
