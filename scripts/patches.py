#!/usr/bin/env python3
"""The patch queue on llama.cpp: the pinned tree and patches/ in, a patched tree or a git repository out.

    patches.py prepare          patched tree in build/llama.cpp, touching only files whose content changes
    patches.py apply --git DIR  git repository: the pinned tree (tag `pin`), then one commit per patch
    patches.py export --git DIR patches/ from that repository's commits, and the table in patches/README.md
    patches.py check            everything that tests/test_patches.py holds, without a compiler
    patches.py status           the table: lines, files, upstream status

Needs the standard library and git only: CMake runs it before anything is installed. See docs/patches.md.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import filecmp
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIN_FILE = ROOT / "cmake" / "pin.json"
PATCH_DIR = ROOT / "patches"
README = PATCH_DIR / "README.md"
FOLDERS = ("upstream", "hooks")  # applied in this order
HOOK_STATUS = "Inappropriate [pyspac hook]"
STATUS_RE = re.compile(
    r"^(Pending|Submitted \[\S+\]|Backport \[[0-9a-f]{7,40}\]|Denied \[\S+\]|Inappropriate \[pyspac hook\])$"
)
SUBJECT_RE = re.compile(r"^[a-z0-9][a-z0-9 ,./-]* : \S")  # upstream's style: "ggml-cpu : what changed"
TABLE_BEGIN = "<!-- table: written by scripts/patches.py export -->"
TABLE_END = "<!-- table end -->"

# Everything that could make an exported patch depend on the machine is pinned here. The identity is the
# committer's, of throw-away commits; an author always comes from the patch, or from whoever edits.
GIT_ENV = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "LC_ALL": "C",
    "TZ": "UTC",
    "GIT_COMMITTER_NAME": "pyspac",
    "GIT_COMMITTER_EMAIL": "pyspac@localhost",
}
GIT_ENV_BASE = {
    "GIT_AUTHOR_NAME": "pyspac",
    "GIT_AUTHOR_EMAIL": "pyspac@localhost",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00+0000",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00+0000",
}
GIT_OPTIONS = (
    "-c", "core.autocrlf=false", "-c", "core.safecrlf=false", "-c", "core.fileMode=true", "-c", "gc.auto=0",
    "-c", "commit.gpgSign=false", "-c", "diff.renames=true", "-c", "diff.algorithm=myers",
    "-c", "core.quotePath=true",
)  # fmt: skip
FORMAT_PATCH = (
    "format-patch", "--stdout", "--zero-commit", "--full-index", "--no-stat", "--no-signature",
    "--keep-subject", "--no-numbered", "--no-thread", "--no-attach", "--unified=3",
)  # fmt: skip


class PatchError(Exception):
    """A message for the user: what failed, with which values, what to do."""


# --- pin ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pin:
    """The one place that names the llama.cpp commit: cmake/pin.json."""

    url: str
    commit: str
    tag: str
    sdist_name: str
    sdist_version: str
    sdist_sha256: str
    sdist_tree: str

    @property
    def sdist_stem(self) -> str:
        return f"{self.sdist_name.replace('-', '_')}-{self.sdist_version}"

    @property
    def requirement(self) -> str:
        return f"{self.sdist_name}=={self.sdist_version}"


def read_pin() -> Pin:
    pin = json.loads(PIN_FILE.read_text())
    llama, sdist = pin["llama_cpp"], pin["sdist"]
    return Pin(
        url=llama["url"],
        commit=llama["commit"],
        tag=llama["tag"],
        sdist_name=sdist["name"],
        sdist_version=sdist["version"],
        sdist_sha256=sdist["sha256"],
        sdist_tree=sdist["tree"],
    )


# --- patches ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Patch:
    """One file of patches/; `name` is its path there, such as upstream/0001-ggml-cpu-skip.patch."""

    name: str
    text: str
    subject: str = ""
    trailers: dict[str, str] = field(default_factory=dict)
    paths: tuple[str, ...] = ()  # files of llama.cpp that it touches
    n_added: int = 0
    n_removed: int = 0

    @property
    def folder(self) -> str:
        return self.name.split("/")[0]

    @property
    def number(self) -> int:
        return int(self.name.split("/")[1][:4])

    @property
    def slug(self) -> str:
        return self.name.split("/")[1][5:].removesuffix(".patch")

    @property
    def size(self) -> str:
        return f"+{self.n_added} -{self.n_removed}"

    @property
    def status(self) -> str:
        return self.trailers.get("Upstream-Status", "")


def parse_patch(name: str, text: str) -> Patch:
    head, _, diff = text.partition("\ndiff --git ")
    diff = "diff --git " + diff
    return Patch(
        name=name,
        text=text,
        subject=parse_subject(head),
        trailers=dict(re.findall(r"^([A-Z][A-Za-z]*(?:-[A-Z][A-Za-z]*)+): +(.+)$", head, re.MULTILINE)),
        paths=tuple(dict.fromkeys(re.findall(r"^diff --git a/(?:\S+) b/(\S+)$", diff, re.MULTILINE))),
        n_added=len(re.findall(r"^\+(?!\+\+ )", diff, re.MULTILINE)),
        n_removed=len(re.findall(r"^-(?!-- )", diff, re.MULTILINE)),
    )


def parse_subject(head: str) -> str:
    """The subject of a mail header, unfolded."""
    found = re.search(r"^Subject: (.*(?:\n[ \t].*)*)", head, re.MULTILINE)
    return re.sub(r"\n[ \t]", " ", found.group(1)) if found else ""


def read_patches(root: Path = PATCH_DIR) -> list[Patch]:
    """All patches, in the order in which they apply."""
    names = [
        f"{folder}/{path.name}" for folder in FOLDERS for path in sorted((root / folder).glob("*.patch"))
    ]
    return [parse_patch(name, (root / name).read_text()) for name in names]


def slugify(subject: str) -> str:
    """File name part of a subject, by the rules of git format-patch."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", subject).strip("-.")[:52].rstrip("-.")


