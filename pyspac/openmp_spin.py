"""How long llama.cpp's threads spin where they wait for each other: shorter than a time slice.

They wait at every node of the graph, in OpenMP's barriers. GNU's spins for 300,000 rounds, some 10 ms, before
it sleeps: a thread that has lost its core to another program is waited for by one that keeps its own busy.
With a fifteenth of it a model is as fast on a machine of its own, and does not stand still beside other
programs (docs/host-experts.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

SPIN_COUNT: Final = "GOMP_SPINCOUNT"
CHOSEN_BY: Final = (SPIN_COUNT, "OMP_WAIT_POLICY")  # the user has chosen if one of them is set
# 0.5 to 1 ms. With 5,000 a model is slower on a machine of its own, with 100,000 it may stand still on others
N_SPINS: Final = "20000"


def spin_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What to set before OpenMP is loaded; nothing, if `environ` has chosen."""
    return {} if any(name in environ for name in CHOSEN_BY) else {SPIN_COUNT: N_SPINS}
