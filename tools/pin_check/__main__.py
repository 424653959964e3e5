"""Says what would no longer apply or compile if the pin moved to another llama.cpp tree.

    python -m tools.pin_check DIR              DIR: an unpatched llama.cpp
    python -m tools.pin_check DIR --json -     the same as JSON
    make pin-check TREE=DIR

Every patch is applied to a copy, in order; every name that is not public is looked up; libspac and the
patched sources are compiled, with nothing written. CUDA's sources are not, as they need nvcc, nor
Vulkan's in a build without it.
Exit code 0: all of it fits, 1: something does not, 2: DIR is no llama.cpp tree, or there is no build to take
the compiler's options from.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from tools.patches.pin import ROOT
from tools.patches.queue import read_patches, touched
from tools.pin_check.names import look_up, read_table
from tools.pin_check.report import Report
from tools.pin_check.scratch import apply_patches, copy_tree, is_llama_tree
from tools.pin_check.sources import compile_all, read_commands


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.pin_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    build = Path(os.environ.get("PYSPAC_BUILD_DIR", ROOT / "build" / "cpu"))
    parser.add_argument("tree", type=Path, metavar="DIR", help="an unpatched llama.cpp")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON; - for stdout")
    parser.add_argument("--no-compile", action="store_true", help="only patches and names: a few seconds")
    parser.add_argument("--build", type=Path, default=build, metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilations at once")
    return parser.parse_args(argv)


def what_is_wrong(args: argparse.Namespace) -> str | None:
    """Why the check cannot be made."""
    if not is_llama_tree(args.tree):
        return f"{args.tree} is no llama.cpp tree: it has no include/llama.h. Name the folder that has it."
    if args.json not in (None, "-") and not Path(args.json).absolute().parent.is_dir():
        return f"--json {args.json} is in no folder that exists. Name another file, or - for stdout."
    if not args.no_compile and not (args.build / "compile_commands.json").is_file():
        return f"{args.build} has no compile_commands.json. Run `make build` first, or give --no-compile."
    return None


def check(args: argparse.Namespace) -> Report:
    """All three parts, on a copy that is deleted afterwards."""
    start_s = time.monotonic()
    patches = read_patches()
    with tempfile.TemporaryDirectory(prefix="pyspac-pin-") as folder:
        scratch = copy_tree(args.tree, Path(folder) / "llama.cpp")
        applied = apply_patches(scratch, patches)
        names = look_up(scratch, read_table())
        commands = [] if args.no_compile else read_commands(args.build, scratch, touched(patches))
        sources = compile_all(commands, scratch, args.jobs)
    return Report(args.tree, applied, names, sources, time.monotonic() - start_s)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if complaint := what_is_wrong(args):
        print(f"pin_check: {complaint}", file=sys.stderr)
        return 2
    report = check(args)
    text = json.dumps(report.to_dict(), indent=2)
    if args.json == "-":
        print(text)
    else:
        print("\n".join(report.lines()))
        if args.json:
            Path(args.json).write_text(f"{text}\n", encoding="utf-8")
    return 0 if report.is_ok else 1


if __name__ == "__main__":
    sys.exit(main())
