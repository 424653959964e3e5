"""pyspac.engine.threads: the threads that compute without a device, read off a board."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyspac.engine.board import BoardGeometry, LocalBoard
from pyspac.engine.engine import Engine
from pyspac.engine.params import EngineParams
from pyspac.engine.threads import threads_dict, threads_text
from pyspac.forward.context import Context, ContextParams
from pyspac.forward.model import Model, ModelParams

DEMO = Path(__file__).resolve().parents[2] / "pyspac" / "models" / "demo-moe.gguf"


@pytest.mark.parametrize(("device", "cache", "n"), [("none", "0", 2), ("none", "0", 1), ("cpu", "25%", None)])
def test_after_a_forward(device: str, cache: str, n: int | None) -> None:
    params = ModelParams(path=DEMO, use_extra_bufts=False)
    with Model(params) as model, Context(model, ContextParams(n_ctx=64, n_threads=n or 2)) as ctx:
        assert ctx.ptr is not None
        engine = Engine.attach(ctx.ptr, EngineParams(device=device, cache=cache))
        try:
            assert threads_dict(engine.board) is None
            ctx.decode([11, 502], 1)
            found = threads_dict(engine.board)
        finally:
            engine.close()
    if n is None:
        assert found is None
    else:
        assert found is not None
        assert found["n_most"] == n
        assert found["n_threads"] == n
        assert not found["is_crowded"]
        assert 0 <= found["share"] <= 1


def test_what_people_read() -> None:
    board = LocalBoard(BoardGeometry.uniform(n_layer=1, n_expert=2, n_expert_used=1, n_slots=1))
    assert threads_dict(board) is None
    board.threads[0] = (7, 8, True, 0.5, 3)
    found = threads_dict(board)
    assert found == {"n_threads": 7, "n_most": 8, "is_crowded": True, "share": 0.5, "n_moves": 3}
    assert threads_text(found) == "7 of 8, beside other programs (50% of a core)"
    assert threads_text(found | {"is_crowded": False}) == "7 of 8"
