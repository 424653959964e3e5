"""upstream/0026: a buffer of ggml's that is cleared is zero, and takes memory only when it is used."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Final

import pytest

from pyspac._native import bin_dir

_GGML: Final = ctypes.CDLL(str(bin_dir() / "libggml-base.so"))
_GGML.ggml_backend_cpu_buffer_type.restype = ctypes.c_void_p
_GGML.ggml_backend_buft_alloc_buffer.restype = ctypes.c_void_p
_GGML.ggml_backend_buft_alloc_buffer.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_GGML.ggml_backend_buffer_get_base.restype = ctypes.c_void_p
_GGML.ggml_backend_buffer_get_base.argtypes = [ctypes.c_void_p]
_GGML.ggml_backend_buffer_clear.argtypes = [ctypes.c_void_p, ctypes.c_uint8]
_GGML.ggml_backend_buffer_clear.restype = None
_GGML.ggml_backend_buffer_free.argtypes = [ctypes.c_void_p]
_GGML.ggml_backend_buffer_free.restype = None
_MIB: Final = 1 << 20


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("n_bytes", [1, 64, 4095, 4096, 8191, 3 * 4096 + 5, 40 * _MIB + 777])
def test_cleared_is_zero(n_bytes: int) -> None:
    """All of it and nothing beside it, whatever was there: pages, and what is none at both ends."""
    buffer = _GGML.ggml_backend_buft_alloc_buffer(_GGML.ggml_backend_cpu_buffer_type(), n_bytes + 64)
    base = _GGML.ggml_backend_buffer_get_base(buffer)
    size = _size(buffer)
    for value, expected in ((0xFF, 0xFF), (0, 0), (0, 0), (7, 7), (0, 0)):
        _GGML.ggml_backend_buffer_clear(buffer, value)
        assert ctypes.string_at(base, size) == bytes([expected]) * size
    _GGML.ggml_backend_buffer_free(buffer)


def test_cleared_takes_no_memory() -> None:
    buffer = _GGML.ggml_backend_buft_alloc_buffer(_GGML.ggml_backend_cpu_buffer_type(), 512 * _MIB)
    before = _resident_bytes()
    _GGML.ggml_backend_buffer_clear(buffer, 0)
    assert _resident_bytes() - before < 64 * _MIB
    _GGML.ggml_backend_buffer_free(buffer)


def _size(buffer: int) -> int:
    get = _GGML.ggml_backend_buffer_get_size
    get.restype, get.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
    return int(get(buffer))
