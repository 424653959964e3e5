"""pyspac.generate.decode: the loop on a fake model, any drafter; stops, limits, hooks, interrupts."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
from fake_context import FakeContext
from hypothesis import given
from hypothesis import strategies as st

from pyspac.engine.step import StepRecord
from pyspac.generate.decode import DecodeLoop, Generation, Interrupt, PromptError, check_prompt
from pyspac.generate.drafting import Drafter, DraftResult, ModelDrafter, NoDrafter
from pyspac.generate.llama import Context
from pyspac.generate.ngram_drafter import NgramDrafter
from pyspac.generate.sampling import Sampler, SamplingParams, argmax

PROMPT = [1, 2, 3]


class ScriptedDrafter(Drafter):
    """Drafts the true continuation, with every `wrong_every`-th token wrong."""

    def __init__(self, context: FakeContext, wrong_every: int) -> None:
        self.context = context
        self.wrong_every = wrong_every
        self.n_drafted = 0
        self.accepted: list[int] = []

    def draft(self, tokens: list[int], n_max: int) -> DraftResult:  # type: ignore[override]
        sequence = list(tokens)
        for _ in range(n_max):
            token = argmax(self.context.logits_after(sequence))
            self.n_drafted += 1
            sequence.append(token if self.n_drafted % self.wrong_every else (token + 1) % 7)
        return DraftResult(sequence[len(tokens) :])

    def accept(self, n: int) -> None:
        self.accepted.append(n)


def loop(
    context: FakeContext, drafter: Drafter | None = None, n_draft_max: int = 0, **options: object
) -> DecodeLoop:
    sampler = options.pop("sampler", None) or Sampler(SamplingParams())
    return DecodeLoop(cast(Context, context), sampler, drafter, n_draft_max=n_draft_max, **options)  # type: ignore[arg-type]


def plain(n_predict: int, **sizes: int) -> Generation:
    return loop(FakeContext(**sizes)).run(PROMPT, n_predict)


SIZES = {"seed": 11, "n_vocab": 97}  # long texts: the end token is rare


def test_plain_decoding_is_the_greedy_continuation() -> None:
    context = FakeContext(**SIZES)
    expected = list(PROMPT)
    for _ in range(10):
        expected.append(argmax(context.logits_after(expected)))
    result = loop(context).run(PROMPT, 10)
    assert result.token_ids == expected[3:]
    assert result.stop_reason == "length"
    assert result.metrics.n_prompt == 3
    assert result.metrics.totals.n_steps == 9  # the prompt gives the first token


@pytest.mark.parametrize("wrong_every", [1, 2, 3, 1000])
@pytest.mark.parametrize("n_draft_max", [1, 4])
def test_drafts_never_change_the_text(wrong_every: int, n_draft_max: int) -> None:
    context = FakeContext(**SIZES)
    drafter = ScriptedDrafter(context, wrong_every)
    result = loop(context, drafter, n_draft_max).run(PROMPT, 20)
    assert result.token_ids == plain(20, **SIZES).token_ids
    assert context.cache == [*PROMPT, *result.token_ids][:-1]
    assert result.metrics.totals.n_accepted == sum(drafter.accepted)
    if wrong_every == 1:
        assert result.metrics.totals.n_accepted == 0
    if wrong_every == 1000:
        assert result.metrics.totals.acceptance_rate == 1.0
        assert result.metrics.totals.n_steps < 20


@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(0, 8), st.sampled_from(["model", "ngram"]))
def test_any_seed_length_and_drafter(seed: int, n_predict: int, n_draft_max: int, kind: str) -> None:
    """With the end token now and then, and a draft model that is right at times."""
    sizes = {"seed": seed, "n_vocab": 9, "n_order": 1}
    context, draft_context = FakeContext(**sizes), FakeContext(**sizes | {"n_order": 2})
    drafter: Drafter = NgramDrafter(2, 1)
    if kind == "model":
        drafter = ModelDrafter(cast(Context, draft_context), Sampler(SamplingParams()))
    result = loop(context, drafter, n_draft_max).run(PROMPT, n_predict)
    expected = plain(n_predict, **sizes)
    assert result.token_ids == expected.token_ids
    assert result.stop_reason == expected.stop_reason
    assert max(context.widths[1:], default=1) <= 1 + n_draft_max
    sequence = [*PROMPT, *result.token_ids]
    assert draft_context.cache == sequence[: len(draft_context.cache)]


def test_sampled_text_ends_and_repeats_with_its_seed() -> None:
    def run(seed: int) -> list[int]:
        context = FakeContext(**SIZES)
        sampler = Sampler(SamplingParams(temp=1.0, seed=seed))
        return loop(context, ScriptedDrafter(context, 3), 4, sampler=sampler).run(PROMPT, 12).token_ids

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert len(run(1)) <= 12


# ---- stops ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_predict", [0, 1, 2, 7])
def test_length_is_exact(n_predict: int) -> None:
    context = FakeContext(**SIZES)
    result = loop(context, ScriptedDrafter(context, 1000), 4).run(PROMPT, n_predict)
    assert len(result.token_ids) == n_predict
    assert result.stop_reason == "length"


def test_stops_at_the_end_token_without_emitting_it() -> None:
    result = plain(-1, seed=0, n_vocab=5, n_ctx=1000)
    assert result.stop_reason == "eog"
    assert 0 not in result.token_ids


@pytest.mark.parametrize("n_draft_max", [0, 4])
def test_context_full(n_draft_max: int) -> None:
    """10 tokens fit: 3 of the prompt and 7 more; the 8th is computed from them but has no place itself."""
    context = FakeContext(n_ctx=10, **SIZES)
    result = loop(context, ScriptedDrafter(context, 1000), n_draft_max).run(PROMPT)
    assert result.stop_reason == "context"
    assert len(result.token_ids) == 8
    assert result.token_ids == plain(8, **SIZES).token_ids


@pytest.mark.parametrize("prompt", [[], [1] * 10, [1] * 50])
def test_prompts_that_cannot_be_processed(prompt: list[int]) -> None:
    with pytest.raises(PromptError) as error:
        check_prompt(prompt, 10)
    assert error.value.exit_code == 2
    assert str(len(prompt)) in str(error.value) or "empty" in str(error.value)


def test_long_prompt_is_processed_in_pieces() -> None:
    context = FakeContext(**SIZES)
    loop(context).run([1] * 20, 1)
    assert context.widths == [8, 8, 4]


# ---- interrupts -----------------------------------------------------------------------------------


def test_interrupt_between_steps_keeps_the_figures() -> None:
    interrupt = Interrupt()

    def stop_after_five(token: int) -> None:
        seen.append(token)
        interrupt.is_set = len(seen) >= 5

    seen: list[int] = []
    result = loop(FakeContext(**SIZES), on_token=stop_after_five, interrupt=interrupt).run(PROMPT, 100)
    assert result.stop_reason == "interrupted"
    assert result.token_ids == seen
    assert result.metrics.n_tokens == 5
    assert result.metrics.tps is not None


def test_interrupt_before_the_prompt() -> None:
    interrupt = Interrupt()
    interrupt.is_set = True
    result = loop(FakeContext(), interrupt=interrupt).run(PROMPT)
    assert result.stop_reason == "interrupted"
    assert result.token_ids == []


@pytest.mark.usefixtures("hears_ctrl_c")
def test_second_ctrl_c_is_immediate() -> None:
    with Interrupt.watch() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ---- hook -----------------------------------------------------------------------------------------


class RecordingHook:
    """Notes its calls; limits drafts to `limit`."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.steps: list[StepRecord] = []
        self.n_prompts = 0
        self.upcoming: list[list[int]] = []

    def n_draft_limit(self) -> int | None:
        return self.limit

    def after_prompt(self) -> None:
        self.n_prompts += 1

    def after_step(self, record: StepRecord) -> None:
        assert record.step == len(self.steps)
        self.steps.append(record)

    def look_ahead(self, tokens: Sequence[int]) -> None:
        self.upcoming.append([*tokens])


