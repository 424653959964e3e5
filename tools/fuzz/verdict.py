"""Carries a case out in a process of its own, and says what came of it: a crash has a seed, too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tools.fuzz.models import write_files
from tools.fuzz.plan import Json
from tools.system_faults import prepare

ROOT: Final = Path(__file__).resolve().parents[2]
SLICE_S: Final = 10.0
N_SLICES: Final = 12  # without an end: it hangs. In slices, as the machine may have paused both of us


@dataclass(slots=True)
class Verdict:
    """What came of a case."""

    kind: str  # "passed", "mismatch", "error", "hang", or a signal's name
    text: str = ""
    at: int = -1  # the operation under way
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def has_passed(self) -> bool:
        return self.kind == "passed"


class Runner:
    """Runs cases; models and the library of faults lie in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        quiet = {"OMP_WAIT_POLICY": "passive", "GGML_NO_BACKTRACE": "1"}
        self.environment = {**os.environ, **prepare(folder), **quiet}

    def run(self, case: Json) -> Verdict:
        asked = {"case": case, "files": write_files(self.folder, case["arch"], case["types"])}
        child = subprocess.Popen(
            [sys.executable, "-m", "tools.fuzz.child"], cwd=ROOT, env=self.environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            said = _wait(child, json.dumps(asked))
        finally:
            if child.poll() is None:
                child.kill()
        if said is None:
            out, _ = child.communicate()
            return Verdict("hang", f"no end within {N_SLICES * SLICE_S:.0f} s", _last_at(_lines(out)))
        out, err = said
        return judge(child.returncode, _lines(out), err)


def _wait(child: subprocess.Popen[str], text: str) -> tuple[str, str] | None:
    """Its stdout and stderr; None: it does not end."""
    for i in range(N_SLICES):
        try:
            return child.communicate(text if i == 0 else None, SLICE_S)
        except subprocess.TimeoutExpired:
            continue
    return None


def _lines(out: str) -> list[Json]:
    """Of a child that may have ended in the middle of one."""
    whole: list[Json] = [json.loads(line) for line in out.splitlines() if line.endswith("}")]
    return whole


def _last_at(lines: list[Json]) -> int:
    return max((line["at"] for line in lines if "at" in line), default=-1)


def judge(code: int, lines: list[Json], err: str) -> Verdict:
    """Of a child's exit code and what it said."""
    last: dict[str, Any] = lines[-1] if lines else {}
    at, tail = _last_at(lines), "\n".join(err.strip().splitlines()[-3:])
    if code < 0:
        return Verdict(signal.Signals(-code).name, tail, at)
    if "mismatch" in last:
        return Verdict("mismatch", last["mismatch"], at, last["counts"])
    if code != 0 or "counts" not in last:
        return Verdict("error", tail or f"exit code {code}", at)
    return Verdict("passed", at=at, counts=last["counts"])
