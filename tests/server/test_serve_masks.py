"""`pyspac serve --mtp`: mask tokens behind the tokens of a server's batch, several requests at once."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf_models
import pytest
from mask_adapters import write_adapter
from near_ties import margins
from serving import HOST, JSON_HEADER, ONE_THREAD, TARGET, Serve, post, run_pyspac, wait_for

from pyspac.engine.board import Board
from pyspac.engine.step import StepRecord

ADAPTER = TARGET.with_name("demo-mtp.gguf")
N_DRAFT = 2
N_SLOTS = 4
PROMPTS = (
    "def parse(self, text):\n",
    "import os\nimport sys\n\n",
    "class Reader:\n    def __init__(self",
    "for i in ",
)


def serving(folder: Path, *arguments: str, passed: tuple[str, ...] = ()) -> Serve:
    passed = ("-np", str(N_SLOTS), *ONE_THREAD, *passed)
    return Serve(folder, "--mtp", str(ADAPTER), *arguments, passed=passed, draft=False)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    folder = tmp_path_factory.mktemp("masks")
    passed = ("-c", "2048", "--slot-save-path", str(folder))
    # -c comes before --
    arguments = ("--draft-max", str(N_DRAFT), *passed[:2])
    with serving(folder, *arguments, passed=passed[2:]) as serve:
        yield serve.wait_ready()


def ask(serve: Serve, prompt: str | list[int], n_predict: int = 60, **fields: Any) -> dict[str, Any]:
    """A greedy answer: its `tokens`, and its prompt's `ids`."""
    ids = prompt if isinstance(prompt, list) else tokenize(serve, prompt)
    body = {"prompt": ids, "n_predict": n_predict, "temperature": 0, "ignore_eos": True,
            "return_tokens": True, **fields}  # fmt: skip
    return {**post(serve.port, "/completion", body), "ids": ids}


def tokenize(serve: Serve, text: str) -> list[int]:
    found = post(serve.port, "/tokenize", {"content": text, "add_special": True})["tokens"]
    return [int(token) for token in found]


# of the two best logits: who else is in the batch decides how wide it is, and so how it rounds
NEAR_TIE = 0.05


def assert_plain(answer: dict[str, Any], n_predict: int = 60) -> None:
    """The text is plain decoding's, near ties apart."""
    assert len(answer["tokens"]) == n_predict
    assert margins(TARGET, answer["ids"], answer["tokens"]).max() < NEAR_TIE


def records(serve: Serve, first: int = 0) -> list[StepRecord]:
    """Of the board's ring, from the step with this index on."""
    with Board.open(serve.board) as board:
        assert int(board.n_records[0]) - first <= len(board.records), "the ring is too short for this test"
        found = range(first, int(board.n_records[0]))
        return [StepRecord.from_row(board.records[i % len(board.records)]) for i in found]


def n_records(serve: Serve) -> int:
    with Board.open(serve.board) as board:
        return int(board.n_records[0])


# ---- one request


def test_every_step_drafts_for_the_next(served: Serve) -> None:
    first = n_records(served)
    assert_plain(ask(served, PROMPTS[0], id_slot=1))
    steps = records(served, first)
    assert all(s.n_masks == (1 + s.n_draft) * N_DRAFT and s.n_others == 0 for s in steps[:20])
    assert sum(s.n_accepted for s in steps) > 10


def test_nothing_is_learned_from_masks(served: Serve) -> None:
    answer = ask(served, PROMPTS[3], 8, id_slot=0)
    with Board.open(served.board) as board:
        before, first = board.counts.copy(), int(board.n_records[0])
        answer = ask(served, PROMPTS[3], id_slot=0)
        assert answer["timings"]["prompt_n"] == 1  # the rest of the prompt was kept
        steps = records(served, first)
        anchors = sum(1 + s.n_draft for s in steps)
        wanted = {(1 + anchors) * board.n_expert_used}

        def counted() -> set[int]:
            return set((board.counts - before).sum(axis=1).tolist())

        wait_for("what the last forward counted", lambda: min(counted()) >= min(wanted), 10)
        assert counted() == wanted
        assert sum(s.n_masks for s in steps) > anchors


@pytest.mark.parametrize("n_predict", [1, 2, 3])
def test_short_answers(served: Serve, n_predict: int) -> None:
    assert_plain(ask(served, PROMPTS[1], n_predict), n_predict)


