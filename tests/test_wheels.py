"""Wheels: what is written can be read; the bindings keep their files, and find pyspac's libraries."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from email import message_from_bytes
from pathlib import Path

import pytest
from conftest import ROOT

from tools.patches.pin import PatchError, read_pin
from tools.wheels.__main__ import rename
from tools.wheels.archive import Member, read_wheel, write_wheel
from tools.wheels.bindings import make_bindings

PIN = replace(read_pin(), sdist_version="1.2.3")
METADATA = (
    b"Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: 1.2.3\nRequires-Dist: numpy\n\nVersion: 1.2.3\n"
)
SDIST = {
    "PKG-INFO": METADATA,
    "LICENSE.md": b"MIT\n",
    "llama_cpp/__init__.py": b"from .llama_cpp import *\n",
    "llama_cpp/llama_cpp.py": b"x = 1\n",
    "vendor/llama.cpp/CMakeLists.txt": b"",
}
PROGRAM = Member(b"\x7fELF", 0o100755)


def make_sdist(folder: Path, files: dict[str, bytes]) -> Path:
    path = folder / "bindings.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(f"{PIN.sdist_stem}/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def test_a_wheel_lists_all_of_its_files_and_keeps_their_modes(tmp_path: Path) -> None:
    members = {"a/tool": PROGRAM, "a-1.dist-info/METADATA": Member(b"Name: a\n")}
    path = tmp_path / "dist" / "a-1-py3-none-any.whl"
    write_wheel(path, members)
    assert read_wheel(path) == members
    with zipfile.ZipFile(path) as archive:
        record = archive.read("a-1.dist-info/RECORD").decode().splitlines()
    digest = base64.urlsafe_b64encode(hashlib.sha256(PROGRAM.data).digest()).decode().rstrip("=")
    assert record[0] == f"a/tool,sha256={digest},4"
    assert record[-1] == "a-1.dist-info/RECORD,,"


def test_the_bindings_are_python_files_and_their_licence(tmp_path: Path) -> None:
    wheel = make_bindings(make_sdist(tmp_path, SDIST), tmp_path, PIN)
    assert wheel.name == "llama_cpp_python-1.2.3+pyspac-py3-none-any.whl"
    members = read_wheel(wheel)
    info = "llama_cpp_python-1.2.3+pyspac.dist-info"
    assert set(members) == {
        "llama_cpp/__init__.py",
        "llama_cpp/llama_cpp.py",
        *(f"{info}/{name}" for name in ("METADATA", "WHEEL", "licenses/LICENSE.md")),
    }
    metadata = message_from_bytes(members[f"{info}/METADATA"].data)
    assert metadata["Version"] == "1.2.3+pyspac"
    assert metadata["Requires-Dist"] == "numpy"
    assert members["llama_cpp/__init__.py"].data.endswith(SDIST["llama_cpp/__init__.py"])
    assert members["llama_cpp/llama_cpp.py"].data == SDIST["llama_cpp/llama_cpp.py"]


def test_an_archive_without_a_licence_is_refused(tmp_path: Path) -> None:
    files = {name: data for name, data in SDIST.items() if name != "LICENSE.md"}
    with pytest.raises(PatchError, match=r"has no LICENSE\.md"):
        make_bindings(make_sdist(tmp_path, files), tmp_path, PIN)


def test_another_name_needs_other_packages_and_keeps_the_programs(tmp_path: Path) -> None:
    wheel = tmp_path / "pyspac-0.1.0-cp311-abi3-linux_x86_64.whl"
    metadata = Member(
        b"Metadata-Version: 2.1\nName: pyspac\nVersion: 0.1.0\nRequires-Dist: numpy\n\nName: none\n"
    )
    write_wheel(wheel, {"pyspac/bin/llama-server": PROGRAM, "pyspac-0.1.0.dist-info/METADATA": metadata})
    renamed = rename(wheel, "pyspac-cuda12", ("nvidia-cublas-cu12",))
    assert renamed.name == "pyspac_cuda12-0.1.0-cp311-abi3-linux_x86_64.whl"
    members = read_wheel(renamed)
    assert members["pyspac/bin/llama-server"] == PROGRAM
    read = message_from_bytes(members["pyspac_cuda12-0.1.0.dist-info/METADATA"].data)
    assert (read["Name"], read.get_all("Requires-Dist")) == ("pyspac-cuda12", ["nvidia-cublas-cu12", "numpy"])


def test_the_bindings_alone_find_the_libraries() -> None:
    """`import llama_cpp` before any of pyspac's modules, as in a program that was written for it."""
    environment = {name: value for name, value in os.environ.items() if name != "LLAMA_CPP_LIB_PATH"}
    program = "import llama_cpp; print(llama_cpp.llama_cpp._lib._name)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    from pyspac._native import lib_dir

    assert done.stdout.strip() == str(lib_dir() / "libllama.so")
