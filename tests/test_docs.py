"""The committed pages agree with the tree: links lead somewhere, files and names that they mention exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from pyspac.server.arguments import FOR_OTHERS

ROOT = Path(__file__).resolve().parent.parent
NOT_OURS = {"build", "dist", "llama.cpp", "node_modules"}  # and whatever begins with a dot
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)[^)]*\)")
CODE = re.compile(r"`([^`\n]+)`")
MENTIONED_FILE = re.compile(
    r"(docs|engine|pyspac|patches|scripts|tools|tests|benchmarks|cmake|packaging)/[\w./-]+\.\w+"
)


def pages(folder: Path = ROOT) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in NOT_OURS:
            continue
        if path.is_dir():
            yield from pages(path)
        elif path.suffix == ".md":
            yield path


PAGES = list(pages())


def prose(path: Path) -> str:
    """The text without fenced and indented blocks, where nothing is a link."""
    text = re.sub(r"^(```|~~~).*?^\1", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"(?m)(?<=\n\n)(?: {4}.*\n|\n)+", "\n", text)


def anchors(path: Path) -> set[str]:
    """Of the headings, as GitHub makes them: small letters, no punctuation, hyphens for spaces."""
    found: set[str] = set()
    for heading in re.findall(r"(?m)^#{1,6} +(.+?) *#*$", prose(path)):
        text = LINK.sub(lambda link: link[0][1:].partition("]")[0], heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        n = sum(1 for other in found if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other))
        found.add(f"{slug}-{n}" if n else slug)
    return found


def dead_links(path: Path) -> list[str]:
    """Relative links of a page that lead nowhere."""
    dead = []
    for target in LINK.findall(CODE.sub("", prose(path))):
        if re.match(r"[a-z][a-z+.-]*:", target):
            continue  # of the web
        file, _, anchor = target.partition("#")
        there = path.parent / file if file else path
        if not there.exists() or (anchor and anchor not in anchors(there)):
            dead.append(target)
    return dead


def torn_tables(text: str) -> list[str]:
    """Lines that hold a table's rule (|---|) and something else, as when lines were joined."""
    return [
        line for line in text.splitlines() if re.search(r"\|\s*:?---", line) and re.search(r"[^|\s:-]", line)
    ]


def test_checks_by_hand(tmp_path: Path) -> None:
    other = tmp_path / "other.md"
    other.write_text("# A `name`, (twice)\n\n## Same\n## Same\n\n```\n# no heading\n```\n")
    assert anchors(other) == {"a-name-twice", "same", "same-1"}
    page = tmp_path / "page.md"
    page.write_text(
        "# Top\n[a](other.md) [b](other.md#same-1) [c](#top) [d](https://x.y/z) `[e](none.md)`\n\n"
        "    [f](none.md)\n\n[g](none.md) ![h](none.png) [i](other.md#no-heading) [j](#nowhere)\n"
    )
    assert dead_links(page) == ["none.md", "none.png", "other.md#no-heading", "#nowhere"]
    assert torn_tables("| a | b |\n|---|:--- |\n| c |") == []
    assert torn_tables("| a | b | |---|---| | c |") == ["| a | b | |---|---| | c |"]


def test_there_are_pages() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in PAGES}
    assert {"README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/glossary.md"} <= names


def test_pages_stay_short() -> None:
    """What a page gains, another one loses: half of what they once were, so that somebody reads them."""
    docs = sum(len(path.read_text(encoding="utf-8").split()) for path in (ROOT / "docs").rglob("*.md"))
    assert docs <= 26_000
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    assert dead_links(path) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_tables_are_whole(path: Path) -> None:
    assert torn_tables(prose(path)) == []


OWN_PAGES = [path for path in PAGES if path.parent.name != "patches"]  # its table names llama.cpp's files


@pytest.mark.parametrize("path", OWN_PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_that_are_mentioned_exist(path: Path) -> None:
    mentioned = [text for text in CODE.findall(prose(path)) if MENTIONED_FILE.fullmatch(text)]
    assert [text for text in mentioned if not (ROOT / text).exists()] == []


@cache
def identifiers() -> set[str]:
    """Whatever is a name in our sources and patches."""
    files = [
        *(ROOT / "engine").rglob("*.h"), *(ROOT / "engine").rglob("*.cpp"),
        *(ROOT / "pyspac").rglob("*.py"), *(ROOT / "patches").rglob("*.patch"),
    ]  # fmt: skip
    return {name for file in files for name in re.findall(r"\w+", file.read_text(encoding="utf-8"))}


def test_names_of_the_glossary_are_those_of_the_code() -> None:
    rows = [
        line.split(" | ") for line in (ROOT / "docs/glossary.md").read_text().splitlines() if " | " in line
    ]
    terms = [row for row in rows if row[0] != "| term"]
    assert len(terms) > 50
    names = {name for row in terms for text in CODE.findall(row[2]) for name in text.split(".")}
    assert len(names) > 50
    assert sorted(names - identifiers()) == []


def test_the_ways_to_compute_host_experts_are_all_described() -> None:
    """docs/architecture.md names every builder of a split layer."""
    header = (ROOT / "engine/src/graph/split-graph.h").read_text()
    builders = re.findall(r"(spac_build_split_\w+)\(", header)
    assert len(builders) == 3
    text = (ROOT / "docs/architecture.md").read_text()
    assert [name for name in builders if name not in text] == []


def test_the_variables_of_the_engine_are_everywhere() -> None:
    """What env-attach.cpp reads: its header, docs/architecture.md, and what a private server is kept from."""
    header, code = (ROOT / "engine/src/env-attach.cpp").read_text().split("#include", 1)
    names = set(re.findall(r'"(PYSPAC_[A-Z_]+)"', code))
    assert {"PYSPAC_NGRAM", "PYSPAC_CACHE"} < names
    assert set(re.findall(r"^// +(PYSPAC_[A-Z_]+)", header, flags=re.MULTILINE)) == names
    rows = re.findall(
        r"^\| (`PYSPAC_[^|]*)\|", (ROOT / "docs/architecture.md").read_text(), flags=re.MULTILINE
    )
    assert set(re.findall(r"PYSPAC_[A-Z_]+", " ".join(rows))) == names
    kept = {name for name in FOR_OTHERS if name.startswith("PYSPAC_")}
    # taken away from every child; chosen for each; no effect without those
    others = {
        "PYSPAC_CACHE",
        "PYSPAC_TRACE",
        "PYSPAC_DEVICE",
        "PYSPAC_RAM",
        "PYSPAC_BOARD",
        "PYSPAC_TRACE_ADD",
    }
    assert kept == names - others
    assert others < names


def python_examples() -> list[str]:
    text = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def test_there_are_examples_in_python() -> None:
    assert len(python_examples()) == 5


@pytest.mark.model
@pytest.mark.parametrize("code", python_examples(), ids=lambda code: code.splitlines()[2])
def test_examples_in_python_run(code: str, tmp_path: Path) -> None:
    """With the demo's models in the place of the reader's."""
    for name, file in (("MODEL", "demo-moe"), ("DRAFT", "demo-draft")):
        (tmp_path / f"{name}.gguf").symlink_to(ROOT / f"pyspac/models/{file}.gguf")
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip()
