"""Predictors move experts, never results; and what the table of tokens is worth on the demo model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from llama_helpers import (
    Batch,
    Sequence0,
    assert_same_bits,
    attached_engine,
    decide_randomly,
    decode,
    loaded_model,
    new_context,
    place,
    split_layers,
)

from pyspac.forward.model import Model, ModelParams
from pyspac.scheduler.config import SchedulerConfig
from pyspac.scheduler.estimator import make_estimator
from pyspac.scheduler.predict.token import TokenPredictor
from pyspac.scheduler.routing_log import RoutingLog
from pyspac.scheduler.scheduler import Scheduler

DEMO = ROOT / "pyspac/models/demo-moe.gguf"
WIDTH = 8


@pytest.fixture(scope="module")
def demo() -> Iterator[Any]:
    with loaded_model(DEMO) as model:
        yield model


@pytest.mark.parametrize("host_mode", ["in-graph", "executor"])
def test_logits_are_stock_s_whatever_is_predicted(demo: Any, host_mode: str) -> None:
    """Random placements, and predictions that are right or wrong."""
    rng = np.random.default_rng(5)
    tokens = Sequence0(2, 400)
    with (
        new_context(demo) as stock,
        new_context(demo) as split,
        attached_engine(split, cache="25%", host_mode=host_mode, fill=True) as engine,
    ):
        scheduler = Scheduler(engine.board, SchedulerConfig(predict=("token",)))
        for i in range(40):
            batch = tokens.next_batch(int(rng.integers(1, WIDTH)) if i else 30)
            upcoming = list(batch.tokens) if i % 3 else [int(t) for t in rng.integers(3, 400, 5)]
            scheduler.look_ahead(upcoming[:1])
            scheduler.look_ahead(upcoming)
            engine.apply()
            if i % 4 == 3:
                decide_randomly(engine, rng)
                place(engine)
            assert_same_bits(decode(split, batch), decode(stock, batch), f"batch {i}")
            engine.end_forward()
            scheduler.step()
        assert scheduler.foresight is not None
        assert scheduler.foresight.predictor.score.n_known > 20
        counters = engine.board.counters[0]
        assert counters["n_hit_rows"] > 0
        assert counters["n_miss_rows"] > 0
        assert counters["n_pinned_steals"] == 0


def demo_tokens(n: int) -> list[int]:
    """English text, as the demo model's vocabulary has it."""
    with Model(ModelParams(path=DEMO)) as model:
        return model.vocab.tokenize((ROOT / "docs/architecture.md").read_text(encoding="utf-8"))[:n]


def test_token_finds_more_than_the_average_does(demo: Any) -> None:
    """On tokens seen before: at least 1.3 times what as many experts of the highest average find."""
    text = demo_tokens(480)
    with new_context(demo) as ctx, attached_engine(ctx) as engine:
        log = RoutingLog(engine.board)
        rows = []
        for first in range(0, len(text), WIDTH):
            batch = text[first : first + WIDTH]
            decode(ctx, Batch(batch, range(first, first + len(batch)), [0] * len(batch)))
            engine.end_forward()
            ids, experts = log.read()
            rows += list(zip(ids.tolist(), experts, strict=True))
        layers, board = split_layers(engine), engine.board
        n_expert, n_used = board.n_expert, board.n_expert_used
    table = TokenPredictor(len(layers), n_expert, n_used)
    average = make_estimator(len(layers), n_expert, SchedulerConfig(estimator="ema"))
    n_right = n_all = 0
    for token, used in rows:
        used = used[layers]
        ids = np.array([token], np.int32)
        if table.predict(ids).any():
            best = np.argsort(-average._sum, axis=1, kind="stable")[:, :n_used]  # type: ignore[attr-defined]
            n_right += sum(len(set(a) & set(b)) for a, b in zip(best.tolist(), used.tolist(), strict=True))
            n_all += used.size
        table.learn(ids, used[None])
        counts = np.zeros((len(layers), n_expert), np.uint32)
        np.add.at(counts, (np.arange(len(layers))[:, None], used), 1)
        average.update(counts, 1)
    assert n_all > 100 * n_used * len(layers)
    assert table.score.n_used == n_all
    recall = table.score.recall
    assert recall is not None
    assert recall >= 1.3 * n_right / n_all
    print(f"token {recall:.3f}, ema {n_right / n_all:.3f}, known {table.score.known:.2f}")
