"""What has to hold of every patch: its header, the table, and that export gives what apply took."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.patches.pin import read_pin
from tools.patches.pristine import pristine_tree
from tools.patches.queue import Patch, touched
from tools.patches.repository import HOOK_STATUS, apply_to_repo, export_repo, make_repo
from tools.patches.table import README, table_block

STATUS_RE = re.compile(
    r"^(Pending|Submitted \[\S+\]|Backport \[[0-9a-f]{7,40}\]|Denied \[\S+\]|Inappropriate \[pyspac hook\])$"
)
SUBJECT_RE = re.compile(r"^[a-z0-9][a-z0-9 ,./-]* : \S")  # upstream's style: "ggml-cpu : what changed"


def header_problems(patch: Patch) -> list[str]:
    """What is missing in the header of a patch."""
    problems = []
    if not SUBJECT_RE.match(patch.subject):
        problems.append(f"subject '{patch.subject}' is not 'area : what changed'")
    if not STATUS_RE.match(patch.status):
        problems.append(f"Upstream-Status is '{patch.status}', not one of the words in docs/patches.md")
    if not patch.trailers.get("Remove-When"):
        problems.append("Remove-When is missing: say under which condition the patch can go")
    if (patch.folder == "hooks") != (patch.status == HOOK_STATUS):
        problems.append(f"hooks/, and only hooks/, carries 'Upstream-Status: {HOOK_STATUS}'")
    if patch.folder == "upstream" and re.search(r"^[+].*(pyspac|\bspac_)", patch.text, re.MULTILINE):
        problems.append("an upstream patch adds lines that name pyspac: it could not be submitted")
    if patch.folder == "hooks" and patch.n_removed > 2 and "Removed-Lines" not in patch.trailers:
        problems.append(f"a hook removes {patch.n_removed} lines; explain in a 'Removed-Lines:' trailer why")
    return [f"patches/{patch.name}: {problem}" for problem in problems]


def readme_problems(patches: Sequence[Patch]) -> list[str]:
    text = README.read_text()
    if table_block(patches) not in text:
        return ["patches/README.md: the table differs from the patches; run `python -m tools.patches table`"]
    return []


def round_trip_problems(build: Path, patches: Sequence[Patch]) -> list[str]:
    """Apply with plain git am in order, export, compare byte by byte."""
    pin = read_pin()
    tree = pristine_tree(build, pin)
    with tempfile.TemporaryDirectory() as scratch:
        repo = Path(scratch) / "repo"
        make_repo(repo, tree, pin, only=touched(patches))
        apply_to_repo(repo, patches)
        exported = {patch.name: patch.text for patch in export_repo(repo, patches)}
    if list(exported) != [patch.name for patch in patches]:
        return [f"export writes {list(exported)}, patches/ holds {[patch.name for patch in patches]}"]
    return [
        f"patches/{patch.name}: not what export writes (lines drifted, or edited by hand): apply, export"
        for patch in patches
        if exported[patch.name] != patch.text
    ]
