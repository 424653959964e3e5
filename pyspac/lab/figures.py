"""Rows of a sweep in, PNG figures out: over capacity, the ablation, collisions per layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from pyspac.errors import PyspacError
from pyspac.lab.report import policy_label

Row = dict[str, Any]
BOUNDS: Final = ("belady", "unbounded")
ABLATION: Final = "moe-spac"
MARKERS: Final = "osDv^<>ph*XP"


def _pyplot() -> Any:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise PyspacError("figures need matplotlib: install it with `pip install 'pyspac[lab]'`") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    return pyplot


def draw_all(rows: list[Row], folder: Path) -> list[Path]:
    """Write every figure that the rows suffice for; return their paths."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["machine"]), []).append(row)
    made = []
    for group in groups.values():
        k = max(row["k"] for row in group)
        stem = f"{_slug(group[0]['model'])}-{group[0]['machine']}-k{k}"
        plain = [row for row in group if not row["policy"].startswith(f"{ABLATION}-no-")]
        if len({row["capacity"] for row in plain}) > 1:
            made.append(draw_capacity(plain, folder / f"{stem}-capacity.png"))
        if any(row["policy"].startswith(f"{ABLATION}-no-") for row in group):
            made.append(draw_ablation(group, folder / f"{stem}-ablation.png"))
        made.append(draw_collisions(plain, folder / f"{stem}-collisions.png"))
    return made


def draw_capacity(rows: list[Row], path: Path) -> Path:
    """Draw coverage and predicted TPS over capacity, a line per policy; the bounds are dashed."""
    plt = _pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.8))
    for i, policy in enumerate(dict.fromkeys(map(policy_label, rows))):
        mine = sorted((row for row in rows if policy_label(row) == policy), key=_share)
        is_bound = policy in BOUNDS
        style = {"ls": "--", "color": "black"} if is_bound else {"marker": MARKERS[i % len(MARKERS)], "ms": 4}
        alpha = 0.4 if policy == "unbounded" else 1.0
        x = [100 * _share(row) for row in mine]
        for axis, name in zip(axes, ("coverage", "predicted_tps"), strict=True):
            axis.plot(x, [row[name] for row in mine], label=policy, lw=1.2, alpha=alpha, **style)
    for axis, label in zip(axes, ("covered activations", "tokens per second, predicted"), strict=True):
        axis.set_xscale("log")
        axis.set_xlabel("capacity, % of all experts' bytes")
        axis.set_ylabel(label)
        shares = sorted({100 * _share(row) for row in rows})
        axis.set_xticks(shares, [f"{share:g}" for share in shares], minor=False)
        axis.set_xticks([], minor=True)
    axes[1].set_yscale("log")
    for which in ("major", "minor"):
        getattr(axes[1].yaxis, f"set_{which}_formatter")(plt.FuncFormatter(lambda y, _: f"{y:g}"))
    axes[1].legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(_title(rows), fontsize=9)
    return _save(plt, figure, path)


def draw_ablation(rows: list[Row], path: Path) -> Path:
    """Draw MoE-SpAc and its ablations: coverage, GB moved and predicted TPS at one capacity."""
    plt = _pyplot()
    mine = [row for row in rows if row["policy"].startswith(ABLATION) or row["policy"] in ("pyspac", "ema")]
    middle = sorted({row["capacity"] for row in mine}, key=lambda text: _share({"capacity": text}))
    capacity = "17%" if "17%" in middle else middle[len(middle) // 2]
    mine = [row for row in mine if row["capacity"] == capacity]
    labels = [policy_label(row).replace("moe-spac-no-", "w/o ") for row in mine]
    figure, axes = plt.subplots(1, 3, figsize=(9.5, 2.8), sharey=True)
    values = (
        ("covered activations", [row["coverage"] for row in mine]),
        ("GB moved", [row["bytes_moved"] / 1e9 for row in mine]),
        ("tokens per second, predicted", [row["predicted_tps"] for row in mine]),
    )
    for axis, (label, numbers) in zip(axes, values, strict=True):
        axis.barh(labels, numbers, color=["#888888" if "w/o" in name else "#1f77b4" for name in labels])
        axis.set_xlabel(label)
    axes[0].invert_yaxis()
    figure.suptitle(f"{_title(mine)}, capacity {capacity}", fontsize=9)
    return _save(plt, figure, path)


def draw_collisions(rows: list[Row], path: Path) -> Path:
    """Draw collision misses per layer, one panel for each of up to three capacities."""
    plt = _pyplot()
    capacities = sorted({row["capacity"] for row in rows}, key=lambda text: _share({"capacity": text}))
    wanted = [c for c in ("1%", "5%", "25%") if c in capacities] or capacities[:3]
    figure, axes = plt.subplots(1, len(wanted), figsize=(3.2 * len(wanted) + 1.5, 2.8), squeeze=False)
    for axis, capacity in zip(axes[0], wanted, strict=True):
        for row in rows:
            if row["capacity"] == capacity and row["policy"] not in BOUNDS and row["misses"]:
                axis.plot(row["collisions_by_layer"], label=policy_label(row), lw=1.0)
        axis.set_title(f"capacity {capacity}", fontsize=9)
        axis.set_xlabel("layer")
    axes[0][0].set_ylabel("collision misses")
    axes[0][-1].legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(_title(rows), fontsize=9, y=1.04)
    return _save(plt, figure, path)


def _title(rows: list[Row]) -> str:
    row = rows[0]
    return f"{row['model']}, K = {max(r['k'] for r in rows)}, {row['machine']}"


def _share(row: Row) -> float:
    text = row["capacity"]
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


def _slug(model: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in model.removesuffix(".gguf").lower()).strip("-")[:40]


def _save(plt: Any, figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)
    return path
