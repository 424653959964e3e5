"""Of a list of operations that fails, a shorter one that fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable

from tools.fuzz.plan import Json
from tools.fuzz.verdict import Verdict


def shrink(
    case: Json, verdict: Verdict, run: Callable[[Json], Verdict], *, seconds: float
) -> tuple[Json, Verdict]:
    """Leave out halves, quarters, ... and single operations, for as long as there is time."""
    end_s = time.monotonic() + seconds
    operations = case["operations"][: verdict.at + 1]
    n = max(1, len(operations) // 2)
    while True:
        begin, n_before = 0, len(operations)
        while begin < len(operations) and time.monotonic() < end_s:
            fewer = operations[:begin] + operations[begin + n :]
            seen = run({**case, "operations": fewer})
            if seen.kind == verdict.kind:
                operations, verdict = fewer, seen
            else:
                begin += n
        if time.monotonic() >= end_s or (n == 1 and len(operations) == n_before):
            return {**case, "operations": operations}, verdict
        n = max(1, n // 2)
