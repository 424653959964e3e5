"""How Python reaches libspac: `ffi`, `lib`, `check(rc)`, and the folders of the libraries and programs.

Importing it loads the module `_ffi` from the folder of the libraries and points llama-cpp-python at the same
libllama, so it comes before any import of `llama_cpp`. A library that is missing or of another ABI is an
error here, never a silent fallback.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from pyspac.errors import EngineError, PyspacError
from pyspac.openmp_spin import spin_environment

_PACKAGE: Final = Path(__file__).resolve().parent.parent
_PRESETS: Final = ("cuda", "cpu", "debug")  # of a checkout; the first one that is built
_MODULE: Final = "_ffi.abi3.so"


def lib_dir() -> Path:
    """Folder of libllama.so, libspac.so and the module: of the wheel, or of a build in the checkout.

    `PYSPAC_BUILD_DIR` names another build folder, such as build/debug.
    """
    named = os.environ.get("PYSPAC_BUILD_DIR")
    folders = [Path(named).resolve() / "bin"] if named else [_PACKAGE / "bin", *_checkout_folders()]
    for folder in folders:
        if (folder / _MODULE).is_file():
            return folder
    raise PyspacError(
        f"no built engine: {_MODULE} is in none of {', '.join(map(str, folders))}.\n"
        "Run `make build` in the checkout, or let PYSPAC_BUILD_DIR name a build folder."
    )


def bin_dir() -> Path:
    """Folder of llama-server, llama-bench and the other programs: the libraries' own."""
    return lib_dir()


def check(rc: int) -> None:
    """Turn a spac_status into an EngineError that carries the engine's own text."""
    if rc != lib.SPAC_STATUS_SUCCESS:
        raise EngineError(rc, ffi.string(lib.spac_last_error()).decode(errors="replace"))


def _checkout_folders() -> list[Path]:
    return [_PACKAGE.parent / "build" / preset / "bin" for preset in _PRESETS]


def _load(folder: Path) -> ModuleType:
    """Import _ffi by its path. It finds libspac beside itself, and libspac finds libllama there."""
    name = f"{__name__}._ffi"
    loader = importlib.machinery.ExtensionFileLoader(name, str(folder / _MODULE))
    spec = importlib.util.spec_from_file_location(name, loader.path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise PyspacError(
            f"{loader.path} cannot be loaded: {error}.\nRun `make build` (or `pip install .`) again."
        ) from error
    sys.modules[name] = module
    return module


def _check_abi(module: Any) -> None:
    found, wanted = module.lib.spac_abi_version(), module.lib.SPAC_ABI_VERSION
    if found != wanted:
        raise PyspacError(
            f"libspac.so has ABI version {found}, its Python module was built for {wanted}.\n"
            "One of the two is stale: run `make build` again."
        )


def _point_bindings_at(folder: Path) -> None:
    """Make llama-cpp-python load our libllama; too late if it has loaded another one."""
    loaded = "llama_cpp.llama_cpp" in sys.modules
    if loaded and os.environ.get("LLAMA_CPP_LIB_PATH") != str(folder):
        raise PyspacError(
            "llama_cpp was imported before pyspac, on another libllama. Import pyspac's modules first."
        )
    os.environ["LLAMA_CPP_LIB_PATH"] = str(folder)


def _point_openssl_at_certificates() -> None:
    """Let the wheel's own libssl find this system's certificates where Python's finds them."""
    import ssl  # slow, and not needed in a checkout

    paths = ssl.get_default_verify_paths()
    for variable, place in (
        (paths.openssl_cafile_env, paths.cafile),
        (paths.openssl_capath_env, paths.capath),
    ):
        if place is not None:
            os.environ.setdefault(variable, place)


if TYPE_CHECKING:
    from pyspac._native._ffi import ffi as ffi
    from pyspac._native._ffi import lib as lib
else:
    _point_bindings_at(lib_dir())
    if lib_dir() == _PACKAGE / "bin":
        _point_openssl_at_certificates()
    os.environ.update(spin_environment())  # OpenMP reads it when it is loaded
    _ffi = _load(lib_dir())
    _check_abi(_ffi)
    ffi, lib = _ffi.ffi, _ffi.lib
