"""The figures of `pyspac profile --png`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pyspac.errors import PyspacError
from pyspac.speculation.sweep import Sweep
from pyspac.speculation.tolerance import ACCEPTANCES, Profile


def draw(measured: Profile | Sweep, path: Path, title: str) -> None:
    """Write the figure of a profile or a sweep. Raises PyspacError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PyspacError("a figure needs matplotlib; install it, or leave --png out") from error
    figure = Figure(layout="constrained")
    figure.suptitle(title)
    if isinstance(measured, Sweep):
        _draw_sweep(figure, measured)
    else:
        _draw_profile(figure, measured)
    figure.savefig(path, dpi=110, format="png")


def _draw_profile(figure: Any, profile: Profile) -> None:
    """T(n), tau(n), union of experts, and the speedup surface of every drafter."""
    figure.set_size_inches(11, 4 + 3.5 * len(profile.drafters))
    axes = figure.subplots(1 + len(profile.drafters), 2, squeeze=False)
    _draw_times(axes[0][0], profile)
    _draw_tolerance(axes[0][1], profile)
    for row, drafter in zip(axes[1:], profile.drafters, strict=True):
        _draw_surface(figure, row[0], profile, drafter)
        _draw_curves(row[1], profile, drafter)


def _draw_sweep(figure: Any, sweep: Sweep) -> None:
    """A panel per context: tau(n), a line for each number of sequences. Gamma-Tolerance, figure 1."""
    contexts, widths = sweep.contexts, sweep.widths
    figure.set_size_inches(1 + 3.4 * len(contexts), 4)
    panels = figure.subplots(1, len(contexts), squeeze=False, sharey=True)[0]
    for axes, n_context in zip(panels, contexts, strict=True):
        for n_sequences in sweep.sequences:
            profile = sweep.profiles[n_sequences, n_context]
            label = f"{n_sequences} ({profile.verify[1].median_us / 1e3:.1f} ms)"
            axes.plot(widths, [profile.tau(n) for n in widths], marker=".", label=label)
        axes.plot(widths, [1 / n for n in widths], ":", color="gray", label="1 / n: no gain")
        axes.set(title=f"after {n_context} tokens", xlabel="tokens of each sequence, n", ylim=(0, 1.05))
        axes.set_xticks(widths)
        axes.legend(title="sequences (T(1))")
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="tau(n) = T(1) / T(n)")


def _draw_times(axes: Any, profile: Profile) -> None:
    widths = sorted(profile.verify)
    medians = np.array([profile.verify[n].median_us for n in widths]) / 1e3
    quartiles = np.array([profile.verify[n].quartiles_us() for n in widths]).T / 1e3  # [2, n]
    axes.errorbar(widths, medians, yerr=abs(quartiles - medians), marker="o", capsize=3)
    axes.set(xlabel="tokens per forward pass, n", ylabel="T(n), ms; median and quartiles", ylim=(0, None))
    axes.grid(alpha=0.3)


def _draw_tolerance(axes: Any, profile: Profile) -> None:
    widths: Sequence[int] = sorted(profile.verify)
    axes.plot(widths, [profile.tau(n) for n in widths], marker="o", label="tau(n) = T(1) / T(n)")
    axes.plot(widths, [1 / n for n in widths], ":", color="gray", label="1 / n: no gain from width")
    if 1 in profile.n_experts:
        ratio = [profile.n_experts[1] / profile.n_experts[n] for n in widths]
        axes.plot(widths, ratio, "--", label="experts of 1 token / union of n")
    axes.set(xlabel="tokens per forward pass, n", ylim=(0, 1.05))
    axes.legend()
    axes.grid(alpha=0.3)


def _draw_surface(figure: Any, axes: Any, profile: Profile, drafter: str) -> None:
    surface = profile.surface(drafter)
    lengths = np.arange(1, profile.n_draft_max + 1)
    mesh = axes.pcolormesh(ACCEPTANCES, lengths, surface, cmap="RdBu", vmin=0, vmax=2, shading="nearest")
    figure.colorbar(mesh, ax=axes, label="speedup S, equation 1")
    if surface.min() < 1 < surface.max():
        axes.contour(ACCEPTANCES, lengths, surface, levels=[1.0], colors="black")
    delta = f"delta = {profile.delta(drafter):.3f}"
    axes.set(xlabel="acceptance", ylabel="draft length K", title=f"{drafter}, {delta}; line: break-even")


def _draw_curves(axes: Any, profile: Profile, drafter: str) -> None:
    lengths = range(profile.n_draft_max + 1)
    for acceptance in (0.3, 0.5, 0.7, 0.8, 0.9, 1.0):
        curve = [1.0] + [profile.speedup(k, acceptance, drafter) for k in lengths[1:]]
        axes.plot(lengths, curve, marker=".", label=f"{acceptance}")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(xlabel="draft length K", ylabel="speedup S", title=drafter, ylim=(0, None))
    axes.legend(title="acceptance", ncols=2)
    axes.grid(alpha=0.3)