def test_turns_a_saved_slot_and_a_long_prompt(served: Serve) -> None:
    """What changes a sequence between two answers: its groups share none of its old cells."""
    start = ask(served, PROMPTS[2], id_slot=0)
    longer = ask(served, [*start["ids"], *start["tokens"], 40, 41], id_slot=0)
    assert longer["timings"]["cache_n"] > len(start["ids"])
    other = ask(served, [*start["ids"], *start["tokens"][:9], 50], id_slot=0)  # goes back, and on otherwise
    for answer in (start, longer, other):
        assert_plain(answer)
    post(served.port, "/slots/0?action=save", {"filename": "slot.bin"})
    ids = ask(served, list(range(100, 130)) * 20, id_slot=0)  # longer than a micro-batch
    assert_plain(ids)
    post(served.port, "/slots/0?action=restore", {"filename": "slot.bin"})
    again = ask(served, [*other["ids"], *other["tokens"][:20], 60], id_slot=0)
    assert again["timings"]["cache_n"] > len(other["ids"])
    # a restored cache holds what wider batches computed: plain decoding of it has the same near tie
    assert margins(TARGET, again["ids"], again["tokens"]).max() < 0.05


def test_sampled_text_repeats_with_its_seed(served: Serve) -> None:
    texts = [ask(served, PROMPTS[0], temperature=0.8, seed=5, cache_prompt=False)["tokens"] for _ in range(2)]
    assert texts[0] == texts[1]


# ---- several