@pytest.mark.parametrize(("limit", "longest"), [(None, 4), (9, 4), (2, 2), (0, 0)])
def test_hook_sees_every_step_and_limits_drafts(limit: int | None, longest: int) -> None:
    context, hook = FakeContext(**SIZES), RecordingHook(limit)
    result = loop(context, ScriptedDrafter(context, 1000), 4, hook=hook).run(PROMPT, 20)
    assert hook.n_prompts == 1
    assert hook.steps == result.metrics.steps
    assert max(step.n_draft for step in hook.steps) == longest
    assert all(step.n_tokens == 1 + step.n_draft for step in hook.steps)


class WatchedContext(FakeContext):
    """Keeps every batch, beside what the hook was told last before it."""

    def __init__(self, hook: RecordingHook, **sizes: int) -> None:
        super().__init__(**sizes)
        self.hook = hook
        self.batches: list[tuple[list[int], list[int] | None]] = []

    def decode(self, tokens: Sequence[int], n_outputs: int = 1) -> np.ndarray:
        self.batches.append(([*tokens], self.hook.upcoming[-1] if self.hook.upcoming else None))
        return super().decode(tokens, n_outputs)


@pytest.mark.parametrize("n_draft", [0, 3])
def test_hook_hears_the_tokens_of_every_step_before_it_runs(n_draft: int) -> None:
    hook = RecordingHook(None)
    context = WatchedContext(hook, **SIZES)
    loop(context, ScriptedDrafter(context, 1000), n_draft, hook=hook).run(PROMPT, 12)
    steps = [(batch, told) for batch, told in context.batches if told is not None]
    assert len(steps) == len(hook.steps) > 2
    assert all(batch == told for batch, told in steps)
    n_told = sum(1 + (step.n_draft > 0) for step in hook.steps)  # the sampled token, and with its drafts
    assert n_told <= len(hook.upcoming) <= n_told + 1  # and the last one, if the answer might have gone on


def test_no_drafter_drafts_nothing() -> None:
    result = loop(FakeContext(**SIZES), NoDrafter(), 4).run(PROMPT, 5)
    assert result.metrics.totals.n_draft == 0
    assert result.metrics.totals.acceptance_rate is None
