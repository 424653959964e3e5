"""A server that may leave experts out, and requests that want all of them."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serving import HOST, ONE_THREAD, Serve, post

PROMPT = "def parse(self, text):\n"
N = 60
# copies are so slow that most experts are not there
LOSSY = ("--lossy", "drop:1", "--policy", "without=['prompt','fallback']\ncopy_gb_s=0.001")


def ask(serve: Serve, path: str = "/completion", **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "n_predict": N, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    return dict(post(serve.port, path, body | fields))


def metrics(serve: Serve) -> dict[str, float]:
    port = int(serve.event("metrics")["port"])
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return {line.split()[0]: float(line.split()[-1]) for line in lines if line.startswith("pyspac_kl_")}


def kept(answer: dict[str, Any]) -> float:
    return float(answer["timings"]["router_weight_kept"])


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """What a server without --lossy answers."""
    with Serve(tmp_path_factory.mktemp("exact"), passed=("-np", "2", *ONE_THREAD), draft=False) as serve:
        answer = ask(serve.wait_ready())
        assert "router_weight_kept" not in answer["timings"]
        assert ask(serve, pyspac_lossy="off")["tokens"] == answer["tokens"], "it is exact anyway"
        return list(answer["tokens"])


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    folder = tmp_path_factory.mktemp("lossy")
    with Serve(folder, *LOSSY, passed=("-np", "2", *ONE_THREAD), draft=False) as serve:
        yield serve.wait_ready()


def test_a_request_may_ask_for_all(lossy: Serve, exact: list[int]) -> None:
    answer = ask(lossy)
    assert 0.2 < kept(answer) < 0.95
    assert answer["tokens"] != exact
    answer = ask(lossy, pyspac_lossy="off")  # on the slot of the lossy one, whose prompt it does not use
    assert kept(answer) == 1.0
    assert answer["tokens"] == exact
    assert kept(ask(lossy)) < 0.95, "the next one on that slot is lossy again"


def test_exact_beside_lossy(lossy: Serve, exact: list[int]) -> None:
    """In the same batches."""
    with ThreadPoolExecutor() as pool:
        other = pool.submit(ask, lossy, n_predict=4 * N)
        answers = [ask(lossy, pyspac_lossy="off") for _ in range(2)]
        assert kept(other.result()) < 0.95
    for answer in answers:
        assert answer["tokens"] == exact
        assert kept(answer) == 1.0


def test_chats_have_it_too(lossy: Serve) -> None:
    messages = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 20}
    assert kept(ask(lossy, "/v1/chat/completions", **messages)) < 0.95
    assert kept(ask(lossy, "/v1/chat/completions", **messages, pyspac_lossy="off")) == 1.0


@pytest.mark.parametrize("value", ["on", "", 1, True, ["off"], {"off": 1}])
def test_other_values_are_refused(lossy: Serve, value: Any) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(lossy, pyspac_lossy=value)
    assert refused.value.code == 400
    assert "pyspac_lossy" in refused.value.read().decode()


def test_other_apis_hand_it_on(lossy: Serve) -> None:
    """Else a request would be lossy that asked for all: what is handed on is refused if it is wrong."""
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "pyspac_lossy": "on"}
    for path in ("/v1/messages", "/v1/chat/completions"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(lossy, path, **body)
        assert refused.value.code == 400, path
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(lossy, "/v1/responses", input=PROMPT, max_output_tokens=4, pyspac_lossy="on")
    assert refused.value.code == 400


def test_exact_beside_limited(tmp_path: Path, exact: list[int]) -> None:
    """In batches of which some are computed twice; and the metrics have what it cost."""
    limit = (*LOSSY, "--max-kl", "0.02", "--metrics-port", "0")
    with Serve(tmp_path, *limit, passed=("-np", "2", *ONE_THREAD), draft=False) as serve:
        serve.wait_ready()
        with ThreadPoolExecutor() as pool:
            other = pool.submit(ask, serve, n_predict=4 * N)
            answers = [ask(serve, pyspac_lossy="off") for _ in range(2)]
            assert 0.5 < kept(other.result()) < 1.0
        for answer in answers:
            assert answer["tokens"] == exact
            assert kept(answer) == 1.0
        seen = metrics(serve)
    n_tokens, n_samples = seen["pyspac_kl_tokens_total"], seen["pyspac_kl_samples_total"]
    assert 4 * N <= n_tokens < 5 * N
    assert 16 <= n_samples < n_tokens / 2
    assert 0 < seen["pyspac_kl_nats_total"] <= 0.03 * n_tokens  # one token may cost more than is left
