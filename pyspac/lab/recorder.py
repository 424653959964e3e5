"""A running model in, a routing trace out: llama.cpp's eval callback reads each layer's router as it is
computed.

`RoutingProbe` is the callback; `TracedContext` a context that carries one and knows which tokens were taken
back. The graph is stock's, evaluated piece by piece: results are the same, only slower.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pyspac._native import lib_dir
from pyspac.generate.decode import Generation, Interrupt
from pyspac.generate.llama import Context, ContextParams, Model, lib  # type: ignore[attr-defined]
from pyspac.generate.session import Session
from pyspac.lab.trace import NOT_RUN, TokenStatus, Trace, TraceError, TraceGeometry
from pyspac.model.geometry import read_geometry
from pyspac.model.gguf_header import GgufHeader, read_header

_NODE: Final = re.compile(rb"ffn_moe_(topk|logits|weights(?:_softmax|_norm|_scaled)?)-(\d+)\Z")
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
class _Layer:
    """One layer's router in one forward pass: rows are tokens."""

    experts: Array  # [n, n_expert_used] int32
    weights: Array | None = None  # [n, n_expert_used] float32
    logits: Array | None = None  # [n, n_expert] float32
    early: Array | None = None


@dataclass(slots=True)
class Pass:
    """One forward pass; `n_token` is set by the context."""

    layers: dict[int, _Layer] = field(default_factory=dict)
    position: int = 0
    n_token: int = 0
    n_kept: int = 0  # tokens that were not taken back


class RoutingProbe:
    """The eval callback: reads topk, weights and, if wanted, logits of every MoE layer."""

    def __init__(self, *, wants_logits: bool, wants_early: bool) -> None:
        """Bind ggml's read function; keep `callback` alive as long as the context."""
        self.wants_logits, self.wants_early = wants_logits, wants_early
        self.layers: dict[int, _Layer] = {}
        self.error: Exception | None = None
        self.callback = lib.ggml_backend_sched_eval_callback(self._on_node)
        self._read = ctypes.CDLL(str(lib_dir() / "libggml-base.so")).ggml_backend_tensor_get
        self._read.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        self._read.restype = None
        self._routers: dict[int, Array] = {}  # [n_expert, n_embd] by layer
        self._input: dict[int, Array] = {}  # [n, n_embd] of this pass
        self._logits: dict[int, tuple[Array, Array | None]] = {}

    def take(self) -> dict[int, _Layer]:
        """Return the layers of the last pass and begin anew; raise what went wrong inside the callback."""
        if self.error is not None:
            raise self.error
        layers, self.layers = self.layers, {}
        self._input.clear()
        self._logits.clear()
        return layers

    def _on_node(self, pointer: int, ask: bool, _user_data: Any) -> bool:
        """Say whether a node is wanted, later read it; nothing may be raised through llama.cpp."""
        tensor = _Tensor.from_address(pointer)
        match = _NODE.match(tensor.name)
        if match is None or (match[1] == b"logits" and not (self.wants_logits or self.wants_early)):
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
        elif what == "topk":
            logits, early = self._logits.get(il, (None, None))
            self.layers[il] = _Layer(self._rows(pointer, tensor, np.int32), None, logits, early)
        elif il in self.layers:
            shape = self.layers[il].experts.shape
            self.layers[il].weights = self._flat(pointer, tensor, np.float32).reshape(shape)

    def _note_logits(self, il: int, pointer: int, tensor: _Tensor) -> None:
        logits = self._rows(pointer, tensor, np.float32)
        early = None
        if self.wants_early:
            self._input[il] = self._source_rows(tensor, 1)
            if il not in self._routers:
                self._routers[il] = self._source_rows(tensor, 0)
            before = self._input.get(il - 1)
            if before is not None:
                early = before[-len(logits) :] @ self._routers[il].T
        self._logits[il] = (logits, early)

    def _source_rows(self, tensor: _Tensor, index: int) -> Array:
        pointer = tensor.src[index]
        source = _Tensor.from_address(pointer)
        if source.type not in _ROUTER_TYPES:
            raise TraceError(f"--early: the router is of ggml type {source.type}; F32 and F16 are read")
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


class TracedContext(Context):
    """A context whose forward passes are recorded in `passes`."""

    def __init__(self, model: Model, params: ContextParams, probe: RoutingProbe) -> None:
        """As Context; the probe must outlive it."""
        self.probe = probe
        self.passes: list[Pass] = []
        super().__init__(model, params)

    def _c_params(self) -> Any:
        c_params = super()._c_params()
        c_params.cb_eval = self.probe.callback
        return c_params

    def _decode_piece(self, tokens: Sequence[int], n_outputs: int) -> None:
        position = self.n_past
        super()._decode_piece(tokens, n_outputs)
        self.passes.append(Pass(self.probe.take(), position, len(tokens), len(tokens)))

    def rollback(self, n_past: int) -> None:
        """Take tokens back, and note which: rejected drafts."""
        last = self.passes[-1]
        last.n_kept = min(last.n_kept, n_past - last.position)
        super().rollback(n_past)


