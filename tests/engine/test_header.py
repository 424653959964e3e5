"""spac.h, libspac.so, the Python module and its stubs name the same functions and constants."""

from __future__ import annotations

import ast
import ctypes
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import generate_board_docs

from pyspac import _native
from pyspac._native import build_ffi
from pyspac.errors import EngineError, PyspacError

ROOT = Path(__file__).resolve().parents[2]
CDEF = build_ffi.read_cdef((ROOT / "engine/include/spac.h").read_text())
FUNCTIONS = build_ffi.function_names(CDEF)
CONSTANTS = build_ffi.constant_names(CDEF)


def stub_class() -> ast.ClassDef:
    tree = ast.parse((ROOT / "pyspac/_native/_ffi.pyi").read_text())
    return next(node for node in tree.body if isinstance(node, ast.ClassDef))


def test_reads_a_header():
    # worked by hand: one constant, one enumerator, a pointer result; comments and SPAC_API leave no trace
    header = """
    #define BEFORE 0
    // cdef-begin: note
    #define SPAC_N 3 // comment
    typedef enum spac_e {
        SPAC_E_A = 0, // comment
    } spac_e;
    SPAC_API const char * spac_text(void); // comment
    // cdef-end
    """.replace("\n    ", "\n")
    cdef = build_ffi.read_cdef(header)
    assert build_ffi.function_names(cdef) == ["spac_text"]
    assert build_ffi.constant_names(cdef) == ["SPAC_N", "SPAC_E_A"]
    assert "comment" not in cdef
    assert "SPAC_API" not in cdef
    assert "BEFORE" not in cdef


def test_a_header_without_markers_is_an_error():
    with pytest.raises(ValueError, match="cdef-begin"):
        build_ffi.read_cdef("int f(void);")


def test_every_declaration_is_found():
    assert len(FUNCTIONS) == CDEF.count("(")
    assert len(set(FUNCTIONS)) == len(FUNCTIONS)


def test_every_function_is_exported():
    library = ctypes.CDLL(str(_native.lib_dir() / "libspac.so"))
    assert [name for name in FUNCTIONS if not hasattr(library, name)] == []


def test_every_function_is_stubbed():
    stubbed = [node.name for node in stub_class().body if isinstance(node, ast.FunctionDef)]
    assert stubbed == FUNCTIONS


def test_every_constant_is_stubbed():
    fields = [node.target for node in stub_class().body if isinstance(node, ast.AnnAssign)]
    assert [field.id for field in fields if isinstance(field, ast.Name)] == CONSTANTS


def test_stubs_take_the_arguments_of_the_header():
    for node in stub_class().body:
        if isinstance(node, ast.FunctionDef):
            declared = CDEF.split(f"{node.name}(")[1].split(")")[0]
            n_declared = 0 if declared == "void" else declared.count(",") + 1
            assert len(node.args.posonlyargs + node.args.args) - 1 == n_declared, node.name


def test_the_module_has_everything():
    assert [name for name in FUNCTIONS + CONSTANTS if not hasattr(_native.lib, name)] == []


def test_version_agrees():
    assert _native.lib.spac_abi_version() == _native.lib.SPAC_ABI_VERSION


def test_the_table_of_the_board_is_up_to_date():
    page = generate_board_docs.PAGE.read_text(encoding="utf-8")
    assert generate_board_docs.BEGIN in page
    assert page == generate_board_docs.render(page), (
        "docs/c-abi.md is stale: run python scripts/generate_board_docs.py"
    )


def test_check_raises_with_the_text_of_the_engine():
    board = _native.ffi.new("spac_board **")
    rc = _native.lib.spac_board_open(b"pyspac-test-no-such-board", board)
    with pytest.raises(EngineError) as caught:
        _native.check(rc)
    assert caught.value.status == rc
    assert "pyspac-test-no-such-board" in caught.value.text


def test_check_accepts_success():
    _native.check(_native.lib.SPAC_STATUS_SUCCESS)


def test_a_missing_build_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("PYSPAC_BUILD_DIR", str(tmp_path))
    with pytest.raises(PyspacError, match="make build"):
        _native.lib_dir()


def test_programs_and_libraries_are_where_they_should_be():
    assert (_native.lib_dir() / "libllama.so").is_file()
    assert (_native.bin_dir() / "llama-server").is_file()
