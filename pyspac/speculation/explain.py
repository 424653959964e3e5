"""Decisions as text, one line each: step, phase, draft length, for how long, utilities, why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pyspac.speculation.controller import Decision

HEADER = "  step  phase     K  steps  utility by K; why"


def explain(decisions: Iterable[Decision], n_last: int | None = None) -> Iterator[str]:
    """The lines of `--explain`; `n_last`: only so many of the latest."""
    kept = list(decisions)
    skipped = 0 if n_last is None else max(0, len(kept) - n_last)
    yield HEADER
    if skipped:
        yield f"  ... {skipped} earlier decisions"
    yield from map(line, kept[skipped:])


def line(decision: Decision) -> str:
    """One decision."""
    n_steps = "-" if decision.n_steps is None else str(decision.n_steps)
    utilities = " ".join(f"{k}:{u:.2f}" for k, u in sorted(decision.utilities.items()))
    details = "; ".join(part for part in (utilities, decision.why) if part)
    return f"{decision.step:6}  {decision.phase:8} {decision.n_draft:2}  {n_steps:>5}  {details}"


def to_dicts(decisions: Iterable[Decision]) -> list[dict[str, Any]]:
    """The same for JSON."""
    return [
        {
            "step": d.step,
            "phase": d.phase,
            "n_draft": d.n_draft,
            "n_steps": d.n_steps,
            "utilities": {str(k): round(u, 4) for k, u in d.utilities.items()},
            "why": d.why,
        }
        for d in decisions
    ]
