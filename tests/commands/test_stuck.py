"""Ctrl-C where llama.cpp does not return: a server that answers the greeting, and nothing else."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest
from fake_rpc import GREETING_BYTES, fake_server, says
from serving import TARGET, has_ended

from tools.served import wait_for

END_S = 10.0


@pytest.mark.usefixtures("hears_ctrl_c")
def test_the_second_interrupt_ends_what_hangs() -> None:
    """In this process, where there is no other."""
    with fake_server(says(7, 0, 1)) as (endpoint, received):
        argv = [sys.executable, "-m", "pyspac", "profile", "-m", str(TARGET), "--rpc", endpoint]
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


@pytest.mark.parametrize("n_interrupts", [1, 2])
def test_what_hangs_in_another_process_is_ended_by_the_first(n_interrupts: int) -> None:
    """While devices are listed; a second one changes nothing."""
    with fake_server(says(7, 0, 1)) as (endpoint, received):
        argv = [sys.executable, "-m", "pyspac", "run", "-m", str(TARGET), "-p", "a", "--rpc", endpoint]
        with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
            wait_for("a request", lambda: len(received) > 2 * GREETING_BYTES)
            children = psutil.Process(process.pid).children(recursive=True)
            for _ in range(n_interrupts):
                process.send_signal(signal.SIGINT)
            assert process.wait(END_S) == 130
            assert process.stderr is not None
            assert process.stderr.read() == "pyspac: interrupted\n"
        assert children
        assert all(has_ended(child.pid) for child in children)


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


def test_ctrl_c_before_a_command_begins_shows_no_traceback() -> None:
    """Typer reads the signatures of all commands for a tenth of a second and more."""
    program = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import pyspac.cli
from pyspac.__main__ import main

def read_signatures(app):
    signal.raise_signal(signal.SIGINT)

pyspac.cli.main = read_signatures
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "")
