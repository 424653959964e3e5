"""Ctrl-C where llama.cpp does not return: a server that answers the greeting, and nothing else."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from fake_rpc import GREETING_BYTES, fake_server, says
from serving import TARGET

from tools.served import wait_for

END_S = 10.0


@pytest.mark.usefixtures("hears_ctrl_c")
def test_the_second_interrupt_ends_what_hangs() -> None:
    with fake_server(says(7, 0, 1)) as (endpoint, received):
        argv = [sys.executable, "-m", "pyspac", "run", "-m", str(TARGET), "-p", "a", "--rpc", endpoint]
        with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
            # behind the greetings of ours and of ggml's client, which then waits for an answer
            wait_for("a request", lambda: len(received) > 2 * GREETING_BYTES)
            process.send_signal(signal.SIGINT)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)
            process.send_signal(signal.SIGINT)
            assert process.wait(END_S) == 130
            assert process.stderr is not None
            assert "llama.cpp did not return" in process.stderr.read()


def test_interrupts_that_are_handled_end_nothing() -> None:
    """The main thread runs between them, in handlers at least, as sleep goes on behind one."""
    program = """
import os, signal, threading, time
from pyspac.commands.stuck import ends_where_stuck

@ends_where_stuck
def command():
    seen = []
    signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    def press():
        for _ in range(5):
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=press).start()
    time.sleep(1)
    assert len(seen) == 5, seen
    print("done")

command()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
