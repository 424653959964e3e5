"""One phase in a process of its own: a crash there costs that phase only, and rows that were written stay.

Called by run.py. Each line of the result file is a JSON object: rows first, then one with the key "result".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from settings import REPOSITORY, Settings

sys.path.insert(0, str(REPOSITORY))


def phase_result(phase: str, s: Settings, left_s: float, model: str, emit: Any) -> dict[str, Any]:
    """Imports are late: each needs the build or packages of its phase only."""
    if phase == "tests":
        import checks

        return checks.run(s, left_s)
    if phase == "model":
        import synthetic

        return synthetic.run(s, left_s)
    if phase == "measure":
        import bandwidth

        return bandwidth.run(s)
    if phase == "timeline":
        import timeline

        return timeline.run(s, model)
    assert phase == "compare", phase
    import compare

    return compare.run(s, left_s, model, emit)


def main() -> int:
    phase, settings, left_s, model, result_file = sys.argv[1:]
    s = Settings.from_json(settings)
    with Path(result_file).open("w", encoding="utf-8") as file:

        def write(value: dict[str, Any]) -> None:
            file.write(json.dumps(value) + "\n")
            file.flush()

        from pyspac.errors import PyspacError

        try:
            result = phase_result(phase, s, float(left_s), model, lambda row: write({"row": phase, **row}))
        except (PyspacError, ValueError, RuntimeError) as error:
            write({"result": f"FAILED: {error}", "failed": [phase]})
            return 1
        for row in result.pop("rows", []):
            write(row)
        write(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
