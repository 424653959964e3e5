"""Controllers in the decode loop: the text never changes, shadows tell the truth, drafters follow lazily."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
from conftest import ROOT
from fake_context import FakeContext
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspac.engine.step import StepRecord
from pyspac.generate.decode import DecodeLoop, Generation
from pyspac.generate.drafting import Drafter, DraftResult, FreeDrafter, ModelDrafter
from pyspac.generate.drop_in_steps import DropInSteps
from pyspac.generate.llama import Context
from pyspac.generate.ngram_drafter import NgramDrafter
from pyspac.generate.options import RunOptions
from pyspac.generate.place_limit import MatchLimit, PlaceLimit
from pyspac.generate.sampling import Sampler, SamplingParams, argmax
from pyspac.generate.session import Session
from pyspac.generate.shadow import ShadowDrafter
from pyspac.generate.speculation_hook import SpeculationHook, forecast_for
from pyspac.speculation.controller import Controller, Shared
from pyspac.speculation.forecast import Forecast
from pyspac.speculation.manager import CONTROLLERS, Speculation
from pyspac.speculation.matches import N_MATCHED_MAX
from pyspac.speculation.placed_forecast import MatchForecast, ModelForecast

PROMPT = [1, 2, 3]
SIZES = {"seed": 11, "n_vocab": 97, "n_ctx": 200}


class Scripted(Controller):
    """Draft lengths from a list, over and over."""

    name = "scripted"

    def __init__(self, shared: Shared, n_drafts: list[int]) -> None:
        super().__init__(shared)
        self.n_drafts = n_drafts
        self.records: list[StepRecord] = []

    def next_n_draft(self) -> int:
        return self.n_drafts[self.n_steps % len(self.n_drafts)]

    def _observe(self, record: StepRecord) -> None:
        self.records.append(record)


def generate(context: FakeContext, hook: SpeculationHook | None, n_predict: int = 60) -> Generation:
    loop = DecodeLoop(
        cast(Context, context),
        Sampler(SamplingParams()),
        hook.drafter if hook else None,
        n_draft_max=8 if hook else 0,
        hook=hook,
    )
    return loop.run(PROMPT, n_predict)


def model_drafter(**sizes: int) -> tuple[ModelDrafter, FakeContext]:
    """A draft model that is right about half of the time: it looks at fewer tokens."""
    context = FakeContext(**{**SIZES, **sizes})
    return ModelDrafter(cast(Context, context), Sampler(SamplingParams())), context


@pytest.mark.parametrize("name", CONTROLLERS)
@pytest.mark.parametrize("kind", ["ngram", "draft"])
def test_no_controller_changes_the_text(name: str, kind: str) -> None:
    drafter = NgramDrafter() if kind == "ngram" else model_drafter()[0]
    hook = SpeculationHook(Speculation(name, n_draft_max=8), drafter)
    plain = generate(FakeContext(**SIZES), None)
    assert generate(FakeContext(**SIZES), hook).token_ids == plain.token_ids


def test_limit_is_the_smaller_one() -> None:
    class Inner:
        def n_draft_limit(self) -> int | None:
            return 2

        def after_prompt(self) -> None: ...

        def after_step(self, record: StepRecord) -> None: ...

        def look_ahead(self, tokens: Sequence[int]) -> None: ...

    hook = SpeculationHook(Speculation("static", n_draft_max=5), NgramDrafter(), Inner())
    assert hook.n_draft_limit() == 2


def test_the_controller_gets_the_loops_records() -> None:
    controller: list[Scripted] = []

    def make(shared: Shared) -> Controller:
        controller.append(Scripted(shared, [0, 3, 1]))
        return controller[-1]

    hook = SpeculationHook(Speculation(make, n_draft_max=8), model_drafter()[0])
    result = generate(FakeContext(**SIZES), hook)
    records = controller[0].records
    assert all(a is b for a, b in zip(result.metrics.steps, records, strict=True))
    assert {record.n_draft for record in records} >= {0, 1, 3}
    assert all(record.total_us >= record.verify_us >= 0 for record in records)
    assert any(record.overhead_us > 0 for record in records)


class Resting(Scripted):
    """Plain steps, five of which may be told of at a time."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared, [0])
        self.n_rest = 5
        self.n_told: list[int] = []

    def observe(self, record: StepRecord) -> None:
        self.n_told.append(record.step)
        super().observe(record)


