"""Figures of MoE-SpAc: speed against other systems, the ablation, what drafts tell about experts.

Replayed as in section 4.1: Qwen3-30B-A3B, an RTX 4090 on PCIe 4.0 (24 of 32 GB/s for single experts), 17 % of
the experts on the device, K = 8, 0.8 accepted (figure 7). The draft's time is not given: Qwen3-4B in 8 bits
reads 4.4 GB per token, 4.4 ms. The tables' numbers are not in the text that this follows; where only the text
speaks, the paper's side is a ratio or a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from statistics import fmean
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from claims import Claim, Figures, Source, main
from replays import Row, machine, replay, workload
from synthetic_routing import make_trace

from pyspac.lab.trace import Trace
from pyspac.scheduler.config import SchedulerConfig
from pyspac.scheduler.estimator import make_estimator
from pyspac.speculation.utility import expected_tokens

Counts = npt.NDArray[Any]  # [n_step, n_expert]

GPU: Final = machine("rtx4090", link=24.0, device=900.0, draft_ms=4.4)
K: Final = 8
ACCEPT: Final = 0.8
CAPACITY: Final = "17%"
BASELINES: Final = {  # system: policy, drafts
    "llama.cpp": ("n-cpu-moe", 0),
    "llama.cpp, drafts": ("n-cpu-moe", K),
    "Mixtral-Offloading": ("specmd-1", 0),
    "MoE-Infinity": ("moe-infinity", 0),
    "SP-MoE": ("sp-moe", K),
    "HybriMoE": ("hybrimoe", 0),
}
DRAFT_WHY: Final = (
    "a draft of 4.4 ms takes half of a plain step here, so 8 of them lose, and HybriMoE without drafts "
    "leads; the paper does not give its baselines' speeds"
)


@cache
def trace(source: Source) -> Trace:
    """Return the recorded trace, or a synthetic one that is short."""
    return source.qwen() or make_trace("Qwen3-30B-A3B", n_token=40)


@cache
def long_trace(source: Source) -> Trace:
    """Return the same where nothing is simulated, only counted: long enough for utilities to settle."""
    return source.qwen() or make_trace("Qwen3-30B-A3B", n_token=200)


def tps(source: Source, policy: str, k: int = K, capacity: str = CAPACITY, **fields: Any) -> float:
    return float(_run(source, policy, k, capacity, tuple(fields.items()))["predicted_tps"])


@cache
def _run(source: Source, policy: str, k: int, capacity: str, fields: tuple[tuple[str, Any], ...]) -> Row:
    return replay(
        trace(source),
        policy,
        GPU,
        k=k,
        accept=ACCEPT,
        capacity=capacity,
        predictor_accuracy=0.85,
        **dict(fields),
    )


def table_2(source: Source) -> Sequence[Claim]:
    ours = {name: tps(source, policy, k) for name, (policy, k) in BASELINES.items()}
    mean = fmean(ours.values())
    return [
        Claim(
            what="speed against six systems",
            source="section 4.2: 4.04 times the baselines' mean, 1.419 times the best, llama.cpp with drafts",
            paper={"MoE-SpAc": 1.419, "llama.cpp, drafts": 1.0, "the baselines' mean": 1.419 / 4.04},
            unit="of the best baseline's",
            ours=ours | {"MoE-SpAc": tps(source, "moe-spac"), "the baselines' mean": mean},
            our_unit="tokens/s",
            how=source.how,
            why=DRAFT_WHY,
        )
    ]


def table_4(source: Source) -> Sequence[Claim]:
    ranks = {"full": 4.0, "adabc": 3.0, "specue": 2.0, "hetwb": 2.0, "prefetch": 1.0, "evict": 1.0}
    ours = {
        name: tps(source, "moe-spac" if name == "full" else f"moe-spac-no-{name}") for name in [*ranks, "sd"]
    }
    return [
        Claim(
            what="ablation: speed without a part",
            source="section 4.4: adabc marginal, specue and hetwb more, prefetch and evict most",
            paper=ranks,
            unit="rank",
            ours=ours,
            our_unit="tokens/s",
            how=source.how,
            why="binary utility costs bytes, and the byte budget keeps them from costing time",
        )
    ]


# ---- what drafts tell


def counts(source: Source, il: int, k: int) -> tuple[Counts, list[int]]:
    """Return [n_step, n_expert] activations of a layer, and tokens per step."""
    found, n_tokens = [], []
    for step in workload(long_trace(source), k, ACCEPT).steps:
        demand = next(d for d in step.layers if d.il == il)
        row = np.zeros(long_trace(source).geometry.n_expert, np.int64)
        row[demand.keys % len(row)] = demand.rows
        found.append(row)
        n_tokens.append(len(step.tokens))
    return np.array(found), n_tokens


def utilities(source: Source, il: int, k: int, estimator: str = "spac") -> Counts:
    """Return [n_step, n_expert] what the estimator says before each step."""
    rows, n_tokens = counts(source, il, k)
    made = make_estimator(1, rows.shape[1], SchedulerConfig(estimator=estimator, n_draft_max=k))
    levels = [made.utility.copy()[0]]
    for row, n in zip(rows[:-1], n_tokens[:-1], strict=True):
        levels.append(made.update(row[None].astype(np.uint32), n)[0].copy())
    return np.array(levels)


def balanced(said: npt.NDArray[np.bool_], is_used: npt.NDArray[np.bool_]) -> float:
    """Return the mean of how many used experts were called hot and how many unused ones cold."""
    return float((said[is_used].mean() + (~said)[~is_used].mean()) / 2)


def figure_4(source: Source) -> Sequence[Claim]:
    il = trace(source).geometry.n_layer - 1
    ours = {}
    for name, k, estimator in (("drafts", K, "spac"), ("one token at a time", 0, "lfu")):
        rows, _ = counts(source, il, k)
        levels = utilities(source, il, k, estimator)
        ours[name] = balanced(levels[2:] >= 1, rows[2:] > 0)
    return [
        Claim(
            what=f"hot or cold, predicted for layer {il} (paper: 0.85)",
            source="section 4.3 and figure 4: 0.85 with drafts, less for HybriMoE without",
            paper={"drafts": 2.0, "one token at a time": 1.0},
            unit="rank",
            ours=ours,
            our_unit="mean of hot and cold ones",
            how=source.how,
            why="a share of all tokens so far separates as well as 8 drafts do",
        )
    ]


def figure_5(source: Source) -> Sequence[Claim]:
    left = {
        "MoE-SpAc, 17 %": tps(source, "moe-spac"),
        "llama.cpp, drafts, 25 %": tps(source, "n-cpu-moe", K, "25%"),
        "HybriMoE, 25 %": tps(source, "hybrimoe", 0, "25%"),
    }
    right = {f"K = {n}": tps(source, f"spac:n_levels={n}") for n in (1, 2, 4, 8)}
    return [
        Claim(
            what="speed over the share of experts on the device",
            source="section 4.5: 17 % beats the baselines at 25 %",
            paper={"MoE-SpAc, 17 %": 2.0, "llama.cpp, drafts, 25 %": 1.0, "HybriMoE, 25 %": 1.0},
            unit="rank",
            ours=left,
            our_unit="tokens/s",
            how=source.how,
            why=DRAFT_WHY,
        ),
        Claim(
            what="speed over the number of levels",
            source="section 4.5: fewer than 4 lose, more do not",
            paper={"K = 1": 1.0, "K = 2": 1.0, "K = 4": 2.0, "K = 8": 2.0},
            unit="rank",
            ours=right,
            our_unit="tokens/s",
            how=source.how,
            why="so short a text hardly lifts an expert beyond level 1",
        ),
        *_lengths(source),
    ]


def _lengths(source: Source) -> Sequence[Claim]:
    """The gain at the beginning of a text and over all of it; our texts are short."""
    from dataclasses import replace as changed

    whole = trace(source)
    n_short = (whole.n_token - whole.n_prompt) // 2
    keep = slice(0, whole.n_prompt + n_short)
    parts = {
        name: getattr(whole, name)[keep] for name in ("step", "position", "status", "experts", "weights")
    }
    short = changed(whole, **parts, token_id=None, logits=None, early_logits=None, draft_logits=None)
    gain = {}
    for name, piece in (("half of the text", short), ("all of it", whole)):
        runs = [
            replay(piece, policy, GPU, k=K, accept=ACCEPT, capacity=CAPACITY)["predicted_tps"]
            for policy in ("moe-spac", "n-cpu-moe")
        ]
        gain[name] = runs[0] / runs[1]
    return [
        Claim(
            what="speed over the generation's length (512 to 4096 in the paper)",
            source="section 4.5 and figure 5, middle: the gain over baselines stays",
            paper={"half of the text": 2.0, "all of it": 2.0, "llama.cpp, drafts": 1.0},
            unit="rank",
            ours=gain | {"llama.cpp, drafts": 1.0},
            our_unit="of llama.cpp's with drafts",
            how=source.how,
        )
    ]


def figure_7(source: Source) -> Sequence[Claim]:
    experts = trace(source).experts
    decoded = experts[trace(source).n_prompt :]
    n_used = decoded.shape[2]

    def distinct(width: int) -> float:
        starts = range(0, len(decoded) - width, 3)
        return fmean(
            len(np.unique(decoded[at : at + width, il]))
            for at in starts
            for il in range(0, decoded.shape[1], 6)
        )

    return [
        Claim(
            what=f"experts touched (a/b) against tokens gained (Omega), 0.8 accepted, K = {gamma}",
            source="section A.1 and figure 7: a/b < Omega for 2 to 8",
            paper={"a/b": 1.0, "Omega": 2.0},
            unit="rank",
            ours={"a/b": distinct(gamma) / n_used, "Omega": expected_tokens(gamma, ACCEPT)},
            our_unit="x",
            how=source.how,
        )
        for gamma in (2, 4, 8)
    ]


def figure_8(source: Source) -> Sequence[Claim]:
    def correlation(k: int) -> float:
        """Return how much a step's activations say about the next one's, mean over layers."""
        found = []
        for il in range(0, trace(source).geometry.n_layer, 12):
            rows = counts(source, il, k)[0].astype(float)
            found.append(np.corrcoef(rows[1:].ravel(), rows[:-1].ravel())[0, 1])
        return float(np.mean(found))

    return [
        Claim(
            what="correlation of an expert's activations from step to step",
            source="section B and figure 8: tighter with drafts than one token at a time",
            paper={"drafts": 2.0, "one token at a time": 1.0},
            unit="rank",
            ours={"drafts": correlation(K), "one token at a time": correlation(0)},
            our_unit="correlation",
            how=source.how,
        )
    ]


def figure_9(source: Source) -> Sequence[Claim]:
    il = trace(source).geometry.n_layer // 2
    rows, levels = counts(source, il, K)[0][2:], utilities(source, il, K)[2:]
    taus = (1, 2, 3, 4)
    cold = {f"r_c({tau})": float(rows[levels < tau].sum() / rows.sum()) for tau in taus}
    hot = {f"r_g({tau})": float(((levels >= tau) & (rows > 0)).sum() / (rows > 0).sum()) for tau in taus}
    seen = [level for level in range(5) if (levels == level).any()]
    by_level = {f"utility {level}": float(rows[levels == level].mean()) for level in seen}
    return [
        Claim(
            what=f"share of activations below tau, layer {il}",
            source="section C.1 and figure 9(a): rises with tau",
            paper={name: float(i) for i, name in enumerate(cold, 1)},
            unit="rank",
            ours=cold,
            our_unit="share",
            how=source.how,
        ),
        Claim(
            what=f"share of distinct experts from tau on, layer {il}",
            source="section C.1 and figure 9(a): falls",
            paper={name: float(5 - i) for i, name in enumerate(hot, 1)},
            unit="rank",
            ours=hot,
            our_unit="share",
            how=source.how,
        ),
        Claim(
            what=f"activations in the next step by utility, layer {il}",
            source="section C.1 and figure 9(b): rise with the utility",
            paper={name: float(i) for i, name in enumerate(by_level, 1)},
            unit="rank",
            ours=by_level,
            our_unit="per expert",
            how=source.how,
        ),
    ]


FIGURES: Final[Figures] = {
    "Table 2": table_2,
    "Table 4": table_4,
    "Figure 4": figure_4,
    "Figure 5": figure_5,
    "Figure 7": figure_7,
    "Figure 8": figure_8,
    "Figure 9": figure_9,
}

if __name__ == "__main__":
    main("MoE-SpAc", FIGURES)
