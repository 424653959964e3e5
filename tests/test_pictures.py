"""The README's pictures are recorded by a command that works, and show what it shows today."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from subprocess import run
from xml.etree import ElementTree

import pytest
from conftest import ROOT

from pyspac.scheduler.fallback import copies_text

NOT_ALWAYS = {"demo", "most", "space", "pause", "quit"}  # a name of a board; what a narrow view cuts off
# a row of `top` that is there once it was measured whether copies pay
VERDICTS = {"copies"}.union(
    *(
        re.findall("[a-z]+", copies_text({"chosen": chosen, "gain": gain}))
        for chosen in ("copies", "split", "whole", "frozen")
        for gain in (-0.1, 0.1)
    )
)


def words(path: Path) -> set[str]:
    """What a recorded picture says beside figures and, of a chat, beside what the model wrote."""
    texts = [e.text or "" for e in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
    lines = texts
    if path.name == "chat.svg":
        lines = "".join(texts).replace("\xa0", " ").splitlines()
        lines = [line for line in lines if re.match(r"\$|>|\[|answer|context", line)]
    return set(re.findall(r"[a-z]{3,}", " ".join(lines))) - NOT_ALWAYS - VERDICTS


@pytest.mark.model
@pytest.mark.timeout(600)
def test_pictures_show_what_is_shown_today(tmp_path: Path) -> None:
    script = ROOT / "scripts/record_pictures.py"
    done = run(
        [sys.executable, script, "--output", tmp_path, "--seconds", "2"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for name in ("chat.svg", "top.svg"):
        assert len(words(tmp_path / name)) > 5
        assert words(ROOT / "docs" / name) == words(tmp_path / name), f"python {script} records {name} again"
