"""What a model's routers choose, by llama.cpp's own callback: to compare what the engine records with."""

from __future__ import annotations

import ctypes
import re
from typing import Any, Final

import numpy as np

from pyspac._native import lib_dir
from pyspac.forward.context import Context, ContextParams
from pyspac.forward.libllama import lib
from pyspac.forward.model import Model
from pyspac.model.geometry import MoeGeometry

_NODE: Final = re.compile(rb"ffn_moe_(topk|logits|weights(?:_softmax|_norm|_scaled)?)-(\d+)")
_GGML: Final = ctypes.CDLL(str(lib_dir() / "libggml-base.so"))
for _name, _result, _args in (
    ("ggml_get_name", ctypes.c_char_p, [ctypes.c_void_p]),
    ("ggml_nelements", ctypes.c_int64, [ctypes.c_void_p]),
    ("ggml_backend_tensor_get", None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]),
):
    getattr(_GGML, _name).restype, getattr(_GGML, _name).argtypes = _result, _args


class Probe:
    """`layers`: of the last pass, by what and layer, [n, width]."""

    def __init__(self, geometry: MoeGeometry) -> None:
        self.geometry = geometry
        self.layers: dict[tuple[str, int], Any] = {}
        self.callback = lib.ggml_backend_sched_eval_callback(self._on_node)

    def _on_node(self, node: int, asks: bool, _user_data: Any) -> bool:
        match = _NODE.fullmatch(_GGML.ggml_get_name(node))
        if match is None or asks:
            return match is not None or not asks
        what = match[1].decode().partition("_")[0]
        n_expert, n_used = self.geometry.n_expert, self.geometry.n_expert_used
        width = n_expert if what == "logits" else n_used
        # the best ones are a view of all that are sorted
        apart = n_expert if what == "topk" else width
        n_rows = _GGML.ggml_nelements(node) // width
        rows = np.empty((n_rows, width), np.int32 if what == "topk" else np.float32)
        for i, row in enumerate(rows):
            _GGML.ggml_backend_tensor_get(node, row.ctypes.data, i * apart * 4, row.nbytes)
        self.layers[what, int(match[2])] = rows
        return True


class ProbedContext(Context):
    """A context with a probe."""

    def __init__(self, model: Model, params: ContextParams, probe: Probe) -> None:
        self.probe = probe
        super().__init__(model, params)

    def _c_params(self) -> Any:
        c_params = super()._c_params()
        c_params.cb_eval = self.probe.callback
        return c_params
