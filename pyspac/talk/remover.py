"""Files that go when this process is killed: paths in, and a process of its own that waits for our end.

It reads from a pipe that the kernel closes with us, however we end.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pyspac.server.child import starting

# by then the kernel has killed what would write there once more, on a busy machine only the second time
_SCRIPT: Final = 'read -r _ || for s in 0.2 3; do sleep "$s"; rm -rf -- "$@"; done'


@contextmanager
def removed_if_killed(paths: Sequence[Path]) -> Iterator[None]:
    """Inside the block the death of this process removes `paths`; its end removes nothing."""
    argv = ["/bin/sh", "-c", _SCRIPT, "pyspac-remover", *map(str, paths)]
    with starting("/bin/sh"):
        remover = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,  # neither Ctrl-C nor a closed terminal ends it
        )  # fmt: skip
    try:
        yield
    finally:
        remover.kill()
        remover.communicate()
