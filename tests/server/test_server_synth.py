"""Controllers through llama-server: acceptance set with --spec-synth-rates, limits through the board.

Acceptance is the server's own chance, alike for equal seeds; the times in its records are replaced by given
ones, so that what a controller should do does not depend on the machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from serving import llama_server, post

from pyspac.engine.board import Board
from pyspac.scheduler.activations import ActivationDrain
from pyspac.server.board_speculation import BoardSpeculation

pytestmark = [pytest.mark.model, pytest.mark.slow]

N_DRAFT_MAX = 8
N_PREDICT = 400
COSTS = [1.0, 1.6, 2.1, 2.6, 3.0, 3.3, 3.6, 3.9, 4.2]  # of a step that drafts 0, 1, ... tokens
RATES = {  # of position 1, 2, ... being accepted, all before it included
    "good": [0.97**i for i in range(1, 9)],
    "bad": [0.15**i for i in range(1, 9)],
    "falling": [0.95, 0.9, 0.3, 0.1, 0.05, 0.02, 0.01, 0.01],
}


class Follower(threading.Thread):
    """Steps the controller while the server generates; keeps the draft lengths in their order.

    To the controller every step takes the time that COSTS says.
    """

    def __init__(self, board: Board, controller: str) -> None:
        super().__init__(daemon=True)
        self.board = board
        self.drain = ActivationDrain(board)
        self.speculation = BoardSpeculation(board, controller, n_draft_max=N_DRAFT_MAX)
        self.n_drafts: list[int] = []
        self.is_done = threading.Event()
        self._n_seen = int(board.n_records[0])

    def run(self) -> None:
        while not self.is_done.is_set():
            if int(self.board.n_records[0]) == self._n_seen:
                time.sleep(0.0002)
                continue
            activity = self.drain.drain()
            self._n_seen += len(activity.steps) + activity.totals.n_lost
            for step in activity.steps:
                step.draft_us = step.process_us = step.sample_us = 0
                step.verify_us = int(10_000 * COSTS[min(step.n_draft, N_DRAFT_MAX)])
                self.n_drafts.append(step.n_draft)
            self.speculation.observe(activity)


def generate(bin_dir: Path, folder: Path, rates: Sequence[float], controller: str) -> list[int]:
    """Draft lengths, step by step, of one request."""
    name = f"pyspac-test-synth-{time.monotonic_ns()}"
    flags = [
        "--spec-draft-n-max",
        str(N_DRAFT_MAX),
        "--spec-synth-rates",
        ",".join(f"{r:.4f}" for r in rates),
    ]
    flags += ["--spac-cache", "50%", "--spac-board", name, "-np", "1", "-t", "1", "-c", "1024"]
    with llama_server(bin_dir, folder, *flags) as port:
        board = Board.open(name)
        follower = Follower(board, controller)
        follower.start()
        body = {
            "prompt": "import os\n",
            "n_predict": N_PREDICT,
            "seed": 1,
            "ignore_eos": True,
            "temperature": 0,
        }
        post(port, "/completion", body)
        follower.is_done.set()
        follower.join(10)
        board.close()
        return follower.n_drafts


@pytest.mark.parametrize("controller", ["forecast", "cascade"])
def test_acceptance_curves(controller: str, bin_dir: Path, tmp_path: Path) -> None:
    """Break-even by COSTS: good drafts pay at all lengths, bad ones at none, falling ones up to two."""
    means = {}
    for kind, rates in RATES.items():
        n_drafts = generate(bin_dir, tmp_path, rates, controller)
        assert len(n_drafts) > 30
        assert max(n_drafts) <= N_DRAFT_MAX
        means[kind] = float(np.mean(n_drafts[30:]))
    assert means["bad"] < 0.5
    assert 0.8 < means["falling"] < 3.2
    assert means["good"] > means["falling"] + 1
