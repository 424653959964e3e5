"""A fork of a process with a `pyspac.Llama`: the child hears that the engine's threads are not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import pyspac

MODEL = Path(pyspac.__file__).parent / "models" / "demo-moe.gguf"
# a process of its own: this one has threads and models of other tests
PROGRAM = """
import os, sys
from pyspac import Llama
llm = Llama({model!r}, n_ctx=128, n_threads=1, verbose=False, **{arguments!r})
if {decodes}:
    llm("def", max_tokens=2)
child = os.fork()
if child == 0:
    try:
        llm("import os", max_tokens=4)
        print("a text")
    except RuntimeError as error:
        print(error)
    llm.close()
    print("closed", flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert llm("import os", max_tokens=4)["choices"][0]["text"]
llm.close()
"""

pytestmark = pytest.mark.model


def run(arguments: dict[str, object], *, decodes: bool) -> list[str]:
    """What the child says, line by line."""
    program = PROGRAM.format(model=str(MODEL), arguments=arguments, decodes=decodes)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("decodes", [False, True])
@pytest.mark.parametrize("arguments", [{"ram": "7"}, {"device": "emulated"}])
def test_a_child_hears_at_once(arguments: dict[str, object], decodes: bool) -> None:
    why, closed = run(arguments, decodes=decodes)
    assert why.startswith("computing after token ")
    assert "attached by the process that this one was forked from" in why
    assert closed == "closed"


def test_a_child_without_engine_threads_works() -> None:
    """As one of llama_cpp.Llama does, before its first decode."""
    assert run({"device": "none"}, decodes=False) == ["a text", "closed"]
