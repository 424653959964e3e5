"""A server's draft model reads nothing while drafts are held back, and catches up when they are not."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from near_ties import NEAR_TIE, margins
from serving import ONE_THREAD, TARGET, Serve, post

from pyspac.engine.board import Board
from pyspac.engine.step import StepRecord

PROMPT = "class Reader:\n    def __init__(self"
NO_LIMIT = -1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("paused")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Serve]:
    """With drafts of four tokens, unless a test holds them back."""
    passed = ("-np", "2", *ONE_THREAD, "--slot-save-path", str(folder))
    with Serve(folder, "--draft-max", "4", passed=passed) as serve:
        yield serve.wait_ready()


def ask(serve: Serve, ids: list[int], n_predict: int, **fields: Any) -> list[int]:
    body = {
        "prompt": ids,
        "n_predict": n_predict,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens": True,
    }
    tokens = post(serve.port, "/completion", body | fields)["tokens"]
    assert margins(TARGET, ids, tokens).max() < NEAR_TIE
    return [int(token) for token in tokens]


def drafted(serve: Serve, ids: list[int], slot: int) -> list[tuple[int, int]]:
    """(drafted, held) of the steps of an answer."""
    with Board.open(serve.board) as board:
        first = int(board.n_records[0])
        ask(serve, ids, 40, id_slot=slot)
        return [(r.n_draft, r.n_accepted) for r in records(board, first)]


def records(board: Board, first: int) -> list[StepRecord]:
    found = range(first, int(board.n_records[0]))
    return [StepRecord.from_row(board.records[i % len(board.records)]) for i in found]


def draft_bytes(serve: Serve, folder: Path, slot: int) -> int:
    """Of what the draft model has in its cache, as a saved slot has it."""
    post(serve.port, f"/slots/{slot}?action=save", {"filename": "held.bin"})
    return (folder / "held.bin.dft").stat().st_size


def hold(board: Board, slot: int, limit: int) -> None:
    board.n_draft_max[slot] = limit


def test_what_was_missed_is_read_before_the_next_draft(served: Serve, folder: Path) -> None:
    ids = [int(t) for t in post(served.port, "/tokenize", {"content": PROMPT, "add_special": True})["tokens"]]
    with Board.open(served.board) as board:
        hold(board, 0, 0)
        first = int(board.n_records[0])
        paused = ask(served, ids, 60, id_slot=0)
        steps = records(board, first)
        assert len(steps) == 59
        assert all(s.is_plain for s in steps)
        hold(board, 0, NO_LIMIT)
    held = draft_bytes(served, folder, 0)
    longer = [*ids, *paused, 40, 41]
    after_a_pause, without = drafted(served, longer, 0), drafted(served, longer, 1)
    assert after_a_pause == without
    assert held < draft_bytes(served, folder, 0) / 4  # it had only the prompt
    assert sum(held for _, held in without) > 10


def test_a_pause_in_the_middle_and_turns(served: Serve) -> None:
    """Beside another slot that drafts all the time; saved, restored and taken back in a pause."""
    ids = [
        int(t) for t in post(served.port, "/tokenize", {"content": "def f(", "add_special": True})["tokens"]
    ]
    with Board.open(served.board) as board, ThreadPoolExecutor(1) as pool:
        beside = pool.submit(ask, served, [*ids, 60], 300, id_slot=1)
        hold(board, 0, 0)
        tokens = ask(served, ids, 50, id_slot=0)
        ask(served, [*ids, *tokens[:20], 70], 30, id_slot=0)
        beside.result()
        paused = ask(served, [*ids, *tokens[:20], 70], 30, id_slot=0)
        post(served.port, "/slots/0?action=save", {"filename": "paused.bin"})
        ask(served, list(range(90, 120)) * 8, 10, id_slot=0)
        post(served.port, "/slots/0?action=restore", {"filename": "paused.bin"})
        hold(board, 0, NO_LIMIT)
    longer = [*ids, *tokens[:20], 70, *paused, 71]
    assert sum(held for _, held in drafted(served, longer, 0)) > 5
