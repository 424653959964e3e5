"""Patches as commits of a git repository, and back."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tools.patches.git import GIT_ENV_BASE, git
from tools.patches.pin import PatchError, Pin
from tools.patches.queue import FOLDERS, PATCH_DIR, Patch, parse_patch, read_patches, slugify
from tools.patches.table import write_table

HOOK_STATUS: Final = "Inappropriate [pyspac hook]"  # what puts a commit into hooks/
FORMAT_PATCH = (
    "format-patch", "--stdout", "--zero-commit", "--full-index", "--no-stat", "--no-signature",
    "--keep-subject", "--no-numbered", "--no-thread", "--no-attach", "--unified=3",
)  # fmt: skip


def make_repo(repo: Path, tree: Path, pin: Pin, only: Sequence[str] | None = None) -> None:
    """A repository whose one commit, tagged `pin`, is the pinned tree (or `only` some of its files)."""
    repo.mkdir(parents=True, exist_ok=True)
    if any(repo.iterdir()):
        raise PatchError(f"{repo} is not empty. Name a new folder, or remove this one.")
    copy_into(tree, repo, only)
    git(repo, "init", "--quiet", "--initial-branch=pyspac")
    git(repo, "add", "--all", "--force", ".")
    message = f"llama.cpp {pin.tag} ({pin.commit})"
    git(repo, "commit", "--quiet", "--allow-empty", "--no-verify", "-m", message, env=GIT_ENV_BASE)
    git(repo, "tag", "pin")


def copy_into(tree: Path, target: Path, only: Sequence[str] | None) -> None:
    if only is None:
        shutil.copytree(
            tree, target, dirs_exist_ok=True, symlinks=True, ignore=shutil.ignore_patterns(".git")
        )
        return
    for path in only:
        if (tree / path).is_file():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / path, target / path)


def apply_to_repo(repo: Path, patches: Sequence[Patch]) -> None:
    """One commit per patch, by plain `git am`: no fuzz, no three-way merge."""
    for patch in patches:
        try:
            git(
                repo, "am", "--quiet", "--keep-non-patch", "--committer-date-is-author-date", stdin=patch.text
            )
        except PatchError as error:
            raise PatchError(
                f"patches/{patch.name} does not apply.\n{error}\n"
                "Either the pin moved or an earlier patch changed the same lines: see docs/patches.md."
            ) from None


def export_repo(repo: Path, known: Sequence[Patch]) -> list[Patch]:
    """The commits after `pin` as patches. A patch that is known keeps its number, so that gaps may stay."""
    commits = git(repo, "rev-list", "--reverse", "pin..HEAD").split()
    numbers = {(patch.folder, patch.slug): patch.number for patch in known}
    last = dict.fromkeys(FOLDERS, 0)
    patches: list[Patch] = []
    for commit in commits:
        draft = parse_patch("", git(repo, *FORMAT_PATCH, "-1", commit))
        folder = "hooks" if draft.status == HOOK_STATUS else "upstream"
        if folder == "upstream" and last["hooks"]:
            raise PatchError(
                f"'{draft.subject}' comes after a hook. Upstream patches first: git rebase -i pin"
            )
        slug = slugify(draft.subject)
        last[folder] = max(last[folder] + 1, numbers.get((folder, slug), 0))
        patches.append(parse_patch(f"{folder}/{last[folder]:04d}-{slug}.patch", draft.text))
    return patches


def write_patches(patches: Sequence[Patch]) -> None:
    for folder in FOLDERS:
        (PATCH_DIR / folder).mkdir(parents=True, exist_ok=True)
    names = {patch.name for patch in patches}
    for old in read_patches():
        if old.name not in names:
            (PATCH_DIR / old.name).unlink()
    for patch in patches:
        (PATCH_DIR / patch.name).write_text(patch.text)
    write_table(patches)