def test_while_the_controller_rests_steps_are_told_of_together() -> None:
    """All of them, in their order, the last ones at the end."""
    speculation = Speculation(Resting, n_draft_max=8)
    hook = SpeculationHook(speculation, model_drafter()[0])
    controller = hook.controller
    assert isinstance(controller, Resting)
    result = generate(FakeContext(**SIZES), hook, n_predict=18)
    assert controller.n_told == list(range(15)), "17 steps behind the prompt's token"
    hook.finish()
    assert all(a is b for a, b in zip(result.metrics.steps, controller.records, strict=True))
    assert min(record.overhead_us for record in controller.records) > 0.0


def test_each_step_of_a_rest_has_the_time_that_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader who pauses for three seconds holds up one step: the others are no longer for that."""
    now_us, told = [0.0], []
    monkeypatch.setattr("time.perf_counter_ns", lambda: int(1e3 * now_us[0]))
    hook = SpeculationHook(Speculation(Resting, n_draft_max=8), model_drafter()[0])
    hook.after_prompt()
    for us in (110.0, 120.0, 3e6, 130.0, 140.0, 150.0, 160.0):
        now_us[0] += us
        told.append(StepRecord(verify_us=100))
        hook.after_step(told[-1])
    now_us[0] += 1e6  # of what comes behind the last step
    hook.finish()
    assert [record.overhead_us for record in told] == pytest.approx([10, 20, 3e6 - 100, 30, 40, 50, 60])


def test_what_looking_takes_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now_us = [0.0]

    class Slow(Resting):
        def observe(self, record: StepRecord) -> None:
            super().observe(record)
            now_us[0] += 1e5

    monkeypatch.setattr("time.perf_counter_ns", lambda: int(1e3 * now_us[0]))
    hook = SpeculationHook(Speculation(Slow, n_draft_max=8), model_drafter()[0])
    for _ in range(10):
        now_us[0] += 10.0
        hook.after_step(StepRecord(verify_us=8))
    now_us[0] += 10.0
    late = StepRecord(verify_us=50)
    hook.after_step(late)
    hook.finish()
    assert isinstance(hook.controller, Slow)
    assert [record.overhead_us for record in hook.controller.records[:10]] == pytest.approx([2.0] * 10)
    assert late.overhead_us == 0.0, "clocks differ; no time is below 0"


def test_who_drafts_in_the_shadow_is_asked_from_the_beginning() -> None:
    hook = SpeculationHook(Speculation(Forecast, n_draft_max=8), Again())
    assert isinstance(hook.drafter, ShadowDrafter)
    assert hook.controller.compare_shadow == hook.drafter.compare


def test_a_session_tells_of_all_steps() -> None:
    """The output ends in a rest."""
    options = RunOptions(model=ROOT / "pyspac/models/demo-moe.gguf", n_predict=9)
    with Session(options) as session:
        session.speculation = Speculation(Resting, n_draft_max=0)
        n = len(session.generate(session.tokenize("Once")).metrics.steps)
        controller = session.speculation.slot()
        assert isinstance(controller, Resting)
        assert controller.n_told == list(range(n))
        assert n % controller.n_rest, "else it shows nothing"


def test_a_new_generation_of_the_drop_in_tells_of_the_last_ones_steps() -> None:
    steps = DropInSteps(None, NgramDrafter(), Speculation(Resting, n_draft_max=4), n_draft_max=4, n_ctx=99)
    assert isinstance(steps._hook, SpeculationHook)
    controller = steps._hook.controller
    assert isinstance(controller, Resting)
    for _ in range(3):
        steps.after_eval(1, 5.0)
    assert not controller.n_told
    steps.begin()
    assert controller.n_told == [0, 1, 2]


def test_a_step_is_told_of_once_whatever_becomes_of_it() -> None:
    """Ctrl-C may come between; what ends the output has the rest told."""

    class Interrupted(Resting):
        def observe(self, record: StepRecord) -> None:
            super().observe(record)
            if record.step == 3:
                raise KeyboardInterrupt

    hook = SpeculationHook(Speculation(Interrupted, n_draft_max=8), model_drafter()[0])
    controller = hook.controller
    assert isinstance(controller, Interrupted)
    for step in range(4):
        hook.after_step(StepRecord(step=step))
    with pytest.raises(KeyboardInterrupt):
        hook.after_step(StepRecord(step=4))
    hook.finish()
    assert controller.n_told == [0, 1, 2, 3]


def test_nothing_is_told_before_a_rest_is_over() -> None:
    hook = SpeculationHook(Speculation(Resting, n_draft_max=8), model_drafter()[0])
    assert isinstance(hook.controller, Resting)
    for step in range(4):
        hook.after_step(StepRecord(step=step))
    assert not hook.controller.n_told
    hook.after_step(StepRecord(step=4))
    assert hook.controller.n_told == [0, 1, 2, 3, 4]


def test_drafts_and_steps_behind_them_are_told_of_at_once() -> None:
    """With the plain steps before them; and the controller knows how many it was not told of."""
    hook = SpeculationHook(Speculation(Resting, n_draft_max=8), model_drafter()[0])
    controller = hook.controller
    assert isinstance(controller, Resting)
    told = []
    for step, n_draft in enumerate([0, 0, 2, 3, 0, 0, 0]):
        hook.after_step(StepRecord(step=step, n_draft=n_draft))
        told.append((len(controller.n_told), controller.n_untold))
    assert told == [(0, 1), (0, 2), (3, 0), (4, 0), (5, 0), (5, 1), (5, 2)]
    assert controller.n_told == [0, 1, 2, 3, 4]
    hook.finish()
    assert controller.n_untold == 0


def test_draft_model_catches_up_in_one_batch() -> None:
    """Off for a long while, then on: the drafter reads all it missed in one decode, not token by token."""
    drafter, draft_context = model_drafter()
    speculation = Speculation(lambda shared: Scripted(shared, [0] * 20 + [2]), n_draft_max=8)
    generate(FakeContext(**SIZES), SpeculationHook(speculation, drafter), 24)
    assert draft_context.widths[0] == len(PROMPT)  # the prompt
    assert draft_context.widths[1] == 21  # twenty steps' tokens and the last one: then it drafts
    assert draft_context.widths[2] == 1


def test_off_drafts_nothing() -> None:
    """K = 0 costs nothing: the draft model is not run at all after the prompt."""
    drafter, draft_context = model_drafter()
    generate(FakeContext(**SIZES), SpeculationHook(Speculation("off", n_draft_max=8), drafter))
    assert draft_context.widths == [len(PROMPT)]


class Known(FreeDrafter):
    """Always drafts the truth, but for one wrong token at a position that depends on the place."""

    def __init__(self, context: FakeContext) -> None:
        self.context = context

    def draft_at(self, tokens: Sequence[int], end: int, n_max: int) -> list[int]:
        sequence = list(tokens[:end])
        for _ in range(n_max):
            sequence.append(argmax(self.context.logits_after(sequence)))
        return [t + (i == end % 9) for i, t in enumerate(sequence[end:])]


class Again(FreeDrafter):
    """What followed the last token when it stood there the last time."""

    def draft_at(self, tokens: Sequence[int], end: int, n_max: int) -> list[int]:
        before = [i for i in range(1, end) if tokens[i - 1] == tokens[end - 1]]
        return list(tokens[before[-1] : min(end, before[-1] + n_max)]) if before else []


@settings(max_examples=30, deadline=None)
@given(n_drafts=st.lists(st.sampled_from([0, 0, 0, 2, 4]), min_size=1, max_size=9), every=st.integers(1, 12))
def test_shadows_say_what_verification_would_have_said(n_drafts: list[int], every: int) -> None:
    """Of plain steps the true length of agreement is reported, whenever it is asked for; steps that draft
    need no shadow."""
    context = FakeContext(**SIZES)
    known, heard = Known(context), []
    shadow = ShadowDrafter(known, 5, lambda n_draft, n_held: heard.append((n_draft, n_held)))
    sequence = list(PROMPT)
    expected = []
    for step, n_draft in enumerate(n_drafts * 4):
        draft = shadow.draft(sequence, n_draft).tokens
        assert len(draft) == n_draft
        wrong = len(sequence) % 9
        if n_draft == 0:
            expected.append((5, min(5, wrong)))
        for _ in range(1 + min(n_draft, wrong)):  # a step emits what holds, and one more
            sequence.append(argmax(context.logits_after(sequence)))
        if step % every == 0:
            shadow.compare()
    shadow.compare()
    assert not Counter(heard) - Counter(expected), "nothing is reported that was not so"
    if set(n_drafts) == {0}:
        assert len(heard) >= len(expected) - 5, "only the last drafts may still be open"


def test_shadow_hears_of_silence() -> None:
    heard: list[tuple[int, int]] = []
    shadow = ShadowDrafter(Again(), 4, lambda *what: heard.append(what))
    shadow.draft([1, 2, 3], 0)
    assert heard == [], "between two passes nothing is looked up"
    shadow.compare()
    assert heard == [(0, 0)]
    shadow.compare()
    assert heard == [(0, 0)], "once"


@given(tokens=st.lists(st.integers(0, 3), min_size=2, max_size=40), every=st.integers(1, 15))
def test_shadow_drafts_are_those_of_the_time(tokens: list[int], every: int) -> None:
    """Asked late, a drafter says what it would have said then: it has not seen what came after."""
    at_once, late = Again(), Again()
    heard: list[tuple[int, int]] = []
    shadow = ShadowDrafter(late, 3, lambda *what: heard.append(what))
    expected = []
    for end in range(1, len(tokens) + 1):
        draft = at_once.draft(tokens[:end], 3).tokens
        n_held = next((i for i, t in enumerate(draft) if tokens[end + i : end + i + 1] != [t]), len(draft))
        if end + min(n_held + 1, len(draft)) <= len(tokens):
            expected.append((len(draft), n_held))
    sequence: list[int] = []
    for token in tokens:
        sequence.append(token)
        shadow.draft(sequence, 0)
        if len(sequence) % every == 0:
            shadow.compare()
    shadow.compare()
    assert Counter(heard) == Counter(expected)


def test_forecasts_suit_their_drafters() -> None:
    """One for copies from the text, one for models; llama.cpp's n-gram drafters are watched instead."""
    names = ["ngram", "none", "ngram-simple", "ngram-mod,ngram-cache", "draft", "ngram-mod,draft-simple"]
    kinds = [MatchForecast, Forecast, Forecast, Forecast, ModelForecast, ModelForecast]
    assert [forecast_for(name) for name in names] == kinds


