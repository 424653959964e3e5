"""Answers that share the server's context, as they do unless -np says how many slots there are."""

from __future__ import annotations

import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from serving import HOST, ONE_THREAD, TARGET, Serve, post, wait_for

from pyspac.forward.context import Context, ContextParams
from pyspac.forward.model import Model, ModelParams
from pyspac.server.health import get_json

N_CTX = 1024
N_TOKENS = 600
ROUNDING = 0.05  # of logits, between batches of different widths
PROMPTS = ("def parse(self, text):\n", "import os\nimport sys\n\n", "class Reader:\n", "for i in range(")


@pytest.fixture(scope="module", params=[False, True], ids=["alone", "draft"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Four slots, and a context for one and a half of their answers."""
    folder = tmp_path_factory.mktemp("context")
    with Serve(folder, "-c", str(N_CTX), passed=ONE_THREAD, draft=request.param) as serve:
        yield serve.wait_ready()


def ask(serve: Serve, prompt: str | list[int], n_predict: int = N_TOKENS) -> list[int]:
    body = {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "ignore_eos": True}
    answer: dict[str, Any] = post(serve.port, "/completion", body | {"return_tokens": True})
    return [int(token) for token in answer["tokens"]]


def tokenize(serve: Serve, text: str) -> list[int]:
    found = post(serve.port, "/tokenize", {"content": text, "add_special": True})["tokens"]
    return [int(token) for token in found]


def below_the_best(prompt: list[int], output: list[int]) -> float:
    """How far the logit of any token of `output` is below the best one, the whole text read at once."""
    params = ModelParams(path=TARGET, n_gpu_layers=0, use_extra_bufts=False)
    sizes = {"n_ctx": N_CTX, "n_threads": 1, "n_ubatch": N_CTX, "n_outputs_max": N_CTX}
    with Model(params) as model, Context(model, ContextParams(**sizes)) as context:
        logits = context.decode([*prompt, *output[:-1]], len(output))
        return float((logits.max(axis=1) - logits[np.arange(len(output)), output]).max())


def n_waiting(serve: Serve) -> int:
    return serve.log().count("waits for room in the context")


def test_answers_wait_for_each_other(served: Serve) -> None:
    """Each of them is whole, and what it was to be, though it was put aside in the middle."""
    before = n_waiting(served)
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda prompt: ask(served, prompt), PROMPTS))
    assert n_waiting(served) > before
    for prompt, tokens in zip(PROMPTS, answers, strict=True):
        assert len(tokens) == N_TOKENS
        assert below_the_best(tokenize(served, prompt), tokens) < ROUNDING


def test_several_answers_to_one_prompt_wait_too(served: Serve) -> None:
    """They begin with cells that they share."""
    body = {"prompt": PROMPTS[0] * 20, "n_predict": 400, "n_cmpl": 3, "ignore_eos": True, "temperature": 0}
    answers = list(post(served.port, "/completion", body))
    assert [answer["tokens_predicted"] for answer in answers] == [400] * 3


def test_several_answers_to_one_prompt_begin_where_others_were(served: Serve) -> None:
    """What their slots held before is no obstacle, and each answer has all of its prompt."""
    body = {"n_predict": 8, "ignore_eos": True, "temperature": 0}
    other, tokens = (tokenize(served, prompt * 200)[:600] for prompt in PROMPTS[:2])
    post(served.port, "/completion", body | {"prompt": other, "id_slot": 1})
    answers = list(post(served.port, "/completion", body | {"prompt": tokens, "n_cmpl": 3}))
    assert {answer["tokens_evaluated"] for answer in answers} == {600}
    assert len({answer["content"] for answer in answers}) == 1


def test_one_that_waits_may_be_cancelled(served: Serve) -> None:
    """Its slot is as good as new."""
    before = n_waiting(served)
    with ThreadPoolExecutor() as pool:
        first = [pool.submit(ask, served, prompt) for prompt in PROMPTS[:2]]
        wait_for("one that waits", lambda: n_waiting(served) > before)
        assert ask(served, PROMPTS[2], 8)
        with pytest.raises(TimeoutError):
            post(
                served.port,
                "/completion",
                {"prompt": PROMPTS[3] * 60, "n_predict": N_TOKENS, "ignore_eos": True},
                timeout_s=0.1,
            )
        assert [len(answer.result()) for answer in first] == [N_TOKENS, N_TOKENS]
    wait_for("idle slots", lambda: not any(slot["is_processing"] for slot in slots(served)))
    assert len(ask(served, PROMPTS[3], 16)) == 16


def slots(serve: Serve) -> list[dict[str, Any]]:
    return list(get_json(HOST, serve.port, "/slots")[1])


def test_a_prompt_that_no_context_could_hold_is_a_bad_request(served: Serve) -> None:
    """With both numbers, and at once, though others are at work."""
    tokens = tokenize(served, PROMPTS[0]) * (N_CTX // 4)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(ask, served, PROMPTS[1])
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(served, tokens)
        assert not first.done()
        assert len(first.result()) == N_TOKENS
    assert refused.value.code == 400
    text = refused.value.read().decode()
    assert str(len(tokens)) in text
    assert str(N_CTX) in text
