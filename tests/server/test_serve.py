"""`pyspac serve` with clients: OpenAI's package, several at once, the same answers as without the engine."""

from __future__ import annotations

import gzip
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import openai
import pytest
from serving import ONE_THREAD, Serve, llama_server, post, wait_for

from pyspac import _native
from pyspac.engine.board import Board
from pyspac.server import board_file
from pyspac.server.build_extras import build_extras

PROMPTS = (
    "def parse(self, text):\n",
    "import os\nimport sys\n\n",
    "class Reader:\n    def __init__(self",
    "for i in ",
)
N_CLIENTS = 4
N_REQUESTS = 200


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("serve"), passed=("-np", str(N_CLIENTS), *ONE_THREAD)) as serve:
        yield serve.wait_ready()


@pytest.fixture(scope="module")
def client(served: Serve) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=60, max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Write a function."}]
    answer = client.chat.completions.create(model="any", messages=messages, max_tokens=24)  # type: ignore[arg-type]
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 24


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="any", prompt=PROMPTS[0], max_tokens=16, temperature=0)
    assert answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"


def test_streaming_gives_the_same_text(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "any", "prompt": PROMPTS[1], "max_tokens": 32, "temperature": 0}
    whole = client.completions.create(**request).choices[0].text
    parts = [chunk.choices[0].text for chunk in client.completions.create(**request, stream=True)]
    assert "".join(parts) == whole
    assert len(parts) > 3