def test_who_is_limited_and_who_is_shadowed() -> None:
    """By `forecast` alone: n-grams by their matches, other free drafters in the shadow."""
    speculation = Speculation("forecast", n_draft_max=4, forecast=MatchForecast)
    assert isinstance(SpeculationHook(speculation, NgramDrafter()).drafter, MatchLimit)
    speculation = Speculation("forecast", n_draft_max=4)
    assert isinstance(SpeculationHook(speculation, Again()).drafter, ShadowDrafter)
    assert isinstance(SpeculationHook(speculation, model_drafter()[0]).drafter, ModelDrafter)
    speculation = Speculation("forecast", n_draft_max=4, forecast=ModelForecast)
    assert isinstance(SpeculationHook(speculation, model_drafter()[0]).drafter, PlaceLimit)
    cascade = Speculation("cascade", n_draft_max=4, forecast=MatchForecast)
    assert isinstance(SpeculationHook(cascade, NgramDrafter()).drafter, NgramDrafter)


class Times(FakeContext):
    """Text that repeats itself: token t is followed by t + 1, and the last one by the first."""

    def logits_after(self, sequence: Sequence[int]) -> np.ndarray:
        logits = np.zeros(SIZES["n_vocab"], np.float32)
        logits[sequence[-1] % 9 + 1] = 1.0
        return logits


