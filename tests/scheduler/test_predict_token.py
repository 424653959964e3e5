"""The predictor `token`: what is remembered of each token, within which memory, and for how long."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pyspac.scheduler.predict.predictor import NOT_SEEN
from pyspac.scheduler.predict.token import MAX_BYTES, STATE_BYTES, TokenPredictor

N_LAYER, N_EXPERT, N_USED = 3, 10, 2
ROW_BYTES = N_LAYER * N_USED + 12
VOCAB_BYTES = 4 << 20  # of the index by token id, at most


def ids(*tokens: int) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)


def routed(*rows: Sequence[int]) -> NDArray[np.uint16]:
    """Every layer of a token the same."""
    return np.array([[row] * N_LAYER for row in rows], np.uint16)


def small(n_rows: int) -> TokenPredictor:
    return TokenPredictor(N_LAYER, N_EXPERT, N_USED, max_bytes=VOCAB_BYTES + n_rows * ROW_BYTES)


def experts_of(table: TokenPredictor, token: int) -> list[int]:
    """What is expected of a token in layer 0."""
    return np.flatnonzero(table.predict(ids(token))[0]).tolist()


def test_memory_of_a_large_model() -> None:
    """150,000 tokens x 48 layers x 8 of 128 experts fit in 64 MiB, all arrays included."""
    table = TokenPredictor(48, 128, 8)
    assert table.n_rows >= 150_000
    table.learn(ids((1 << 20) - 1), np.zeros((1, 48, 8), np.uint16))  # the index is as long as it ever gets
    assert table.n_bytes <= MAX_BYTES == 64 << 20
    arrays = [value for value in vars(table).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in arrays) <= MAX_BYTES + 4096


@pytest.mark.parametrize(("n_expert", "dtype"), [(254, np.uint8), (255, np.uint16), (512, np.uint16)])
def test_ids_are_as_wide_as_they_have_to_be(n_expert: int, dtype: type) -> None:
    table = TokenPredictor(N_LAYER, n_expert, N_USED)
    table.learn(ids(7), routed([0, n_expert - 1]))
    assert table.state()["experts"].dtype == dtype
    assert experts_of(table, 7) == [0, n_expert - 1]


def test_the_last_time_counts() -> None:
    table = small(8)
    table.learn(ids(5, 6, 5), routed([0, 1], [2, 3], [4, 5]))
    assert experts_of(table, 5) == [4, 5]
    table.learn(ids(5), routed([8, 9]))
    assert experts_of(table, 5) == [8, 9]
    assert experts_of(table, 6) == [2, 3]


def test_unknown_tokens_predict_nothing() -> None:
    table = small(8)
    table.learn(ids(5, -1, 2_000_000), routed([0, 1], [2, 3], [4, 5]))
    assert table.n_known == 1
    assert not table.predict(ids(-1, 4, 6, 5000, 2_000_000, 2**31 - 1)).any()
    assert not table.predict(ids()).any()


def test_a_layer_that_did_not_run_keeps_what_was_known() -> None:
    table = small(8)
    experts = routed([0, 1])
    table.learn(ids(5), experts)
    experts = routed([2, 3])
    experts[:, 1] = NOT_SEEN
    table.learn(ids(5), experts)
    assert [np.flatnonzero(row).tolist() for row in table.predict(ids(5))] == [[2, 3], [0, 1], [2, 3]]
    table.learn(ids(6), experts)
    assert [np.flatnonzero(row).tolist() for row in table.predict(ids(6))] == [[2, 3], [], [2, 3]]
    table.learn(ids(9), np.full((1, N_LAYER, N_USED), NOT_SEEN, np.uint16))
    assert table.n_known == 2


def test_the_row_seen_least_recently_is_replaced() -> None:
    table = small(3)
    for token in (1, 2, 3, 1, 4):
        table.learn(ids(token), routed([token, 0]))
    assert [token for token in range(9) if experts_of(table, token)] == [1, 3, 4]


def test_a_batch_that_fills_the_table_and_goes_on() -> None:
    """Of the rows it takes, those that were never used are not given up again."""
    table = small(5)
    table.learn(ids(3, 4, 5), routed([0, 1], [1, 2], [2, 3]))
    table.learn(ids(0, 1, 2), routed([4, 5], [5, 6], [6, 7]))
    assert [token for token in range(9) if experts_of(table, token)] == [0, 1, 2, 4, 5]
    assert [experts_of(table, token) for token in (0, 1, 2)] == [[4, 5], [5, 6], [6, 7]]


def test_more_tokens_at_once_than_rows() -> None:
    table = small(3)
    table.learn(ids(*range(8)), routed(*([i, 9] for i in range(8))))
    assert [token for token in range(9) if experts_of(table, token)] == [5, 6, 7]


@settings(max_examples=80, deadline=None)
@given(
    n_rows=st.sampled_from([1, 5, 130]),
    batches=st.lists(st.lists(st.integers(-1, 200), min_size=1, max_size=140), max_size=12),
)
def test_properties(n_rows: int, batches: list[list[int]]) -> None:
    table, rng = small(n_rows), np.random.default_rng(1)
    last: dict[int, NDArray[np.uint16]] = {}  # the most recent at the end
    for batch in batches:
        experts = np.array([[rng.permutation(N_EXPERT)[:N_USED] for _ in range(N_LAYER)] for _ in batch])
        table.learn(ids(*batch), experts.astype(np.uint16))
        for token, rows in zip(batch, experts, strict=True):
            if token >= 0:
                last.pop(token, None)
                last[token] = rows
    known = [token for token in range(201) if table.predict(ids(token)).any()]
    assert len(known) == table.n_known <= n_rows
    assert table.n_known >= min(len(last), n_rows - n_rows // 64)
    assert known == sorted(list(last)[len(last) - len(known) :])
    for token in known:
        said = table.predict(ids(token))
        assert np.all(said.sum(axis=1) == N_USED)
        assert [set(np.flatnonzero(row)) for row in said] == [set(row) for row in last[token].tolist()]
    several = table.predict(ids(*known, 999))
    assert np.all(several.sum(axis=1) == N_USED * len(known))
    other = small(n_rows)
    assert other.restore(table.state())
    for token in range(201):
        assert np.array_equal(other.predict(ids(token)), table.predict(ids(token)))


def test_state_goes_into_a_table_of_the_same_kind_alone() -> None:
    table = small(8)
    table.learn(ids(5), routed([0, 1]))
    state = table.state()
    assert not TokenPredictor(N_LAYER + 1, N_EXPERT, N_USED).restore(state)
    assert not TokenPredictor(N_LAYER, 300, N_USED).restore(state)
    assert not small(8).restore({})
    assert not small(8).restore({**state, "tokens": state["tokens"].astype(np.int64)})
    other = small(8)
    assert other.restore(state)
    assert other.score.n_tokens == 0


def test_what_is_saved_is_bounded_and_the_newest() -> None:
    table = TokenPredictor(48, 128, 8)
    n = STATE_BYTES // (48 * 8) + 1000
    for first in range(0, n, 4096):
        tokens = np.arange(first, min(n, first + 4096), dtype=np.int32)
        table.learn(tokens, np.ones((len(tokens), 48, 8), np.uint16))
    state = table.state()
    assert state["experts"].nbytes <= STATE_BYTES
    assert state["tokens"][-1] == n - 1
    assert state["tokens"][0] == n - len(state["tokens"])


def test_score_by_hand() -> None:
    table = small(8)
    table.learn(ids(5), routed([0, 1]))
    assert (table.score.recall, table.score.precision, table.score.known) == (None, None, 0.0)
    table.learn(ids(5, 6), routed([1, 2], [0, 1]))  # of 5 one of two was right, of 6 nothing was known
    assert (table.score.recall, table.score.precision) == (0.5, 0.5)
    assert (table.score.n_tokens, table.score.n_known) == (3, 1)
    experts = routed([1, 2])
    experts[:, 0] = NOT_SEEN  # did not run: neither right nor wrong
    experts[:, 1, 1] = NOT_SEEN  # a layer with one expert per token
    table.learn(ids(5), experts)
    assert table.score.n_used == N_LAYER * 2 + 3
    assert table.score.n_predicted == N_LAYER * 2 + 4
    assert table.score.n_right == N_LAYER + 3
