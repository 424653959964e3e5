"""The package's folders and the engine's rooms: no circle, nothing uses what it may not, speculation is
pure, and no function or file is long.

Every import counts: at the top of a module, inside a function, and under TYPE_CHECKING. A module also needs
the packages that it lies in. In C++ every include of the engine's own headers counts; NAME.h and NAME.cpp are
one file.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Final

import pytest
from conftest import ROOT

PACKAGE: Final = ROOT / "pyspac"
MAX_FUNCTION_LINES: Final = 60
MAX_FILE_LINES: Final = 400  # of the package

# folder -> the folders that its modules may import from
FOLDERS: Final = {
    "_native": set[str](),
    "engine": {"_native"},
    "model": {"engine"},
    "scheduler": {"engine"},
    "speculation": {"engine"},
    "forward": {"_native", "engine", "model", "scheduler", "speculation"},
    "train": {"_native", "engine", "model", "forward"},
    "lab": {"engine", "model", "scheduler", "speculation"},
    "server": {"_native", "engine", "model", "scheduler", "speculation", "forward"},
    "talk": {"engine", "model", "scheduler", "speculation", "server"},
    "drop_in": {"_native", "engine", "model", "scheduler", "speculation", "forward", "server", "talk"},
    "commands": {
        "talk",
        "_native",
        "engine",
        "model",
        "scheduler",
        "speculation",
        "forward",
        "lab",
        "server",
        "train",
    },
}
# room of engine/src -> the rooms that its files may include headers of; each stands below those that it uses
ENGINE: Final = ROOT / "engine" / "src"
ROOMS: Final = {
    "base": set[str](),
    "board": {"base"},
    "layers": {"base"},
    "cache": {"base", "layers"},
    "tier": {"base", "board", "layers"},
    "host": {"base", "layers", "cache", "tier"},
    "plan": {"base", "layers", "cache", "host"},
    "graph": {"board", "layers", "cache"},
    "untried": {"base", "layers", "cache", "graph"},  # no GPU has run it; its door: untried.h
    "decide": {"base", "board", "layers", "cache", "tier"},
    "split": {"base", "board", "layers", "cache", "host", "plan", "graph", "untried", "decide"},
    "draft": {"base"},
    "keep": {"base"},
    "trace": {"base", "draft"},
}
MAX_TOP_FILES: Final = 6  # engine, the C interface, attaching

# for all folders; they import only each other
SHARED: Final = ("checks", "errors", "ledger", "openmp_spin", "units")
FRONT: Final = ("__main__", "cli")  # they start the commands

# they run without the native library, the lab for the most part: all that they know of the engine
WITHOUT_NATIVE: Final = {
    "scheduler": {
        "pyspac.engine.ahead",
        "pyspac.engine.board",
        "pyspac.engine.layout_groups",
        "pyspac.engine.step",
        "pyspac.engine.values",
    },
    "lab": {"pyspac.engine.ahead", "pyspac.engine.board", "pyspac.engine.step", "pyspac.engine.values"},
    "speculation": {"pyspac.engine.step"},
}

# what arithmetic needs; neither files nor clocks nor processes are among it
PURE: Final = {
    "__future__",
    "abc",
    "bisect",
    "collections",
    "dataclasses",
    "functools",
    "itertools",
    "math",
    "numpy",
    "statistics",
    "typing",
}
INPUT_OUTPUT: Final = {"open", "print", "input", "exec", "eval", "__import__"}


@cache
def modules() -> dict[str, Path]:
    """All modules and packages of pyspac by their full names."""
    return {_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text(encoding="utf-8"))


def imported(name: str) -> Iterator[str]:
    """Full names of what a module imports, of pyspac and of others; a name in a module is that module."""
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: a relative import"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in modules() else node.module


def parents(name: str) -> Iterator[str]:
    """The packages that Python imports before it."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def own_imports(name: str) -> set[str]:
    """The modules of pyspac that `name` imports."""
    return {other for other in imported(name) if other in modules()} - {name}


def folder(name: str) -> str:
    """The folder under pyspac, or the module that lies beside the folders; "" for pyspac itself."""
    return ".".join(name.split(".")[1:2])


def test_every_folder_is_listed() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == set(FOLDERS)
    assert {path.stem for path in PACKAGE.glob("*.py")} == {*SHARED, *FRONT, "__init__"}
    assert {
        name for name in modules() if folder(name) in FOLDERS and len(own_imports(name))
    }  # they are found


def test_there_is_no_circle_of_imports() -> None:
    """`prepare` raises CycleError with the circle."""
    graph = {name: own_imports(name) | set(parents(name)) for name in modules()}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_uses_only_what_it_may(name: str) -> None:
    allowed = {"", name, *SHARED, *FOLDERS[name]}
    wrong = [
        f"{module} imports {other}"
        for module in modules()
        if folder(module) == name
        for other in sorted(own_imports(module))
        if folder(other) not in allowed
    ]
    assert wrong == []


