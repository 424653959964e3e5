"""The names of `--spec-type`, and which files can draft so."""

from __future__ import annotations

import re
from pathlib import Path

import input_models
import pytest
from conftest import ROOT

from pyspac.errors import ConfigError, ModelError, UsageError
from pyspac.model import spec_types
from pyspac.model.draft_files import check_drafter
from pyspac.model.gguf_header import read_header
from pyspac.model.spec_types import check_has_draft, parse_spec_type

MODELS = ROOT / "pyspac/models"
TARGET, DRAFT = MODELS / "demo-moe.gguf", MODELS / "demo-draft.gguf"


def test_names_are_llama_cpps() -> None:
    source = (ROOT / "build/llama.cpp/common/speculative.cpp").read_text()
    table = source[source.index("common_speculative_type_from_name_map") :]
    names = re.findall(r'\{ *"([a-z0-9-]+)"', table[: table.index("};")])
    assert sorted(names) == sorted(("none", *spec_types.LLAMA))


def test_lists_are_read() -> None:
    assert parse_spec_type(None) is None
    assert parse_spec_type("draft") == "draft"
    assert parse_spec_type(" ngram-mod, draft-simple,ngram-mod") == "ngram-mod,draft-simple"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("eagle", "draft, ngram, draft-lora, none, or one or more of llama.cpp's: draft-simple"),
        ("ngram,draft-simple", "ngram cannot be in a list"),
        ("none,ngram-mod", "none cannot be in a list"),
        ("draft-simple,draft-mtp", "one of the draft- names"),
        ("", "cannot be ''"),
    ],
)
def test_wrong_names_are_errors(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse_spec_type(text)
    assert caught.value.exit_code == 2


def test_what_a_name_needs() -> None:
    with pytest.raises(UsageError, match="needs a draft model: give one with -md"):
        check_has_draft("ngram-mod,draft-simple", has_draft=False)
    with pytest.raises(UsageError, match="uses no draft model"):
        check_has_draft("ngram-mod", has_draft=True)


def test_files_that_cannot_draft_so(tmp_path: Path) -> None:
    target, draft = read_header(TARGET), read_header(DRAFT)
    with pytest.raises(ModelError, match="no head that predicts further tokens") as caught:
        check_drafter("draft-mtp", target, None)
    assert caught.value.exit_code == 2
    with pytest.raises(ModelError, match="draft-eagle3 needs a draft that was trained for it"):
        check_drafter("draft-eagle3", target, draft)
    small = input_models.write_target(tmp_path / "target.gguf")
    other = input_models.write_other_vocab(tmp_path / "other.gguf")
    with pytest.raises(ModelError, match="another vocabulary"):
        check_drafter("draft-simple", read_header(small), read_header(other))
