"""Figures of SP-MoE: time per token, hit rates, memory, ablation, draft lengths, cutoff layer.

Replayed on the paper's machines (table 2, PCIe 4.0 x16: 14, 6 and 0.6 ms per expert, section 5.1) with
synthetic routing of its three targets. Each layer has its own slots, as in the paper. Drafts of one token,
97 % accepted (table 1). The paper gives no draft times; they are inferred from figure 14: the copies of 20
layers end with the draft of one token for Mixtral and Phi-MoE, those of all layers for Deepseek.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Final

from claims import Claim, Figures, Source, main
from replays import Row, machine, replay
from synthetic_routing import MODELS, make_trace


@dataclass(frozen=True, slots=True)
class Pair:
    """A target with its draft."""

    target: str
    draft_ms: float  # per drafted token
    k_critical: int  # k' (section 3.2)
    accept: float  # table 1
    capacity: str  # of the experts: 1, 2 and 6 per layer


PAIRS: Final = {
    "Mixtral": Pair("Mixtral-8x7B", 240.0, 1, 0.974, "12.5%"),
    "Phi-MoE": Pair("Phi-3.5-MoE", 175.0, 2, 0.982, "12.5%"),
    "Deepseek": Pair("DeepSeek-Lite", 80.0, 6, 0.970, "9.4%"),
}
GPUS: Final = {"3090": (24.0, 936.0), "4090": (24.0, 1008.0), "A100": (24.0, 1555.0)}  # link, device in GB/s
SYSTEMS: Final = {
    "Mixtral-Offloading": ("lru", "none"),
    "MoE-Infinity": ("lfu", "history"),
    "AdapMoE": ("lru", "next-layer:overfetch=0.5"),
    "SP-MoE": ("lru", "draft-gate"),
}
N_TOKEN: Final = 20


@cache
def run(
    pair: str, system: str, gpu: str = "3090", k: int = 1, capacity: str = "", knobs: str = "", seed: int = 0
) -> Row:
    """Return one replay."""
    p, (link, device) = PAIRS[pair], GPUS[gpu]
    eviction, prefetch = SYSTEMS[system]
    if prefetch == "draft-gate":
        prefetch = f"draft-gate:critical={p.k_critical}{knobs}"
    if system == "Mixtral-Offloading":
        link /= 2  # it copies its victims back to the host (section 7)
    where = machine(gpu, link=link, device=device, draft_ms=p.draft_ms)
    trace = make_trace(p.target, n_token=N_TOKEN, seed=seed)
    return replay(
        trace, eviction, where, k=k, accept=p.accept, prefetch=prefetch, miss="fetch",
        capacity=capacity or p.capacity, per_layer=True,
    )  # fmt: skip


def tpot(pair: str, system: str, **how: str | int) -> float:
    return float(run(pair, system, **how)["predicted_tpot_ms"])


def hit_rate(row: Row) -> float:
    """Return the share of distinct experts that were there, or whose copy was under way, in per cent."""
    return float(100 * (row["hits"] + row["late_loads"]) / row["accesses"])


def table_3(_source: Source) -> Sequence[Claim]:
    paper = {
        "Mixtral": (15.02, 15.87, 42.14, 20.89),
        "Phi-MoE": (27.60, 14.67, 49.43, 42.72),
        "Deepseek": (17.67, 16.73, 21.85, 40.06),
    }
    return [
        Claim(
            what=f"hit rate, {pair}",
            source="table 3, average; ours counts copies on their way",
            paper=dict(zip(SYSTEMS, values, strict=True)),
            unit="%",
            ours={name: hit_rate(run(pair, name)) for name in SYSTEMS},
        )
        for pair, values in paper.items()
    ]


def figure_9(_source: Source) -> Sequence[Claim]:
    """Four data sets: here four seeds of the same model."""
    ours = {
        name: fmean(float(run("Mixtral", name, seed=seed)["predicted_tpot_ms"]) for seed in range(4))
        for name in SYSTEMS
    }
    return [
        Claim(
            what="TPOT over four data sets (here: four seeds), Mixtral, 3090",
            source="section 5.1: SP-MoE takes 34 % less than Mixtral-Offloading, 19 % less than "
            "MoE-Infinity, 12 % less than AdapMoE",
            paper={
                "SP-MoE": 1.0, "AdapMoE": 1 / 0.88, "MoE-Infinity": 1 / 0.81, "Mixtral-Offloading": 1 / 0.66
            },
            unit="of SP-MoE's",
            ours={name: value / ours["SP-MoE"] for name, value in ours.items()},
            why=INFINITY_WHY,
        )
    ]  # fmt: skip


INFINITY_WHY: Final = "MoE-Infinity's copies of what a sequence used most delay what is asked for"


def figure_10(_source: Source) -> Sequence[Claim]:
    paper = {  # share of the other's TPOT that SP-MoE takes: Mixtral-Offloading, MoE-Infinity, AdapMoE
        ("3090", "Mixtral"): (0.572, 0.802, 0.868),
        ("3090", "Phi-MoE"): (None, None, 0.684),
        ("3090", "Deepseek"): (None, None, 0.931),
        ("4090", "Mixtral"): (0.548, 0.701, 0.854),
        ("4090", "Phi-MoE"): (None, None, 0.848),
        ("4090", "Deepseek"): (None, None, 0.912),
        ("A100", "Mixtral"): (0.564, 0.706, 0.905),
        ("A100", "Phi-MoE"): (None, None, 0.907),
        ("A100", "Deepseek"): (None, None, 0.874),
    }
    others = ("Mixtral-Offloading", "MoE-Infinity", "AdapMoE")
    claims = []
    for (gpu, pair), shares in paper.items():
        theirs = {name: 1 / share for name, share in zip(others, shares, strict=True) if share is not None}
        best = tpot(pair, "SP-MoE", gpu=gpu)
        claims.append(
            Claim(
                what=f"TPOT, {gpu}, {pair}",
                source="section 5.1",
                paper={"SP-MoE": 1.0, **theirs},
                unit="of SP-MoE's",
                ours={"SP-MoE": 1.0, **{name: tpot(pair, name, gpu=gpu) / best for name in theirs}},
                why=INFINITY_WHY,
            )
        )
    return claims


def figure_11(_source: Source) -> Sequence[Claim]:
    """The paper does not name the model; of its three only Deepseek's 30 GB can run in 7 GB as in 39 GB."""
    paper = {"7 GB": (0.27, 0.39, 0.20, 0.18), "39 GB": (0.10, 0.23, 0.19, 0.10)}
    share = {"7 GB": "9.4%", "39 GB": "100%"}
    return [
        Claim(
            what=f"TPOT, Deepseek, 3090, {size}",
            source="section 5.3 and figure 11",
            paper=dict(zip(SYSTEMS, values, strict=True)),
            ours={name: tpot("Deepseek", name, capacity=share[size]) / 1e3 for name in SYSTEMS},
            unit="s",
            why="in 39 GB all experts fit, and systems differ here by the copies of first uses; in the "
            "paper MoE-Infinity and AdapMoE go on waiting"
            if size == "39 GB"
            else "Mixtral-Offloading's second copy per victim weighs most where victims are many",
        )
        for size, values in paper.items()
    ]