def test_the_folders_have_an_order() -> None:
    TopologicalSorter(FOLDERS).prepare()


@pytest.mark.parametrize("name", SHARED)
def test_what_all_share_imports_no_folder(name: str) -> None:
    assert {folder(other) for other in own_imports(f"pyspac.{name}")} <= set(SHARED)


def test_pyspac_itself_imports_nothing() -> None:
    """Its public names come on first use."""
    assert own_imports("pyspac") == set()


@pytest.mark.parametrize("name", WITHOUT_NATIVE)
def test_of_the_engine_only_board_and_steps_are_known(name: str) -> None:
    used = {other for module in modules() if folder(module) == name for other in own_imports(module)}
    assert {other for other in used if folder(other) == "engine"} == WITHOUT_NATIVE[name]


def test_board_and_steps_work_without_the_native_library() -> None:
    code = "import sys; import pyspac.engine.ahead; assert 'pyspac._native' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", [name for name in modules() if folder(name) == "speculation"])
def test_speculation_is_arithmetic(name: str) -> None:
    """No clock, no file, no process: what it decides follows from what it was told."""
    outside = {other.partition(".")[0] for other in imported(name)} - {"pyspac"}
    assert outside - PURE == set()
    names = {node.id for node in ast.walk(tree(name)) if isinstance(node, ast.Name)}
    assert names & INPUT_OUTPUT == set()


def test_programs_are_started_in_one_place() -> None:
    """By what ends them with us; the remover is the one that has to go on."""
    starts = {
        path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if "subprocess." in path.read_text()
    }
    assert starts == {Path("server/child.py"), Path("talk/remover.py")}


def long_functions(path: Path) -> list[str]:
    """Functions with more than MAX_FUNCTION_LINES lines, from `def` to the end."""
    return [
        f"{path.relative_to(ROOT)}: {node.name} has {length} lines"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]


@pytest.mark.parametrize("name", ["pyspac", "tools", "benchmarks", "scripts", "cmake"])
def test_functions_are_short(name: str) -> None:
    assert [said for path in sorted((ROOT / name).rglob("*.py")) for said in long_functions(path)] == []


def test_files_of_the_package_are_short() -> None:
    lengths = {name: path.read_text(encoding="utf-8").count("\n") for name, path in modules().items()}
    assert {name: n for name, n in lengths.items() if n > MAX_FILE_LINES} == {}


@cache
def engine_files() -> dict[str, set[str]]:
    """The engine's files as room/name, of both kinds together, and the others that each includes."""
    paths = [path for path in sorted(ENGINE.rglob("*")) if path.suffix in {".h", ".cpp"}]
    names = {path: path.relative_to(ENGINE).with_suffix("").as_posix() for path in paths}
    graph: dict[str, set[str]] = {name: set() for name in names.values()}
    for path in paths:
        for header in re.findall(r'^#\s*include "([^"]+)"', path.read_text(encoding="utf-8"), re.MULTILINE):
            beside, from_top = path.parent / header, ENGINE / header
            found = beside if beside in names else from_top
            if found in names:
                graph[names[path]].add(names[found])
    return {name: others - {name} for name, others in graph.items()}


def room(name: str) -> str:
    """Of a file of the engine; "" for one at the top."""
    return name.rpartition("/")[0]


def test_every_room_is_listed() -> None:
    assert {room(name) for name in engine_files()} - {""} == set(ROOMS)
    assert sum(1 for name in engine_files() if not room(name)) <= MAX_TOP_FILES
    assert any(room(other) == "base" for other in engine_files()["split/forward"])  # includes are found


def test_the_rooms_have_an_order() -> None:
    names = list(ROOMS)
    wrong = [(name, used) for i, name in enumerate(names) for used in ROOMS[name] - set(names[:i])]
    assert wrong == []


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_uses_only_what_it_may(name: str) -> None:
    files = [(file, others) for file, others in engine_files().items() if room(file) == name]
    wrong = [
        (file, other) for file, others in files for other in others if room(other) not in {name, *ROOMS[name]}
    ]
    assert wrong == []
    unused = ROOMS[name] - {room(other) for _, others in files for other in others}
    assert unused == set(), "the table says more than there is"


def test_there_is_no_circle_of_includes() -> None:
    TopologicalSorter(engine_files()).prepare()


def test_what_no_gpu_has_run_has_one_door() -> None:
    used = {other for file, others in engine_files().items() for other in others if room(file) != "untried"}
    assert {other for other in used if room(other) == "untried"} == {"untried/untried"}
