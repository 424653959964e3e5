"""The patch queue: headers, table, round trip; and the tool itself on a tree of three lines."""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
import threading
import time
import tomllib
from pathlib import Path

import pytest

from tools.patches import pristine
from tools.patches.__main__ import main
from tools.patches.check import header_problems, readme_problems, round_trip_problems
from tools.patches.git import git
from tools.patches.pin import PatchError, read_pin
from tools.patches.pristine import extract_sdist, find_sdist
from tools.patches.queue import PATCH_DIR, parse_patch, read_patches, touched
from tools.patches.repository import HOOK_STATUS, apply_to_repo, export_repo, make_repo
from tools.patches.table import README
from tools.patches.tree import fingerprint, patch_files, sync_tree

ROOT = Path(__file__).resolve().parent.parent
PATCHES = read_patches()
PIN = read_pin()
BUILD = ROOT / "build"
BODY = "Why it is needed.\n\nUpstream-Status: {status}\nRemove-When: never\n"


# --- the queue ---


def test_patches_apply_in_order_and_export_unchanged():
    assert round_trip_problems(BUILD, PATCHES) == []


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_header_is_complete(patch):
    assert header_problems(patch) == []


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_body_says_why(patch):
    head = patch.text.split("\ndiff --git ")[0]
    body = head.split("\n\n", 1)[1].split("Upstream-Status:")[0]
    assert len(body.split()) >= 10, "a patch states its reason"


def test_table_of_the_readme_is_current():
    assert readme_problems(PATCHES) == []
    listed = re.findall(r"\]\(((?:upstream|hooks)/[^)]+\.patch)\)", README.read_text())
    assert listed == [patch.name for patch in PATCHES]


def test_no_other_file_lies_among_the_patches():
    files = {str(path.relative_to(PATCH_DIR)) for path in PATCH_DIR.rglob("*") if path.is_file()}
    assert files == {"README.md", *(patch.name for patch in PATCHES)}


def test_patches_stay_small():
    # 410, and what it takes that a server's heads wait, too: what is kept and read where, in whose time, and
    # dropped when a slot's text is another one; one for the masks' cells of a slot that waits for others; and
    # that a graph fails in a fork, or without an expert that cannot be read, whatever abort callback is set;
    # 61 that tell the engine which weights to read into which memory; 156 that keep prompts; 27
    # for requests that are computed exactly
    assert sum(patch.n_added + patch.n_removed for patch in PATCHES if patch.folder == "hooks") <= 711


def test_public_structs_and_functions_are_only_added_to():
    # llama-cpp-python binds every symbol and struct of the pin
    for patch in PATCHES:
        for part in patch.text.split("\ndiff --git ")[1:]:
            path = part.split(" b/")[1].split("\n")[0]
            if path.startswith(("include/", "ggml/include/")):
                assert not re.search(r"^-(?!-- )", part, re.MULTILINE), f"{patch.name}: {path}"


# --- the pin ---


def test_pin_is_named_in_the_changelog():
    assert PIN.commit in (ROOT / "CHANGELOG.md").read_text()