def test_four_requests_at_once(served: Serve) -> None:
    """Of different lengths, so that slots come and go."""
    first = n_records(served)
    with ThreadPoolExecutor(N_SLOTS) as pool:
        lengths = [20 + 7 * i for i in range(8)]
        answers = list(pool.map(lambda i: ask(served, PROMPTS[i % 4] + "#" * (i // 4), lengths[i]), range(8)))
    for answer, n_predict in zip(answers, lengths, strict=True):
        assert_plain(answer, n_predict)
    steps = records(served, first)
    assert {s.server_slot for s in steps} == set(range(N_SLOTS))
    assert any(s.n_others for s in steps)
    assert max(s.n_tokens for s in steps) > (1 + N_DRAFT) ** 2  # more than one slot with masks
    assert sum(s.n_accepted for s in steps) > 40


def test_the_same_prompt_for_several_answers(served: Serve) -> None:
    """Slots that share their prompt's cells, each with masks of its own."""
    ids = tokenize(served, PROMPTS[1])
    body = {"prompt": ids, "n_predict": 40, "temperature": 0, "ignore_eos": True, "return_tokens": True,
            "n_cmpl": 3}  # fmt: skip
    request = urllib.request.Request(f"{served.url}/completion", json.dumps(body).encode(), JSON_HEADER)
    with urllib.request.urlopen(request, timeout=60) as response:
        answers = json.load(response)
    assert len(answers) == 3
    for answer in answers:
        assert_plain({**answer, "ids": ids}, 40)


def test_a_client_that_goes_away(served: Serve) -> None:
    """In the middle of an answer, beside another one; the slot's next answers are right."""
    body = '{"prompt": "def f(", "n_predict": 1500, "stream": true, "ignore_eos": true, "id_slot": 2}'
    head = "POST /completion HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}"
    with socket.create_connection((HOST, served.port)) as connection, ThreadPoolExecutor(1) as pool:
        connection.sendall(request.encode())
        beside = pool.submit(ask, served, PROMPTS[0], 120, id_slot=3)
        while connection.recv(4096).count(b"data:") < 1:
            pass
        connection.close()
        assert_plain(beside.result(), 120)
    assert_plain(ask(served, PROMPTS[1], id_slot=2))


# ---- the context's end


@pytest.mark.parametrize("shift", [False, True])
def test_the_contexts_end(tmp_path: Path, shift: bool) -> None:
    """With context shift an answer goes on, without its oldest tokens; else it ends."""
    n_ctx = 256
    flags = ("--context-shift",) if shift else ()
    with serving(tmp_path, "--draft-max", "4", "-c", str(n_ctx), passed=("-np", "1", *flags)) as serve:
        serve.wait_ready()
        answer = ask(serve, PROMPTS[0], 400 if shift else -1)
        n_before = n_ctx - len(answer["ids"]) - 10
        head = {**answer, "tokens": answer["tokens"][:n_before]}
        assert_plain(head, n_before)
        if shift:
            assert len(answer["tokens"]) == 400
            assert sum(s.n_accepted for s in records(serve)[-40:]) > 5
        assert_plain(ask(serve, PROMPTS[2]))  # nothing of it is left
        assert sum(s.n_accepted for s in records(serve)) > 20


def test_a_full_cache_leaves_masks_out(tmp_path: Path) -> None:
    """Slots that share too few cells: what can be decoded is, and what cannot is an error of its own."""
    with serving(tmp_path, "--draft-max", "4", "-c", "256") as serve:
        serve.wait_ready()

        def answer(i: int) -> dict[str, Any] | None:
            try:
                return ask(serve, PROMPTS[i], 90)
            except OSError:
                return None

        with ThreadPoolExecutor(N_SLOTS) as pool:
            answers = list(pool.map(answer, range(4)))
        for found in answers:
            if found is not None:
                assert_plain(found, 90)
        assert_plain(ask(serve, PROMPTS[0]))


# ---- lengths


def test_a_controller_chooses(tmp_path: Path) -> None:
    """Plain steps and steps with masks; a scheduler may be late on a busy machine, so several answers."""
    seen: list[StepRecord] = []
    with serving(tmp_path, "--speculation", "cascade") as serve:
        serve.wait_ready()

        def has_tried() -> bool:
            first = n_records(serve)
            assert_plain(ask(serve, PROMPTS[0], 150), 150)
            seen.extend(records(serve, first))
            return len({s.n_masks // (1 + s.n_draft) for s in seen}) > 2 and any(s.n_draft for s in seen)

        wait_for("drafts of several lengths", has_tried)
    assert any(s.is_plain for s in seen)
    assert all(s.n_masks % (1 + s.n_draft) == 0 for s in seen)


def test_off_is_plain_decoding(tmp_path: Path) -> None:
    with serving(tmp_path, "--speculation", "off") as serve:
        serve.wait_ready()
        ask(serve, PROMPTS[0], 4)  # the first step may run before the scheduler said no
        first = n_records(serve)
        assert_plain(ask(serve, PROMPTS[0]))
        assert all(s.is_plain and s.n_tokens == 1 for s in records(serve, first))


def test_without_a_device(tmp_path: Path) -> None:
    """The engine computes every expert on the host, and drafts as well."""
    arguments = ("--mtp", str(ADAPTER), "--draft-max", "2")
    with Serve(tmp_path, *arguments, passed=("-np", "2", *ONE_THREAD), draft=False, device="none") as serve:
        serve.wait_ready(scheduler=False)
        answer = ask(serve, PROMPTS[0])
    assert answer["timings"]["draft_n_accepted"] > 10
    assert (
        margins(TARGET, answer["ids"], answer["tokens"]).max() < 0.05
    )  # the engine's kernels round otherwise


# ---- mistakes


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--spec-type", "draft-lora"), "draft-lora needs an adapter with mask tokens: give one with --mtp"),
        (("--mtp", str(TARGET)), "this is a model or a head, and --mtp takes an adapter"),
        (("--mtp", str(ADAPTER), "--spec-type", "ngram"), "uses no adapter: leave out --mtp"),
        (("--mtp", str(ADAPTER), "-md", str(TARGET)), "uses no draft model: leave out -md"),
        (("--mtp", str(ADAPTER), "--max-batch", "8", "--draft-max", "2"), "--max-batch is 8"),
        (("--mtp", str(ADAPTER), "--", "-ub", "16"), "--ubatch-size is 16"),
        (("--mtp", str(ADAPTER), "--", "-np", "60"), "need 360 sequences"),
        (("--mtp", str(ADAPTER), "--", "--no-kv-unified"), "--no-kv-unified cannot be used with --mtp"),
        (("--mtp", "missing.gguf"), "missing.gguf"),
    ],
)
def test_mistakes(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    done = run_pyspac("serve", "-m", str(TARGET), "--device", "emulated", *arguments, cache_dir=tmp_path)
    assert done.returncode == 2, done.stderr
    assert says in " ".join(done.stderr.split())


def test_adapters_of_other_models(tmp_path: Path) -> None:
    model = gguf_models.write_model(tmp_path / "model.gguf", "qwen3moe")
    recurrent = gguf_models.write_model(tmp_path / "recurrent.gguf", "qwen3next")
    adapter = write_adapter(tmp_path / "mtp.gguf", recurrent)
    for target, says in ((model, "was trained on another model"), (recurrent, "recurrent layers")):
        done = run_pyspac("serve", "-m", str(target), "--mtp", str(adapter), "--device", "emulated",
                          cache_dir=tmp_path)  # fmt: skip
        assert done.returncode == 2, done.stderr
        assert says in " ".join(done.stderr.split())
