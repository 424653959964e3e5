"""A server's head reads nothing while drafts are held back; what it missed is there when it reads again."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import eagle_models
import gguf_models
import head_models
import numpy as np
import pytest
from near_ties import NEAR_TIE, margins
from serving import HOST, ONE_THREAD, TARGET, Serve, post, wait_for

from pyspac.engine.board import Board
from pyspac.engine.step import StepRecord

HEADS = ("draft-eagle3", "draft-mtp")
PROMPT = "hello world, hello world, hello"
NO_LIMIT = -1
ALIKE = 0.85  # routers of random models turn with the width of a batch; with wrong states it is half of that
N_HEADER = 4  # words: magic number, version, no tokens, how many caches


@dataclass(frozen=True, slots=True)
class Served:
    """A server whose target has a head."""

    serve: Serve
    target: Path
    folder: Path
    n_slots: int

    def tokenize(self, text: str) -> list[int]:
        found = post(self.serve.port, "/tokenize", {"content": text, "add_special": True})["tokens"]
        return [int(token) for token in found]

    def ask(self, ids: list[int], n_predict: int, **fields: Any) -> list[int]:
        """A greedy answer. A random model's depends on who shares its batches, drafts or not."""
        body = {"prompt": ids, "n_predict": n_predict, "temperature": 0, "ignore_eos": True}
        answer = post(self.serve.port, "/completion", body | {"return_tokens": True} | fields)
        assert len(answer["tokens"]) == n_predict
        return [int(token) for token in answer["tokens"]]

    def head_has(self, slot: int) -> np.ndarray:
        """What the head has in its cache of a slot, as a file has it: keys and values are 16-bit floats."""
        post(self.serve.port, f"/slots/{slot}?action=save", {"filename": f"{slot}.bin"})
        words = np.fromfile(self.folder / f"{slot}.bin.dft", np.uint32)[N_HEADER:]
        others = words[:slot], words[len(words) - (self.n_slots - 1 - slot) :]  # of their caches: no cells
        assert not np.any(np.concatenate(others))
        return words[slot : len(words) - (self.n_slots - 1 - slot)].view(np.float16).astype(np.float32)


@contextmanager
def serving(
    folder: Path, spec_type: str, *passed: str, n_slots: int = 2, n_ctx: int = 256
) -> Iterator[Served]:
    if spec_type == "draft-eagle3":
        target = gguf_models.write_model(folder / "target.gguf", "qwen3moe")
        pair = (target, eagle_models.write_eagle3(folder / "head.gguf", "qwen3moe"))
    else:
        target = head_models.write_headed(folder / "target.gguf", head_models.WITH_HEADS[0], 1)
        pair = (target, target)
    every = ("-np", str(n_slots), *ONE_THREAD, "--slot-save-path", str(folder), "--no-kv-unified", *passed)
    how = (
        "-c",
        str(n_ctx * n_slots),
        "--spec-type",
        spec_type,
        "--draft-max",
        "3",
        "--speculation",
        "static",
    )
    with Serve(folder, *how, passed=every, pair=pair, draft=spec_type == "draft-eagle3") as serve:
        yield Served(serve.wait_ready(), target, folder, n_slots)


@pytest.fixture(scope="module", params=HEADS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("heads"), request.param) as found:
        yield found


def records(board: Board, first: int) -> list[StepRecord]:
    found = range(first, int(board.n_records[0]))
    return [StepRecord.from_row(board.records[i % len(board.records)]) for i in found]


def alike(one: np.ndarray, other: np.ndarray) -> float:
    """The share of numbers that are the same but for rounding."""
    assert len(one) == len(other)
    return float(np.isclose(one, other, rtol=0.05, atol=0.02, equal_nan=True).mean())