def test_stop_words(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "any", "prompt": PROMPTS[2], "max_tokens": 48, "temperature": 0}
    text = client.completions.create(**request).choices[0].text
    word = text[len(text) // 2 :].split()[0]
    stopped = client.completions.create(**request, stop=[word])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == text[: text.index(word)]


def test_probabilities(client: openai.OpenAI, served: Serve) -> None:
    answer = client.completions.create(model="any", prompt="def ", max_tokens=4, temperature=0, logprobs=3)
    assert answer.choices[0].logprobs is not None
    body = {"prompt": "def ", "n_predict": 4, "n_probs": 3, "temperature": 0}
    listed = post(served.port, "/completion", body)["completion_probabilities"]
    assert len(listed) == 4
    assert len(listed[0]["top_logprobs"]) == 3  # tokens of a step with drafts have none, in llama.cpp as well


def test_cancel_in_the_middle_frees_the_server_slot(client: openai.OpenAI, served: Serve) -> None:
    with client.completions.create(
        model="any", prompt=PROMPTS[0], max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        for _ in range(5):
            next(stream)
    wait_for("an idle server", lambda: not any(slot["is_processing"] for slot in slots(served)), 20)
    assert client.completions.create(model="any", prompt="x = ", max_tokens=4).choices[0].text


def slots(served: Serve) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{served.url}/slots", timeout=10) as response:
        return list(json.load(response))


def test_many_clients_at_once(client: openai.OpenAI, served: Serve) -> None:
    def ask(index: int) -> int:
        answer = client.completions.create(
            model="any", prompt=f"{PROMPTS[index % 4]}# {index}\n", max_tokens=6, seed=index,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        assert answer.usage is not None
        return answer.usage.completion_tokens

    with ThreadPoolExecutor(N_CLIENTS) as pool:
        assert list(pool.map(ask, range(N_REQUESTS))) == [6] * N_REQUESTS
    assert served.process.poll() is None


def test_what_the_board_saw(served: Serve, client: openai.OpenAI) -> None:
    """After the tests above: steps of several server slots, decisions taken over, no slot stolen."""
    client.completions.create(model="any", prompt=PROMPTS[0], max_tokens=32)
    with Board.open(served.board) as board:
        counters = board.counters[0]
        assert counters["n_forward"] > 0
        assert counters["n_hit"] > 0
        assert counters["n_decisions"] > 1
        assert counters["n_pinned_steals"] == 0
        assert int(board.n_records[0]) > 0
        records = board.records[: min(int(board.n_records[0]), len(board.records))]
        assert set(records["server_slot"]) <= set(range(N_CLIENTS))
        assert (records["n_accepted"] <= records["n_draft"]).all()
        assert (records["verify_us"] > 0).any()


def test_each_request_has_its_number(served: Serve) -> None:
    """Two, one after another, on one server slot: their steps carry two numbers."""
    body = {"prompt": PROMPTS[2], "n_predict": 6, "id_slot": 1, "ignore_eos": True}
    with Board.open(served.board) as board:
        numbers = []
        for _ in range(2):
            before = int(board.n_records[0])
            post(served.port, "/completion", body)
            after = int(board.n_records[0])
            steps = [board.records[i % len(board.records)] for i in range(before, after)]
            assert {int(step["server_slot"]) for step in steps} == {1}
            numbers.append({int(step["request"]) for step in steps})
    first, second = numbers
    assert len(first) == len(second) == 1
    assert first != second
    assert min(first | second) >= 0


def test_the_board_is_private(served: Serve) -> None:
    assert board_file.path_of(served.board).stat().st_mode & 0o777 == 0o600


def test_timings_split_draft_and_verify(served: Serve) -> None:
    body = {"prompt": PROMPTS[0], "n_predict": 24, "temperature": 0, "ignore_eos": True}
    timings = post(served.port, "/completion", body)["timings"]
    assert timings["draft_ms"] > 0
    assert timings["verify_ms"] > 0
    assert timings["process_ms"] > 0
    assert (
        timings["draft_ms"] + timings["verify_ms"] + timings["process_ms"]
        <= 1.5 * timings["predicted_ms"] + 50
    )


def test_llama_servers_own_pages(served: Serve) -> None:
    for path, text in (("/health", "ok"), ("/v1/models", "demo-moe"), ("/metrics", "llamacpp:")):
        with urllib.request.urlopen(f"{served.url}{path}", timeout=10) as response:
            assert text in response.read().decode()


def test_the_web_page_or_how_to_get_it(served: Serve) -> None:
    with urllib.request.urlopen(
        urllib.request.Request(f"{served.url}/", headers={"Accept-Encoding": "gzip"}), timeout=10
    ) as response:
        content = response.read()
        is_zipped = response.headers.get("Content-Encoding") == "gzip"
    text = (gzip.decompress(content) if is_zipped else content).decode()
    assert "<html" in text
    assert ("PYSPAC_UI=1 make build" in text) == (not build_extras(_native.bin_dir()).ui)


def test_draft_limit_of_the_board_is_obeyed(served: Serve) -> None:
    """A limit of 1 per server slot, written as a scheduler would: no later step drafts more."""
    body = {"prompt": PROMPTS[1], "n_predict": 24, "temperature": 0, "ignore_eos": True}
    with Board.open(served.board) as board:
        try:
            board.n_draft_max[:] = 1
            timings = post(served.port, "/completion", body)["timings"]
            n_new = timings["predicted_n"] - timings["draft_n_accepted"]
            last = int(board.n_records[0])
            lengths = [
                int(board.records[i % len(board.records)]["n_draft"]) for i in range(last - n_new + 1, last)
            ]
            assert max(lengths) == 1
            board.n_draft_max[:] = 0
            assert "draft_n" not in post(served.port, "/completion", body)["timings"]
        finally:
            board.n_draft_max[:] = -1


@pytest.mark.parametrize("draft", [True, False], ids=["drafting", "plain"])
def test_greedy_answers_equal_those_without_the_engine(bin_dir: Path, tmp_path: Path, draft: bool) -> None:
    """One client after the other, the CPU as the device, the same drafting and layout of weights."""
    arguments = ("-np", "1", *ONE_THREAD)
    with ExitStack() as stack:
        serve = stack.enter_context(Serve(tmp_path, passed=arguments, draft=draft)).wait_ready()
        flags = ("-c", "--spec-draft-n-max") if draft else ("-c",)
        own = chain.from_iterable(passed_to_server(serve, flag) for flag in flags)
        stock = stack.enter_context(
            llama_server(bin_dir, tmp_path, *arguments, *own, "--no-repack", draft=draft)
        )
        for prompt in PROMPTS:
            body = {"prompt": prompt, "n_predict": 96, "temperature": 0, "n_probs": 3, "ignore_eos": True}
            split, plain = (post(port, "/completion", body) for port in (serve.port, stock))
            assert split["completion_probabilities"] == plain["completion_probabilities"]  # to the last bit
            assert split["timings"].get("draft_n") == plain["timings"].get("draft_n")
            ours = split["timings"].keys() - plain["timings"].keys()
            assert ours == {"draft_ms", "verify_ms", "process_ms"}
        with Board.open(serve.board) as board:
            assert int(board.counters["n_hit_rows"][0]) > 0
            assert int(board.counters["n_miss_rows"][0]) > 0


def test_draft_lengths_are_decided_while_it_runs(tmp_path: Path) -> None:
    """Unless they are fixed: every server slot has a limit, and steps keep to it one step later."""
    with Serve(tmp_path, "--speculation", "auto", "--draft-max", "6").wait_ready() as serve:
        lengths: set[int] = set()
        with Board.open(serve.board) as board:
            for prompt in PROMPTS * 10:  # on a busy machine the scheduler decides late
                body = {"prompt": prompt, "n_predict": 96, "temperature": 0, "ignore_eos": True}
                assert post(serve.port, "/completion", body)["tokens_predicted"] == 96
                lengths |= set(board.records["n_draft"][: int(board.n_records[0])].tolist())
                if len(lengths) > 1:
                    break
            assert ((board.n_draft_max >= 0) & (board.n_draft_max <= 6)).all()
        assert max(lengths) <= 6
        assert len(lengths) > 1


def test_a_restored_slot_has_what_the_draft_model_computed(bin_dir: Path, tmp_path: Path) -> None:
    """Else the draft model fails where the target goes on, and every answer under way with it."""
    prompt = "def parse(self, text):\n    return self.text\n\n" * 4
    body = {"prompt": prompt, "n_predict": 16, "temperature": 0}
    file = {"filename": "saved"}
    with llama_server(bin_dir, tmp_path, "-np", "1", *ONE_THREAD, "--slot-save-path", f"{tmp_path}/") as port:
        before = post(port, "/completion", body)
        post(port, "/slots/0?action=save", file)
        post(port, "/completion", {**body, "prompt": "x = "})
        post(port, "/slots/0?action=restore", file)
        after = post(port, "/completion", body)
        assert after["content"] == before["content"]
        assert after["timings"]["cache_n"] > 10  # it was restored, and used
        assert after["timings"]["draft_n"] > 0

        (tmp_path / "saved.dft").unlink()
        with pytest.raises(urllib.error.HTTPError, match="400"):
            post(port, "/slots/0?action=restore", file)
        assert post(port, "/completion", body)["content"] == before["content"]


@pytest.mark.parametrize("kind", ["ngram-simple", "ngram-mod,draft-simple"])  # the others are steered below
def test_other_kinds_of_drafting(bin_dir: Path, tmp_path: Path, kind: str) -> None:
    """They draft from earlier text, so the prompt repeats itself; wide batches are split as well."""
    repeated = "def parse(self, text):\n    return self.text\n\n" * 8
    passed = ("-np", "1", *ONE_THREAD, "--spec-type", kind)
    with Serve(tmp_path, "--max-batch", "128", passed=passed, draft="draft" in kind).wait_ready() as serve:
        answer = post(serve.port, "/completion", {"prompt": repeated, "n_predict": 64, "temperature": 0})
        assert answer["content"]
        assert serve.process.poll() is None


@pytest.mark.parametrize("kind", ["ngram", "ngram-map-k", "ngram-mod", "ngram-cache", "draft"])
def test_every_kind_of_drafting_is_steered(tmp_path: Path, kind: str) -> None:
    """With four clients at once, by limits on the board, which no step exceeds."""
    repeated = "def parse(self, text):\n    return self.text\n\n" * 8
    bodies = [
        {"prompt": repeated + prompt, "n_predict": 48, "temperature": 0, "ignore_eos": True}
        for prompt in PROMPTS
    ]
    arguments = ("--spec-type", kind, "--speculation", "auto")
    passed = ("-np", str(N_CLIENTS), *ONE_THREAD)
    with ExitStack() as stack:
        serve = Serve(tmp_path, *arguments, passed=passed, draft=kind == "draft")
        stack.enter_context(serve).wait_ready()
        pool = stack.enter_context(ThreadPoolExecutor(N_CLIENTS))
        board = stack.enter_context(Board.open(serve.board))
        wait_for("limits", lambda: bool((board.n_draft_max >= 0).all()))
        for _ in range(10):  # on a busy machine the scheduler decides late
            answers = list(pool.map(lambda body: post(serve.port, "/completion", body), bodies))
            assert all(answer["tokens_predicted"] == 48 for answer in answers)
            lengths = set(board.records["n_draft"][: int(board.n_records[0])].tolist())
            if len(lengths) > 1:
                break
        assert max(lengths) <= 8
        assert len(lengths) > 1
        assert ((board.n_draft_max >= 0) & (board.n_draft_max <= 8)).all()


@pytest.mark.parametrize("kind", ["ngram", "ngram-map-k", "ngram-mod", "ngram-cache"])
def test_the_boards_limit_holds_for_n_grams(tmp_path: Path, kind: str) -> None:
    """Written as a scheduler would: no later step drafts more, and none at 0."""
    prompt = "def parse(self, text):\n    return self.text\n\n" * 8
    body = {"prompt": prompt, "n_predict": 64, "temperature": 0, "ignore_eos": True}
    arguments = ("--spec-type", kind, "--speculation", "static", "--draft-max", "8")
    with ExitStack() as stack:
        serve = Serve(tmp_path, *arguments, passed=("-np", "1", *ONE_THREAD), draft=False)
        stack.enter_context(serve).wait_ready()
        board = stack.enter_context(Board.open(serve.board))
        longest = []
        for limit in (-1, 2, 0):
            board.n_draft_max[:] = limit
            n_before = int(board.n_records[0])
            post(serve.port, "/completion", body)
            longest.append(int(board.records["n_draft"][n_before : int(board.n_records[0])].max()))
        assert longest == [8, 2, 0]


def passed_to_server(serve: Serve, flag: str) -> list[str]:
    """The flag and its value in the command line of llama-server that was logged."""
    argv = next(event["argv"] for event in serve.events if "argv" in event)
    return [flag, str(argv[argv.index(flag) + 1])]
