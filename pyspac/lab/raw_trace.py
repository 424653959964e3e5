"""A raw trace in, forward passes with the nodes of their routers out.

The engine writes it inside any llama.cpp program (PYSPAC_TRACE): engine/src/trace/trace-file.h describes it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt

from pyspac.lab.trace import TraceError

Array = npt.NDArray[Any]

MAGIC: Final = b"spactrc1"
_FORWARD, _NODE, _END = 1, 2, 3  # enum spac_trace_kind
_RECORD: Final = struct.Struct("<IIQ")  # kind, context, bytes
_TENSOR: Final = struct.Struct("<16sii4q")  # spac_trace_node
_N_COLUMNS: Final = 4  # ids, positions, sequences, whether a token has an output
_TYPES: Final = {0: np.float32, 1: np.float16, 26: np.int32}  # enum ggml_type
_CONSTANT: Final = ("router", "bias")
_TEXT: Final = 0  # the sequence of a server's one slot; mask tokens have others


@dataclass(slots=True)
class RawPass:
    """One forward pass. Rows are its tokens of the text, in their order."""

    context: int  # 0: the first that the program made, the target
    tokens: Array  # [n] ids
    positions: Array  # [n]
    nodes: dict[str, dict[int, Array]]  # what -> layer -> [n or fewer, width]: only of the last tokens
    constants: dict[str, dict[int, Array]]  # router [n_expert, n_embd] and bias [1, n_expert]


@dataclass(slots=True)
class _Open:
    """A pass whose end was not read yet."""

    columns: Array  # [4, n]
    nodes: dict[str, dict[int, Array]] = field(default_factory=dict)

    def rows_of_text(self, values: Array) -> Array:
        """A node has a row for every token, or for those with an output, or for the last ones."""
        _, _, sequences, has_output = self.columns
        n = len(sequences)
        of_outputs = np.flatnonzero(has_output)
        if len(values) == n:
            tokens = np.arange(n)
        elif len(values) == len(of_outputs):
            tokens = of_outputs
        else:
            tokens = np.arange(n - len(values), n)
        return np.asarray(values[sequences[tokens] == _TEXT])


def read_passes(file: IO[bytes], since: int = 0, *, is_whole: bool = True) -> Iterator[RawPass]:
    """In the order of their ends; of those that were not computed to the end none.

    `since`: bytes of the file that were there before what is wanted. Raises TraceError for a file that is
    damaged, and if `is_whole` for one that is cut off.
    """
    file.seek(0)
    if file.read(len(MAGIC)) != MAGIC:
        raise TraceError("the engine's record of the routing is empty, or of another version of pyspac")
    opened: dict[int, _Open] = {}
    constants: dict[int, dict[str, dict[int, Array]]] = {}
    for begin, kind, context, data in _records(file, is_whole=is_whole):
        try:
            if kind == _FORWARD:
                opened[context] = _Open(np.frombuffer(data, np.int32).reshape(_N_COLUMNS, -1))
            elif kind == _NODE:
                what, il, values = _read_node(data)
                if what in _CONSTANT:
                    constants.setdefault(context, {}).setdefault(what, {})[il] = values
                elif context in opened:
                    opened[context].nodes.setdefault(what, {})[il] = values
            elif kind == _END:
                one = opened.pop(context, None)
                if one is not None and begin >= since:
                    yield _finish(one, context, constants.get(context, {}))
            else:
                raise ValueError(f"a record of kind {kind}")
        except (KeyError, IndexError, ValueError, struct.error) as error:
            raise TraceError(
                f"the engine's record of the routing is damaged at byte {begin} ({error}): record it again"
            ) from error


def cut_off(n_bytes: int) -> TraceError:
    """What to raise for a file that ends too early."""
    return TraceError(
        f"the engine's record of the routing is cut off after {n_bytes} bytes: look for a disk that is full"
    )


def _records(file: IO[bytes], *, is_whole: bool) -> Iterator[tuple[int, int, int, bytes]]:
    """Where each begins, its kind, its context, and what is in it."""
    n_bytes, begin = os.fstat(file.fileno()).st_size, len(MAGIC)
    while begin < n_bytes:
        file.seek(begin)
        head = file.read(_RECORD.size)
        kind, context, n = _RECORD.unpack(head) if len(head) == _RECORD.size else (0, 0, n_bytes)
        end = begin + _RECORD.size + n
        if end > n_bytes:
            if is_whole:
                raise cut_off(begin)
            return
        yield begin, kind, context, file.read(n)
        begin = end


def _read_node(data: bytes) -> tuple[str, int, Array]:
    """Its name, its layer, and [rows, width]."""
    name, il, kind, *ne = _TENSOR.unpack_from(data)
    what = name.rstrip(b"\0").decode()
    if kind not in _TYPES:
        raise TraceError(
            f"--early and --draft-gate read routers of F32 and F16; in layer {il} a {what} is of type {kind}"
        )
    values = np.frombuffer(data, _TYPES[kind], offset=_TENSOR.size)
    if values.size != int(np.prod(ne)):
        raise ValueError(f"a {what} of {ne}")
    return what, il, values.reshape(-1, ne[0])


def _finish(one: _Open, context: int, constants: dict[str, dict[int, Array]]) -> RawPass:
    is_text = one.columns[2] == _TEXT
    for il, values in one.nodes.get("weights", {}).items():  # [1, n_expert_used, n_tokens], or without the 1
        one.nodes["weights"][il] = values.reshape(one.nodes["topk"][il].shape)
    nodes = {
        what: {il: one.rows_of_text(values) for il, values in layers.items()}
        for what, layers in one.nodes.items()
    }
    return RawPass(context, one.columns[0][is_text], one.columns[1][is_text], nodes, constants)
