"""Scripted streams for controllers: costs and acceptances as tables, no chance and no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pyspac.engine.step import StepRecord
from pyspac.speculation.controller import Controller

Costs = Sequence[float]  # [n] time of a step that drafts 0, 1, ... tokens, microseconds
Accepts = Callable[[int, int], int]  # (step, n_draft) -> n_accepted


@dataclass(slots=True)
class Played:
    """What happened, step by step."""

    n_drafts: list[int] = field(default_factory=list)
    n_tokens: int = 0
    total_us: float = 0.0


def play(controller: Controller, n_steps: int, costs: Costs, accepts: Accepts, *, first: int = 0) -> Played:
    """Run the controller; every draft is as long as it asks for."""
    played = Played()
    for step in range(first, first + n_steps):
        n_draft = controller.next_n_draft()
        assert n_draft == controller.next_n_draft(), "asking twice must change nothing"
        assert 0 <= n_draft <= controller.n_draft_max
        n_accepted = accepts(step, n_draft)
        controller.observe(StepRecord(n_draft=n_draft, n_accepted=n_accepted, verify_us=costs[n_draft]))
        played.n_drafts.append(n_draft)
        played.n_tokens += 1 + n_accepted
        played.total_us += costs[n_draft]
    return played


def always(n: int) -> Accepts:
    """The first `n` drafted tokens hold."""
    return lambda step, n_draft: min(n, n_draft)


def every(period: int) -> Accepts:
    """All drafts hold in every `period`-th step, none in the others."""
    return lambda step, n_draft: n_draft if step % period == 0 else 0
