"""What the context keeps from prompt to prompt, and prompts that are none."""

from __future__ import annotations

import pytest
from conftest import ROOT

from pyspac.errors import PyspacError
from pyspac.generate.decode import PromptError
from pyspac.generate.options import RunOptions
from pyspac.generate.session import Session

TARGET = ROOT / "pyspac/models/demo-moe.gguf"


@pytest.mark.model
def test_another_prompt_keeps_what_they_begin_with() -> None:
    with Session(RunOptions(model=TARGET, n_predict=4, n_threads=1, n_ctx=512)) as session:
        first = session.tokenize("def parse(self, text):\n    return text\n")
        session.generate(first)
        second = session.generate([*first[:6], *session.tokenize("import os\n")])
        assert second.metrics.n_cached == 6
        again = session.generate(first)
        assert again.metrics.n_cached == 6
        assert session.generate(first).metrics.n_cached == len(first) - 1  # the last one gives the logits


@pytest.mark.model
def test_a_prompt_that_is_too_long_costs_nothing() -> None:
    with Session(RunOptions(model=TARGET, n_predict=4, n_threads=1, n_ctx=64)) as session:
        first = session.tokenize("def parse(self, text):\n    return text\n")
        session.generate(first)
        with pytest.raises(PromptError, match="the context only 64"):
            session.generate(first[:1] * 64)
        assert session.generate(first).metrics.n_cached == len(first) - 1


def test_half_of_a_character_is_no_text() -> None:
    with (
        Session(RunOptions(model=TARGET, n_predict=4, n_threads=1)) as session,
        pytest.raises(PyspacError, match=r"the text has half of a character, U\+D83D, behind ''"),
    ):
        session.tokenize("\ud83d")


@pytest.mark.model
def test_a_closed_session_says_so() -> None:
    """The context is freed: asking it would read freed memory."""
    session = Session(RunOptions(model=TARGET, device="none", n_threads=1, n_predict=1))
    prompt = session.tokenize("import os")
    session.generate(prompt)
    session.close()
    with pytest.raises(PyspacError, match="this session is closed"):
        session.generate(prompt)
