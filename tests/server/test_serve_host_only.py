"""`pyspac serve --device none` and `--host-kernels`: the engine's own kernels behind llama-server."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import (
    DRAFT,
    ONE_THREAD,
    TARGET,
    Serve,
    assert_nothing_left,
    complete,
    environment,
    free_port,
    llama_server,
    post,
    run_pyspac,
    wait_for,
)

from pyspac.engine.board import Board

PASSED = ("-np", "2", *ONE_THREAD)
PROMPTS = ("def parse(self, text):\n", "import os\nimport sys\n\n", "class Reader:\n    def __init__(self")
# Own kernels round activations in another way than ggml's, so a choice may differ where two are this close.
NEAR_TIE = 0.1
N_PREDICT = 32


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("none"), device="none", draft=False, passed=PASSED) as serve:
        yield serve.wait_ready(scheduler=False)


@pytest.fixture(scope="module")
def stock(bin_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("stock")
    with llama_server(bin_dir, folder, *PASSED, "-c", "1024", "--no-repack", draft=False) as port:
        yield port


def greedy(port: int, prompt: str | list[int], n_predict: int, n_probs: int = 0) -> dict[str, Any]:
    body = {
        "prompt": prompt, "n_predict": n_predict, "temperature": 0, "ignore_eos": True, "return_tokens": True,
        "n_probs": n_probs,
    }  # fmt: skip
    return post(port, "/completion", body)


def choices_below_the_best(ours: int, stock: int, prompt: str) -> list[float]:
    """How far each token of our answer is below stock's best one after the same text, in log-probability."""
    text: list[int] = post(stock, "/tokenize", {"content": prompt, "add_special": True})["tokens"]
    below = []
    for token in greedy(ours, text, N_PREDICT)["tokens"]:
        listed = greedy(stock, text, 1, n_probs=16)["completion_probabilities"][0]["top_logprobs"]
        found = [entry["logprob"] for entry in listed if entry["id"] == token]
        assert found, f"token {token} is not among stock's 16 best"
        below.append(listed[0]["logprob"] - found[0])
        text = [*text, token]
    return below


def assert_near_ties(ours: int, stock: int) -> None:
    below = [value for prompt in PROMPTS for value in choices_below_the_best(ours, stock, prompt)]
    assert max(below) < NEAR_TIE
    assert below.count(0) > 0.9 * len(below)


def test_every_choice_is_stocks_or_a_near_tie(served: Serve, stock: int) -> None:
    assert_near_ties(served.port, stock)


def test_answers_repeat_to_the_last_bit(served: Serve) -> None:
    first, second = (greedy(served.port, PROMPTS[0], N_PREDICT, n_probs=3) for _ in range(2))
    assert first["completion_probabilities"][-1] == second["completion_probabilities"][-1]


def test_no_scheduler_and_no_slots(served: Serve) -> None:
    """All of a prompt's tokens are counted: no width is left to llama.cpp."""
    assert served.event("scheduler_started") is None
    assert "no scheduler" in json.dumps(served.events)
    with Board.open(served.board) as board:
        assert board.n_slots == 0
        before = int(board.counters["n_miss_rows"][0])
        greedy(served.port, "x = 1\n" * 60, 1)
        n_split = int((board.expert_bytes > 0).sum())
        assert board.counters["n_miss_rows"][0] - before > 100 * n_split * board.n_expert_used
        assert board.counters["n_hit_rows"][0] == 0


