"""PYSPAC_CACHE is for llama.cpp's own programs: whoever has exported it may run pyspac all the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf_models
import pytest
from gguf import GGMLQuantizationType
from serving import DRAFT, TARGET, Serve, environment, run_pyspac

from pyspac.engine.attached import VARIABLE, not_by_environment

SIZES = ("auto", "25%")
RUN = ("run", "-m", str(TARGET), "-p", "a", "-n", "4", "--temp", "0", "-t", "1", "--json", "-")
WAYS = {
    "no device": ("--device", "none"),
    "emulated": ("--device", "emulated", "--cache", "50%"),
    "a draft model": ("--device", "none", "-md", str(DRAFT)),
    "stock": ("--stock",),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", SIZES)
def test_run_does_not_see_it(size: str, way: str, tmp_path: Path) -> None:
    runs = [
        run_pyspac(*RUN, *WAYS[way], cache_dir=tmp_path, variables=variables)
        for variables in ({VARIABLE: size}, {})
    ]
    assert runs[0].returncode == 0, runs[0].stderr
    ours, without = (json.loads(done.stdout) for done in runs)
    assert ours["token_ids"] == without["token_ids"]
    assert ours["mode"] == without["mode"]
    for name in ("n_slots", "pool_bytes"):
        assert ours["experts"][name] == without["experts"][name]


def test_stock_has_no_engine_by_it(tmp_path: Path) -> None:
    done = run_pyspac(*RUN, "--stock", "-v", cache_dir=tmp_path, variables={VARIABLE: "25%"})
    assert done.returncode == 0, done.stderr
    assert "llama-server" in done.stderr  # its log is shown
    assert "spac:" not in done.stderr


def test_the_drop_in_does_not_see_it_and_leaves_it(tmp_path: Path) -> None:
    program = f"""
import os, pyspac
with pyspac.Llama({str(TARGET)!r}, device="none", n_threads=1, verbose=False) as llm:
    assert llm("a", max_tokens=2)["choices"][0]["text"]
print(os.environ[{VARIABLE!r}])
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env={**environment(tmp_path), VARIABLE: "25%"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "25%\n"


def test_a_server_without_an_engine_does_not_see_it(tmp_path: Path) -> None:
    """There are no kernels for these types, and the size would be refused without a device."""
    model = gguf_models.write_model(tmp_path / "model.gguf", "qwen3moe", [(GGMLQuantizationType.F32,) * 3])
    with Serve(
        tmp_path, device="none", draft=False, pair=(model, model), variables={VARIABLE: "25%"}
    ) as serve:
        serve.wait_ready(scheduler=False)
        assert any("llama.cpp's own serve it" in str(event) for event in serve.events)
        assert "spac:" not in serve.log()


def test_it_is_there_again_even_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "25%")

    def fail() -> None:
        with not_by_environment():
            assert VARIABLE not in os.environ
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert os.environ[VARIABLE] == "25%"
    monkeypatch.delenv(VARIABLE)
    with not_by_environment():
        pass
    assert VARIABLE not in os.environ
