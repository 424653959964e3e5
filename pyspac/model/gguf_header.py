"""The header of a GGUF file: metadata and tensor descriptions, without mapping or reading any weight.

In: the path of a GGUF file (or of the first file of a split model). Out: a `GgufHeader`.

The reader of the `gguf` package maps every tensor, so a truncated file fails inside it with a numpy error,
and it takes seconds for a vocabulary of 150,000 tokens. This one takes milliseconds and says what is wrong
and where.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from pyspac.engine.gguf_constants import GGUFValueType
from pyspac.engine.tensor_types import TENSOR_TYPES
from pyspac.errors import ModelError
from pyspac.model.not_gguf import check_is_file, describe_content

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT: Final = 32
MAX_DIMS: Final = 4

_SCALARS: Final[dict[int, struct.Struct]] = {
    int(GGUFValueType.UINT8): struct.Struct("<B"),
    int(GGUFValueType.INT8): struct.Struct("<b"),
    int(GGUFValueType.UINT16): struct.Struct("<H"),
    int(GGUFValueType.INT16): struct.Struct("<h"),
    int(GGUFValueType.UINT32): struct.Struct("<I"),
    int(GGUFValueType.INT32): struct.Struct("<i"),
    int(GGUFValueType.FLOAT32): struct.Struct("<f"),
    int(GGUFValueType.BOOL): struct.Struct("<?"),
    int(GGUFValueType.UINT64): struct.Struct("<Q"),
    int(GGUFValueType.INT64): struct.Struct("<q"),
    int(GGUFValueType.FLOAT64): struct.Struct("<d"),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor; `shape` in ggml's order (contiguous dimension first), `offset` from the file's start."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    n_bytes: int
    offset: int
    path: Path


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata (arrays as lists) and tensors of a model, over all files of a split model."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `<architecture>.<key>`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def is_gguf(path: Path) -> bool:
    """Whether there is such a file, and it begins as a GGUF does."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_header(path: str | Path) -> GgufHeader:
    """Read the header of `path`, and of its sibling files if it is the first of a split model.

    Raises ModelError: missing, not a GGUF, another version, cut off, an unknown tensor type.
    """
    header = _read_file(Path(path))
    n_split = _whole_number(header.path, header.metadata, "split.count", 0)
    if n_split <= 1:
        return header
    parts = [_read_file(p) for p in _sibling_paths(header, n_split)]
    return GgufHeader(
        header.path, header.metadata, header.tensors + tuple(t for p in parts for t in p.tensors)
    )


def _sibling_paths(header: GgufHeader, n_split: int) -> list[Path]:
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", header.path.name)
    if match is None or header.metadata.get("split.no", 0) != 0:
        raise ModelError(
            f"{header.path}: this is one of {n_split} files of a split model, but not the first by name; "
            f"give the file that ends in -00001-of-{n_split:05d}.gguf"
        )
    return [header.path.with_name(f"{match[1]}-{i:05d}-of-{n_split:05d}.gguf") for i in range(2, n_split + 1)]


def _read_file(path: Path) -> GgufHeader:
    check_is_file(path)
    try:
        with path.open("rb") as file:
            return _Parser(path, file).parse()
    except OSError as error:
        raise ModelError(
            f"{path}: this file cannot be read ({error.strerror}); check its permissions"
        ) from error


class _Parser:
    """A cursor over one file; every read is checked against the file's size."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.file = file
        self.file_bytes = path.stat().st_size

    def parse(self) -> GgufHeader:
        n_tensors, n_metadata = self._read_counts()
        metadata = {}
        for _ in range(n_metadata):
            key = self._string()
            metadata[key] = self._value(self._scalar(GGUFValueType.UINT32))
        raw = [self._raw_tensor() for _ in range(n_tensors)]
        alignment = _whole_number(self.path, metadata, "general.alignment", DEFAULT_ALIGNMENT)
        start = _align(self.file.tell(), max(1, alignment))
        return GgufHeader(self.path, metadata, tuple(self._tensor(*entry, start) for entry in raw))

    def _read_counts(self) -> tuple[int, int]:
        magic = self.file.read(4)
        if magic != MAGIC:
            raise ModelError(f"{self.path}: {describe_content(self.path, magic + self.file.read(60))}")
        version = self._scalar(GGUFValueType.UINT32)
        if version not in VERSIONS:
            raise ModelError(
                f"{self.path}: GGUF version {version} is not supported (known: 2, 3); convert the model again"
            )
        return self._scalar(GGUFValueType.UINT64), self._scalar(GGUFValueType.UINT64)

    def _bytes(self, n: int) -> bytes:
        data = self.file.read(n) if n <= self.file_bytes else b""
        if len(data) != n:
            raise ModelError(
                f"{self.path}: this file is cut off inside the header, at byte {self.file_bytes}; "
                "download or copy it again"
            )
        return data

    def _scalar(self, value_type: int) -> Any:
        scalar = _SCALARS[int(value_type)]
        return scalar.unpack(self._bytes(scalar.size))[0]

    def _string(self) -> str:
        return self._bytes(self._scalar(GGUFValueType.UINT64)).decode("utf-8", errors="replace")

    def _value(self, value_type: int) -> Any:
        if value_type == GGUFValueType.STRING:
            return self._string()
        if value_type == GGUFValueType.ARRAY:
            return self._array(self._scalar(GGUFValueType.UINT32), self._scalar(GGUFValueType.UINT64))
        if value_type in _SCALARS:
            return self._scalar(value_type)
        raise ModelError(
            f"{self.path}: the header has metadata of the unknown type {value_type}; download the file again"
        )

    def _array(self, item_type: int, n: int) -> list[Any]:
        if item_type == GGUFValueType.ARRAY:
            raise ModelError(
                f"{self.path}: the header has arrays within arrays; it is damaged, download the file again"
            )
        if item_type not in _SCALARS:
            return [self._value(item_type) for _ in range(n)]
        scalar = _SCALARS[item_type]
        return list(struct.unpack(f"<{n}{scalar.format[1]}", self._bytes(n * scalar.size)))

    def _raw_tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        n_dims = self._scalar(GGUFValueType.UINT32)
        if n_dims > MAX_DIMS:
            raise ModelError(
                f"{self.path}: tensor {name!r} has {n_dims} dimensions (at most {MAX_DIMS}); "
                "the header is damaged, download the file again"
            )
        shape = tuple(self._scalar(GGUFValueType.UINT64) for _ in range(n_dims))
        return name, shape, self._scalar(GGUFValueType.UINT32), self._scalar(GGUFValueType.UINT64)

    def _tensor(self, name: str, shape: tuple[int, ...], type_id: int, offset: int, start: int) -> TensorInfo:
        if type_id not in TENSOR_TYPES:
            raise ModelError(
                f"{self.path}: tensor {name!r} has the unknown type {type_id}; "
                "quantise the model again with a type that this llama.cpp knows"
            )
        type_name, block_elements, block_bytes = TENSOR_TYPES[type_id]
        n_elements = 1
        for size in shape:
            n_elements *= size
        return TensorInfo(
            name, type_name, shape, n_elements // block_elements * block_bytes, start + offset, self.path
        )


def _whole_number(path: Path, metadata: dict[str, Any], key: str, default: int) -> int:
    value = metadata.get(key, default)
    if isinstance(value, int) and value >= 0:
        return value
    raise ModelError(f"{path}: {key} cannot be {value!r}; the header is damaged, download the file again")


def _align(offset: int, alignment: int) -> int:
    return (offset + alignment - 1) // alignment * alignment
