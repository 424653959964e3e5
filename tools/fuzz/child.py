"""One case, carried out in this process: reads {"case", "files"} from stdin, writes a JSON object per line.

{"at": i} before each operation, which tells where a crash came; at the end {"counts": ...} and, where the
sides differ, {"mismatch": text}.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tools.fuzz.contexts import loaded, new_context
from tools.fuzz.pair import Mismatch, Pair
from tools.fuzz.plan import N_SEQ, WITHOUT_KERNELS, Json
from tools.system_faults import VARIABLE, SystemFaults


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def run(case: Json, files: dict[str, str]) -> Json:
    """Counts, and what differed."""
    has_tier = case["mode"] != "slots"
    with ExitStack() as stack:
        split, stock = (
            stack.enter_context(
                new_context(
                    stack.enter_context(loaded(files, is_on_disk=is_on_disk)),
                    n_seq=N_SEQ, settings=case["context"],
                )
            )
            for is_on_disk in (has_tier, has_tier and case["types"] in WITHOUT_KERNELS)
        )  # fmt: skip
        pair = Pair(split, stock, case, SystemFaults(Path(os.environ[VARIABLE])), files["model"])
        stack.callback(pair.close)
        try:
            for i, operation in enumerate(case["operations"]):
                say(at=i)
                pair.do(operation)
        except Mismatch as error:
            return {"counts": pair.counts, "mismatch": str(error)}
        say(at=len(case["operations"]))
        pair.do_free({})
    return {"counts": pair.counts}


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    say(**run(asked["case"], asked["files"]))