def test_what_was_missed_is_read_before_the_next_draft(served: Served) -> None:
    ids = served.tokenize(PROMPT)
    with Board.open(served.serve.board) as board:
        board.n_draft_max[0] = 0
        first = int(board.n_records[0])
        paused = served.ask(ids, 60, id_slot=0)
        steps = records(board, first)
        assert len(steps) == 59
        assert all(step.is_plain for step in steps)
        assert sorted(step.process_us for step in steps)[30] < 30  # nothing is read
        held = len(served.head_has(0))
        first = int(board.n_records[0])
        board.n_draft_max[0] = NO_LIMIT
        longer = [*ids, *paused, 40, 41]
        longer += [*served.ask(longer, 12, id_slot=0), 42]
        assert sum(step.n_draft for step in records(board, first)) > 10
        served.ask(longer, 1, id_slot=0)
        caught_up = served.head_has(0)
        board.n_draft_max[1] = NO_LIMIT
        served.ask(longer, 1, id_slot=1)
    assert held < len(caught_up) / 2
    assert alike(caught_up, served.head_has(1)) > ALIKE


def test_drafts_in_the_middle_of_an_answer(served: Served) -> None:
    """The limit comes and goes while two slots are at work; a text that is taken back into the pause."""
    ids = served.tokenize(PROMPT)
    with Board.open(served.serve.board) as board, ThreadPoolExecutor(2) as pool:
        board.n_draft_max[:2] = 0
        answers = [pool.submit(served.ask, [*ids, 50 + slot], 150, id_slot=slot) for slot in range(2)]
        board.n_draft_max[1] = NO_LIMIT
        toggle(board, answers)
        tokens = answers[0].result()
        board.n_draft_max[0] = 0
        longer = [*ids, 50, *tokens[:30], 7]
        served.ask(longer, 40, id_slot=0)
        again = [*longer[:-10], 8, 9]
        served.ask(again, 1, id_slot=0)
        caught_up = served.head_has(0)
        served.ask(again, 1, id_slot=1)
    assert alike(caught_up, served.head_has(1)) > ALIKE


def done(answers: Sequence[Future[Any]]) -> bool:
    return all(answer.done() for answer in answers)


def at_least(board: Board, n_records: int) -> bool:
    return int(board.n_records[0]) >= n_records


def toggle(board: Board, answers: Sequence[Future[Any]]) -> None:
    """Who may draft may not, and the other way round, every 60 steps, until all have their answers."""
    while not done(answers):
        wait_for("steps", lambda until=int(board.n_records[0]) + 60: at_least(board, until) or done(answers))
        board.n_draft_max[:4] = NO_LIMIT - board.n_draft_max[:4]


def cancel(served: Served, ids: list[int], slot: int) -> None:
    """A request whose client goes away after some tokens."""
    body = {"prompt": ids, "n_predict": 2000, "temperature": 0, "ignore_eos": True, "stream": True}
    text = json.dumps(body | {"id_slot": slot})
    with socket.create_connection((HOST, served.serve.port)) as client:
        head = f"POST /completion HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {len(text)}\r\n\r\n"
        client.sendall((head + text).encode())
        with client.makefile("rb") as lines:
            for _ in range(60):
                lines.readline()


def test_a_request_that_is_cancelled_in_a_pause(served: Served) -> None:
    ids = served.tokenize(PROMPT)
    with Board.open(served.serve.board) as board:
        board.n_draft_max[:2] = 0
        cancel(served, ids, 0)
        board.n_draft_max[:2] = NO_LIMIT
        same = served.ask(ids, 20, id_slot=1)  # as the first of those that were cancelled
        longer = [*ids, *same[:15], 9]
        for slot in range(2):
            served.ask(longer, 30, id_slot=slot)
        for slot in range(2):
            served.ask([*longer, 6], 1, id_slot=slot)
    assert alike(served.head_has(0), served.head_has(1)) > ALIKE


