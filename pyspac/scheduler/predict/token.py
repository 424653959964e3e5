"""A table: token id -> the experts that this token used last time, layer by layer.

A router sees little more than the token in the first layers, and much of it still in the last ones. The table
needs no gate and no hidden state, so it serves every drafter: a drafted id is known before it is verified.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pyspac.scheduler.config import TOKEN
from pyspac.scheduler.predict.predictor import NOT_SEEN, Expected, Routed, Score, Tokens

MAX_BYTES: Final = 64 << 20  # of all arrays: enough for 150,000 tokens x 48 layers x 8 of up to 255 experts
STATE_BYTES: Final = 8 << 20  # of the rows that are saved, those seen last
_MAX_VOCAB: Final = 1 << 20  # ids from here on are not remembered
_MIN_VOCAB: Final = 1 << 10
_UNKNOWN: Final = -1  # in `_row_of`
_NEVER_OLDEST: Final = np.iinfo(np.int64).max  # in `_seen`: the row holds nothing, or was just taken
_NOBODY: Final = NOT_SEEN - 1  # no expert has it, and no table says it
_FREED_SHARE: Final = 64  # a full table gives up one row in so many at once: finding the oldest reads all


class TokenPredictor:
    """Learns in O(n_layer * n_expert_used) per token; its memory is taken page by page as tokens come.

    A full table gives up the rows that were seen least recently.
    """

    name = TOKEN

    def __init__(
        self, n_layer: int, n_expert: int, n_expert_used: int, *, max_bytes: int = MAX_BYTES
    ) -> None:
        """Know nothing. AssertionError where `max_bytes` has no room for one row."""
        self.score = Score()
        self.n_expert = n_expert
        dtype, none = (np.uint8, 0xFF) if n_expert < 0xFF else (np.uint16, NOT_SEEN)
        self._none = none  # in the table: nothing known
        row_bytes = n_layer * n_expert_used * np.dtype(dtype).itemsize + 8 + 4
        self.n_rows = min(_MAX_VOCAB, (max_bytes - 4 * _MAX_VOCAB) // row_bytes)
        assert self.n_rows > 0, f"{max_bytes} bytes hold no row of {row_bytes}"
        self._experts = np.empty((self.n_rows, n_layer, n_expert_used), dtype)
        self._seen = np.zeros(self.n_rows, np.int64)  # when each row was seen last, in tokens
        self._token_of = np.zeros(self.n_rows, np.int32)  # [n_rows]
        self._row_of = np.full(_MIN_VOCAB, _UNKNOWN, np.int32)  # by token id; grows up to _MAX_VOCAB
        self._free = np.zeros(0, np.intp)  # rows that were given up
        self._n_touched = 0  # rows from here on were never used
        self._now = 0  # tokens learned
        self._cells = (np.arange(n_layer) * (n_expert + 1))[:, None]  # [n_layer, 1] see _count

    @property
    def n_bytes(self) -> int:
        """Return what all arrays take when they are full: at most `max_bytes`."""
        return self._experts.nbytes + self._seen.nbytes + self._token_of.nbytes + self._row_of.nbytes

    @property
    def n_known(self) -> int:
        """Return the number of tokens in the table."""
        return self._n_touched - len(self._free)

    def predict(self, tokens: Tokens) -> Expected:
        """Return what each token used last time, added up: n_expert_used per known token and layer."""
        rows = self._rows(tokens)
        return self._count(self._experts[rows[rows != _UNKNOWN]])

    def learn(self, tokens: Tokens, experts: Routed) -> None:
        """See Predictor: of a token that comes twice the last time counts."""
        has_run = experts[:, :, 0] < self.n_expert  # [n, n_layer]
        is_used = (tokens >= 0) & (tokens < _MAX_VOCAB) & has_run.any(axis=1)
        if not is_used.all():
            tokens, experts, has_run = tokens[is_used], experts[is_used], has_run[is_used]
        if len(tokens) == 0:
            return
        self._judge(tokens, experts, has_run)
        latest = {token: i for i, token in enumerate(tokens.tolist())}
        if len(latest) > self.n_rows:
            latest = dict(sorted(latest.items(), key=lambda item: item[1])[-self.n_rows :])
        last = np.array([*latest.values()])
        ids = tokens[last]
        rows = self._rows_to_write(ids, self._now + 1 + last)
        self._put(rows, experts[last], has_run[last])
        self._now += len(tokens)

    def _judge(self, tokens: Tokens, experts: Routed, has_run: NDArray[np.bool_]) -> None:
        """Compare what would have been predicted for each token with what it used."""
        rows = self._rows(tokens)
        is_known = rows != _UNKNOWN
        self.score.n_tokens += len(tokens)
        if not is_known.any():
            return
        said = self._experts[rows[is_known]]
        said[~has_run[is_known]] = self._none
        used = np.where(experts[is_known] < self.n_expert, experts[is_known], _NOBODY)
        self.score.n_known += len(said)
        self.score.n_used += int(np.count_nonzero(used != _NOBODY))
        self.score.n_predicted += int(np.count_nonzero(said != self._none))
        self.score.n_right += int(np.count_nonzero(said[:, :, :, None] == used[:, :, None, :]))

    def _rows_to_write(self, ids: Tokens, seen: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the rows of distinct tokens, new ones where they have none; `seen` [n]: when."""
        self._grow(int(ids.max()))
        rows = self._row_of[ids]
        is_new = rows == _UNKNOWN
        if is_new.any():
            self._seen[rows[~is_new]] = seen[~is_new]  # first: what is seen now is not given up
            rows[is_new] = new = self._take_rows(int(np.count_nonzero(is_new)), self.n_rows - len(ids))
            self._experts[new] = self._none
            self._token_of[new] = ids[is_new]
            self._row_of[ids[is_new]] = new
        self._seen[rows] = seen
        return rows

    def _put(self, rows: NDArray[np.int32], experts: Routed, has_run: NDArray[np.bool_]) -> None:
        """Write what tokens used; in a layer that did not run, what was known stays."""
        if has_run.all():
            self._experts[rows] = np.minimum(experts, self._none)
        else:
            row, layer = np.nonzero(has_run)
            self._experts[rows[row], layer] = np.minimum(experts[row, layer], self._none)

    def _rows(self, tokens: Tokens) -> NDArray[np.int32]:
        """Return [n] the row of each token, or _UNKNOWN."""
        is_in = (tokens >= 0) & (tokens < len(self._row_of))
        return np.where(is_in, self._row_of[np.where(is_in, tokens, 0)], np.int32(_UNKNOWN))

    def _count(self, rows: NDArray[Any]) -> Expected:
        """Return [n_layer, n_expert] how often each expert is in rows [n, n_layer, n_expert_used].

        The cell behind a layer's experts takes what belongs to none.
        """
        cells = np.minimum(rows, self.n_expert) + self._cells
        n_layer, width = len(self._cells), self.n_expert + 1
        counts = np.bincount(cells.ravel(), minlength=n_layer * width).reshape(n_layer, width)
        return counts[:, : self.n_expert].astype(np.float32)

    def _grow(self, token: int) -> None:
        """Make room for an id in `_row_of`."""
        n_before = len(self._row_of)
        if token < n_before:
            return
        grown = np.full(1 << token.bit_length(), _UNKNOWN, np.int32)
        grown[:n_before] = self._row_of
        self._row_of = grown

    def _take_rows(self, n: int, n_others: int) -> NDArray[np.intp]:
        """Return n rows that hold nothing; n_others: rows besides those that are being learned."""
        n_new = min(n, self.n_rows - self._n_touched)
        new = np.arange(self._n_touched, self._n_touched + n_new)
        self._n_touched += n_new
        self._seen[new] = _NEVER_OLDEST  # taken, and so not to be given up
        n_missing = n - n_new - len(self._free)
        if n_missing > 0:  # so every row was used
            self._give_up(max(n_missing, min(self.n_rows // _FREED_SHARE, n_others)))
        taken, self._free = self._free[: n - n_new], self._free[n - n_new :]
        return np.concatenate([new, taken])

    def _give_up(self, n: int) -> None:
        """Empty the n rows that were seen least recently."""
        oldest = np.argpartition(self._seen, n - 1)[:n]
        self._row_of[self._token_of[oldest]] = _UNKNOWN
        self._seen[oldest] = _NEVER_OLDEST
        self._free = np.concatenate([self._free, oldest])

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the tokens seen last and their rows, the oldest first: at most STATE_BYTES."""
        rows = self._row_of[self._row_of != _UNKNOWN]
        rows = rows[np.argsort(self._seen[rows])][-self._n_saved :]
        return {"tokens": self._token_of[rows], "experts": self._experts[rows]}

    @property
    def _n_saved(self) -> int:
        """Rows that are saved at most."""
        return max(1, STATE_BYTES // int(self._experts[0].nbytes))

    def restore(self, state: dict[str, NDArray[Any]]) -> bool:
        """See Predictor."""
        if not self._fits(state):
            return False
        tokens, experts = state["tokens"], state["experts"]
        self.learn(tokens, np.where(experts == self._none, NOT_SEEN, experts).astype(np.uint16))
        self.score = Score()  # what was remembered was not predicted
        return True

    def merged(self, state: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """See Predictor: rows of tokens that are not known here come in as the oldest."""
        own = self.state()
        if not self._fits(state):
            return own
        is_new = ~np.isin(state["tokens"], own["tokens"])
        return {
            name: np.concatenate([state[name][is_new], own[name]])[-self._n_saved :]
            for name in ("tokens", "experts")
        }

    def _fits(self, state: dict[str, NDArray[Any]]) -> bool:
        """Whether it is of such a table's `state()`, and of this geometry."""
        tokens, experts = state.get("tokens"), state.get("experts")
        if tokens is None or experts is None or tokens.dtype != np.int32 or tokens.ndim != 1:
            return False
        shape = (len(tokens), *self._experts.shape[1:])
        return experts.dtype == self._experts.dtype and experts.shape == shape
