"""Controllers of draft lengths that only the lab has."""

from __future__ import annotations

import pytest
from scripted import always, play

from pyspac.errors import ConfigError
from pyspac.lab.drafts.controllers import parse_lab_controller
from pyspac.lab.drafts.per_k_ema import PerKEma, ladder
from pyspac.speculation.controller import Shared
from pyspac.speculation.manager import CONTROLLERS


class TestPerK:
    def test_ladder(self) -> None:
        assert ladder(15) == (0, 1, 2, 3, 5, 8)
        assert ladder(4) == (0, 1, 2, 3, 4)
        assert ladder(0) == (0,)

    def test_passes_a_jump_of_the_costs(self) -> None:
        costs = [100.0 * x for x in (1, 1.8, 2.8, 3.0, 3.1, 3.2, 3.3, 3.4, 3.5)]
        played = play(PerKEma(Shared(n_draft_max=8)), 300, costs, always(8))
        assert played.n_drafts[100:].count(8) > 150

    def test_off_when_nothing_holds(self) -> None:
        costs = [100.0 * (1 + k) for k in range(9)]
        played = play(PerKEma(Shared(n_draft_max=8)), 400, costs, always(0))
        assert played.n_drafts[100:].count(0) >= 270


def test_names() -> None:
    reduced = parse_lab_controller("cascade-climb-backoff")(Shared(n_draft_max=3))
    assert reduced.config.without == {"climb", "backoff"}  # type: ignore[attr-defined]
    assert parse_lab_controller("per-k-ema") is PerKEma
    assert all(parse_lab_controller(name) is CONTROLLERS[name] for name in CONTROLLERS)
    for wrong in ("cascade-speed", "fast", ""):
        with pytest.raises(ConfigError):
            parse_lab_controller(wrong)
