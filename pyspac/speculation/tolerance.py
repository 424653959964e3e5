"""What `pyspac profile` found, and what follows from it: gamma-tolerance, speedups, break-even, advice.

In: times of forward passes by width, and of drafters. Out: a `Profile`, its rows, its JSON object, a figure.
Everything here is arithmetic on measured times, by equation 1 of gamma-tolerance.txt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pyspac.errors import PyspacError
from pyspac.speculation.utility import break_even, speedup

ACCEPTANCES: Final = tuple(round(0.05 * i, 2) for i in range(21))  # of the surface
SHOWN_ACCEPTANCES: Final = (0.5, 0.7, 0.9)  # of the table
GOOD_ACCEPTANCE: Final = 0.8  # the advice takes the draft length that is best there
NOISY: Final = 0.1  # spread; other work on the machine, most likely
WORTHWHILE: Final = 1.05  # a speedup below this is not worth advising


@dataclass(frozen=True, slots=True)
class Samples:
    """Repeated measurements of one thing; microseconds."""

    us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        return median(self.us)

    def quartiles_us(self) -> tuple[float, float]:
        """The spread: a quarter of the samples lies below, a quarter above."""
        low, high = np.percentile(self.us, [25, 75])
        return float(low), float(high)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        low, high = self.quartiles_us()
        return (high - low) / 2 / self.median_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measured on one machine, with one model and placement."""

    verify: Mapping[int, Samples]  # by width, from 1
    drafters: Mapping[str, Samples]  # per drafted token, by drafter
    n_experts: Mapping[int, float] = field(default_factory=dict)  # distinct per layer; {}: not known
    experts_share: Mapping[int, float] = field(default_factory=dict)  # of verify's time

    @property
    def n_draft_max(self) -> int:
        return max(self.verify) - 1

    @property
    def is_noisy(self) -> bool:
        """Whether the times vary too much to build on."""
        return median(samples.spread for samples in self.verify.values()) > NOISY

    def tau(self, n_tokens: int) -> float:
        """T(1) / T(n): section 3.1."""
        return self.verify[1].median_us / self.verify[n_tokens].median_us

    def delta(self, drafter: str) -> float:
        """T_draft / T(1)."""
        return self.drafters[drafter].median_us / self.verify[1].median_us

    def speedup(self, n_draft: int, acceptance: float, drafter: str) -> float:
        """S of equation 1."""
        return speedup(n_draft, acceptance, self.tau(n_draft + 1), self.delta(drafter))

    def surface(self, drafter: str) -> NDArray[np.float64]:
        """S: [n_draft_max, len(ACCEPTANCES)], draft lengths from 1."""
        return np.array(
            [[self.speedup(k, a, drafter) for a in ACCEPTANCES] for k in range(1, self.n_draft_max + 1)]
        )

    def break_even(self, n_draft: int, drafter: str) -> float | None:
        """The acceptance from which this draft length pays; None: it never does."""
        return break_even(n_draft, self.tau(n_draft + 1), self.delta(drafter))

    def best_n_draft(self, acceptance: float, drafter: str) -> int:
        """The draft length with the highest speedup, 0 if none is above 1."""
        lengths = range(self.n_draft_max + 1)
        return max(lengths, key=lambda k: (self.speedup(k, acceptance, drafter) if k else 1.0, -k))

    def advice(self) -> str:
        """One sentence for each drafter, joined."""
        return "; ".join(self._advice_for(drafter) for drafter in self.drafters)

    def _advice_for(self, drafter: str) -> str:
        k = self.best_n_draft(GOOD_ACCEPTANCE, drafter)
        name = f"with the {drafter} drafter"
        if k and self.speedup(k, GOOD_ACCEPTANCE, drafter) >= WORTHWHILE:
            return f"{name}, speculate up to K={k} when acceptance is above {self.break_even(k, drafter):.2f}"
        k = self.best_n_draft(1.0, drafter)
        if k and self.speedup(k, 1.0, drafter) >= WORTHWHILE:
            even = self.break_even(k, drafter)
            return f"{name}, speculate only when acceptance is above {even:.2f}, up to K={k}"
        return f"{name}, do not speculate: no draft length pays even if every token holds"

    # ---------------------------------------------------------------------------------------- reports

    def rows(self, drafter: str) -> list[list[str]]:
        """The table, one row per width."""
        return [self._row(n, drafter) for n in sorted(self.verify)]

    def _row(self, n: int, drafter: str) -> list[str]:
        even = self.break_even(n - 1, drafter) if n > 1 else None
        return [
            str(n),
            f"{self.verify[n].median_us / 1e3:.2f}",
            f"{self.verify[n].spread:.0%}",
            f"{self.tau(n):.2f}",
            f"{self.n_experts[n]:.1f}" if n in self.n_experts else "-",
            f"{self.experts_share[n]:.0%}" if n in self.experts_share else "-",
            *(f"{self.speedup(n - 1, a, drafter):.2f}" for a in SHOWN_ACCEPTANCES),
            "-" if n == 1 else "never" if even is None else f"{even:.2f}",
        ]

    def to_dict(self) -> dict[str, Any]:
        """The object of `--json`."""
        widths = sorted(self.verify)
        return {
            "verify_us": {str(n): _samples_dict(self.verify[n]) for n in widths},
            "tau": {str(n): self.tau(n) for n in widths},
            "n_experts": {str(n): self.n_experts.get(n) for n in widths},
            "experts_share": {str(n): self.experts_share.get(n) for n in widths},
            "acceptances": list(ACCEPTANCES),
            "drafters": {name: self._drafter_dict(name) for name in self.drafters},
            "advice": self.advice(),
        }

    def _drafter_dict(self, name: str) -> dict[str, Any]:
        lengths = range(1, self.n_draft_max + 1)
        return {
            "draft_us": _samples_dict(self.drafters[name]),
            "delta": self.delta(name),
            "break_even": {str(k): self.break_even(k, name) for k in lengths},
            "best_n_draft": {str(a): self.best_n_draft(a, name) for a in ACCEPTANCES},
            "speedup": {str(k): [self.speedup(k, a, name) for a in ACCEPTANCES] for k in lengths},
        }


def _samples_dict(samples: Samples) -> dict[str, float]:
    low, high = samples.quartiles_us()
    return {"median": samples.median_us, "q1": low, "q3": high, "n": len(samples.us)}


# --------------------------------------------------------------------------------------------- figure


def draw(profile: Profile, path: Path, title: str) -> None:
    """Write the figure: T(n), tau(n), union of experts, and the speedup surface of every drafter."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PyspacError("a figure needs matplotlib; install it, or leave --png out") from error
    figure = Figure(figsize=(11, 4 + 3.5 * len(profile.drafters)), layout="constrained")
    axes = figure.subplots(1 + len(profile.drafters), 2, squeeze=False)
    figure.suptitle(title)
    _draw_times(axes[0][0], profile)
    _draw_tolerance(axes[0][1], profile)
    for row, drafter in zip(axes[1:], profile.drafters, strict=True):
        _draw_surface(figure, row[0], profile, drafter)
        _draw_curves(row[1], profile, drafter)
    figure.savefig(path, dpi=110, format="png")


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
