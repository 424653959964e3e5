"""What controllers are made of: cost table, acceptance curve, formulas, ledger; static."""

from __future__ import annotations

import random

import pytest
from scripted import always, play

from pyspac.engine.step import StepRecord
from pyspac.errors import ConfigError
from pyspac.ledger import CAPACITY, SHARE, LossLedger
from pyspac.speculation.acceptance import AcceptanceCurve
from pyspac.speculation.cascade import CascadeMemory
from pyspac.speculation.controller import Shared
from pyspac.speculation.cost_table import CostTable, MaskCosts, TimeCurve
from pyspac.speculation.explain import explain, to_dicts
from pyspac.speculation.forecast import MOST_BOOKED, Forecast, ForecastMemory
from pyspac.speculation.manager import (
    CONTROLLERS,
    DEFAULT_CONTROLLER,
    FIXED,
    Speculation,
    choose_controller,
    parse_controller,
)
from pyspac.speculation.utility import break_even, expected_tokens, speedup


class TestTimeCurve:
    def test_measured_and_not_measured(self) -> None:
        """T(1) = 100, T(4) = 200. T(2) lies in 100 .. 200, T(8) in 200 .. 400: the middle of logs."""
        curve = TimeCurve()
        for _ in range(3):
            curve.observe(1, 100)
            curve.observe(4, 200)
        assert curve.us(1) == pytest.approx(100)
        assert curve.us(4) == pytest.approx(200)
        assert curve.us(2) == pytest.approx(100 * 2**0.5)
        assert curve.us(8) == pytest.approx(200 * 2**0.5)

    def test_narrower_than_all_that_was_measured(self) -> None:
        curve = TimeCurve()
        curve.observe(4, 200)
        assert 50 <= (curve.us(1) or 0) <= 200

    def test_masks_widen_a_pass_and_begin_it(self) -> None:
        """By hand: 100 us a plain step and 10 us a token more; drafts of two take nine tokens."""
        table = MaskCosts()
        plain = StepRecord(n_tokens=1, verify_us=100)
        begins = StepRecord(n_tokens=3, n_masks=2, verify_us=120)
        drafts = StepRecord(n_tokens=9, n_masks=6, n_draft=2, verify_us=180)
        for _ in range(20):
            for record in (plain, begins, drafts):
                table.observe(record, record)
        assert table.passes.widths() == [1, 3, 9]
        assert step_us(table, 0) == pytest.approx(100, rel=0.02)
        assert step_us(table, 2) == pytest.approx(180, rel=0.02)
        assert table.backlog_us(7, 2) == pytest.approx(20, rel=0.1)
        assert table.backlog_us(0, 2) == 0.0
        table.observe(begins, plain)  # of another width: no plain step
        assert table.returns.n_observed == 0

    def test_nothing_measured(self) -> None:
        assert TimeCurve().us(1) is None

    def test_doubt_shrinks_with_samples_and_grows_with_age(self) -> None:
        curve = TimeCurve()
        curve.observe(1, 100)
        doubts = [variance(curve, 4)]
        for _ in range(3):
            curve.observe(4, 200)
            doubts.append(variance(curve, 4))
        assert doubts == sorted(doubts, reverse=True)
        for _ in range(100):
            curve.observe(1, 100)
        assert variance(curve, 4) > 2 * doubts[-1]

    def test_page_faults_move_nothing(self) -> None:
        rng = random.Random(0)
        curve = TimeCurve()
        for _ in range(300):
            curve.observe(1, 100 * rng.uniform(0.95, 1.05) * (20 if rng.random() < 0.05 else 1))
        assert curve.us(1) == pytest.approx(100, rel=0.08)

    def test_unseen_widths_follow_what_changes_all(self) -> None:
        """Width 9 is measured a few times, then the context grows and width 1 becomes half as slow again."""
        curve = TimeCurve()
        for _ in range(5):
            curve.observe(1, 100)
            curve.observe(9, 400)
        for i in range(301):
            curve.observe(1, 100 + 50 * i / 300)
        assert curve.us(1) == pytest.approx(150, rel=0.03)
        assert curve.us(9) == pytest.approx(600, rel=0.15)

    def test_ratios_hold_on_a_machine_of_two_speeds(self) -> None:
        """Another program comes and goes on the same core: all passes take 1.7 times as long meanwhile."""
        rng = random.Random(1)
        curve, is_slow, n, errors = TimeCurve(), False, 1, []
        for i in range(2000):
            is_slow ^= rng.random() < 0.02
            n = rng.choice((1, 4, 9)) if rng.random() < 0.05 else n  # a length is kept for a while
            curve.observe(n, 100 * n**0.6 * (1.7 if is_slow else 1.0) * rng.uniform(0.93, 1.07))
            one, nine = curve.us(1), curve.us(9)
            if i > 200 and one and nine:
                errors.append(abs(nine / one / 9**0.6 - 1))
        errors.sort()
        assert errors[len(errors) // 2] < 0.1
        assert errors[len(errors) * 95 // 100] < 0.35

    def test_first_pass_of_all_may_be_slow(self) -> None:
        curve = TimeCurve()
        for us in (900, 300, 300):
            curve.observe(4, us)
        assert curve.us(4) == pytest.approx(300, rel=0.1)

    def test_first_pass_of_a_width_is_believed_as_far_as_it_is_possible(self) -> None:
        """Four tokens at once take no longer than four times one; the rest was an accident."""
        curve = TimeCurve()
        for us in (100, 100, 100):
            curve.observe(1, us)
        curve.observe(4, 2000)
        assert curve.us(4) == pytest.approx(400)
        curve.observe(4, 200)
        assert (curve.us(4) or 0) < 250, "and is not sure"

    def test_follows_a_lasting_change_of_one_width(self) -> None:
        curve = TimeCurve()
        for us in [100] * 20 + [200] * 20:
            curve.observe(2, us)
        assert curve.us(2) == pytest.approx(200, rel=0.02)

    @pytest.mark.parametrize("every", [2, 4, 10])
    def test_a_width_that_changes_beside_others_is_not_an_accident_for_long(self, every: int) -> None:
        """Each wide pass takes three times as long from here on, and those between as long as ever."""
        curve = TimeCurve()
        for _ in range(20):
            curve.observe(1, 100)
            curve.observe(9, 150)
        for i in range(12 * every):
            curve.observe(*((9, 450) if i % every == 0 else (1, 100)))
        assert curve.us(9) == pytest.approx(450, rel=0.15)
        assert curve.us(1) == pytest.approx(100, rel=0.15)


def variance(curve: TimeCurve, n: int) -> float:
    estimate = curve.estimate(n)
    assert estimate is not None
    return estimate.variance


PLAIN = StepRecord(verify_us=100, process_us=10)
DRAFTED = StepRecord(n_draft=2, n_accepted=1, verify_us=180, process_us=12, draft_us=30)


class TestCostTable:
    def test_passes_and_drafts_add_up(self) -> None:
        table = CostTable()
        for _ in range(3):
            table.observe(PLAIN, PLAIN)
            table.observe(DRAFTED, DRAFTED)
        assert step_us(table, 0) == pytest.approx(110, rel=0.01)
        assert step_us(table, 2) == pytest.approx(222, rel=0.03), (
            "the first is weighed against what is likely"
        )

    def test_what_a_change_of_widths_takes_is_no_step_s(self) -> None:
        """A graph of another width takes 40 us, a draft after a pause reads what it missed."""
        table = CostTable()
        table.observe(PLAIN, PLAIN)
        for _ in range(20):
            table.observe(StepRecord(n_draft=2, verify_us=220, process_us=12, draft_us=300), PLAIN, 5)
            table.observe(DRAFTED, DRAFTED)
            table.observe(StepRecord(verify_us=140, process_us=10), DRAFTED)
            table.observe(PLAIN, PLAIN)
        assert step_us(table, 0) == pytest.approx(110, rel=0.01)
        assert table.change_us() == pytest.approx(40, rel=0.05)
        assert step_us(table, 2) == pytest.approx(222, rel=0.02)
        assert table.backlog_us(5, 2) == pytest.approx(270, rel=0.05)
        assert table.backlog_us(6, 2) == table.backlog_us(5, 2), "widths by powers of two"
        assert 270 < table.backlog_us(50, 2) < 270 * 50 / 4
        assert table.backlog_us(0, 2) == 0.0

    def test_plain_step_after_a_prompt_is_none_to_measure(self) -> None:
        """Its caches are cold. All that is compared with it would seem fast."""
        table = CostTable()
        table.observe(StepRecord(verify_us=250), None)
        assert table.step(0) is None
        table.observe(PLAIN, PLAIN)
        assert step_us(table, 0) == pytest.approx(110)

    def test_nothing_measured(self) -> None:
        table = CostTable()
        assert table.step(1) is None
        assert table.change_us() == 0.0


def step_us(table: CostTable, n_draft: int) -> float:
    estimate = table.step(n_draft)
    assert estimate is not None
    return estimate.us


class TestAcceptance:
    def test_censored_drafts_say_nothing_about_what_follows(self) -> None:
        """Drafts of one token that always hold: position 2 is thought as good, not bad."""
        curve = AcceptanceCurve(3)
        for _ in range(100):
            curve.observe(1, 1, 1)
        assert curve.forecast().tokens[3] > 3.5

    def test_expected_tokens(self) -> None:
        """Position 1 always holds, position 2 never: 1, 2, 2, 2 tokens."""
        curve = AcceptanceCurve(3)
        for _ in range(100):
            curve.observe(3, 3, 1)
        assert curve.forecast().tokens == pytest.approx([1, 2, 2, 2], abs=0.25)

    def test_drafters_end_drafts_early(self) -> None:
        """Asked for three, always two: the third one never comes."""
        curve = AcceptanceCurve(3)
        for _ in range(100):
            curve.observe(3, 2, 2)
        assert curve.forecast().chances == pytest.approx([1, 1, 1, 0], abs=0.01)

    def test_doubt_comes_back_where_nobody_looks(self) -> None:
        curve = AcceptanceCurve(2)
        for _ in range(50):
            curve.observe(2, 2, 0)
        sure = curve.forecast()
        for _ in range(100):
            curve.observe(0, 0, 0)
        unsure = curve.forecast()
        assert sure.tokens[1] < 1.1 < 1.45 < unsure.tokens[1]


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
        """gamma-tolerance, 4.1: lambda = 3 and tau(25) = 0.34 give about 1."""
        assert pytest.approx(1.0, abs=0.03) == 3 * 0.34


@pytest.mark.parametrize("seed", range(3))
def test_plain_passes_that_another_program_slows_say_nothing_of_wider_ones(seed: int) -> None:
    """It comes and goes for five steps at a time; nothing is drafted for three thousand steps."""
    curve, rng, factor = TimeCurve(), random.Random(seed), 1.0
    for _ in range(30):
        curve.observe(1, 1e3, is_plain=True)
        curve.observe(9, 3e3)
    for _ in range(3000):
        if rng.random() < 0.2:
            factor = 3.0 if rng.random() < 0.3 else 1.0
        curve.observe(1, 1e3 * factor * rng.uniform(0.95, 1.05), is_plain=True)
    for _ in range(50):
        curve.observe(1, 1e3, is_plain=True)
    plain, wide = curve.us(1), curve.us(9)
    assert plain == pytest.approx(1e3, rel=0.05)
    assert wide == pytest.approx(3e3, rel=0.25)


def test_ledger() -> None:
    ledger = LossLedger()
    ledger.book(2.0, 1.0)  # lost one plain step, earned SHARE of two
    assert ledger.level == pytest.approx(CAPACITY - 1.0 + 2 * SHARE)
    assert ledger.appetite() == pytest.approx(ledger.level / CAPACITY)
    ledger.book(1.0, 5.0)
    assert ledger.level == CAPACITY
    assert ledger.can_lose(CAPACITY)
    assert not ledger.can_lose(CAPACITY + 0.1)
    ledger.book(100.0, 1.0)
    assert not ledger.can_lose(0.0)
    assert not ledger.can_lose(-1.0)
    assert ledger.appetite() == 0.0


def test_evidence_fades_for_as_long_as_one_likes() -> None:
    """What is left is the guess."""
    curve = AcceptanceCurve(2)
    curve.observe(2, 2, 2)
    for _ in range(30_000):
        curve.observe(0, 0, 0)
    assert curve.forecast().tokens == pytest.approx([1.0, 1.5, 1.75], rel=0.01)


def test_sequences_of_a_batch_share_what_its_time_earns() -> None:
    together = LossLedger(level=0.0)
    for _ in range(3):
        together.book(1.0, 1.0, 3)
    assert together.level == pytest.approx(SHARE)


def test_a_sure_gain_may_overdraw_the_ledger_once() -> None:
    ledger = LossLedger(level=-0.5 * CAPACITY)
    assert not ledger.can_lose(0.0)
    assert ledger.can_lose(-0.1)
    ledger.book(1.0 + CAPACITY, 1.0)
    assert not ledger.can_lose(-0.1)


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
        assert speculation.slot(1).shared.table.passes.n_observed == 19, "all but the first"
        assert speculation.begin(3).n_steps == 0

    def test_what_a_class_of_controllers_keeps_is_its_own(self) -> None:
        shared = Shared(n_draft_max=4)
        memory = shared.memory(CascadeMemory)
        assert shared.memory(CascadeMemory) is memory
        assert shared.memory(ForecastMemory) is not memory
        assert Shared(n_draft_max=4).memory(CascadeMemory) is not memory, "another run"

    def test_names(self) -> None:
        assert parse_controller("auto") is CONTROLLERS[DEFAULT_CONTROLLER]
        for wrong in ("cascade-climb", "per-k-ema", "fast", ""):
            with pytest.raises(ConfigError, match="--speculation"):
                parse_controller(wrong)

    def test_explain(self) -> None:
        speculation = Speculation("cascade", n_draft_max=4)
        play(speculation.begin(), 60, [100, 160, 210, 260, 300], always(1))
        text = "\n".join(explain(speculation.decisions()))
        assert "baseline" in text
        assert "3:0.77" in text, "utility of K = 3: 2 tokens at 2.6 times the time"
        assert to_dicts(speculation.decisions())[0]["n_draft"] == 0


class TestWhoDecides:
    """choose_controller: a wish is kept, else the best controller decides."""

    def test_the_best_by_default(self) -> None:
        assert choose_controller(None, None) == DEFAULT_CONTROLLER

    def test_a_length_that_was_asked_for_is_kept(self) -> None:
        assert choose_controller(None, 4) == FIXED

    def test_a_name_makes_the_length_a_cap(self) -> None:
        assert choose_controller("cascade", 4) == "cascade"

    def test_sampled_text_repeats_with_its_seed(self) -> None:
        assert choose_controller(None, None, must_repeat=True) == FIXED

    def test_unknown(self) -> None:
        with pytest.raises(ConfigError, match="--speculation"):
            choose_controller("fast", None)


def test_an_accident_of_a_batch_is_booked_once() -> None:
    """Not by each of its sequences: three that draft with success would owe for it for hundreds of steps."""
    speculation = Speculation(Forecast, n_draft_max=8, lag_steps=1)

    def batch(n_draft: int, verify_us: float) -> None:
        for slot in range(3):
            speculation.observe(
                StepRecord(
                    server_slot=slot, n_draft=n_draft, n_accepted=n_draft, n_tokens=3 * (1 + n_draft),
                    verify_us=verify_us,
                )
            )  # fmt: skip

    for _ in range(30):
        batch(0, 2000.0)
    for _ in range(30):
        batch(1, 2500.0)
    ledger = speculation.shared.memory(ForecastMemory).ledger
    assert ledger.level == CAPACITY
    batch(1, 1e6)
    assert CAPACITY - MOST_BOOKED <= ledger.level < CAPACITY
