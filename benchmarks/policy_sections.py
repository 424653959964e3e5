"""The tables and figures of docs/policies.md: which runs each one needs, and how it shows them.

A section asks a `Bench` for rows and returns Markdown. It is asked twice: first to learn which runs it needs
(the rows are blank then), later with the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from policy_bench import (
    ACCEPTS,
    DEMO,
    FILES,
    GEMMA,
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

from pyspac.lab.figures import draw_capacity, draw_collisions

CAPACITIES: Final = ("5%", "17%", "40%")
MIDDLE: Final = "17%"
REPLAYED: Final = ("specue", "adabc", "hetwb", "prefetch", "evict", "sd")  # the paper's ablation

POLICIES: Final = {  # policy: how the tables call it
    "oracle": "oracle",
    "ema": "**ema** (shipped)",
    "spac": "spac (Algorithm 1)",
    "lru": "lru (llama.cpp)",
    "least-stale:cyclic=1": "least-stale, cyclic",
    "n-cpu-moe": "n-cpu-moe",
    "host-admit": "host-admit",
    "hybrimoe": "hybrimoe",
}
SHORTER: Final = ("ema", "spac", "lru", "n-cpu-moe", "hybrimoe")
STALE: Final = {
    "lru": "lru",
    "farthest-layer": "farthest-layer",
    "farthest-layer:cyclic=1": "farthest-layer, cyclic",
    "least-stale": "least-stale",
    "least-stale:cyclic=1": "least-stale, cyclic",
}
Make = Callable[[Bench], str]


# ---- sections


def capacity_table(trace: str, policies: Iterable[str] = POLICIES) -> Make:
    """Policies over capacity, without drafts."""

    def make(bench: Bench) -> str:
        lines = []
        for policy in policies:
            rows = [bench.row(trace, policy, capacity, 0) for capacity in CAPACITIES]
            lines.append([shown_name(POLICIES[policy], rows[0]), *map(share_and_speed, rows)])
        return table(["policy", *map(percent, CAPACITIES)], lines)

    return make


def drafts(bench: Bench) -> str:
    """Speed over acceptance, beside none: from where drafts pay."""
    cases = (
        (QWEN, "ema", (4, 8)), (QWEN, "spac", (8,)), (QWEN, "hybrimoe", (8,)), (QWEN, "lru", (4,)),
        (QWEN, "n-cpu-moe", (4,)), (GEMMA, "ema", (4, 8)),
    )  # fmt: skip
    lines = []
    for trace, policy, lengths in cases:
        none = bench.row(trace, policy, MIDDLE, 0)
        for k in lengths:
            rows = bench.grid(trace, policy, MIDDLE, k)
            pays = [row["accept"] for row in rows if row["predicted_tps"] > none["predicted_tps"]]
            lines.append([
                f"{trace}, {shown_name(POLICIES[policy], none)}", str(k), tps(none), *map(tps, rows),
                f"{pays[0]:g}" if pays else "no",
            ])  # fmt: skip
    return table(
        ["17 %, tokens per second", "K", "none", *(f"{a:g}" for a in ACCEPTS), "drafts pay from"], lines
    )


SETTINGS: Final = (
    "spac:gamma=2", "spac:gamma=4", "spac:reset=2", "spac:cold_on_host=1", "ema:ema_decay=0.93",
    "ema:ema_decay=0.98", "ema:ema_decay=0.99", "ema:payback_steps=0", "ema:payback_steps=66", "ema:reset=2",
    "ema:cold_on_host=1",
)  # fmt: skip


def settings(bench: Bench) -> str:
    """What one setting changes, without drafts."""

    def gain(policy: str, trace: str) -> str:
        before, after = (bench.row(trace, name, MIDDLE, 0) for name in (policy.partition(":")[0], policy))
        return f"{100 * (after['predicted_tps'] / before['predicted_tps'] - 1):+.1f}"

    lines = [[f"`{policy}`", *(gain(policy, trace) for trace in FILES)] for policy in SETTINGS]
    return table(["change of speed in %, 17 %, K = 0", *FILES], lines)


def prompts(bench: Bench) -> str:
    """What a cold start and one that is seeded by the prompt cover of the first tokens, and of all."""
    lines = []
    for trace in FILES:
        for machine in (MACHINE, "instant"):
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
    names = (MACHINE, "rtx3060-laptop", "h200", "cpu-ssd")
    lines = []
    for policy in ("ema", "lru", "n-cpu-moe", "hybrimoe"):
        rows = [bench.row(QWEN, policy, MIDDLE, 0, machine=machine) for machine in names]
        lines.append([shown_name(POLICIES[policy], rows[0]), *map(tps, rows)])
    return table(["17 %, K = 0", *(f"`{machine}`" for machine in names)], lines)


def prefetch(bench: Bench) -> str:
    """What prefetching adds to LRU with uploads."""
    lines = []
    for name in ("none", "history", "next-layer", "draft-gate"):
        none = bench.row(QWEN, "lru", MIDDLE, 0, prefetch=name) if name != "draft-gate" else None
        grid = bench.grid(QWEN, "lru", MIDDLE, 4, prefetch=name)
        lines.append([shown_name(f"lru, {name}", grid[0]), tps(none) if none else "", *map(tps, grid)])
    return table(["17 %, tokens per second", "K = 0", *(f"K = 4, {a:g}" for a in ACCEPTS)], lines)


def collisions(bench: Bench) -> str:
    """Collision misses and all misses, of both readings of two policies."""
    lines = []
    for trace, capacity in ((QWEN, "1%"), (QWEN, "5%"), (GEMMA, "5%")):
        rows = [bench.row(trace, policy, capacity, 0, miss="fetch") for policy in STALE]
        cells = [f"{row['collision_misses']:,}/{row['misses']:,}" for row in rows]
        lines.append([trace, percent(capacity), *cells])
    return table(["collisions/misses, K = 0", "capacity", *STALE.values()], lines)


def ablation(bench: Bench) -> str:
    lines = []
    for policy, name in (
        ("moe-spac", "full"),
        *((f"moe-spac-no-{part}", f"without `{part}`") for part in REPLAYED),
    ):
        rows = bench.grid(QWEN, policy, MIDDLE, 0 if policy.endswith("-sd") else 8)
        cells = [tps(row) for row in rows]
        lines.append([name, *(cells if len(cells) > 1 else cells * len(ACCEPTS))])
    return table(["MoE-SpAc, Qwen3, 17 %, K = 8", *(f"{a:g}" for a in ACCEPTS)], lines)


PEERS: Final[dict[str, dict[str, str]]] = {
    "second use within 64 tokens": {"eviction": "ema:second_use=64"},
    "LFU, halved every 64 tokens": {"eviction": "aged-lfu"},
    "copies while the host rests": {"eviction": "ema", "prefetch": "utility:quiet=1"},
    "always admit, decayed LFU": {"eviction": "lfu:keep=0.97", "miss": "host-admit:per_layer=99"},
}


def peers(bench: Bench) -> str:
    """What other engines do, on equal terms: change of speed against `ema`."""
    where = [(trace, c, k) for trace in FILES for k in (0, 4) for c in ("17%", "40%")]
    lines = []
    for name, fields in PEERS.items():
        changes = []
        for trace, capacity, k in where:
            before = bench.row(trace, "ema", capacity, k, accept=0.8)["predicted_tps"]
            after = bench.row(trace, "ema", capacity, k, accept=0.8, **fields)["predicted_tps"]
            changes.append(100 * (after / before - 1))
        parts = ["/".join(f"{c:+.1f}" for c in changes[i : i + 2]) for i in range(0, len(changes), 2)]
        lines.append([name, *parts, f"{sum(changes) / len(changes):+.1f}"])
    heads = [f"{trace}, K = {k}" for trace in FILES for k in (0, 4)]
    return table(["17/40 %: change in %", *heads, "mean"], lines)


def lossy(bench: Bench) -> str:
    """What leaving out misses beyond a rank spares the host, and costs."""
    lines = []
    for trace in FILES:
        for keep in (1, 2, 3):
            cells = []
            for capacity in ("17%", "40%"):
                exact = bench.row(trace, "ema", capacity, 0)
                row = bench.row(trace, "ema", capacity, 0, miss=f"drop:keep={keep},host=1")
                cells.append(f"{row['fidelity']:.3f}: {tps(exact)} to {tps(row)}")
            lines.append([f"{trace}, `drop:keep={keep},host=1`", *cells])
    return table(["weight kept: tokens per second, K = 0", "17 %", "40 %"], lines)


def recorded(bench: Bench) -> str:
    """Policies that need logits or guesses, on a trace that recorded them."""
    capacities = ("25%", "40%")
    lines = []
    for policy, fields in (
        ("specmd-1", {}), ("specmd-2", {}), ("specmd-3", {}), ("specmd-4", {}), ("specmd-5", {}),
        ("lru", {}), ("lru", {"miss": "drop-priority-cascade"}),
        *(("lru", {"routing": f"cache-aware:lambda={value},range=1"}) for value in (0.1, 0.5)),
        ("ema", {}),
    ):  # fmt: skip
        rows = [bench.row(DEMO, policy, capacity, None, **fields) for capacity in capacities]
        cells = [
            f"{row['coverage']:.2f}/{row['bytes_moved'] / 1e6:.0f}/{row['predicted_tps']:.0f}" for row in rows
        ]
        name = ", ".join([policy, *(f"{kind} {value}" for kind, value in fields.items())])
        kept = f"{rows[-1]['fidelity']:.3f}", f"{rows[-1]['low_bit_share']:.2f}"
        lines.append([f"`{name}`", *cells, *kept])
    return table(["policy", *map(percent, capacities), "weight kept, 40 %", "in fewer bits"], lines)


SECTIONS: Final[dict[str, Make]] = {
    "capacity-qwen": capacity_table(QWEN),
    "capacity-gemma": capacity_table(GEMMA, SHORTER),
    "drafts": drafts,
    "settings": settings,
    "prompts": prompts,
    "machines": machines,
    "prefetch": prefetch,
    "collisions": collisions,
    "ablation": ablation,
    "peers": peers,
    "lossy": lossy,
    "recorded": recorded,
}


# ---- figures


def capacity_rows(bench: Bench) -> list[Row]:
    return [bench.row(QWEN, policy, c, 0) for policy in POLICIES if policy != "oracle" for c in CAPACITIES]


def collision_rows(bench: Bench) -> list[Row]:
    return [bench.row(QWEN, policy, c, 0, miss="fetch") for policy in STALE for c in ("1%", "5%")]


Draw = Callable[[list[Row], Path], Path]
FIGURES: Final[dict[str, tuple[Callable[[Bench], list[Row]], Draw]]] = {
    "policies-capacity-k0.png": (capacity_rows, draw_capacity),
    "policies-collisions-k0.png": (collision_rows, draw_collisions),
}