def test_submodule_is_at_the_pin():
    listed = subprocess.run(
        ["git", "ls-files", "--stage", "llama.cpp"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    if listed:  # absent in an archive of the project
        assert listed[:2] == ["160000", PIN.commit]


def test_submodule_url_is_that_of_the_pin():
    assert f"url = {PIN.url}\n" in (ROOT / ".gitmodules").read_text()


def test_bindings_are_those_of_the_pin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert PIN.requirement in project["dependencies"]


# --- the tool ---


@pytest.fixture
def tree(tmp_path):
    """A pristine tree of two files."""
    folder = tmp_path / "tree"
    (folder / "src").mkdir(parents=True)
    (folder / "src/a.c").write_text("one\ntwo\nthree\n")
    (folder / "b.txt").write_text("b\n")
    return folder


def commit(repo: Path, subject: str, status: str = "Pending") -> None:
    who = {"GIT_AUTHOR_NAME": "A", "GIT_AUTHOR_EMAIL": "a@localhost"}
    git(repo, "add", "--all")
    git(repo, "commit", "-m", f"{subject}\n\n{BODY.format(status=status)}", env=who)


@pytest.fixture
def repo(tree, tmp_path):
    """The tree as a repository: two upstream commits that touch the same line, a hook that adds a file."""
    folder = tmp_path / "repo"
    make_repo(folder, tree, PIN)
    for text in ("TWO", "Two"):
        (folder / "src/a.c").write_text(f"one\n{text}\nthree\n")
        commit(folder, f"src : write {text}")
    (folder / "hook.h").write_text("hook\n")
    commit(folder, "llama : add a hook", HOOK_STATUS)
    return folder


def names(patches) -> list[str]:
    return [patch.name for patch in patches]


def test_export_names_folders_and_numbers(repo):
    expected = ["upstream/0001-src-write-TWO.patch", "upstream/0002-src-write-Two.patch"]
    patches = export_repo(repo, [])
    assert names(patches) == [*expected, "hooks/0001-llama-add-a-hook.patch"]
    assert [(patch.n_added, patch.n_removed) for patch in patches] == [(1, 1), (1, 1), (1, 0)]
    assert patches[2].paths == ("hook.h",)
    assert all(header_problems(patch) == [] for patch in patches)


def test_export_of_apply_is_the_same(repo, tree, tmp_path):
    patches = export_repo(repo, [])
    make_repo(tmp_path / "again", tree, PIN, only=touched(patches))
    apply_to_repo(tmp_path / "again", patches)
    assert export_repo(tmp_path / "again", patches) == patches


def test_export_keeps_gaps_in_the_numbers(repo):
    known = [parse_patch("upstream/0004-src-write-Two.patch", "")]
    assert names(export_repo(repo, known))[:2] == [
        "upstream/0001-src-write-TWO.patch",
        "upstream/0004-src-write-Two.patch",
    ]


def test_export_refuses_an_upstream_patch_after_a_hook(repo):
    (repo / "b.txt").write_text("B\n")
    commit(repo, "src : late")
    with pytest.raises(PatchError, match="rebase -i pin"):
        export_repo(repo, [])


def test_a_long_subject_is_unfolded(repo):
    subject = "src : " + "a long way to say very little about one file " * 3
    (repo / "hook.h").write_text("hook 2\n")
    commit(repo, subject.strip(), HOOK_STATUS)
    assert export_repo(repo, [])[-1].subject == subject.strip()


def prepare(tree: Path, target: Path, patches) -> int:
    scratch = target.parent / f"scratch-{time.monotonic_ns()}"
    scratch.mkdir()
    patched = patch_files(scratch, tree, patches)
    return sync_tree(tree, patched, touched(patches), target)


def test_prepare_writes_only_what_changes(repo, tree, tmp_path):
    patches, target = export_repo(repo, []), tmp_path / "target"
    assert prepare(tree, target, patches) == 3
    assert (target / "src/a.c").read_text() == "one\nTwo\nthree\n"
    os.utime(target / "b.txt", (1, 1))
    assert prepare(tree, target, patches) == 0
    assert (target / "b.txt").stat().st_mtime == 1


def test_prepare_takes_a_patch_back(repo, tree, tmp_path):
    patches, target = export_repo(repo, []), tmp_path / "target"
    prepare(tree, target, patches)
    os.utime(tree / "src/a.c", (1, 1))
    assert prepare(tree, target, []) == 1
    assert (target / "src/a.c").read_text() == "one\ntwo\nthree\n"
    assert (target / "src/a.c").stat().st_mtime > 1, "an older time would hide the change from make and ninja"
    assert not (target / "hook.h").exists()


def test_prepare_inside_another_repository_still_patches(repo, tree, tmp_path):
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    prepare(tree, tmp_path / "target", export_repo(repo, []))
    assert (tmp_path / "target/hook.h").is_file()


def test_a_patch_that_does_not_apply_is_named(repo, tree, tmp_path):
    patches = export_repo(repo, [])
    with pytest.raises(PatchError, match=r"0002-src-write-Two\.patch does not apply"):
        prepare(tree, tmp_path / "target", patches[1:])


def test_fingerprint_depends_on_every_patch(repo):
    patches = export_repo(repo, [])
    prints = {fingerprint(PIN, part) for part in (patches, patches[:2], patches[::-1], [])}
    assert len(prints) == 4


@pytest.mark.parametrize(
    ("replace", "by", "problem"),
    [
        ("Upstream-Status: Pending", "Upstream-Status: Soon", "Upstream-Status"),
        ("Remove-When: never", "Remove: never", "Remove-When"),
        ("src : write TWO", "Write TWO", "area : what changed"),
        ("+TWO", "+pyspac", "could not be submitted"),
        ("Upstream-Status: Pending", f"Upstream-Status: {HOOK_STATUS}", "hooks/"),
    ],
)
def test_a_bad_header_is_reported(repo, replace, by, problem):
    good = export_repo(repo, [])[0]
    bad = parse_patch(good.name, good.text.replace(replace, by))
    assert problem in "\n".join(header_problems(bad))


def test_a_wrong_archive_is_refused(monkeypatch, tmp_path):
    archive = tmp_path / "wrong.tar.gz"
    archive.write_bytes(b"not it")
    monkeypatch.setenv("PYSPAC_SDIST", str(archive))
    with pytest.raises(PatchError, match="sha256"):
        find_sdist(tmp_path, PIN)


def test_two_that_unpack_at_once_take_turns(monkeypatch, tmp_path):
    archive, inside = tmp_path / "a.tar.gz", f"{PIN.sdist_stem}/{PIN.sdist_tree}/CMakeLists.txt"
    (tmp_path / "CMakeLists.txt").write_text("text")
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "CMakeLists.txt", inside)
    entered = []

    def extract(tar, members, folder, real=pristine.extract_members):
        entered.append(folder)
        time.sleep(0.1)
        real(tar, members, folder)

    monkeypatch.setattr(pristine, "extract_members", extract)
    threads = [threading.Thread(target=extract_sdist, args=(archive, tmp_path / "s", PIN)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(entered) == 1  # the second finds what the first has unpacked
    assert (tmp_path / "s" / inside).read_text() == "text"


def test_a_folder_that_cannot_be_written_is_told(tmp_path, capsys):
    (tmp_path / "build").write_text("a file")
    assert main(["--build", str(tmp_path / "build"), "prepare"]) == 1
    assert "error:" in capsys.readouterr().err
