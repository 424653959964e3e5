"""What goes when a process is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from serving import wait_for

SCRIPT = """
import pathlib, subprocess, sys, time
from pyspac.talk.remover import removed_if_killed
late = 'sleep 1; : > "$1"; : > "$1.was-there"'  # as of a server that the kernel is slow to kill
with removed_if_killed([pathlib.Path(sys.argv[1])]):
    subprocess.Popen(["/bin/sh", "-c", late, "late", sys.argv[1]], start_new_session=True)
    print(flush=True)
    time.sleep(60)
"""


def test_what_is_written_late_goes_too(tmp_path: Path) -> None:
    path = tmp_path / "board"
    path.touch()
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.communicate()
    wait_for("the late file", Path(f"{path}.was-there").exists, 10)
    wait_for("its end", lambda: not path.exists(), 10)
