"""spac.h in, the C source of the module `pyspac._native._ffi` out (cffi, out-of-line API mode).

The text between `cdef-begin` and `cdef-end` in the header is the interface: there is no second copy that
could drift. The compiler then checks every struct, constant and signature against the header itself.

    python build_ffi.py engine/include/spac.h build/cpu/_ffi.c
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

MODULE = "pyspac._native._ffi"


def read_cdef(header: str) -> str:
    """The declarations for cffi: the marked part of the header, without SPAC_API and the board's list."""
    found = re.search(r"// cdef-begin[^\n]*\n(.*)// cdef-end", header, re.DOTALL)
    if found is None:
        raise ValueError("spac.h has no lines `// cdef-begin` and `// cdef-end`")
    # cffi accepts a #define only where nothing follows its number
    text = re.sub(r"\s*//[^\n]*", "", found.group(1))
    text = re.sub(r"\bSPAC_API\s+", "", text)
    return re.sub(r"SPAC_BOARD_FIELDS\(\w+\)", "...;", text)


def function_names(cdef: str) -> list[str]:
    """Every function that the header declares, in its order."""
    return re.findall(r"^[a-z][\w \t*]*?\b(spac_\w+)\(", cdef, re.MULTILINE)


def constant_names(cdef: str) -> list[str]:
    """Every #define and every enumerator."""
    return re.findall(r"^#define\s+(\w+)\s+\d", cdef, re.MULTILINE) + re.findall(
        r"^\s+(SPAC_\w+)\s*=", cdef, re.MULTILINE
    )


def emit(header: Path, target: Path) -> None:
    from cffi import FFI  # only needed here: tests use the readers above without cffi

    ffi = FFI()
    ffi.cdef(read_cdef(header.read_text()))
    ffi.set_source(MODULE, '#include "spac.h"')
    ffi.emit_c_code(str(target))


if __name__ == "__main__":
    emit(Path(sys.argv[1]), Path(sys.argv[2]))
