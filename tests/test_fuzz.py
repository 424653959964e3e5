"""The fuzzer can fail: a planted defect is found, named with its seed, and its list of operations cut."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.fuzz import __main__ as program
from tools.fuzz import verdict
from tools.fuzz.plan import KINDS, MODES, make_case
from tools.fuzz.shrink import shrink
from tools.fuzz.verdict import Verdict, judge
from tools.system_faults import VARIABLE, SystemFaults, prepare

CONTEXT = {"is_unified": True, "n_ubatch": 64, "flash": True, "n_threads": 1}
ENGINE = {"device": "none", "cache": "0", "ram": "100%"}


def decode(n: int, outputs: str = "all") -> dict[str, Any]:
    return {"op": "decode", "parts": [{"seq": 0, "n": n, "seed": n}], "outputs": outputs}


def case(*operations: dict[str, Any]) -> dict[str, Any]:
    return {
        "seed": 7, "mode": "ram", "arch": "qwen3moe", "types": "q8", "context": CONTEXT,
        "operations": list(operations),
    }  # fmt: skip


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "seen.json"
    code = program.main([*arguments, "--json", str(path)])
    return code, json.loads(path.read_text())


# ---- it finds what is planted --------------------------------------------------------------------


@pytest.fixture
def lie() -> dict[str, Any]:
    """Reads that say they have read, and have not: no error comes, and the experts are zeros."""
    return case(
        {"op": "seq_cp", "seq": 1, "to": 2},
        {"op": "attach", "fields": ENGINE},
        {"op": "disk", "kind": "lie", "every": 1},
        decode(5),
        decode(2),
    )


def test_a_skipped_error_is_found(
    tmp_path: Path, lie: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lie.json"
    path.write_text(json.dumps(lie))
    code, seen = run(tmp_path, "--replay", str(path))
    assert code == 1
    assert seen["passed"] is False
    (failure,) = seen["failures"]
    assert failure["kind"] == "mismatch"
    assert "5 of 5 rows of logits differ" in failure["text"]
    assert [operation["op"] for operation in failure["case"]["operations"]] == ["attach", "disk", "decode"]
    text = capsys.readouterr().err
    assert "seed 7: mismatch" in text
    assert json.dumps(decode(5)) in text


def test_an_honest_disk_passes(tmp_path: Path, lie: dict[str, Any]) -> None:
    lie["operations"][2]["kind"] = "none"
    path = tmp_path / "case.json"
    path.write_text(json.dumps(lie))
    code, seen = run(tmp_path, "--replay", str(path))
    assert (code, seen["failures"]) == (0, [])
    assert (seen["decodes"], seen["compared_rows"]) == (2, 7)


def test_a_seed_passes_and_says_what_it_did(tmp_path: Path) -> None:
    code, seen = run(tmp_path, "--seed", "3", "--cases", "1", "--mode", "slots")
    assert (code, seen["cases"], seen["failures"]) == (0, 1, [])
    assert sum(seen["operations"].values()) == len(make_case(3, "slots")["operations"])
    assert seen["compared_rows"] > seen["decodes"] > 0


# ---- what came of a child ------------------------------------------------------------------------


def test_verdicts() -> None:
    lines = [{"at": 0}, {"at": 1}]
    crash = judge(-signal.SIGSEGV, lines, "one\ntwo")
    assert (crash.kind, crash.at, crash.text) == ("SIGSEGV", 1, "one\ntwo")
    differs = judge(0, [*lines, {"counts": {"rows": 4}, "mismatch": "1 of 2"}], "")
    assert (differs.kind, differs.text, differs.counts) == ("mismatch", "1 of 2", {"rows": 4})
    assert judge(1, lines, "a\nTypeError: no").kind == "error"
    assert judge(0, lines, "").kind == "error"  # it ended in the middle
    assert judge(0, [*lines, {"counts": {}}], "").has_passed


def test_a_case_that_does_not_end(
    tmp_path: Path, lie: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict, "SLICE_S", 0.01)
    seen = verdict.Runner(tmp_path).run(lie)
    assert (seen.kind, seen.text) == ("hang", "no end within 0 s")


def test_the_shortest_list_that_fails_in_the_same_way() -> None:
    def run(case: dict[str, Any]) -> Verdict:
        kept = {operation["n"] for operation in case["operations"]}
        if {3, 11} <= kept:
            return Verdict("mismatch", "both", at=len(case["operations"]) - 1)
        return Verdict("SIGSEGV" if 11 in kept else "passed")

    whole = {"operations": [{"n": n} for n in range(20)]}
    found, last = shrink(whole, Verdict("mismatch", at=11), run, seconds=60)
    assert [operation["n"] for operation in found["operations"]] == [3, 11]
    assert last.text == "both"
    found, _ = shrink(whole, Verdict("mismatch", at=11), run, seconds=0)
    assert len(found["operations"]) == 12  # no time: up to where it failed


# ---- plans ---------------------------------------------------------------------------------------


def test_a_seed_is_always_the_same_case() -> None:
    cases = [make_case(seed) for seed in range(30)]
    assert cases == json.loads(json.dumps([make_case(seed) for seed in range(30)]))
    assert {case["mode"] for case in cases} == set(MODES)
    assert len({case["arch"] for case in cases}) > 3
    assert {operation["op"] for case in cases for operation in case["operations"]} == set(KINDS)


def test_what_is_left_out() -> None:
    operations = make_case(1, "ram", ["disk", "cancel"])["operations"]
    assert not {"disk", "cancel"} & {operation["op"] for operation in operations}
    assert program.parse_arguments(["--without", "disk,cancel"]).without == ["disk", "cancel"]
    for bad in (["--without", "flood"], ["--without", "decode"], ["--minutes", "nan"], ["--cases", "0"]):
        with pytest.raises(SystemExit) as exit_:
            program.parse_arguments(bad)
        assert exit_.value.code == 2


# ---- faults of the system ------------------------------------------------------------------------

PROGRAM = """
import os, sys, threading
fd = os.open(sys.argv[1], os.O_RDONLY)
for _ in range(2):
    try:
        print(len(os.pread(fd, 100, 0)))
    except OSError as error:
        print(error.errno)
try:
    threading.Thread(target=print, args=("thread",)).start()
except RuntimeError:
    print("none")
"""


@pytest.mark.parametrize(
    ("faults", "lines"),
    [
        ({}, ["100", "100", "thread"]),
        ({"read_every": 2}, ["100", "5", "thread"]),
        ({"short_every": 1}, ["51", "51", "thread"]),
        ({"slow_every": 1, "slow_us": 10}, ["100", "100", "thread"]),
        ({"lie_every": 1, "thread_every": 1}, ["100", "100", "none"]),
    ],
    ids=str,
)
def test_faults_of_the_system(tmp_path: Path, faults: dict[str, int], lines: list[str]) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(200))
    variables = prepare(tmp_path)
    words = SystemFaults(Path(variables[VARIABLE]))
    words.set(**faults)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(file)],
        env={**os.environ, **variables}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == lines
    assert words.get("n_reads") == 2
    assert words.get("n_no_threads") == faults.get("thread_every", 0)
    with words.paused():
        assert words.get("read_every") == 0
    assert words.get("read_every") == faults.get("read_every", 0)
