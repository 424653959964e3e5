"""The wheels of dist/ in an empty environment, with no compiler, cmake or git on the PATH: do they run?

    python -m tools.wheels.check dist

What they depend on comes from the package index, as wheels. A new user's walk (tests/test_user_walk.py) goes
with what was installed. Exit code 1 if something does not run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

PYTHONS: Final = ("python3.11", "python3.12", "python3.13", "python3.14")
ABSENT: Final = ("cc", "c++", "gcc", "g++", "clang", "cmake", "ninja", "make", "git", "nvcc")
ROOT: Final = Path(__file__).resolve().parents[2]
WALK: Final = ROOT / "tests/test_user_walk.py"
PROGRAM: Final = """
from importlib.resources import files
from llama_cpp import Llama
llm = Llama(str(files("pyspac") / "models" / "demo-moe.gguf"), verbose=False)
text = llm("def main():", max_tokens=8, temperature=0)["choices"][0]["text"]
assert text.strip(), "the bindings gave no text"
from pyspac import _native
assert "site-packages" in str(_native.lib_dir()), _native.lib_dir()
"""


class Installed:
    """An environment with the wheels, and a PATH that has only the environment's own programs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "venv" / "bin"
        # no variable of a checkout or of a compiler comes through
        self.environment = {"PATH": str(self.bin), "HOME": str(folder), "LANG": "C.UTF-8"}

    def install(self, wheels: list[Path], python: str) -> None:
        subprocess.run([python, "-m", "venv", str(self.bin.parent)], check=True)
        found = [name for name in ABSENT if shutil.which(name, path=str(self.bin))]
        assert not found, f"the environment has {found}"
        # pip has the caller's settings, for the package index; the PATH is as empty
        environment = {**os.environ, "PATH": str(self.bin)}
        self.run(
            "python", "-m", "pip", "install", "-q", "--only-binary", ":all:", *map(str, wheels), **environment
        )

    def run(self, program: str, *arguments: str, **environment: str) -> str:
        """What it printed. Raises CalledProcessError."""
        done = subprocess.run(
            [str(self.bin / program), *arguments],
            cwd=self.folder,
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return done.stdout


def check(folder: Path) -> None:
    """With every Python that is there. Raises CalledProcessError where a program fails."""
    for python in pythons():
        print(f"with {python}", flush=True)
        check_with(python, folder)


def pythons() -> list[str]:
    """This one, and others that the wheels are for: Debian 12 has 3.11, Ubuntu 24.04 3.12."""
    this = f"python3.{sys.version_info.minor}"
    others = [name for name in PYTHONS if name != this and _has_venv(name)]
    return [sys.executable, *others]


def _has_venv(python: str) -> bool:
    """pyenv leaves names of versions that are not chosen, and Debian's Python may have no venv."""
    if shutil.which(python) is None:
        return False
    return (
        subprocess.run([python, "-c", "import ensurepip"], capture_output=True, check=False).returncode == 0
    )


def check_with(python: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="pyspac-wheel-") as name:
        installed = Installed(Path(name))
        wheels = [*folder.glob("pyspac-*.whl"), *folder.glob("llama_cpp_python-*.whl")]
        installed.install(wheels, python)
        installed.run("python", "-c", PROGRAM)
        print("llama_cpp: Llama runs", flush=True)
        installed.run("pyspac", "models")  # llama-server and its libraries
        installed.run("pyspac", "demo")
        print("pyspac demo: runs", flush=True)
        models = next(installed.bin.parent.glob("lib/python*/site-packages/pyspac/models"))
        extras = json.loads((models.parent / "bin" / "pyspac-build.json").read_text())
        print(f"llama-server: HTTPS {extras['https']}, web page {extras['ui']}", flush=True)
        for device in ("none", "emulated"):
            arguments = (str(models / "demo-moe.gguf"), "-p", "def main():", "-n", "16", "--device", device)
            assert installed.run("pyspac", "run", *arguments).strip(), (
                f"pyspac run --device {device}: no text"
            )
            print(f"pyspac run --device {device}: runs", flush=True)
        walk(installed.bin / "pyspac")


def walk(pyspac: Path) -> None:
    """What a new user does, with the installed program. Raises CalledProcessError."""
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", str(WALK)]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYSPAC_WALK": str(pyspac)})


if __name__ == "__main__":
    try:
        check(Path(sys.argv[1]).resolve())
    except (AssertionError, subprocess.CalledProcessError) as error:
        sys.exit(f"the wheels do not work where they are installed: {error}")
