"""The patch queue on llama.cpp: the pinned tree and patches/ in, a patched tree or a git repository out.

    prepare          patched tree in build/llama.cpp, touching only files whose content changes
    apply --git DIR  git repository: the pinned tree (tag `pin`), then one commit per patch
    export --git DIR patches/ from that repository's commits, and the table in patches/README.md
    check            everything that tests/test_patches.py holds, without a compiler
    status           the table: lines, files, upstream status

Needs the standard library and git only: CMake runs it before anything is installed. See docs/patches.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.patches.check import header_problems, readme_problems, round_trip_problems
from tools.patches.pin import ROOT, PatchError, log, read_pin
from tools.patches.pristine import find_sdist, pristine_tree
from tools.patches.queue import read_patches
from tools.patches.repository import apply_to_repo, export_repo, make_repo, write_patches
from tools.patches.table import total_size, write_table
from tools.patches.tree import prepare


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


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.patches", description=(__doc__ or "").split("\n")[0]
    )
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
    except (PatchError, OSError) as error:  # such as a disk that is full
        log(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