# --- the pristine tree --------------------------------------------------------------------------------------


def pristine_tree(build: Path, pin: Pin) -> Path:
    """The unpatched tree: the submodule, or the one inside the source distribution of the Python bindings."""
    submodule = ROOT / "llama.cpp"
    if (submodule / "CMakeLists.txt").is_file():
        check_submodule(submodule, pin)
        return submodule
    return extract_sdist(find_sdist(build, pin), build / "sdist", pin)


def check_submodule(submodule: Path, pin: Pin) -> None:
    if not (submodule / ".git").exists():
        return  # an archive of a checkout: nothing to compare with
    commit = git(submodule, "rev-parse", "HEAD").strip()
    if commit != pin.commit:
        raise PatchError(
            f"llama.cpp/ is at {commit}, but cmake/pin.json names {pin.commit}.\n"
            "Run `git submodule update llama.cpp`, or move the pin (docs/patches.md)."
        )


def find_sdist(build: Path, pin: Pin) -> Path:
    """The checked archive; PYSPAC_SDIST names one that is already on this machine."""
    given = os.environ.get("PYSPAC_SDIST")
    archive = Path(given) if given else build / "sdist" / f"{pin.sdist_stem}.tar.gz"
    if not archive.is_file() and not given:
        download_sdist(archive.parent, pin)
    if not archive.is_file():
        raise PatchError(f"{archive} is missing. Unset PYSPAC_SDIST, or let it name {pin.sdist_stem}.tar.gz.")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != pin.sdist_sha256:
        raise PatchError(
            f"{archive} has sha256 {digest}, expected {pin.sdist_sha256}. Delete it and run again."
        )
    return archive


def download_sdist(folder: Path, pin: Pin) -> None:
    """Fetch the archive with pip, which also reads its metadata (a few seconds; it compiles nothing)."""
    folder.mkdir(parents=True, exist_ok=True)
    log(f"fetching the source distribution of {pin.requirement}")
    command = [*find_pip(folder), "download", "--quiet", "--no-deps", "--no-binary", pin.sdist_name]
    command += ["--dest", str(folder), pin.requirement]
    env = {**os.environ, "CMAKE_ARGS": "-DLLAMA_BUILD=OFF"}
    if subprocess.run(command, env=env, stdout=sys.stderr).returncode != 0:
        raise PatchError(
            f"could not fetch {pin.requirement}. llama.cpp/ is empty, so the tree has to come from there:\n"
            "check the connection to the package index, run `git submodule update --init llama.cpp`,\n"
            f"or set PYSPAC_SDIST to a copy of {pin.sdist_stem}.tar.gz."
        )


def find_pip(folder: Path) -> list[str]:
    """A pip that runs. Inside an isolated build sys.path hides it; isolated mode (-I) shows it again."""
    for command in ([sys.executable, "-m", "pip"], [sys.executable, "-I", "-m", "pip"]):
        if subprocess.run([*command, "--version"], capture_output=True).returncode == 0:
            return command
    venv = folder / "venv"
    if not (venv / "bin" / "pip").exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, stdout=sys.stderr)
    return [str(venv / "bin" / "python"), "-m", "pip"]


