"""pyspac.generate.metrics: a generation timed by hand."""

import pytest

from pyspac.engine.step import StepRecord
from pyspac.generate.metrics import Metrics


def test_by_hand() -> None:
    """Prompt from 10.0 s, first token at 10.5 s; two steps emit 3 and 1 tokens, the last at 10.9 s.

    5 tokens; TTFT 500 ms; TPOT (900 - 500) / 4 = 100 ms; 10 tokens/s. 4 + 2 drafted, 2 accepted: rate 1/3,
    length 1 + 2/2 = 2.
    """
    m = Metrics(start_s=10.0)
    m.mark_tokens(1, 10.5)
    m.mark_tokens(3, 10.7)
    m.mark_tokens(1, 10.9)
    m.steps += [StepRecord(n_draft=4, n_accepted=2), StepRecord(n_draft=2)]
    assert m.ttft_ms == pytest.approx(500)
    assert m.tpot_ms == pytest.approx(100)
    assert m.tps == pytest.approx(10)
    assert m.totals.acceptance_rate == pytest.approx(1 / 3)
    assert m.totals.acceptance_length == pytest.approx(2.0)
    assert m.to_dict()["n_steps"] == 2
    assert m.to_dict()["n_tokens"] == 5


def test_nothing_generated() -> None:
    assert set(Metrics().to_dict().values()) == {0, None}


def test_one_token_has_no_tpot() -> None:
    m = Metrics(start_s=1.0)
    m.mark_tokens(1, 2.0)
    assert m.ttft_ms == pytest.approx(1000)
    assert m.tpot_ms is None
    assert m.tps is None


def test_no_tokens_leave_the_times_alone() -> None:
    m = Metrics(start_s=1.0)
    m.mark_tokens(1, 2.0)
    m.mark_tokens(0, 9.0)
    assert m.last_token_s == 2.0