def test_text_with_matches_is_that_without() -> None:
    """Drafts behind matches, limited by the controller: the text is plain decoding's."""
    speculation = Speculation("forecast", n_draft_max=8, forecast=MatchForecast)
    hook = SpeculationHook(speculation, NgramDrafter())
    drafted = generate(Times(**SIZES), hook, 150)
    assert drafted.token_ids == generate(Times(**SIZES), None, 150).token_ids
    matches = [step.n_matched for step in drafted.metrics.steps]
    assert max(matches) == N_MATCHED_MAX
    assert all(step.n_matched > 0 for step in drafted.metrics.steps if step.n_draft)


class Asked(Drafter):
    """Drafts as many as it may, and notes how many that were."""

    def __init__(self) -> None:
        self.limits: list[int] = []

    def draft(self, tokens: Sequence[int], n_max: int) -> DraftResult:
        self.limits.append(n_max)
        return DraftResult([7] * n_max)


def test_a_model_drafts_no_more_than_its_place_is_worth() -> None:
    """The controller is asked with the match, unless nothing may be drafted; the draft has it, too."""
    controller = ModelForecast(Shared(n_draft_max=8))
    heard: list[int] = []
    limits = iter([3, 8])
    controller.n_draft_for = lambda n, n_max: heard.append(n) or min(n_max, next(limits))  # type: ignore
    inner = Asked()
    drafter = PlaceLimit(inner, controller)
    text = [*range(1, 11), *range(2, 10)]
    drafter.prepare(text[:5])
    assert drafter.draft(text[:9], 8) == DraftResult([7, 7, 7])
    assert drafter.draft(text, 5) == DraftResult([7] * 5, n_matched=8)
    assert drafter.draft(text, 0) == DraftResult()
    assert heard == [0, 8]
    assert inner.limits == [3, 5, 0]


