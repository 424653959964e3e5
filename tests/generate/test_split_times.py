"""Times of the experts per step: what a prompt took is none of a step's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np

from pyspac.engine.engine import Engine
from pyspac.generate.split import Split

TIMES = np.dtype([("host_us", "i8"), ("device_us", "i8")])


def test_a_prompt_is_no_step() -> None:
    """Two layers; a second prompt, as in a chat, begins anew."""
    stats = np.zeros(2, dtype=TIMES)
    split = Split.__new__(Split)
    split.engine = cast(
        "Engine",
        SimpleNamespace(board=SimpleNamespace(layer_stats=stats), tier=lambda: SimpleNamespace(read_bytes=0)),
    )
    split.scheduler = None
    split.read_ahead = None
    split._prompt_us = {}
    for _ in range(2):
        stats["host_us"] += 1000
        stats["device_us"] += 100
        split.after_prompt()
        assert split.steps_us("host_us") == split.steps_us("device_us") == 0
        stats["host_us"] += [3, 4]
        assert split.steps_us("host_us") == 7
        assert split.steps_us("device_us") == 0
