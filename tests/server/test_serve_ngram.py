"""`--spec-type ngram` in a server: the engine drafts from the text so far, for every slot apart."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from near_ties import NEAR_TIE, margins
from serving import ONE_THREAD, TARGET, Serve, llama_server, post

from pyspac.engine.board import Board
from pyspac.engine.step import StepRecord

N_SLOTS = 4
N_PREDICT = 60
REPEATED = "def parse(self, text):\n    return self.text\n\n"
PROMPTS = (
    REPEATED * 4,
    "import os\nimport sys\n\nfor name in os.listdir(path):\n    print(name)\n",
    "\n".join(f"from .module_{c} import *" for c in "abcdefghij") + "\n",
    "class Reader:\n    def __init__(self",
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    arguments = ("--spec-type", "ngram", "--speculation", "static", "--draft-max", "4")
    passed = ("-np", str(N_SLOTS), "--cache-ram", "0", *ONE_THREAD)
    with Serve(tmp_path_factory.mktemp("ngram"), *arguments, passed=passed, draft=False) as serve:
        yield serve.wait_ready()


def ask(port: int, prompt: str, **fields: Any) -> dict[str, Any]:
    ids = post(port, "/tokenize", {"content": prompt, "add_special": True})["tokens"]
    body = {"prompt": ids, "n_predict": N_PREDICT, "temperature": 0, "ignore_eos": True,
            "return_tokens": True, **fields}  # fmt: skip
    return {**post(port, "/completion", body), "ids": ids}


def assert_plain(answer: dict[str, Any]) -> None:
    """The text is plain decoding's, near ties apart."""
    assert len(answer["tokens"]) == N_PREDICT
    assert margins(TARGET, answer["ids"], answer["tokens"]).max() < NEAR_TIE


def steps_since(board: Board, first: int) -> list[StepRecord]:
    found = range(first, int(board.n_records[0]))
    return [StepRecord.from_row(board.records[i % len(board.records)]) for i in found]


def test_slots_draft_from_their_own_text(served: Serve) -> None:
    """Four requests at once, twice: the second time each slot has another one's prompt."""
    for prompts in (PROMPTS, PROMPTS[1:] + PROMPTS[:1]):
        with ThreadPoolExecutor(N_SLOTS) as pool:
            requests = [pool.submit(ask, served.port, text, id_slot=i) for i, text in enumerate(prompts)]
            answers = [request.result() for request in requests]
        for answer in answers:
            assert_plain(answer)
        assert sum(answer["timings"]["draft_n_accepted"] for answer in answers) > 2 * N_PREDICT


def test_a_step_tells_the_match(served: Serve) -> None:
    with Board.open(served.board) as board:
        first = int(board.n_records[0])
        assert_plain(ask(served.port, PROMPTS[0], id_slot=2))
        steps = steps_since(board, first)
    assert all(step.n_matched >= 2 for step in steps if step.n_draft)
    assert max(step.n_matched for step in steps) > 8  # the text repeats itself
    assert {step.n_passed_over for step in steps} == {0}
    assert max(step.n_draft for step in steps) == 4


def test_a_longer_turn_goes_on_with_the_same_text(served: Serve) -> None:
    first = ask(served.port, PROMPTS[3], id_slot=3)
    second = ask(served.port, PROMPTS[3] + first["content"] + "\n" + REPEATED, id_slot=3)
    assert second["timings"]["cache_n"] > N_PREDICT // 2
    assert second["timings"]["draft_n_accepted"] > 0
    assert_plain(second)


def test_a_limit_for_each_length_of_the_match(served: Serve) -> None:
    """What was passed over is told with the next step."""
    with Board.open(served.board) as board:
        board.n_draft_matched[0] = [-1, -1, 0, 0, 1, 1, 2, 2]  # matches of 2, 3, 4, 8, 16, 32 tokens
        try:
            first = int(board.n_records[0])
            assert_plain(ask(served.port, PROMPTS[0] + "x", id_slot=0))
        finally:
            board.n_draft_matched[0] = -1
        steps = steps_since(board, first)
    for step in steps:
        assert step.n_draft <= (0 if step.n_matched < 4 else 1 if step.n_matched < 16 else 2)
    assert max(step.n_draft for step in steps) == 2
    passed = [step.n_passed_over for step in steps if step.n_passed_over]
    assert passed
    assert {abs(n) for n in passed} <= {2, 3}


def test_plain_llama_server_drafts_by_the_environment(
    bin_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSPAC_NGRAM", "4")
    flags = ("--spac-cache", "25%", "--spec-type", "ngram-simple", "--spec-ngram-simple-size-m", "4")
    with llama_server(bin_dir, tmp_path, "-np", "1", *ONE_THREAD, *flags, draft=False) as port:
        answer = ask(port, PROMPTS[1])
    assert_plain(answer)
    assert answer["timings"]["draft_n"] > 0
