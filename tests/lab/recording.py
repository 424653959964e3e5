"""The engine's recording of contexts of this process: watch them, decode, read what was written."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from pyspac._native import lib_dir
from pyspac.engine.attached import TRACE
from pyspac.forward.context import Context
from pyspac.lab.raw_trace import RawPass, read_passes


class Recording:
    """The first context that is watched is the target; `adds` as PYSPAC_TRACE_ADD has them."""

    def __init__(self, path: Path, *adds: str) -> None:
        self.path, self.adds = path, adds
        self._library = ctypes.CDLL(str(lib_dir() / "libspac.so"))
        self._library.spac_attach_from_env.restype = ctypes.c_bool

    def watch(self, context: Context) -> bool:
        """Whether it is recorded from now on."""
        assert context.ptr is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("PYSPAC_CACHE", raising=False)
            patch.setenv(TRACE, str(self.path))
            patch.setenv("PYSPAC_TRACE_ADD", ",".join(self.adds))
            return bool(self._library.spac_attach_from_env(ctypes.c_void_p(context.ptr)))

    def passes(self) -> list[RawPass]:
        with self.path.open("rb") as file:
            return list(read_passes(file))
