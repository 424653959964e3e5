"""Experts on disk in a cgroup whose memory is full all the time: the same text, no error."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyspac.units import MIB

DEMO = Path(__file__).resolve().parents[2] / "pyspac" / "models" / "demo-moe.gguf"
GROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
FILE_BYTES = 96 * MIB  # whose pages fill what is left
# argv: the cgroup's file of processes, a model, a file of FILE_BYTES. Out: the text's tokens, how many
# experts were not in memory, and the memory that the process has to itself
CHILD = """
import json, os, sys, threading
from pathlib import Path
Path(sys.argv[1]).write_text(str(os.getpid()))
from pyspac.forward.options import ForwardOptions
from pyspac.forward.runner import Runner

def read_on():
    while True:
        with open(sys.argv[3], "rb", buffering=0) as file:
            while file.read(1 << 20):
                pass
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

threading.Thread(target=read_on, daemon=True).start()
run = dict(model=Path(sys.argv[2]), device="none", ram="5M", n_threads=2, n_ctx=512)
with Runner(ForwardOptions(**run)) as runner:
    new, tokens = runner.model.vocab.tokenize("def read_header(path):\\n"), []
    for _ in range(60):
        new = [int(runner.context.decode(new)[0].argmax())]
        tokens += new
    n_miss = runner.split.engine.tier().n_miss
rows = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
print(json.dumps([tokens, n_miss, 1024 * int(rows["RssAnon"].split()[0])]), flush=True)
os._exit(0)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    root = next((path for path in GROUPS if path.is_dir()), None)
    if root is None or os.geteuid():
        pytest.skip("a memory cgroup needs root and /sys/fs/cgroup")
    folder = root / f"pyspac-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup may be made here: {error}")
    yield folder
    for _ in range(100):  # the kernel takes a moment to see that the last process is gone
        with contextlib.suppress(OSError):
            folder.rmdir()
            break
        time.sleep(0.1)


def limit(group: Path, n_bytes: int) -> None:
    v1 = group / "memory.limit_in_bytes"
    try:
        (v1 if v1.exists() else group / "memory.max").write_text(str(n_bytes))
    except OSError as error:
        pytest.skip(f"the cgroup has no limit of memory: {error}")


def n_times_full(group: Path) -> int:
    v1 = group / "memory.failcnt"
    if v1.exists():
        return int(v1.read_text())
    rows = dict(line.split() for line in (group / "memory.events").read_text().splitlines())
    return int(rows["max"])


@pytest.mark.slow
def test_the_same_text_while_memory_is_full(group: Path, tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    with pages.open("wb") as file:
        file.truncate(FILE_BYTES)
    found = []
    limit(group, 4 << 30)
    for _ in range(2):
        argv = [sys.executable, "-c", CHILD, str(group / "cgroup.procs"), str(DEMO), str(pages)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(json.loads(done.stdout))
        limit(group, found[0][2] + FILE_BYTES // 3)  # for the second one
    (wanted, n_miss, _), (tokens, _, _) = found
    assert n_miss > 0
    assert tokens == wanted
    assert n_times_full(group) > 0
