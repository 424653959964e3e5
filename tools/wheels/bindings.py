"""The Python bindings (llama-cpp-python) as a wheel of only Python files, which load pyspac's libllama.

    python -m tools.wheels.bindings dist      prints the wheel's path

The package index has them as source only, and installing that asks for a compiler. Here the Python files of
the pinned source distribution go into a wheel as they are, with their licence; two lines more let `import
llama_cpp` find the libraries. Its version is the pinned one with the local label `pyspac`, which satisfies
`llama-cpp-python==` that version. Needs the standard library only: `make` runs it before anything is
installed.
"""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path
from typing import Final

from tools.patches.pin import ROOT, PatchError, Pin, log, read_pin
from tools.patches.pristine import find_sdist
from tools.wheels.archive import Member, write_wheel

LOCAL_LABEL: Final = "pyspac"
_FIND_LIBRARIES: Final = b"""import os as _os
if "LLAMA_CPP_LIB_PATH" not in _os.environ: import pyspac._native  # added by pyspac: the libraries are there

"""
_WHEEL: Final = b"Wheel-Version: 1.0\nGenerator: pyspac\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def make_bindings(archive: Path, folder: Path, pin: Pin) -> Path:
    """The wheel's path. Raises PatchError where the archive has no file that is needed."""
    version = f"{pin.sdist_version}+{LOCAL_LABEL}"
    name = f"{pin.sdist_name.replace('-', '_')}-{version}"
    members: dict[str, Member] = {}
    with tarfile.open(archive) as tar:
        for entry in tar:
            path = entry.name.removeprefix(f"{pin.sdist_stem}/")
            if path.startswith("llama_cpp/") or path in ("PKG-INFO", "LICENSE.md"):
                source = tar.extractfile(entry)
                if source is not None:
                    members[path] = Member(source.read())
    missing = {"llama_cpp/__init__.py", "PKG-INFO", "LICENSE.md"} - set(members)
    if missing:
        raise PatchError(f"{archive} has no {', '.join(sorted(missing))}: is it {pin.requirement}?")

    init = members["llama_cpp/__init__.py"].data
    members["llama_cpp/__init__.py"] = Member(_FIND_LIBRARIES + init)
    metadata = members.pop("PKG-INFO").data
    old, new = f"\nVersion: {pin.sdist_version}\n", f"\nVersion: {version}\n"
    members[f"{name}.dist-info/METADATA"] = Member(metadata.replace(old.encode(), new.encode(), 1))
    members[f"{name}.dist-info/WHEEL"] = Member(_WHEEL)
    members[f"{name}.dist-info/licenses/LICENSE.md"] = members.pop("LICENSE.md")
    target = folder / f"{name}-py3-none-any.whl"
    write_wheel(target, members)
    return target


if __name__ == "__main__":
    try:
        pin = read_pin()
        print(make_bindings(find_sdist(ROOT / "build", pin), Path(sys.argv[1]), pin))
    except PatchError as error:
        log(str(error))
        sys.exit(1)