class TraceSession(Session):
    """A stock session whose target context is traced."""

    probe: RoutingProbe

    @classmethod
    def with_probe(cls, probe: RoutingProbe, *args: Any) -> TraceSession:
        """Return a session; the arguments are Session's."""
        session = cls.__new__(cls)
        session.probe = probe
        session.n_prompt = 0
        session.__init__(*args)  # type: ignore[misc]
        return session

    n_prompt: int

    def _open_context(self, model: Model, n_draft_max: int) -> Context:
        context = super()._open_context(model, n_draft_max)
        if model is not self.model:
            return context
        params = context.params
        context.close()
        return TracedContext(model, params, self.probe)

    def generate(
        self,
        prompt: list[int],
        on_token: Callable[[int], None] = lambda token: None,
        interrupt: Interrupt | None = None,
    ) -> Generation:
        """As Session; remembers where the prompt ends."""
        self.n_prompt = len(prompt)
        return super().generate(prompt, on_token, interrupt)

    def trace(self) -> Trace:
        """Return what was recorded."""
        assert isinstance(self.context, TracedContext)
        return build_trace(trace_geometry(self.options.model), self.context.passes, self.n_prompt)


def trace_geometry(path: Path) -> TraceGeometry:
    """Read a model's geometry from its file; TraceError if it is dense."""
    header = read_header(path)
    geometry = read_geometry(header)
    if not geometry.is_moe:
        raise TraceError(f"{path}: a dense model has no routing to trace")
    layouts = {layout: i for i, layout in enumerate(dict.fromkeys(x.layout for x in geometry.moe_layers))}
    return TraceGeometry(
        model=path.name,
        architecture=geometry.architecture,
        n_layer=geometry.n_layer,
        n_expert=geometry.n_expert,
        n_expert_used=geometry.n_expert_used,
        expert_bytes=tuple(x.expert_bytes for x in geometry.layers),
        dense_bytes=_dense_bytes(header, geometry.n_layer),
        group=tuple(layouts.get(x.layout, 0) for x in geometry.layers),
    )


def _dense_bytes(header: GgufHeader, n_layer: int) -> tuple[int, ...]:
    sizes = [0] * n_layer
    for tensor in header.tensors:
        match = re.match(r"blk\.(\d+)\.", tensor.name)
        if match and "_exps" not in tensor.name and int(match[1]) < n_layer:
            sizes[int(match[1])] += tensor.n_bytes
    return tuple(sizes)


def build_trace(geometry: TraceGeometry, passes: list[Pass], n_prompt: int) -> Trace:
    """Lay passes out token by token. A layer that ran for the last tokens only is NOT_RUN for the others."""
    if not any(one.layers for one in passes):
        raise TraceError("no router was seen: the graph of this architecture names its nodes differently")
    n = sum(one.n_token for one in passes)
    shape = (n, geometry.n_layer, geometry.n_expert_used)
    experts = np.full(shape, NOT_RUN, np.int16)
    weights = np.zeros(shape, np.float32)
    first = next(layer for one in passes for layer in one.layers.values())
    per_expert = (n, geometry.n_layer, geometry.n_expert)
    has_early = any(layer.early is not None for one in passes for layer in one.layers.values())
    logits = None if first.logits is None else np.full(per_expert, np.nan, np.float16)
    early = np.full(per_expert, np.nan, np.float16) if has_early else None
    end = 0
    for one in passes:
        end += one.n_token
        for il, layer in one.layers.items():
            at = slice(end - len(layer.experts), end)
            experts[at, il, : layer.experts.shape[1]] = layer.experts
            if layer.weights is not None:
                weights[at, il] = layer.weights
            if logits is not None and layer.logits is not None:
                logits[at, il] = layer.logits
            if early is not None and layer.early is not None:
                early[at, il] = layer.early
    return Trace(
        geometry=geometry,
        step=np.repeat(np.arange(len(passes)), [p.n_token for p in passes]).astype(np.int32),
        position=np.concatenate([p.position + np.arange(p.n_token) for p in passes]).astype(np.int32),
        status=np.concatenate([_status(p, n_prompt) for p in passes]),
        experts=experts, weights=weights, logits=logits, early_logits=early,
    )  # fmt: skip


def _status(one: Pass, n_prompt: int) -> npt.NDArray[np.uint8]:
    """A step verifies the last emitted token and its drafts; what was taken back was rejected."""
    if one.position < n_prompt:
        return np.full(one.n_token, TokenStatus.PROMPT, np.uint8)
    status = np.full(one.n_token, TokenStatus.REJECTED, np.uint8)
    status[: one.n_kept] = TokenStatus.ACCEPTED
    status[0] = TokenStatus.SAMPLED
    return status
