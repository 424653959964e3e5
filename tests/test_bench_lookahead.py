"""The sums of benchmarks/bench_lookahead.py, by hand; the servers that it asks are tested elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from conftest import ROOT

from pyspac.forward.model import Model, ModelParams
from pyspac.server.options import ServeOptions


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import bench_lookahead

        yield bench_lookahead
        for name in ("bench_lookahead", "bench_server", "machine"):
            sys.modules.pop(name, None)


def start_rows(bench: ModuleType, coverage: dict[str, float]) -> list[dict[str, Any]]:
    """Three rounds; the first token of a seeded start takes 10, 20 and 60 ms, of a cold one 20."""
    return [
        {"round": r, "way": way, "place": place, "prompt": kind, "coverage": coverage[way],
         "ttft_ms": (10.0, 20.0, 60.0)[r] if way == "seeded" else 20.0}
        for r in range(3)
        for way in bench.WAYS
        for place in bench.PLACES
        for kind in bench.PROMPTS
    ]  # fmt: skip


def test_starts_are_compared_round_by_round(bench: ModuleType) -> None:
    rows = bench.sum_up_starts(start_rows(bench, {"seeded": 0.6, "cold": 0.4}))
    assert [(row["place"], row["prompt"]) for row in rows] == [
        (place, kind) for place in bench.PLACES for kind in (*bench.PROMPTS, "all")
    ]
    for row in rows:
        assert (row["coverage_seeded"], row["coverage_cold"], row["coverage_ratio"]) == (0.6, 0.4, 1.5)
        assert (row["ttft_ms_ratio"], row["ttft_ms_ratio_spread"]) == (1.0, [0.5, 3.0])


def test_predictors_have_medians_and_nothing_where_nothing_was_said(bench: ModuleType) -> None:
    rows = [
        {
            "round": r,
            "name": name,
            "prompt": "data",
            "tps": 100.0 + r,
            "recall": 0.5 if name != "none" else None,
        }
        for r in range(3)
        for name in ("none", "token")
    ]
    none, token = bench.sum_up_predictors(rows)
    assert (none["name"], none["recall"], none["tps"]) == ("none", None, 101.0)
    assert (token["recall"], token["tps_spread"]) == (0.5, [100.0, 102.0])


@pytest.mark.model
def test_prompts_are_wider_than_what_is_split(bench: ModuleType) -> None:
    # a narrower one would be decoded through the split, and seed nothing
    assert len(bench.PROMPTS) == 4
    with Model(ModelParams(path=bench.MODELS / "demo-moe.gguf")) as model:
        for kind, text in bench.PROMPTS.items():
            assert len(model.vocab.tokenize(text)) > ServeOptions(model=model.path).default_max_batch, kind
