"""The tables and figures of docs/policies.md: which runs each one needs, and how it shows them.

A section asks a `Bench` for rows and returns Markdown. It is asked twice: first to learn which runs it needs
(the rows are blank then), later with the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from policy_bench import (
    FILES,
    MACHINE,
    N_FIRST,
    QWEN,
    Bench,
    Row,
    percent,
    share_and_speed,
    shown_name,
    table,
    tps,
)

from pyspac.lab.figures import draw_ablation, draw_capacity, draw_collisions
from pyspac.scheduler.config import ABLATIONS

CAPACITIES: Final = ("1%", "5%", "17%", "25%", "40%")
FIGURE_CAPACITIES: Final = ("1%", "2.5%", "5%", "10%", "17%", "25%", "40%", "60%")
COMMON: Final = ("5%", "17%", "25%")
REPLAYED: Final = tuple(part for part in ABLATIONS if part != "stage")  # no replay moves a prompt's experts

POLICIES: Final = {  # policy: how the tables call it
    "unbounded": "unbounded",
    "oracle": "oracle",
    "belady": "belady",
    "ema": "**ema** (shipped)",
    "spac": "spac (Algorithm 1)",
    "utility-lru": "utility-lru",
    "utility-lfu": "utility-lfu",
    "lru": "lru (llama.cpp)",
    "lfu": "lfu",
    "arc": "arc",
    "least-stale": "least-stale",
    "least-stale:cyclic=1": "least-stale, cyclic",
    "n-cpu-moe": "n-cpu-moe",
    "host-admit": "host-admit",
    "hybrimoe": "hybrimoe",
}
SHORTER: Final = (
    "oracle", "ema", "spac", "utility-lfu", "lru", "lfu", "least-stale:cyclic=1", "n-cpu-moe", "host-admit",
    "hybrimoe",
)  # fmt: skip
IN_FIGURE: Final = (
    "lru", "lfu", "least-stale", "least-stale:cyclic=1", "score", "arc", "belady", "unbounded", "ema", "spac",
    "n-cpu-moe", "hybrimoe",
)  # fmt: skip
Make = Callable[[Bench], str]


# ---- sections


def capacity_table(trace: str, k: int, policies: Iterable[str] = POLICIES) -> Make:
    """Policies over capacity."""

    def make(bench: Bench) -> str:
        lines = []
        for policy in policies:
            rows = [bench.row(trace, policy, capacity, k) for capacity in CAPACITIES]
            lines.append([shown_name(POLICIES[policy], rows[0]), *map(share_and_speed, rows)])
        return table(["policy", *map(percent, CAPACITIES)], lines)

    return make


def estimators(bench: Bench) -> str:
    policies = ("ema", "spac")
    lines = [
        [
            f"{trace}, K = {k}",
            *(
                f"{row['coverage']:.2f}/{row['predicted_tps']:.0f}"
                for row in (
                    bench.row(trace, policy, capacity, k) for capacity in COMMON for policy in policies
                )
            ),
        ]
        for trace in FILES
        for k in (0, 4, 8)
    ]
    heads = [head for c in COMMON for head in (f"{percent(c)}: {policies[0]}", policies[1])]
    return table(["covered/tokens per second", *heads], lines)


def prompts(bench: Bench) -> str:
    """What a cold start and one that is seeded by the prompt cover of the first tokens, and of all."""
    lines = []
    for trace in FILES:
        for machine in (MACHINE, "rtx3060-laptop", "instant"):
            cells = []
            for capacity in ("17%", "40%"):
                cold, seeded = (
                    bench.row(trace, "ema", capacity, 0, machine=machine, is_cold=is_cold)
                    for is_cold in (True, False)
                )
                cells += [f"{cold[name]:.2f}/{seeded[name]:.2f}" for name in ("coverage_first", "coverage")]
            lines.append([trace, f"`{machine}`", *cells])
    what = [f"{percent(c)}, {tokens}" for c in ("17%", "40%") for tokens in (f"first {N_FIRST}", "all")]
    return table(["cold/seeded, K = 0", "machine", *what], lines)


def machines(bench: Bench) -> str:
    capacities = ("5%", "10%", "17%", "25%", "40%")
    names = (MACHINE, "rtx3060-laptop", "h200", "cpu-ssd")
    lines = []
    for policy in ("ema", "lru", "n-cpu-moe", "hybrimoe"):
        rows = [[bench.row(QWEN, policy, c, 0, machine=machine) for c in capacities] for machine in names]
        lines.append([shown_name(POLICIES[policy], rows[0][0]), *("/".join(map(tps, row)) for row in rows)])
    return table(["5/10/17/25/40 %", *(f"`{machine}`" for machine in names)], lines)


def prefetch(bench: Bench) -> str:
    """What prefetching adds to LRU with uploads; guesses of three assumed accuracies."""
    guessing = [
        (name, policy, accuracy)
        for name, policy in (("next-layer", "lru"), ("draft-gate", "lru"), ("auto", "hybrimoe"))
        for accuracy in (0.6, 0.85, 1.0)
    ]
    lines = []
    for name, policy, accuracy in (("none", "lru", 0.85), ("history", "lru", 0.85), *guessing):
        fields = {"predictor_accuracy": accuracy} | ({} if name == "auto" else {"prefetch": name})
        lengths = (4,) if name == "draft-gate" else (0, 4)
        rows = [[bench.row(QWEN, policy, capacity, k, **fields) for capacity in COMMON] for k in lengths]
        label = POLICIES[policy] if name in ("none", "auto") else f"lru with {name}"
        blank = [""] * (2 - len(rows))
        lines.append([shown_name(label, rows[0][0]), *blank, *("/".join(map(tps, row)) for row in rows)])
    return table(["5/17/25 %", "K = 0", "K = 4"], lines)


def collisions(bench: Bench) -> str:
    policies = ("lru", "farthest-layer", "least-stale", "least-stale:cyclic=1")
    cases = (
        (0, "1%", "none", MACHINE), (0, "1%", "next-layer", MACHINE), (0, "1%", "next-layer", "instant"),
        (0, "5%", "none", MACHINE), (0, "5%", "next-layer", MACHINE), (4, "1%", "none", MACHINE),
        (4, "5%", "none", MACHINE), (4, "17%", "none", MACHINE),
    )  # fmt: skip
    lines = []
    for k, capacity, ahead, machine in cases:
        rows = [
            bench.row(QWEN, policy, capacity, k, machine=machine, prefetch=ahead, miss="fetch")
            for policy in policies
        ]
        cells = [f"{row['collision_misses']:,.0f}/{row['misses']:,.0f}" for row in rows]
        name = shown_name(ahead.replace("-", " "), rows[0]) + (", copies free" if machine != MACHINE else "")
        lines.append([str(k), percent(capacity), name, *cells])
    names = ["lru: collisions/misses", "farthest-layer", "least-stale", "least-stale, cyclic"]
    return table(["K", "capacity", "prefetch", *names], lines)


def ablation(bench: Bench) -> str:
    where = [(trace, k) for trace in FILES for k in (4, 8)]
    lines = [
        [name, *(tps(bench.row(trace, policy, "17%", k)) for trace, k in where)]
        for policy, name in (
            ("moe-spac", "full"),
            *((f"moe-spac-no-{part}", f"without `{part}`") for part in REPLAYED),
        )
    ]
    return table(["MoE-SpAc, 17 %", *(f"{trace}, K = {k}" for trace, k in where)], lines)


def departures(bench: Bench) -> str:
    """What the paper does otherwise than pyspac, one at a time and together."""
    where = [(trace, k) for trace in FILES for k in (0, 4)]
    lines = []
    for estimator in ("spac", "ema"):
        for knob in (
            "",
            "reset=1",
            "reset=2",
            "cold_on_host=1",
            "reset=2,cold_on_host=1,budget=0,free_slots=0",
        ):
            policy = f"{estimator}:{knob}" if knob else estimator
            rows = [bench.row(trace, policy, "17%", k) for trace, k in where]
            cells = [f"{row['bytes_moved'] / 1e9:.1f}/{tps(row)}" for row in rows]
            lines.append([f"`{policy}`", *cells])
    return table(["GB/tokens per second, 17 %", *(f"{trace}, K = {k}" for trace, k in where)], lines)


SECTIONS: Final[dict[str, Make]] = {
    "capacity-qwen-k0": capacity_table(QWEN, 0),
    "capacity-qwen-k4": capacity_table(QWEN, 4, SHORTER),
    "estimators": estimators,
    "prompts": prompts,
    "machines": machines,
    "prefetch": prefetch,
    "collisions": collisions,
    "ablation": ablation,
    "departures": departures,
}


# ---- figures


def capacity_rows(bench: Bench, k: int) -> list[Row]:
    return [bench.row(QWEN, policy, c, k) for policy in IN_FIGURE for c in FIGURE_CAPACITIES]


def collision_rows(bench: Bench) -> list[Row]:
    policies = ("lru", "lfu", "least-stale", "least-stale:cyclic=1", "ema")
    return [bench.row(QWEN, policy, c, 0) for policy in policies for c in CAPACITIES]


def ablation_rows(bench: Bench) -> list[Row]:
    policies = ("pyspac", "moe-spac", *(f"moe-spac-no-{part}" for part in REPLAYED))
    return [bench.row(QWEN, policy, "17%", 4) for policy in policies]


Draw = Callable[[list[Row], Path], Path]
FIGURES: Final[dict[str, tuple[Callable[[Bench], list[Row]], Draw]]] = {
    "policies-capacity-k0.png": (lambda bench: capacity_rows(bench, 0), draw_capacity),
    "policies-capacity-k4.png": (lambda bench: capacity_rows(bench, 4), draw_capacity),
    "policies-collisions-k0.png": (collision_rows, draw_collisions),
    "policies-ablation-k4.png": (ablation_rows, draw_ablation),
}