def extract_sdist(archive: Path, folder: Path, pin: Pin) -> Path:
    """Unpack llama.cpp only. Its stray `.git` is a file that points nowhere: git would trip over it."""
    tree = folder / pin.sdist_stem / pin.sdist_tree
    stamp = folder / "extracted.sha256"
    if stamp.is_file() and stamp.read_text() == pin.sdist_sha256 and (tree / "CMakeLists.txt").is_file():
        return tree
    shutil.rmtree(folder / pin.sdist_stem, ignore_errors=True)
    prefix = f"{pin.sdist_stem}/{pin.sdist_tree}/"
    with tarfile.open(archive) as tar:
        members = (m for m in tar if m.name.startswith(prefix) and m.name != prefix + ".git")
        extract_members(tar, members, folder)
    stamp.write_text(pin.sdist_sha256)
    return tree


def extract_members(tar: tarfile.TarFile, members: Iterator[tarfile.TarInfo], folder: Path) -> None:
    # the filter argument came with security updates: older Pythons do not know it
    options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    for member in members:
        tar.extract(member, folder, **options)  # type: ignore[arg-type]


# --- git ----------------------------------------------------------------------------------------------------


def git(repo: Path, *args: str, env: dict[str, str] | None = None, stdin: str | None = None) -> str:
    """Run git in `repo`, blind to every repository around it and to the user's configuration."""
    ceiling = {"GIT_CEILING_DIRECTORIES": str(repo.resolve().parent)}
    full = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | GIT_ENV | ceiling | (env or {})
    done = subprocess.run(
        ["git", *GIT_OPTIONS, *args], cwd=repo, env=full, input=stdin, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise PatchError(f"git {' '.join(args)} failed in {repo}:\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout


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


def touched(patches: Sequence[Patch]) -> list[str]:
    return sorted({path for patch in patches for path in patch.paths})


# --- export -------------------------------------------------------------------------------------------------


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


# --- the patched tree ---------------------------------------------------------------------------------------


def prepare(build: Path, force: bool = False) -> Path:
    """The patched tree, redone only when pin or patches change; a file whose content stays keeps its time."""
    pin, patches, target = read_pin(), read_patches(), build / "llama.cpp"
    stamp = build / "llama.cpp.stamp"
    wanted = fingerprint(pin, patches)
    with locked(build / "llama.cpp.lock"):
        if not force and stamp.is_file() and stamp.read_text() == wanted and target.is_dir():
            return target
        stamp.unlink(missing_ok=True)
        tree = pristine_tree(build, pin)
        with tempfile.TemporaryDirectory(dir=build) as scratch:
            patched = patch_files(Path(scratch), tree, patches)
            n_written = sync_tree(tree, patched, touched(patches), target)
        stamp.write_text(wanted)
    log(f"llama.cpp {pin.tag} with {len(patches)} patches in {target} ({n_written} files written)")
    return target


def fingerprint(pin: Pin, patches: Sequence[Patch]) -> str:
    """sha256 over pin and patches; asking "does it reverse-apply?" misreports patches that share lines."""
    parts = [pin.commit, pin.sdist_sha256, *(f"{patch.name}\0{patch.text}" for patch in patches)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def patch_files(scratch: Path, tree: Path, patches: Sequence[Patch]) -> Path:
    """The files that patches touch, patched: by plain `git apply`, hidden from repositories around it."""
    copy_into(tree, scratch, touched(patches))
    for patch in patches:
        try:
            git(scratch, "apply", "--whitespace=nowarn", "-", stdin=patch.text)
        except PatchError as error:
            raise PatchError(
                f"patches/{patch.name} does not apply to llama.cpp {read_pin().tag}.\n{error}\n"
                "Either the pin moved or an earlier patch changed the same lines: see docs/patches.md."
            ) from None
    return scratch


def sync_tree(tree: Path, patched: Path, changed: Sequence[str], target: Path) -> int:
    """Make `target` equal to `tree` with `changed` taken from `patched`; return how many files it wrote."""
    wanted = {path: tree / path for path in list_files(tree)}
    for path in changed:
        wanted.pop(path, None)
        if (patched / path).is_file():
            wanted[path] = patched / path
    for path in set(list_files(target)) - set(wanted):
        (target / path).unlink()
    return sum(copy_if_different(source, target / path) for path, source in wanted.items())


def list_files(tree: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(tree):
        folders[:] = [name for name in folders if name not in (".git", "__pycache__")]
        yield from (os.path.relpath(f"{folder}/{name}", tree) for name in files if name != ".git")


def copy_if_different(source: Path, target: Path) -> bool:
    # a written file gets the present time, not its source's: make and ninja rebuild only what is newer
    if target.is_file() and filecmp.cmp(source, target, shallow=False):
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    shutil.copymode(source, target)
    return True


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One at a time: several presets may configure at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


# --- check and status ---------------------------------------------------------------------------------------


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
        problems.append(f"hooks/, and hooks/ alone, carries 'Upstream-Status: {HOOK_STATUS}'")
    if patch.folder == "upstream" and re.search(r"^[+].*(pyspac|\bspac_)", patch.text, re.MULTILINE):
        problems.append("an upstream patch adds lines that name pyspac: it could not be submitted")
    if patch.folder == "hooks" and patch.n_removed > 2 and "Removed-Lines" not in patch.trailers:
        problems.append(f"a hook removes {patch.n_removed} lines; explain in a 'Removed-Lines:' trailer why")
    return [f"patches/{patch.name}: {problem}" for problem in problems]


def readme_problems(patches: Sequence[Patch]) -> list[str]:
    text = README.read_text()
    if table_block(patches) not in text:
        return ["patches/README.md: the table differs from the patches; run `scripts/patches.py table`"]
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


def total_size(patches: Sequence[Patch]) -> str:
    return f"+{sum(p.n_added for p in patches)} -{sum(p.n_removed for p in patches)}"


def table_rows(patches: Sequence[Patch]) -> list[tuple[str, ...]]:
    return [
        (f"`{p.name}`", p.subject, p.size, ", ".join(f"`{path}`" for path in p.paths), p.status)
        for p in patches
    ]


def table_block(patches: Sequence[Patch]) -> str:
    lines = [TABLE_BEGIN, "| patch | subject | lines | files | upstream status |", "|---|---|---|---|---|"]
    lines += ["| " + " | ".join(row) + " |" for row in table_rows(patches)]
    lines += [f"| total: {len(patches)} | | {total_size(patches)} | | |", TABLE_END]
    return "\n".join(lines)


def write_table(patches: Sequence[Patch]) -> None:
    text = README.read_text()
    begin, end = text.index(TABLE_BEGIN), text.index(TABLE_END) + len(TABLE_END)
    README.write_text(text[:begin] + table_block(patches) + text[end:])


# --- command line -------------------------------------------------------------------------------------------


def cmd_prepare(args: argparse.Namespace) -> None:
    print(prepare(args.build, args.force))


def cmd_apply(args: argparse.Namespace) -> None:
    pin, patches = read_pin(), read_patches()
    make_repo(args.git, pristine_tree(args.build, pin), pin)
    apply_to_repo(args.git, patches)
    log(f"{args.git}: llama.cpp {pin.tag} as tag `pin`, then {len(patches)} commits")


def cmd_export(args: argparse.Namespace) -> None:
    patches = export_repo(args.git, read_patches())
    write_patches(patches)
    for patch in patches:
        for problem in header_problems(patch):
            log(f"warning: {problem}")
        print(patch.name)


def cmd_check(args: argparse.Namespace) -> None:
    patches = read_patches()
    problems = [problem for patch in patches for problem in header_problems(patch)]
    problems += readme_problems(patches) + round_trip_problems(args.build, patches)
    if problems:
        raise PatchError("\n".join(problems))
    log(f"{len(patches)} patches: headers complete, table in step, apply and export agree")


def cmd_status(args: argparse.Namespace) -> None:
    patches = read_patches()
    for patch in patches:
        print(f"{patch.name}\n    {patch.size}  {patch.status}\n    {' '.join(patch.paths)}")
    print(f"total: {len(patches)} patches, {total_size(patches)}")


def cmd_table(args: argparse.Namespace) -> None:
    write_table(read_patches())


def cmd_sdist(args: argparse.Namespace) -> None:
    print(find_sdist(args.build, read_pin()))


def log(text: str) -> None:
    print(f"patches.py: {text}", file=sys.stderr)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="build folder (default: build)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: object, help: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help)
        command.set_defaults(run=run)
        return command

    command = add("prepare", cmd_prepare, "make or refresh the patched tree; print its path")
    command.add_argument("--force", action="store_true", help="compare every file even if nothing changed")
    for name, run, help in (
        ("apply", cmd_apply, "make a git repository with the patches as commits"),
        ("export", cmd_export, "write patches/ from such a repository"),
    ):
        add(name, run, help).add_argument(
            "--git", type=Path, required=True, metavar="DIR", help="the repository"
        )
    add("check", cmd_check, "apply, export, compare; check headers and the table")
    add("status", cmd_status, "print every patch with its size and status")
    add("table", cmd_table, "rewrite the table in patches/README.md")
    add("sdist", cmd_sdist, "fetch the pinned source distribution; print its path")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    args.build = args.build.resolve()
    try:
        args.run(args)
    except PatchError as error:
        log(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
