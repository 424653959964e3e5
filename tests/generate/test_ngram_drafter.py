"""pyspac.generate.ngram_drafter: prompt lookup worked by hand, and against a search through the text."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from pyspac.generate.drafting import DraftResult
from pyspac.generate.ngram_drafter import NgramDrafter
from pyspac.speculation.matches import N_MATCHED_MAX

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=80)


def n_matched(tokens: Sequence[int], start: int) -> int:
    """How many tokens before `start` are those before the end."""
    n = 0
    while n < start and tokens[start - 1 - n] == tokens[len(tokens) - 1 - n]:
        n += 1
    return n


def test_by_hand() -> None:
    """The last two tokens, 1 2, stood at the start, followed by 3 4."""
    assert NgramDrafter(2, 2).draft([1, 2, 3, 4, 9, 1, 2], 2) == DraftResult([3, 4], n_matched=2)


def test_prefers_the_longest_then_the_latest_match() -> None:
    tokens = [1, 2, 3, 5, 2, 3, 6, 1, 2, 3]
    assert NgramDrafter(3, 2).draft(tokens, 1) == DraftResult([5], n_matched=3)  # after 1 2 3
    assert NgramDrafter(2, 2).draft(tokens, 1) == DraftResult([6], n_matched=2)  # after the latest 2 3


def test_does_not_match_itself() -> None:
    assert NgramDrafter(2, 1).draft([1, 2, 3], 4).tokens == []
    assert NgramDrafter(2, 1).draft([1], 4).tokens == []
    assert NgramDrafter().draft([], 4).tokens == []


def test_without_room() -> None:
    assert NgramDrafter(1, 1).draft([1, 1, 1], 0).tokens == []


def test_a_period_goes_on() -> None:
    """What is copied is itself copied from, where the source comes to the end of the text."""
    assert NgramDrafter().draft([5, 1, 2, 3, 1, 2, 3, 1, 2], 7).tokens == [3, 1, 2, 3, 1, 2, 3]
    assert NgramDrafter().draft([0, 0, 0, 0], 3).tokens == [0, 0, 0]


def test_the_last_source_goes_on_while_it_matches_longer() -> None:
    """3 4 5 6 stands twice: behind 1 2, from where the first draft came, and later without them."""
    text = [1, 2, 3, 4, 5, 6, 7, 8, 3, 4, 5, 6, 9, 1, 2, 3]
    drafter = NgramDrafter()
    assert drafter.draft(text, 1) == DraftResult([4], n_matched=3)
    text += [4, 5, 6]
    assert drafter.draft(text, 2) == DraftResult([7, 8], n_matched=6)
    assert NgramDrafter().draft(text, 2) == DraftResult([9, 1], n_matched=4), "nothing to go on with"


def test_long_matches_are_measured_up_to_a_length() -> None:
    text = list(range(50))
    assert NgramDrafter().draft([*text, 99, *text], 1) == DraftResult([99], n_matched=N_MATCHED_MAX)
    assert NgramDrafter().draft([*text, 99, *text[-31:]], 1) == DraftResult([99], n_matched=31)


@given(TEXTS, st.lists(st.integers(1, 7), min_size=1), st.integers(1, 9))
def test_drafts_are_copies_and_matches_are_true(tokens: list[int], strides: list[int], n_max: int) -> None:
    """Asked at any places: the draft is what follows such a match, and no latest match is longer."""
    drafter, end, i = NgramDrafter(3, 1), 1, 0
    while end <= len(tokens):
        known = tokens[:end]
        draft = drafter.draft(known, n_max)
        fresh = NgramDrafter(3, 1).draft(known, n_max)
        assert draft.n_matched >= fresh.n_matched
        assert len(draft.tokens) == (n_max if draft.n_matched else 0)
        copies = {
            tuple((known + draft.tokens)[start : start + n_max])
            for start in range(1, end)
            if min(n_matched(known, start), N_MATCHED_MAX) == draft.n_matched
        }
        assert not draft.n_matched or tuple(draft.tokens) in copies
        end, i = end + strides[i % len(strides)], i + 1


@given(TEXTS, st.integers(0, 79), TEXTS)
def test_another_text_after_a_common_beginning(tokens: list[int], cut: int, after: list[int]) -> None:
    """What was indexed of the part that is gone is not drafted."""
    drafter = NgramDrafter(3, 1)
    drafter.draft(tokens, 2)
    n = drafter.keep(min(cut, len(tokens)))
    other = [*tokens[:n], *after]
    draft = drafter.draft(other, 3)
    assert draft.n_matched >= NgramDrafter(3, 1).draft(other, 3).n_matched
    starts = [s for s in range(1, len(other)) if n_matched(other, s) >= draft.n_matched]
    assert not draft.tokens or any((other + draft.tokens)[s : s + 3] == draft.tokens for s in starts)
