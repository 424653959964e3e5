"""What reports say of the engine's own predictors."""

from __future__ import annotations

import pytest

from pyspac.engine.ahead import AHEAD_NAMES, DRAFT_GATE, NEXT_LAYERS, ahead_dict, check_not_in_engine
from pyspac.engine.board import BoardGeometry, LocalBoard
from pyspac.engine.params import NEXT_LAYER_MAX, EngineParams
from pyspac.errors import ConfigError, UsageError


def make_board() -> LocalBoard:
    return LocalBoard(BoardGeometry.uniform(n_layer=2, n_expert=4, n_expert_used=2, n_slots=3))


def test_by_hand():
    board = make_board()
    row = board.ahead[1]
    row["n_inputs"], row["n_late"], row["us"] = 10, 2, 40
    row["n_chosen"], row["n_predicted"], row["n_hit"] = 20, 25, 15
    row["n_cut"], row["n_copied"], row["n_used"], row["cutoff_layer"] = 3, 5, 4, 7
    figures = ahead_dict(board, DRAFT_GATE)
    assert (figures["recall"], figures["precision"], figures["us_per_layer"]) == (0.75, 0.6, 5.0)
    assert (figures["n_inputs"], figures["n_inputs_late"], figures["us"]) == (10, 2, 40)
    assert (figures["n_refused"], figures["n_copied"], figures["n_copies_used"]) == (3, 5, 4)
    assert figures["cutoff_layer"] == 7


def test_before_the_first_prediction():
    for name in NEXT_LAYERS:
        figures = ahead_dict(make_board(), name)
        assert figures["name"] == name
        assert figures["recall"] is figures["precision"] is figures["us_per_layer"] is None
        assert "cutoff_layer" not in figures


def test_distances_and_names_are_those_of_the_engine():
    from pyspac._native import lib

    assert max(NEXT_LAYERS.values()) == NEXT_LAYER_MAX == lib.SPAC_NEXT_LAYER_MAX
    assert len(AHEAD_NAMES) == lib.SPAC_N_AHEAD
    assert (lib.SPAC_AHEAD_NEXT_LAYER, lib.SPAC_AHEAD_DRAFT_GATE) == (0, 1)


def test_a_running_engine_cannot_be_given_one():
    check_not_in_engine(["token"])
    with pytest.raises(UsageError, match="PYSPAC_PREDICT=next-layer-2"):
        check_not_in_engine(["token", "next-layer-2"])


@pytest.mark.parametrize("distance", [-1, 4])
def test_a_distance_that_no_router_is_asked_at(distance: int):
    with pytest.raises(ConfigError, match="next_layer"):
        EngineParams(next_layer=distance)
