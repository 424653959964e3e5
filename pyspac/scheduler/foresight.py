"""What is known of the tokens that come next: predictions in, the chance of each expert's use out.

Between steps a driver says which tokens the next forward computes (`see`); the predictor names their experts,
and how often it was right so far is how far it is believed. What they really used is read from the engine's
routing log, which teaches the predictor and judges it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import perf_counter_ns
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pyspac.engine.ahead import share
from pyspac.engine.board import Board
from pyspac.scheduler.occupancy import Occupancy
from pyspac.scheduler.predict.predictor import Predictor
from pyspac.scheduler.predict.token import TokenPredictor
from pyspac.scheduler.prefetch import PrefetchPlan
from pyspac.scheduler.routing_log import RoutingLog

_BELIEVED: Final = 0.5  # precision until it is measured: tables of several models came to about that
_N_BELIEVED: Final = 2000  # predictions for which that counts
# of a copy that was planned for a prediction
_NONE, _ASKED, _ARRIVED = 0, 1, 2


@dataclass(slots=True)
class ForesightStats:
    """What predictions did, over all steps so far."""

    n_looks: int = 0  # times the next tokens were told
    us: float = 0.0  # spent on predicting and learning
    n_refused: int = 0  # absent predicted experts that were not copied, summed over plans
    n_late: int = 0  # of these, whose copy would have come after their layer; the others' would not have paid
    n_planned: int = 0  # copies that only a prediction asked for
    n_copied: int = 0  # of these, done
    n_copies_used: int = 0  # of these, used in the step in which they came or later, before they left
    n_rows_lost: int = 0  # of the routing log, overwritten before they were read


class Foresight:
    """One predictor at work on a board."""

    def __init__(self, board: Board, predictor: Predictor) -> None:
        """Expect nothing yet."""
        self.predictor = predictor
        self.stats = ForesightStats()
        self.chance: NDArray[np.float32] | None = None  # [n_layer, n_expert] of use in the next forward
        self._log = RoutingLog(board)
        self._fate = np.full((board.n_layer, board.n_expert), _NONE, np.uint8)

    def learn(self, counts: NDArray[np.uint32], slots: Occupancy) -> None:
        """Take in the last step: its tokens, what it used [n_layer, n_expert], and what is there now."""
        start = perf_counter_ns()
        self.chance = None
        tokens, experts = self._log.read()
        if len(tokens):
            self.predictor.learn(tokens, experts)
        self.stats.n_rows_lost = self._log.n_lost
        self._follow_copies(counts, slots)
        self.stats.us += (perf_counter_ns() - start) / 1e3

    def see(self, tokens: Sequence[int]) -> None:
        """Predict for the next forward's tokens: their ids, as far as they are known."""
        start = perf_counter_ns()
        expected = self.predictor.predict(np.asarray(tokens, np.int32))
        # of several tokens that name an expert, one suffices
        n_most = int(expected.max())
        chance = 1.0 - (1.0 - self.precision()) ** np.arange(n_most + 1, dtype=np.float32)
        self.chance = chance[expected.astype(np.intp)] if n_most > 0 else None
        self.stats.n_looks += 1
        self.stats.us += (perf_counter_ns() - start) / 1e3

    def precision(self) -> float:
        """Return the chance that a predicted expert is used: as measured, from a stated one on."""
        score = self.predictor.score
        return (score.n_right + _BELIEVED * _N_BELIEVED) / (score.n_predicted + _N_BELIEVED)

    def note_plan(self, plan: PrefetchPlan) -> None:
        """Remember which copies were planned only for a prediction."""
        self.stats.n_refused += plan.n_refused + plan.n_late
        self.stats.n_late += plan.n_late
        fate = self._fate.reshape(-1)
        self.stats.n_planned += int(np.count_nonzero(fate[plan.ahead] != _ASKED))  # else asked for again
        fate[plan.ahead] = _ASKED

    def _follow_copies(self, counts: NDArray[np.uint32], slots: Occupancy) -> None:
        """Count copies that came, and those that were used before they left."""
        marked = np.flatnonzero(self._fate)
        fate = self._fate.reshape(-1)[marked]
        is_resident = slots.is_resident.reshape(-1)[marked]
        is_used = is_resident & (counts.reshape(-1)[marked] > 0)
        self.stats.n_copied += int(np.count_nonzero(is_resident & (fate == _ASKED)))
        self.stats.n_copies_used += int(np.count_nonzero(is_used))
        is_waiting = slots.is_held.reshape(-1)[marked] & ~is_resident
        fate[is_resident] = _ARRIVED
        fate[is_used | ~(is_resident | is_waiting)] = _NONE
        self._fate.reshape(-1)[marked] = fate

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for reports; shares are None where there is nothing to divide by."""
        score, stats = self.predictor.score, self.stats
        return {
            "name": self.predictor.name,
            "recall": score.recall,
            "precision": score.precision,
            "known": score.known,
            "n_tokens": score.n_tokens,
            "us_per_step": share(stats.us, stats.n_looks),
            "n_bytes": self.predictor.n_bytes,
            **asdict(stats),
        }


def make_foresight(board: Board, names: Sequence[str]) -> Foresight | None:
    """Return the foresight that a configuration names; None: there is no look-ahead here."""
    if TokenPredictor.name not in names:
        return None
    return Foresight(board, TokenPredictor(board.n_layer, board.n_expert, board.n_expert_used))
