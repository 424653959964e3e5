"""A loaded model: how to load it in, its vocabulary and a handle for contexts out."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from pyspac.errors import ModelError
from pyspac.forward.libllama import lib
from pyspac.forward.log import take_errors
from pyspac.forward.vocab import Vocab

Progress = Callable[[float], bool]  # gets 0.0 .. 1.0; False stops the loading

# the tensors that llama.cpp's --cpu-moe keeps on the host (common/common.h, LLM_FFN_EXPS_REGEX)
EXPERT_TENSORS: Final = rb"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
ALL_TENSORS: Final = rb"."
ALL_LAYERS: Final = -1
LAZY_MODE_AUTO: Final = 1  # enum llama_lazy_mode
LAZY_MODE_EXPERTS: Final = 3  # experts are mapped, and not read
LOAD_MODE_AUTO: Final = -1  # enum llama_load_mode: mmap
LOAD_MODE_NONE: Final = 0  # read into memory, which is pinned where the device can

lib.llama_backend_init()


class _BuftOverride(ctypes.Structure):
    """struct llama_model_tensor_buft_override, for which the bindings have no class."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParams:
    """How to load a model; handles as in ggml."""

    path: Path
    n_gpu_layers: int = 0  # ALL_LAYERS: all
    devices: tuple[int, ...] = ()  # ggml_backend_dev_t; (): only the CPU
    tensor_split: tuple[float, ...] = ()  # shares of the layers, of each device; (): by free memory
    buft: int | None = None  # ggml_backend_buffer_type_t for the tensors below; None: with their layer
    buft_tensors: bytes = EXPERT_TENSORS  # a regular expression
    use_extra_bufts: bool = True  # False: weights keep the file's layout, which bit-exact comparison needs
    load_mode: int = LOAD_MODE_AUTO
    lazy_mode: int = LAZY_MODE_AUTO


def model_fields(params: ModelParams, keep: list[Any]) -> dict[str, Any]:
    """Fields of llama_model_params; what they point to is added to `keep`, until the model is loaded."""

    def pointer(array: Any) -> int:
        keep.append(array)
        return ctypes.addressof(array)

    fields: dict[str, Any] = {
        "n_gpu_layers": params.n_gpu_layers,
        "use_extra_bufts": params.use_extra_bufts,
        "load_mode": params.load_mode,
        "lazy_mode": params.lazy_mode,
        "devices": pointer((ctypes.c_void_p * (len(params.devices) + 1))(*params.devices, None)),
    }
    if params.tensor_split:
        shares = (ctypes.c_float * lib.llama_max_devices())(*params.tensor_split)
        keep.append(shares)
        fields["tensor_split"] = ctypes.cast(shares, ctypes.POINTER(ctypes.c_float))
    if params.buft is not None:
        rows = (_BuftOverride(params.buft_tensors, params.buft), _BuftOverride(None, None))
        fields["tensor_buft_overrides"] = pointer((_BuftOverride * len(rows))(*rows))
    return fields


class Model:
    """A loaded model; close it after its contexts."""

    def __init__(self, params: ModelParams, progress: Progress | None = None) -> None:
        """Raises ModelError if llama.cpp refuses the file, KeyboardInterrupt if `progress` stopped it."""
        self.path = params.path
        self._is_cancelled = False
        self._keep: list[Any] = []  # what llama.cpp reads through pointers while it loads
        self.ptr: int | None = lib.llama_model_load_from_file(
            os.fsencode(params.path), self._c_params(params, progress)
        )
        self._keep.clear()
        if self._is_cancelled:
            self.close()
            raise KeyboardInterrupt
        if not self.ptr:
            raise ModelError(
                f"{params.path}: llama.cpp cannot load this model{take_errors()}; "
                "check that the architecture is supported and that memory suffices"
            )
        self.vocab = Vocab(self.ptr)

    def _c_params(self, params: ModelParams, progress: Progress | None) -> Any:
        c_params = lib.llama_model_default_params()
        for name, value in model_fields(params, self._keep).items():
            setattr(c_params, name, value)
        if progress is not None:
            c_params.progress_callback = self._progress_callback(progress)
        return c_params

    def _progress_callback(self, progress: Progress) -> Any:
        def report(fraction: float, _user_data: Any) -> bool:
            self._is_cancelled = not progress(fraction)
            return not self._is_cancelled

        callback = lib.llama_progress_callback(report)
        self._keep.append(callback)
        return callback

    @property
    def is_recurrent(self) -> bool:
        """Some or all layers keep a state instead of a key-value cache."""
        return bool(lib.llama_model_is_recurrent(self.ptr) or lib.llama_model_is_hybrid(self.ptr))

    def close(self) -> None:
        if self.ptr:
            lib.llama_model_free(self.ptr)
            self.ptr = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
