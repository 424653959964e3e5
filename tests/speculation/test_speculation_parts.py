"""What controllers are made of: cost table, acceptance curve, formulas, budget; static and per-K EMA."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from scripted import always, play

from pyspac.engine.step import StepRecord
from pyspac.errors import ConfigError
from pyspac.generate.options import RunOptions
from pyspac.generate.sampling import SamplingParams
from pyspac.speculation.acceptance import AcceptanceCurve
from pyspac.speculation.budget import LossBudget
from pyspac.speculation.controller import Shared
from pyspac.speculation.cost_table import CostTable, WidthCurve
from pyspac.speculation.explain import explain, to_dicts
from pyspac.speculation.manager import (
    CONTROLLERS,
    DEFAULT_CONTROLLER,
    FIXED,
    Speculation,
    choose_controller,
    parse_controller,
)
from pyspac.speculation.per_k_ema import PerKEma, ladder
from pyspac.speculation.utility import break_even, expected_tokens, speedup


class TestWidthCurve:
    def test_measured_interpolated_extrapolated(self) -> None:
        """T(1) = 100, T(5) = 300: T(3) = 200 between, T(7) = 400 beyond, half as steep for an optimist."""
        curve = WidthCurve()
        for _ in range(3):
            curve.observe(1, 100)
            curve.observe(5, 300)
        assert curve.us(1) == pytest.approx(100)
        assert curve.us(3) == pytest.approx(200)
        assert curve.us(7) == pytest.approx(400)
        assert curve.us(7, is_optimistic=True) == pytest.approx(350)

    def test_optimist_follows_the_last_slope_after_a_jump(self) -> None:
        """1, 2.6, 2.8: from 3 tokens on it is flat; 2.8 + half of 0.2."""
        curve = WidthCurve()
        for n, us in ((1, 100), (2, 260), (3, 280)):
            curve.observe(n, us)
        assert curve.us(4, is_optimistic=True) == pytest.approx(290)

    def test_nothing_measured(self) -> None:
        assert WidthCurve().us(1) is None

    def test_page_faults_move_nothing(self) -> None:
        rng = random.Random(0)
        curve = WidthCurve()
        for _ in range(300):
            curve.observe(1, 100 * rng.uniform(0.95, 1.05) * (20 if rng.random() < 0.05 else 1))
        assert curve.us(1) == pytest.approx(100, rel=0.08)

    def test_unseen_widths_follow_what_changes_all(self) -> None:
        """Width 9 is measured once, then the context grows and width 1 becomes half as slow again."""
        curve = WidthCurve()
        for _ in range(3):
            curve.observe(9, 400)
        for i in range(301):
            curve.observe(1, 100 + 50 * i / 300)
        assert curve.us(1) == pytest.approx(150, rel=0.03)
        assert curve.us(9) == pytest.approx(600, rel=0.1)

    def test_ratios_hold_on_a_machine_of_two_speeds(self) -> None:
        """Another program comes and goes on the same core: all passes take 1.7 times as long meanwhile."""
        rng = random.Random(1)
        curve, is_slow, n, errors = WidthCurve(), False, 1, []
        for i in range(2000):
            is_slow ^= rng.random() < 0.02
            n = rng.choice((1, 4, 9)) if rng.random() < 0.05 else n  # a length is kept for a while
            curve.observe(n, 100 * n**0.6 * (1.7 if is_slow else 1.0) * rng.uniform(0.93, 1.07))
            one, nine = curve.us(1), curve.us(9)
            if i > 200 and one and nine:
                errors.append(abs(nine / one / 9**0.6 - 1))
        errors.sort()
        assert errors[len(errors) // 2] < 0.05
        assert errors[len(errors) * 95 // 100] < 0.15

    def test_first_pass_of_a_width_may_be_slow(self) -> None:
        curve = WidthCurve()
        curve.observe(4, 900)
        curve.observe(4, 300)
        assert curve.us(4) == pytest.approx(300, rel=0.1)

    def test_follows_a_lasting_change_of_one_width(self) -> None:
        curve = WidthCurve()
        for us in [100] * 20 + [200] * 20:
            curve.observe(2, us)
        assert curve.us(2) == pytest.approx(200, rel=0.02)


class TestCostTable:
    def test_classes_add_up(self) -> None:
        table = CostTable()
        for _ in range(3):
            table.observe(StepRecord(n_draft=0, n_accepted=0, verify_us=100, process_us=10))
            table.observe(StepRecord(n_draft=2, n_accepted=1, verify_us=180, process_us=12, draft_us=30))
        assert table.step_us(2) == pytest.approx(222)
        assert table.cost(2) == pytest.approx(222 / 110)
        assert table.tolerance(3) == pytest.approx(100 / 180)
        assert table.delta() == pytest.approx(15 / 100)

    def test_experts_share_is_kept_apart(self) -> None:
        """Experts become twice as fast (the cache is warm): seen at width 1, expected at width 5 too."""
        table = CostTable()
        for _ in range(3):
            table.observe_verify(1, 100, 60)
            table.observe_verify(5, 280, 240)
        assert table.verify_us(5) == pytest.approx(280)
        for i in range(200):
            table.observe_verify(1, *((100, 60) if i < 50 else (70, 30)))
        assert table.verify_us(1) == pytest.approx(70, rel=0.02)
        assert table.verify_us(5) == pytest.approx(40 + 120, rel=0.1)

    def test_nothing_measured(self) -> None:
        table = CostTable()
        assert table.step_us(1) is None
        assert table.cost(1) is None
        assert table.tolerance(2) is None
        assert table.delta() is None


class TestAcceptance:
    def test_censored_drafts_say_nothing_about_what_follows(self) -> None:
        """Drafts of one token that always hold: position 2 is thought as good, not bad."""
        curve = AcceptanceCurve(3, prior=0.5)
        for _ in range(100):
            curve.observe(1, 1)
        assert all(rate > 0.8 for rate in curve.rates())

    def test_expected_tokens(self) -> None:
        """Position 1 always holds, position 2 never: 1, 2, 2, 2 tokens."""
        curve = AcceptanceCurve(3)
        for _ in range(100):
            curve.observe(3, 1)
        assert curve.expected_tokens(curve.chances()) == pytest.approx([1, 2, 2, 2], abs=0.25)

    def test_forgetting_keeps_the_guess_and_loses_the_weight(self) -> None:
        curve = AcceptanceCurve(2)
        for _ in range(50):
            curve.observe(2, 0)
        before = curve.rates()[0]
        for _ in range(100):
            curve.forget()
        assert curve.rates()[0] == pytest.approx(before, abs=0.05)
        assert curve.weight() < 0.1


class TestFormulas:
    def test_equation_1_by_hand(self) -> None:
        """K = 2, acceptance 0.5: lambda = 1.75; tau(3) = 0.5, delta = 0.1: S = 0.875 / 1.1."""
        assert expected_tokens(2, 0.5) == pytest.approx(1.75)
        assert speedup(2, 0.5, 0.5, 0.1) == pytest.approx(0.875 / 1.1)

    def test_break_even(self) -> None:
        """K = 1, no drafting cost: 1 + a = 1 / tau."""
        assert break_even(1, 0.625, 0.0) == pytest.approx(0.6, abs=1e-5)
        assert break_even(1, 0.4, 0.0) is None, "two tokens cost more than twice as much"
        assert break_even(0, 1.0, 0.0) is None

    def test_large_windows_of_the_paper(self) -> None:
        """gamma-tolerance.txt, 4.1: lambda = 3 and tau(25) = 0.34 give about 1."""
        assert pytest.approx(1.0, abs=0.03) == 3 * 0.34


def test_budget() -> None:
    budget = LossBudget(share=0.1, capacity=3.0, level=3.0)
    budget.pay(200, 1, 100)  # lost one plain step, earned 0.2
    assert budget.level == pytest.approx(2.2)
    budget.pay(100, 5, 100)
    assert budget.level == 3.0
    assert budget.can_lose(3.0)
    assert not budget.can_lose(3.1)


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


class TestSpeculation:
    def test_static_and_off(self) -> None:
        assert Speculation("static", n_draft_max=5).next_n_draft() == 5
        assert Speculation("off", n_draft_max=5).next_n_draft() == 0

    def test_slots_are_apart_but_share_costs(self) -> None:
        speculation = Speculation("forecast", n_draft_max=4)
        for _ in range(20):
            speculation.observe(StepRecord(server_slot=3, n_draft=0, n_accepted=0, verify_us=100))
        assert speculation.slot(3).n_steps == 20
        assert speculation.slot(1).n_steps == 0
        assert speculation.slot(1).shared.table.verify.n_samples(1) > 0
        assert speculation.begin(3).n_steps == 0

    def test_names(self) -> None:
        assert parse_controller("auto") is CONTROLLERS[DEFAULT_CONTROLLER]
        reduced = parse_controller("cascade-climb-backoff")(Shared(n_draft_max=3))
        assert reduced.config.without == {"climb", "backoff"}  # type: ignore[attr-defined]
        for wrong in ("cascade-speed", "fast", ""):
            with pytest.raises(ConfigError, match="--speculation"):
                parse_controller(wrong)

    def test_explain(self) -> None:
        speculation = Speculation("cascade", n_draft_max=4)
        play(speculation.begin(), 60, [100, 160, 210, 260, 300], always(1))
        text = "\n".join(explain(speculation.decisions()))
        assert "baseline" in text
        assert "3:0.77" in text, "utility of K = 3: 2 tokens at 2.6 times the time"
        assert to_dicts(speculation.decisions())[0]["n_draft"] == 0


class TestSwitch:
    """A pass of another width than the last one takes longer, which is no property of its width."""

    def test_settled_passes_tell_the_width_and_pairs_the_switch(self) -> None:
        """100 us for one token, 150 for four, 40 more after a change; groups of three."""
        table = CostTable()
        for _ in range(12):
            for width, us in ((1, 100), (4, 150)):
                for i in range(3):
                    table.observe_verify(width, us + (40 if i == 0 else 0))
        assert table.verify_us(1) == pytest.approx(100, rel=0.01)
        assert table.verify_us(4) == pytest.approx(150, rel=0.01)
        assert table.switch_us == pytest.approx(40, rel=0.05)

    def test_without_settled_passes_the_switch_is_taken_off(self) -> None:
        table = CostTable()
        for us in (140, 100) * 20:
            table.observe_verify(1, us)
            table.pass_by(1 if us == 140 else 0)
        learned = table.switch_us
        for width in (2, 3) * 4:
            table.observe_verify(width, 240)
        assert table.verify_us(2) == pytest.approx(240 - learned, rel=0.01)

    def test_equal_widths_have_none(self) -> None:
        table = CostTable()
        for us in (100, 110, 90, 105):
            table.observe_verify(3, us)
        assert table.switch_us < 5


class TestWhoDecides:
    """choose_controller: a wish is kept, else the best controller decides."""

    def test_the_best_by_default(self) -> None:
        assert choose_controller(None, None) == DEFAULT_CONTROLLER

    def test_a_length_that_was_asked_for_is_kept(self) -> None:
        assert choose_controller(None, 4) == FIXED

    def test_a_name_makes_the_length_a_cap(self) -> None:
        assert choose_controller("cascade", 4) == "cascade"

    def test_sampled_text_repeats_with_its_seed(self) -> None:
        assert RunOptions(model=Path("m"), spec_type="ngram").controller == DEFAULT_CONTROLLER
        sampling = SamplingParams(temp=0.8, seed=3)
        assert RunOptions(model=Path("m"), spec_type="ngram", sampling=sampling).controller == FIXED

    def test_unknown(self) -> None:
        with pytest.raises(ConfigError, match="--speculation"):
            choose_controller("fast", None)