class Finds(NgramDrafter):
    """Always a match of five tokens, followed by 7."""

    def match(self, tokens: Sequence[int]) -> int:
        return 5

    def copy(self, tokens: Sequence[int], n: int) -> list[int]:
        return [7] * n


def test_requests_that_were_ended_need_no_drafter() -> None:
    """A `Speculation` that goes on behind another drafter asks the first one, which is closed, no more."""

    class Closes(Again):
        is_closed = False

        def draft_at(self, tokens: Sequence[int], end: int, n_max: int) -> list[int]:
            assert not self.is_closed
            return super().draft_at(tokens, end, n_max)

    speculation, drafter = Speculation(n_draft_max=8), Closes()
    hook = SpeculationHook(speculation, drafter)
    assert isinstance(hook.controller, Forecast)
    text = [1, 2, 1]
    hook.drafter.draft(text, 0)
    text.append(3)
    speculation.end()
    assert hook.controller.memory.seen == {0: (1, 0)}, "learned"
    assert not speculation.slots, "nobody is asked any more"
    drafter.is_closed = True
    assert SpeculationHook(speculation, Again()).controller is not hook.controller


def test_what_is_passed_over_is_compared_with_the_text() -> None:
    """Its first token, once; nothing is said of drafts that were made, or could not be."""
    controller = MatchForecast(Shared(n_draft_max=4))
    heard: list[tuple[int, bool]] = []
    controller.observe_passed_over = lambda *what: heard.append(what)  # type: ignore[method-assign]
    limits = iter([0, 0, 2, 0])
    controller.n_draft_for = lambda n_matched: next(limits)  # type: ignore[method-assign]
    drafter = MatchLimit(Finds(), controller)
    assert drafter.draft([1], 4) == DraftResult([], n_matched=5)
    assert drafter.draft([1, 7], 4) == DraftResult([], n_matched=5)
    assert heard == [(5, True)]
    assert drafter.draft([1, 7, 8], 4) == DraftResult([7, 7], n_matched=5)
    assert heard == [(5, True), (5, False)]
    assert drafter.draft([1, 7, 8, 7], 4).tokens == []
    assert drafter.draft([1, 7, 8, 7, 7], 0).tokens == []
    assert drafter.draft([1, 7, 8, 7, 7, 7], 0).tokens == []
    assert heard == [(5, True), (5, False), (5, True)]


def test_no_more_is_copied_than_others_allow() -> None:
    """The end of the output, or of the context."""
    controller = MatchForecast(Shared(n_draft_max=4))
    controller.n_draft_for = lambda n_matched: 4  # type: ignore[method-assign]
    assert MatchLimit(Finds(), controller).draft([1], 2) == DraftResult([7, 7], n_matched=5)


class Drafts(Drafter):
    """As many as it may."""

    def draft(self, tokens: Sequence[int], n_max: int) -> DraftResult:
        return DraftResult([1] * n_max)


def test_drafts_that_others_cut_short_are_not_thought_to_end() -> None:
    """The end of the output, or the split, allows two tokens: nothing is said of those beyond."""
    controller = ModelForecast(Shared(n_draft_max=8))
    drafter = PlaceLimit(Drafts(), controller)
    for step in range(80):
        n = len(drafter.draft([1] * 9, min(controller.next_n_draft(), 8 if step < 40 else 2)).tokens)
        controller.observe(StepRecord(n_draft=n, n_accepted=n, n_matched=8, verify_us=1e4 * (1 + 0.2 * n)))
    assert n == 2
    controller.learn_gathered()
    assert min(controller.curves[1].forecast().chances) > 0.9
