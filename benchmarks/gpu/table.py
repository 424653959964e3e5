"""Rows in, a table of at most 110 columns out, and under it what else there is to know."""

from __future__ import annotations

from typing import Any

import prediction

HEAD = (
    f"{'contender':22} {'tok/s':>8} {'min..max':>15} {'ms/tok':>8} {'ratio':>6} {'min..max':>12} "
    f"{'tok/step':>8} {'covered':>7} {'MiB/step':>8} {'wait ms':>8}"
)


def comparison(rows: list[dict[str, Any]]) -> list[str]:
    """One line per contender; the ratio is the speed as a multiple of stock's with the same drafts."""
    lines: list[str] = []
    for group in dict.fromkeys(row["group"] for row in rows):
        chosen = [row for row in rows if row["group"] == group]
        lines += [f"{group}, {chosen[0]['rounds']} rounds, medians; ratio to stock-sd, paired by round", HEAD]
        lines += [line_of(row) for row in chosen]
    return lines + notes(rows) + prediction.notes(rows)


def line_of(row: dict[str, Any]) -> str:
    covered = f"{row['coverage']:7.1%}" if "coverage" in row else f"{'-':>7}"
    moved = f"{row['loaded_mib_per_step']:8.1f}" if "coverage" in row else f"{'-':>8}"
    wait = f"{row['wait_ms_per_step']:8.2f}" if "coverage" in row else f"{'-':>8}"
    return (
        f"{row['arm']:22} {row['tps']:8.1f} {row['tps_min']:7.1f}..{row['tps_max']:<6.1f} "
        f"{row['tpot_ms']:8.2f} {row['ratio']:6.3f} {row['ratio_min']:5.2f}..{row['ratio_max']:<5.2f} "
        f"{row['tokens_per_step']:8.2f} {covered} {moved} {wait}"
    )


def notes(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    row = rows[0]
    bytes_text = ", ".join(
        f"{r['arm']} {r['device_expert_mib']:.0f} MiB" for r in rows[:7] if r["device_expert_mib"]
    )
    lines = [
        f"model {row['model']}, {row['n_layer']} layers, experts {row['experts_mib']:.0f} MiB; "
        f"cache {row['cache']}, --n-cpu-moe {row['n_cpu_moe']}; {row['n_threads']} threads",
        f"experts on the device: {bytes_text or 'none'}",
        f"drafts: {row['drafts']}, at most {row['draft_max']}, {row['draft_ms']} ms each",
    ]
    if row["emulated"]:
        lines.append(f"emulated: {', '.join(row['emulated'])}")
    if row["pool_capped"]:
        lines.append(f"pool capped: {row['device']} has room for more than {row['cache']} of the experts")
    others = [f"{r['arm']} {1 - r['agreement']:.1%}" for r in rows if r["agreement"] < 1]
    if others:
        lines.append(f"tokens that a contender would have chosen otherwise (near ties): {', '.join(others)}")
    return lines
