"""Figures of SpecMD: collision misses, prefetch strategies, Least-Stale as a replacement.

The paper runs an A100 with copies at 5 GB/s and caches of 1, 5 and 25 % of the model (section 5.1); replayed
on such a machine, with synthetic routing of the paper's models. Its capacity is a share of the model, ours of
the experts, 3 to 13 % less.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from statistics import fmean
from typing import Final

import numpy as np
from claims import Claim, Figures, Source, main
from replays import Row, machine, replay
from synthetic_routing import MODELS, make_trace

A100: Final = machine("a100", link=5.0, device=1500.0)
NAMES: Final = ("OLMoE-1B-7B", "Mixtral-8x7B", "Phi-3.5-MoE", "Qwen1.5-MoE")
POLICIES: Final = {
    "LRU": "lru",
    "SB": "score",
    "FLD": "farthest-layer",
    "FLD, cyclic": "farthest-layer:cyclic=1",
    "LS": "least-stale:cyclic=1",
    "LS, literal": "least-stale",
}
COLLISIONS_WHY: Final = (
    "SB: weights added up over the text keep popular experts, whatever their layer; the paper's score is not "
    "said to be a sum"
)


@cache
def run(model: str, eviction: str, capacity: str, prefetch: str = "next-layer") -> Row:
    """Return one replay; 24 tokens, so that a figure takes seconds."""
    trace = make_trace(model, n_token=24)
    return replay(trace, eviction, A100, prefetch=prefetch, miss="fetch", capacity=capacity)


def rate(eviction: str, capacity: str) -> float:
    """Return the collision misses over all accesses in per cent, mean over the models that fit."""
    return 100 * fmean(run(name, eviction, capacity)["collision_rate"] for name in fitting(capacity))


def fitting(capacity: str) -> list[str]:
    """Return the models of which the cache holds at least one layer's experts of a token."""
    share = float(capacity.rstrip("%")) / 100
    return [n for n in NAMES if share * MODELS[n].n_layer * MODELS[n].n_expert >= MODELS[n].n_used]


def figure_4(_source: Source) -> Sequence[Claim]:
    return [
        Claim(
            what="collision misses at 5 %, all models",
            source="section 5.2: LS 1.6-1.9 %, LRU 4.5-12.6 %, SB 42.6-60.9 %, FLD slightly better than LRU",
            paper={"LS": 1.75, "FLD": 8.0, "LRU": 8.5, "SB": 51.0},
            ours={name: rate(policy, "5%") for name, policy in POLICIES.items()},
            unit="%, middle of the range",
            our_unit="% of accesses",
            why=COLLISIONS_WHY,
        )
    ]


def figure_8(_source: Source) -> Sequence[Claim]:
    paper = {
        "1%": {"LS": 1.0, "LRU": 10.0, "SB": 10.0},
        "5%": {"LS": 1.0, "LRU": 5.6, "SB": 75.0},
        "25%": {"LS": 1.0, "LRU": 10.0, "SB": 10.0},
    }
    return [
        Claim(
            what=f"collision misses at {capacity.replace('%', ' %')}",
            source="figure 8's caption: LS 10 to 34 times lower; section 5.2: 2.6-8.6 and 58-91 at 5 %",
            paper=theirs,
            unit="of LS",
            ours={name: rate(policy, capacity) for name, policy in POLICIES.items()},
            our_unit="% of accesses",
            why=COLLISIONS_WHY,
        )
        for capacity, theirs in paper.items()
    ]


def figure_9(_source: Source) -> Sequence[Claim]:
    def by_half(eviction: str) -> tuple[float, float]:
        row = run("OLMoE-1B-7B", eviction, "1%")
        counts = np.array(row["collisions_by_layer"], float)
        half = len(counts) // 2
        return 100 * counts[:half].sum() / row["accesses"], 100 * counts[half:].sum() / row["accesses"]

    ours = {
        f"{name}, layers {where}": value
        for name in ("LS", "LRU", "SB")
        for where, value in zip(("0-7", "8-15"), by_half(POLICIES[name]), strict=True)
    }
    ranks = {"LS": (1.0, 1.0), "LRU": (2.0, 3.0), "SB": (2.0, 3.0)}
    paper = {
        f"{name}, layers {w}": r for name in ranks for w, r in zip(("0-7", "8-15"), ranks[name], strict=True)
    }
    return [
        Claim(
            what="collisions by layer, OLMoE, 1 %",
            source="section 5.2, figures 5 and 9: LS near 0 everywhere, LRU and SB 8-12 % in deep layers",
            paper=paper,
            unit="rank",
            ours=ours,
            our_unit="% of accesses",
            why=COLLISIONS_WHY,
        )
    ]


def figure_6(_source: Source) -> Sequence[Claim]:
    strategies = {"top-k 1.0": "next-layer", "top-k 1.5": "next-layer:overfetch=1.5", "score 80th": "score"}
    paper = {"score 80th": 2.0, "top-k 1.0": 1.0}
    claims = []
    for model in NAMES:
        rows = {name: run(model, POLICIES["LS"], "5%", prefetch) for name, prefetch in strategies.items()}
        theirs = {name: 3 - rank for name, rank in paper.items()} if model == "Mixtral-8x7B" else paper
        claims.append(
            Claim(
                what=f"hit rate by prefetch strategy at 5 %, {model}",
                source="section 5.3: score finds more with less waiting; Mixtral is the exception",
                paper=theirs,
                unit="rank",
                ours={name: 100 * row["expert_coverage"] for name, row in rows.items()},
                our_unit="% hits",
                how="replayed, synthetic routing and guesses",
                why="at 5 GB/s the link brings only part of what either asks for, whose order decides",
            )
        )
    return claims


def table_2(_source: Source) -> Sequence[Claim]:
    """Four systems with their own eviction and with Least-Stale."""
    systems = {"Eliseev": "specmd-1", "Zhu": "specmd-2", "HOBBIT": "specmd-3", "MixtureCache": "specmd-4"}
    gains = {
        "OLMoE-1B-7B": (10.7, 34.7, 17.7, 13.8),
        "Mixtral-8x7B": (17.8, 9.8, 25.7, 17.5),
        "Phi-3.5-MoE": (14.8, -4.3, 44.1, 24.6),
        "Qwen1.5-MoE": (7.8, 4.3, 18.4, 23.0),
    }

    def saved(model: str, system: str) -> float:
        trace = make_trace(model, n_token=24)
        before, after = (
            replay(trace, system, A100, capacity="5%", eviction=eviction)["predicted_tpot_ms"]
            for eviction in ("", POLICIES["LS"])
        )
        return float(100 * (1 - after / before))

    return [
        Claim(
            what=f"time saved by Least-Stale at 5 %, {model}",
            source="table 2, of the first token; ours: of decoding",
            paper=dict(zip(systems, paper, strict=True)),
            unit="%",
            ours={name: saved(model, system) for name, system in systems.items()},
            why="another thing is compared: time per token, not the first one's; a first pass from an empty "
            "cache uses each expert once, whoever leaves",
        )
        for model, paper in gains.items()
    ]


FIGURES: Final[Figures] = {
    "Figure 4": figure_4,
    "Figure 6": figure_6,
    "Figure 8": figure_8,
    "Figure 9": figure_9,
    "Table 2": table_2,
}

if __name__ == "__main__":
    main("SpecMD", FIGURES)