def test_four_texts_at_once_are_plain_decodings(tmp_path: Path) -> None:
    """The demo's model, whose texts do not depend on who shares a batch; the limits come and go."""
    pair = (TARGET, eagle_models.write_demo_head(tmp_path / "head.gguf", TARGET))
    how = ("--spec-type", "draft-eagle3", "--draft-max", "3")
    with Serve(tmp_path, *how, passed=("-np", "4", *ONE_THREAD), pair=pair) as serve:
        served = Served(serve.wait_ready(), TARGET, tmp_path, 4)
        prompts = [served.tokenize(f"def f{i}(self, x):") for i in range(4)]
        with Board.open(serve.board) as board, ThreadPoolExecutor(4) as pool:
            board.n_draft_max[:4] = (0, 0, NO_LIMIT, 0)
            answers = [pool.submit(served.ask, prompts[i], 100, id_slot=i) for i in range(4)]
            toggle(board, answers)
            first = int(board.n_records[0])
        found = [answer.result() for answer in answers]
        assert first > 100
        for ids, tokens in zip(prompts, found, strict=True):
            assert margins(TARGET, ids, tokens).max() < NEAR_TIE


@pytest.mark.parametrize("spec_type", HEADS)
def test_four_requests_at_once_and_contexts_that_shift(tmp_path: Path, spec_type: str) -> None:
    """Each slot has 128 tokens; a text that has been shifted is not compared, but all of it comes."""
    with serving(tmp_path, spec_type, "--context-shift", n_slots=4, n_ctx=128) as served:
        ids = served.tokenize(PROMPT)
        with Board.open(served.serve.board) as board, ThreadPoolExecutor(4) as pool:
            board.n_draft_max[:4] = 0
            board.n_draft_max[2] = NO_LIMIT
            short = [pool.submit(served.ask, [*ids, 30 + slot], 60, id_slot=slot) for slot in range(4)]
            for answer in short:
                answer.result()
            body = {"n_predict": 300, "temperature": 0, "ignore_eos": True, "return_tokens": True}
            answers = [
                pool.submit(
                    post, served.serve.port, "/completion", body | {"prompt": [*ids, 30 + i], "id_slot": i}
                )
                for i in range(4)
            ]
            toggle(board, answers)
            for answer in answers:
                assert len(answer.result()["tokens"]) == 300
                assert answer.result()["truncated"]
            board.n_draft_max[:4] = NO_LIMIT
            served.ask(ids, 40, id_slot=0)


@pytest.mark.parametrize("spec_type", HEADS)
def test_a_text_out_of_the_prompt_cache(tmp_path: Path, spec_type: str) -> None:
    """llama-server keeps the head's state beside the target's; what it had not read by then is left out."""
    with serving(tmp_path, spec_type, n_slots=1) as served:
        ids, others = served.tokenize(PROMPT), list(range(60, 90)) * 3
        with Board.open(served.serve.board) as board:
            for limit in (NO_LIMIT, 0):
                board.n_draft_max[0] = limit
                text = [*ids, *served.ask(ids, 40)]
                served.ask(others, 20)
                board.n_draft_max[0] = NO_LIMIT
                first = int(board.n_records[0])
                served.ask([*text, 9, 8, 7], 30)
                assert sum(step.n_draft for step in records(board, first)) > 20


def test_states_of_another_text_are_not_those_of_a_restored_one(served: Served) -> None:
    """What is kept goes with the text: behind a restored one the head begins anew."""
    ids, others = served.tokenize(PROMPT), served.tokenize("another text, another one")
    with Board.open(served.serve.board) as board:

        def go_on(text: list[int]) -> int:
            board.n_draft_max[0] = NO_LIMIT
            served.ask(text, 10, id_slot=0)
            return len(served.head_has(0))

        board.n_draft_max[0] = 0
        text = ids + served.ask(ids, 60, id_slot=0)
        post(served.serve.port, "/slots/0?action=save", {"filename": "text.bin"})
        n_whole = go_on(text)
        board.n_draft_max[0] = 0
        served.ask(others, 80, id_slot=0)
        post(served.serve.port, "/slots/0?action=restore", {"filename": "text.bin"})
        assert go_on(text) < n_whole / 2