def figure_12(_source: Source) -> Sequence[Claim]:
    paper = {"Mixtral": (1.68, 1.80), "Phi-MoE": (1.39, 1.59), "Deepseek": (1.96, 1.96)}
    claims = []
    for pair, (worker, batched) in paper.items():
        none = tpot(pair, "SP-MoE", knobs=",cutoff=0")
        claims.append(
            Claim(
                what=f"ablation: speed over no prefetching, 3090, {pair}",
                source="section 5.4 (batched copies cost nothing here: a copy's latency is 15 us)",
                paper={"none": 1.0, "prefetch": worker, "batched": batched},
                unit="x",
                ours={"none": 1.0, "prefetch": none / tpot(pair, "SP-MoE")},
            )
        )
    return claims


def figure_13(_source: Source) -> Sequence[Claim]:
    lengths = (1, 2, 4)
    ours = {f"{name}, {k}": tpot("Mixtral", name, k=k) for name in ("AdapMoE", "SP-MoE") for k in lengths}
    paper = {f"SP-MoE, {k}": 0.83 for k in lengths} | {f"AdapMoE, {k}": 1.0 for k in lengths}
    base = ours["AdapMoE, 1"]
    return [
        Claim(
            what=f"TPOT, Mixtral, 3090, K = {k}",
            source="section 5.5: SP-MoE takes 15-20 % less than AdapMoE, at each draft length",
            paper={name: paper[f"{name}, {k}"] for name in ("SP-MoE", "AdapMoE")},
            unit="of AdapMoE's",
            ours={name: ours[f"{name}, {k}"] / base for name in ("SP-MoE", "AdapMoE")},
            our_unit="of AdapMoE's with 1",
        )
        for k in lengths
    ]


def figure_14(_source: Source) -> Sequence[Claim]:
    claims = []
    for pair, shape in {"Mixtral": (3.0, 2.0, 1.0, 2.0), "Deepseek": (4.0, 3.0, 2.0, 1.0)}.items():
        n_layer = MODELS[PAIRS[pair].target].n_layer
        cutoffs = (0, 10, 20, n_layer)
        claims.append(
            Claim(
                what=f"TPOT over the cutoff layer, {pair}, 3090 (solved for: {solved(pair)})",
                source="section 5.6: "
                + ("a U with its bottom near 20" if pair == "Mixtral" else "falls to the last layer"),
                paper={str(c): rank for c, rank in zip(cutoffs, shape, strict=True)},
                unit="rank",
                ours={str(c): tpot(pair, "SP-MoE", knobs=f",cutoff={c}") for c in cutoffs},
                our_unit="ms",
                why="the U's bottom lies where drafting ends, which follows from its time per layer"
                if pair == "Mixtral"
                else "",
            )
        )
    return claims


def solved(pair: str) -> int:
    """Return the cutoff layer that the lab solves for."""
    from pyspac.lab.cutoff import cutoff_layer

    p, link = PAIRS[pair], GPUS["3090"][0]
    moe = MODELS[p.target]
    n_room = float(p.capacity.rstrip("%")) / 100 * moe.n_layer * moe.n_expert
    layer_us = 1e3 * p.draft_ms / moe.n_layer
    return cutoff_layer(
        [p.k_critical] * moe.n_layer, layer_us=layer_us, copy_us=15 + 1e3 * moe.expert_mb / link, n_draft=1,
        n_layer_draft=moe.n_layer, n_experts_room=n_room,
    )  # fmt: skip


FIGURES: Final[Figures] = {
    "Table 3": table_3,
    "Figure 9": figure_9,
    "Figure 10": figure_10,
    "Figure 11": figure_11,
    "Figure 12": figure_12,
    "Figure 13": figure_13,
    "Figure 14": figure_14,
}

if __name__ == "__main__":
    main("SP-MoE", FIGURES)