def test_top_watches_it(served: Serve, tmp_path: Path) -> None:
    done = run_pyspac("top", served.board, "--once", "--json", "--seconds", "0.2", cache_dir=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["n_slots"] == 0
    done = run_pyspac(
        "top", served.board, "--svg", str(tmp_path / "top.svg"), "--seconds", "0.2", cache_dir=tmp_path
    )
    assert done.returncode == 0, done.stderr


def test_a_scheduler_may_be_attached_all_the_same(served: Serve, tmp_path: Path) -> None:
    """It has draft lengths to choose and metrics to show, but nothing to load."""
    port = free_port()
    argv = [sys.executable, "-m", "pyspac", "attach", served.board, "--metrics-port", str(port)]
    with subprocess.Popen(argv, env=environment(tmp_path), stderr=subprocess.PIPE, text=True) as attached:
        assert attached.stderr is not None
        try:
            wait_for("attaching", lambda: "slots" in attached.stderr.readline())  # type: ignore[union-attr]
            complete(served.port, 16)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
                text = response.read().decode()
            assert "pyspac_slots 0.0" in text
            assert "pyspac_planned_loads_total 0.0" in text
        finally:
            attached.terminate()
    assert attached.returncode == 0


def test_it_is_the_default_without_a_gpu(tmp_path: Path) -> None:
    """And a dense model is served as well."""
    with Serve(tmp_path, device="auto", draft=False, pair=(DRAFT, DRAFT), passed=PASSED) as serve:
        serve.wait_ready(scheduler=False)
        assert complete(serve.port, 16)["tokens_predicted"] == 16
        assert "0 layers, and" in serve.log(), "the engine's kernels multiply its matrices"
        with Board.open(serve.board) as board:
            assert (board.n_slots, board.n_expert) == (0, 1)
            assert board.counters["n_forward"][0] > 0
        assert serve.stop() == 0


def test_it_ends_cleanly(tmp_path: Path) -> None:
    with Serve(tmp_path, device="none") as serve:
        serve.wait_ready(scheduler=False)
        assert complete(serve.port, 32)["timings"]["draft_n"] > 0
        assert serve.stop() == 0
        assert_nothing_left(serve)


def test_draft_lengths_need_the_scheduler(tmp_path: Path) -> None:
    with Serve(tmp_path, "--speculation", "auto", device="none") as serve:
        serve.wait_ready()
        assert complete(serve.port, 48)["tokens_predicted"] == 48
        with Board.open(serve.board) as board:
            assert (board.n_draft_max >= 0).all()
        assert serve.stop() == 0


def test_experts_on_disk_beside_a_device(tmp_path: Path) -> None:
    """Device, memory and disk all have some; llama-server does not warm up, which would read the file."""
    with Serve(tmp_path, "--ram", "6", "--cache", "25%", draft=False, passed=PASSED) as serve:
        serve.wait_ready()
        assert complete(serve.port, 48)["tokens_predicted"] == 48
        with Board.open(serve.board) as board:
            assert board.counters["n_hit"][0] > 0, "the device computed some"
            assert 0 < board.in_memory.sum() <= board.tier["n_slots"][0] < board.in_memory.size
            assert board.tier["n_miss"][0] > 0
        done = run_pyspac("top", serve.board, "--once", "--json", "--seconds", "0.2", cache_dir=tmp_path)
        assert sum(json.loads(done.stdout)["layers"][0]["in_memory"]) > 0
        assert serve.stop() == 0


def test_experts_on_disk_are_read_ahead_without_a_device(tmp_path: Path) -> None:
    """`token` works in the scheduler's process, on what the server tells it and the engine's routing log."""
    port = free_port()
    argv = ("--ram", "6M", "--predict", "token", "--metrics-port", str(port))
    with Serve(tmp_path, *argv, draft=False, device="none", passed=PASSED) as serve:
        serve.wait_ready()
        for _ in range(2):
            assert complete(serve.port, 64)["tokens_predicted"] == 64
        with Board.open(serve.board) as board:
            assert board.tier["n_slots"][0] > 0
            wait_for("experts read ahead", lambda: board.tier["n_ahead"][0] > 0)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            text = response.read().decode()
        assert 'predictor="token"' in text
        assert serve.stop() == 0


def test_own_kernels_beside_a_device(tmp_path: Path, stock: int) -> None:
    with Serve(tmp_path, "--host-kernels", "spac", "--cache", "25%", draft=False, passed=PASSED) as serve:
        serve.wait_ready()
        assert any(f"the engine's {kernels}" in serve.log() for kernels in ("amx", "avx"))
        assert_near_ties(serve.port, stock)
        with Board.open(serve.board) as board:
            assert board.counters["n_hit_rows"][0] > 0
            assert board.counters["n_miss_rows"][0] > 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--device", "none", "--cache", "25%"], "--cache 25% needs a device"),
        (["--device", "none", "--host-kernels", "ggml"], "run --stock"),
        (["--device", "cpu", "--host-kernels", "fast"], "auto, spac, ggml"),
        (["--device", "none", "--predict", "next-layer"], "needs a device, or experts on disk: give --ram"),
        (["-Cr", "0-"], "the first and the last core"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, arguments: list[str], text: str) -> None:
    done = run_pyspac("serve", "-m", str(TARGET), *arguments, cache_dir=tmp_path)
    assert done.returncode == 2
    assert text in done.stderr
