"""A running model in, its routing out: llama.cpp's eval callback reads each layer's router."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pyspac._native import lib_dir
from pyspac.generate.llama import lib  # type: ignore[attr-defined]
from pyspac.lab.trace import EARLY_MAX, TraceError

_NODE: Final = re.compile(
    rb"ffn_moe_(topk|logits(?:_biased)?|probs|weights(?:_softmax|_norm|_scaled)?)-(\d+)\Z"
)
_ROUTER_TYPES: Final = {0: np.float32, 1: np.float16}  # enum ggml_type
Array = npt.NDArray[Any]


class _Tensor(ctypes.Structure):
    """struct ggml_tensor of the pinned llama.cpp, up to its name."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
    ]


@dataclass(slots=True)
class RoutedLayer:
    """One layer's router in one forward pass: rows are tokens."""

    experts: Array  # [n, n_expert_used] int32
    weights: Array | None = None  # [n, n_expert_used] float32
    logits: Array | None = None  # [n, n_expert] float32
    early: Array | None = None  # [EARLY_MAX, n, n_expert] by the inputs of routers before; NaN: there is none
    draft: Array | None = None  # [n, n_expert] by the draft model's inputs; NaN where it has none

    def first(self, n: int) -> RoutedLayer:
        """The first n tokens alone; views."""
        return RoutedLayer(
            self.experts[:n],
            None if self.weights is None else self.weights[:n],
            None if self.logits is None else self.logits[:n],
            None if self.early is None else self.early[:, :n],
            None if self.draft is None else self.draft[:n],
        )


class RoutingProbe:
    """The eval callback: reads topk, weights and, if wanted, logits of every MoE layer."""

    def __init__(self, *, wants_logits: bool, wants_early: bool, keeps_inputs: bool = False) -> None:
        """Bind ggml's read function; keep `callback` alive as long as the context.

        keeps_inputs: `inputs`, `routers` and `biases` are filled even if nothing is asked early.
        """
        self.wants_logits, self.wants_early = wants_logits, wants_early
        self.keeps_inputs = keeps_inputs or wants_early
        self._wants_scores = self.wants_logits or self.keeps_inputs
        self.layers: dict[int, RoutedLayer] = {}
        self.error: Exception | None = None
        self.callback = lib.ggml_backend_sched_eval_callback(self._on_node)
        self._read = ctypes.CDLL(str(lib_dir() / "libggml-base.so")).ggml_backend_tensor_get
        self._read.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        self._read.restype = None
        self.routers: dict[int, Array] = {}  # [n_expert, n_embd] by layer
        self.biases: dict[int, Array] = {}  # [1, n_expert] by layer, where there is one
        self.inputs: dict[int, Array] = {}  # [n, n_embd] of this pass
        self._logits: dict[int, tuple[Array, Array | None]] = {}

    def take(self) -> dict[int, RoutedLayer]:
        """Return the layers of the last pass and begin again; raise what went wrong inside the callback."""
        if self.error is not None:
            raise self.error
        layers, self.layers = self.layers, {}
        self.inputs.clear()
        self._logits.clear()
        return layers

    def _on_node(self, pointer: int, ask: bool, _user_data: Any) -> bool:
        """Say whether a node is wanted, later read it; nothing may be raised through llama.cpp."""
        tensor = _Tensor.from_address(pointer)
        match = _NODE.match(tensor.name)
        if match is None or (match[1].startswith((b"logits", b"probs")) and not self._wants_scores):
            return not ask
        if not ask and self.error is None:
            try:
                self._note(match[1].decode(), int(match[2]), pointer, tensor)
            except Exception as error:
                self.error = error
        return True

    def _note(self, what: str, il: int, pointer: int, tensor: _Tensor) -> None:
        if what == "logits":
            self._note_logits(il, pointer, tensor)
        elif what in ("logits_biased", "probs"):
            self._add_bias(il, tensor)
        elif what == "topk":
            logits, early = self._logits.get(il, (None, None))
            self.layers[il] = RoutedLayer(self._rows(pointer, tensor, np.int32), None, logits, early)
        elif il in self.layers:
            shape = self.layers[il].experts.shape
            self.layers[il].weights = self._flat(pointer, tensor, np.float32).reshape(shape)

    def _note_logits(self, il: int, pointer: int, tensor: _Tensor) -> None:
        logits = self._rows(pointer, tensor, np.float32)
        if self.keeps_inputs:
            self.inputs[il] = self._source_rows(tensor, 1)
            if il not in self.routers:
                self.routers[il] = self._source_rows(tensor, 0)
        self._logits[il] = (logits, self._early_logits(il, len(logits)) if self.wants_early else None)

    def _add_bias(self, il: int, tensor: _Tensor) -> None:
        """Experts are selected by what a bias makes of the logits; probabilities take one input alone."""
        if not tensor.src[1]:
            return
        bias = self.biases[il] = self._source_rows(tensor, 1)
        logits, early = self._logits[il]
        self._logits[il] = (logits + bias, None if early is None else early + bias)

    def _early_logits(self, il: int, n: int) -> Array:
        """Return [EARLY_MAX, n, n_expert] a layer's router on the inputs of the routers before it."""
        router = self.routers[il]
        early = np.full((EARLY_MAX, n, len(router)), np.nan, np.float32)
        before = [rows for layer, rows in self.inputs.items() if layer < il]
        for at, rows in zip(early, before[::-1], strict=False):
            at[:] = rows[-n:] @ router.T
        return early

    def _source_rows(self, tensor: _Tensor, index: int) -> Array:
        pointer = tensor.src[index]
        source = _Tensor.from_address(pointer)
        if source.type not in _ROUTER_TYPES:
            raise TraceError(
                f"--early and --draft-gate read routers of F32 and F16; this one is of type {source.type}"
            )
        return self._rows(pointer, source, _ROUTER_TYPES[source.type]).astype(np.float32)

    def _rows(self, pointer: int, tensor: _Tensor, dtype: Any) -> Array:
        """Return [ne1, ne0]; rows may lie apart."""
        out = np.empty((tensor.ne[1], tensor.ne[0]), dtype)
        n_bytes = out.itemsize * out.shape[1]
        if tensor.nb[1] == n_bytes:
            self._read(pointer, out.ctypes.data, 0, out.nbytes)
            return out
        for i in range(len(out)):
            self._read(pointer, out[i].ctypes.data, i * tensor.nb[1], n_bytes)
        return out

    def _flat(self, pointer: int, tensor: _Tensor, dtype: Any) -> Array:
        out = np.empty(int(np.prod(list(tensor.ne))), dtype)
        self._read(pointer, out.ctypes.data, 0, out.nbytes)
        return out
